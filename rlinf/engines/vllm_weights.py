"""New weights in an engine: under the names that vLLM loads, complete, and under every name of tied ones.

Used in the engine's process only; importing it needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from rlinf.engines.weight_handle import WeightsHandle, WeightsRefusedError, check_manifest, complete_tied
from rlinf.optim.finite import not_finite


class TensorNames:
    """The tensors that a model takes.

    Args:
        tensors: By name, on the meta device; tied ones are one tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def check(self, handle: WeightsHandle) -> None:
        """Raise what ``read`` would raise, and refuse weights that are not finite."""
        check_manifest(handle.manifest, self.tensors)
        weights = handle.open()
        found = not_finite(weights)
        if found:
            name, number = next(iter(found.items()))
            raise WeightsRefusedError(
                f"Weights refused, nothing was changed: '{name}' holds {number} ({len(found)} of {len(weights)} tensors are not finite)"
            )

    def read(self, handle: WeightsHandle) -> dict[str, Tensor]:
        """Return views of the weights, as vLLM loads them.

        Raises:
            WeightsRefusedError: The handle is incomplete, or its memory holds other weights by now.
        """
        check_manifest(handle.manifest, self.tensors)
        return complete_tied(handle.open(), self.tensors)


class LanguageModelNames(TensorNames):
    """The tensors of a language model of transformers, by the names of the model in memory or by those of a public checkpoint.

    The two differ where transformers joins or renames weights while loading (experts); vLLM loads those of a checkpoint.

    Args:
        config: Configuration of the model.
    """

    def __init__(self, config: Any) -> None:
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)
        self.model.tie_weights()
        super().__init__(dict(self.model.state_dict(keep_vars=True)))
        self.public = TensorNames(revert_weight_conversion(self.model, dict(self.tensors)))

    def check(self, handle: WeightsHandle) -> None:
        """See ``TensorNames.check``."""
        self.public.check(handle) if self._are_public(handle) else super().check(handle)

    def read(self, handle: WeightsHandle) -> dict[str, Tensor]:
        """See ``TensorNames.read``."""
        if self._are_public(handle):
            return self.public.read(handle)
        return revert_weight_conversion(self.model, super().read(handle))

    def _are_public(self, handle: WeightsHandle) -> bool:
        given = handle.manifest.keys()
        return len(given & self.public.tensors.keys()) > len(given & self.tensors.keys())


def reload_weights(worker: Any, handle: WeightsHandle, names: TensorNames) -> list[str]:
    """Let a worker of vLLM load weights in place; returns the parameters that none of them was for, which vLLM only logs.

    Args:
        worker: Of vLLM; ``collective_rpc`` gives it. With tensor parallelism each is a process, which opens the handle itself:
            tensors would be pickled for each, and with each view all of the shared memory.
        handle: Of the weights.
        names: Of the tensors that vLLM takes.
    """
    weights = list(names.read(handle).items())
    model: nn.Module = worker.get_model()
    load, missing = model.load_weights, []

    def recorded(weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        names = {name for name, _ in model.named_parameters()}
        loaded = load(weights)
        if loaded is not None and worker.model_config.quantization is None:
            missing.extend(sorted(names - loaded))
        return loaded

    if not torch.cuda.is_available():
        for module in model.modules():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None  # experts on CPUs are packed only where there is no kernel yet
    model.load_weights = recorded
    try:
        worker.reload_weights(weights_iterator=weights)
    finally:
        del model.load_weights
    return missing
