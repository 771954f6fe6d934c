"""Storage of trained weights in Ray's object store, from which rollout workers load them."""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.distributed.process_group import barrier, rank, world_size
from rlinf.engines.weight_handle import TensorSpec, WeightBuckets, WeightsHandle
from rlinf.engines.weight_transfer import manifest_of
from rlinf.errors import ConfigError
from rlinf.rollout.weight_push import gathered

NAMESPACE = "rlinf"


@dataclass(frozen=True)
class StoredWeights:
    """Stored weights, which rollout workers can load regardless of the version that they have, if any."""

    version: int  # number of preceding weight updates
    manifest: Mapping[str, TensorSpec]  # specifications of all tensors
    frozen: Sequence[Any]  # references to buckets that are the same throughout a run
    trained: Sequence[Any]  # references to buckets


class WeightStore:
    """Stores a trained model's weights, sharded or not, once for all ranks.

    Rank 0 stores them and passes the references to the other ranks. Rollout workers on the same machine read the same memory. Ray
    copies it to each machine once, and frees it when no rank or pending call refers to it. ``run`` identifies the run in the cluster.
    """

    def __init__(self, model: nn.Module, run: str) -> None:
        self.model = model
        self._frozen: list[Any] | None = None
        self._post = _post(run) if world_size() > 1 else None

    def put(self, version: int) -> StoredWeights:
        """Store the current weights, and on the first call frozen weights (a collective call). Raise ConfigError if the store is full."""
        import ray

        # Drop the last push's references first, so that the store never contains two versions.
        if rank() == 0 and self._post is not None:
            self._post.set.remote(None)
        manifest = manifest_of(self.model)
        if self._frozen is None:
            self._frozen = self._stored({name for name, spec in manifest.items() if not spec.trained}, version)
        trained = self._stored({name for name, spec in manifest.items() if spec.trained}, version)
        weights = StoredWeights(version, manifest, self._frozen, trained)
        if self._post is None:
            return weights
        if rank() == 0:
            ray.get(self._post.set.remote(weights))
        barrier()
        return weights if rank() == 0 else ray.get(self._post.get.remote())

    def _stored(self, names: set[str], version: int) -> list[Any]:
        """Store some tensors on rank 0 and return references to their buckets. Other ranks only help to gather them."""
        import ray

        tensors = gathered(self.model, names)
        if rank() > 0:
            deque(tensors, maxlen=0)
            return []
        try:
            return [ray.put(bucket) for bucket in stored_buckets(tensors, version)]
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            problem = (
                f"Ray's object store is too full for the weights of version {version}: {str(error).splitlines()[0]}"
            )
            fix = "Free /dev/shm if the run starts Ray; otherwise start Ray with more memory: ray start --object-store-memory=<bytes>"
            raise ConfigError(f"{problem} {fix}") from error


class _Post:
    """A Ray actor that passes references from rank 0 to other ranks."""

    # Ray counts references only if they pass through an actor or a task. Objects referenced from torch's store would never be freed.
    value: Any = None

    def set(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


def _post(run: str) -> Any:
    """Return the run's ``_Post`` actor, which rank 0 starts on its own machine (a collective call)."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor, name = None, f"weights of {run}"
    if rank() == 0:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "scheduling_strategy": here}
        actor = ray.remote(**options)(_Post).remote()
        ray.get(actor.get.remote())
    barrier()
    return ray.get_actor(name, NAMESPACE) if actor is None else actor


BUCKET_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class StoredBucket(WeightsHandle):
    """A bucket with its own copy of the data, uint8 ``[nbytes]``, which is read-only in the object store."""

    data: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))

    def _map(self, mapped: dict[str, Tensor]) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.data)  # never written


def stored_buckets(tensors: Iterable[tuple[str, Tensor]], version: int) -> Iterator[StoredBucket]:
    """Pack tensors of one device into buckets. Each bucket remains valid until two more have been requested."""
    buckets = WeightBuckets(BUCKET_BYTES)
    try:
        for handle in buckets.pack(tensors, version):
            end = max(entry.offset + entry.padded_nbytes for entry in handle.manifest.values())
            data = handle._map({})[:end].cpu().numpy()
            yield StoredBucket(version, handle.manifest, end, handle.nonce, data=data)
    finally:
        buckets.close()
