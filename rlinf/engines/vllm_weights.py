"""Load new weights into an engine under the names that vLLM expects, including all names of tied weights.

This module is used only by the engine's processes, but can be imported without vLLM.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from rlinf.engines.weight_handle import TensorSpec, WeightsHandle, check_manifest, complete_tied
from rlinf.engines.weight_transfer import join_parts


class TensorNames:
    """Tensors that a model requires, as meta tensors by name; tied names refer to the same tensor."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def check(self, manifest: Mapping[str, TensorSpec]) -> None:
        """Raise WeightsRejectedError if the manifest does not match the model."""
        check_manifest(manifest, self.tensors)

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors from a checked manifest under the names that vLLM loads."""
        return complete_tied(tensors, self.tensors)


class LanguageModelNames(TensorNames):
    """Tensors of a transformers language model, under its module names or the names in a public checkpoint.

    These differ if transformers merges or renames weights while loading, as it does for experts; vLLM loads checkpoint names.
    """

    def __init__(self, config: Any) -> None:
        with torch.device("meta"):
            reads_images = getattr(config, "vision_config", None) is not None
            self.model = (AutoModelForImageTextToText if reads_images else AutoModelForCausalLM).from_config(config)
        self.model.tie_weights()
        super().__init__(dict(self.model.state_dict(keep_vars=True)))
        self.public = TensorNames(revert_weight_conversion(self.model, dict(self.tensors)))
        self.are_public = False

    def check(self, manifest: Mapping[str, TensorSpec]) -> None:
        """See ``TensorNames.check``."""
        names = manifest.keys()
        self.are_public = len(names & self.public.tensors.keys()) > len(names & self.tensors.keys())
        self.public.check(manifest) if self.are_public else super().check(manifest)

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``TensorNames.read``."""
        if self.are_public:
            return self.public.read(tensors)
        return revert_weight_conversion(self.model, super().read(tensors))


class BucketLoader:
    """Loads weight buckets in one vLLM worker, which opens the handles itself (with tensor parallelism, in its own process)."""

    def __init__(self, worker: Any, names: TensorNames) -> None:
        self.worker, self.names = worker, names
        self._mapped: dict[str, Tensor] = {}
        self._parts: dict[str, tuple[Tensor, int]] = {}
        self._loaded: set[str] | None = None

    def start(self, manifest: Mapping[str, TensorSpec]) -> None:
        """Prepare every layer to receive new weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.names.check(manifest)
        self._mapped, self._parts, self._loaded = {}, {}, set()
        model = self.worker.get_model()
        if not torch.cuda.is_available():
            for module in model.modules():
                if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                    # On CPUs, vLLM repacks experts only if they have no kernel.
                    module.quant_method.moe_kernel = None
        with self._config():
            initialize_layerwise_reload(model)

    def load(self, handle: WeightsHandle) -> None:
        """Load a bucket's tensors."""
        weights = self.names.read(dict(join_parts(handle, self._mapped, self._parts)))
        # vLLM retains a layer's tensors until the layer is complete, and by then the bucket may have been overwritten.
        copies = ((name, tensor.clone()) for name, tensor in weights.items())
        with self._config():
            loaded = self.worker.get_model().load_weights(copies)
        self._loaded = None if loaded is None or self._loaded is None else self._loaded | loaded

    def finish(self) -> list[str]:
        """Activate the new weights; return the parameters that received none, which vLLM would only log."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        worker, model = self.worker, self.worker.get_model()
        with self._config():
            finalize_layerwise_reload(model, worker.model_config)
        self._mapped = {}
        worker.model_runner.reset_lora_state()
        worker.model_runner.reset_encoder_cache()
        worker.model_runner.reset_mm_cache()
        if self._loaded is None or worker.model_config.quantization is not None:
            return []
        return sorted({name for name, _ in model.named_parameters()} - self._loaded)

    def _config(self) -> AbstractContextManager:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.worker.vllm_config)


def keep_names(worker: Any, names: TensorNames) -> None:
    """Attach a loader to a worker, which ``collective_rpc`` passes as the first argument here and below."""
    worker.rlinf_loader = BucketLoader(worker, names)


def call_loader(worker: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a worker's ``BucketLoader``."""
    return getattr(worker.rlinf_loader, method)(*arguments)
