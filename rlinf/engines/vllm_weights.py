"""Load new weights into an engine: complete, under the names that vLLM expects, with all names of tied weights.

Only the engine's process uses this; importing it does not need vLLM.
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
    """The tensors that a model needs: meta tensors by name; tied names share one tensor."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def check(self, handle: WeightsHandle) -> None:
        """Raise the errors of ``read``, and WeightsRefusedError for weights that are not finite."""
        check_manifest(handle.manifest, self.tensors)
        weights = handle.open()
        found = not_finite(weights)
        if found:
            name, number = next(iter(found.items()))
            count = f"{len(found)} of {len(weights)} tensors are not finite"
            raise WeightsRefusedError(f"Weights refused, nothing was changed: '{name}' holds {number} ({count})")

    def read(self, handle: WeightsHandle) -> dict[str, Tensor]:
        """Return views of the weights under the names that vLLM loads; raise WeightsRefusedError if they are incomplete."""
        check_manifest(handle.manifest, self.tensors)
        return complete_tied(handle.open(), self.tensors)


class LanguageModelNames(TensorNames):
    """The tensors of a language model of transformers, under its names in memory or those of a public checkpoint.

    They differ if transformers joins or renames weights while loading (experts); vLLM loads those of a checkpoint.
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
    """Let a worker of vLLM load weights in place, and return the parameters without new weights, which vLLM only logs.

    ``collective_rpc`` passes the worker. With tensor parallelism each is a process that opens the handle itself; pickled views
    would copy all of the shared memory to each.
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
                module.quant_method.moe_kernel = None  # on CPUs, vLLM repacks experts only if they have no kernel yet
    model.load_weights = recorded
    try:
        worker.reload_weights(weights_iterator=weights)
    finally:
        del model.load_weights
    return missing
