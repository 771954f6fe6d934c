"""The weights of a model with adapters, as an engine needs them: merged."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, nn

from rlinf.engines.weight_handle import TensorSpec, WeightBuckets
from rlinf.engines.weight_transfer import ModuleWeights
from rlinf.models.base_weights import base_tensors, trained_names
from rlinf.models.lora import merged_tensors


class MergedWeights(ModuleWeights):
    """The weights of a model for vLLM, adapters added to one weight at a time (a ``WeightSource``).

    Adapters do not cross. What crosses after the first push are the blocks (``block_of``) with trained or adapted weights.

    Args:
        model: With or without adapters, unsharded.
        version: Number of weight updates that produced the weights.
        buckets: Shared memory.
        trained: What training changes (``trained_names``); None: what ``model`` trains.
        excluded: First parts of the names of tensors that the engine does not need.
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
        blocks = {block_of(name) for name in (trained_names(model) if trained is None else trained)}
        self.manifest = {
            name: TensorSpec(tensor.dtype, tuple(tensor.shape), block_of(name) in blocks)
            for name, tensor in base_tensors(model)
            if name.split(".")[0] not in excluded
        }

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield some tensors of the manifest, each merged when its turn comes."""
        return merged_tensors(self.module, names)


def block_of(name: str) -> str:
    """Return the numbered block of a tensor (``model.layers.3``), or the module of a tensor outside all blocks.

    vLLM fuses layers of one block, such as queries, keys and values, and loads a fused layer whole or not at all.
    """
    parts = name.split(".")
    number = next((k for k, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: number + 1])
