"""Send the merged weights of a model with adapters to an inference engine."""

from collections.abc import Collection, Iterator

from torch import Tensor, nn

from rlinf.engines.weight_handle import TensorSpec, WeightBuckets
from rlinf.engines.weight_transfer import ModuleWeights
from rlinf.models.base_weights import base_tensors, trained_names
from rlinf.models.lora import merged_tensors


class MergedWeights(ModuleWeights):
    """A ``WeightSource`` that provides a model's weights to vLLM, merging adapters into one weight at a time.

    After the first push, only layers (``layer_prefix``) with trained or adapted weights are sent.

    Args:
        model: Unsharded model, with or without adapters.
        version: Number of weight updates that produced the weights.
        trained: Names of weights that training changes (``trained_names``); None uses ``trained_names(model)``.
        excluded: Top-level modules that the engine does not need.
    """

    def __init__(
        self,
        model: nn.Module,
        version: int,
        buckets: WeightBuckets,
        trained: Collection[str] | None = None,
        excluded: Collection[str] = (),
    ) -> None:
        super().__init__(model, version, buckets)
        changed = {layer_prefix(name) for name in (trained_names(model) if trained is None else trained)}
        self.manifest = {
            name: TensorSpec(tensor.dtype, tuple(tensor.shape), layer_prefix(name) in changed)
            for name, tensor in base_tensors(model)
            if name.split(".")[0] not in excluded
        }

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        return merged_tensors(self.module, names)


def layer_prefix(name: str) -> str:
    """Return the name of the numbered layer that contains a tensor (``model.layers.3``) or, outside all layers, its module."""
    # vLLM fuses weights within a layer (queries, keys and values) and can only load a fused weight completely.
    parts = name.split(".")
    number = next((k for k, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: number + 1])
