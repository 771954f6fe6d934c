"""Process-group utilities: ranks, devices, and the exchange of objects, sums, counts and maxima.

An *env group* is a group of envs, or a single env if groups are not used. Env groups are numbered across all ranks, and each rank
has the same number of consecutive env groups.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlinf.errors import ConfigError
from rlinf.memory import num_cores


def rank() -> int:
    """Return this process's rank, or 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks, or 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world_size() -> int:
    """Return the number of ranks on this machine: ``LOCAL_WORLD_SIZE`` if set, otherwise all ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) if dist.is_initialized() else 1


def given_num_threads(num_threads: int | None) -> int | None:
    """Return ``num_threads`` (``cluster.num_threads``) if set, otherwise ``OMP_NUM_THREADS``, or None if neither is set."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return num_threads or (int(first) if first.isdigit() and int(first) else None)


def set_num_threads(num_threads: int | None, num_processes: int) -> None:
    """Set torch's thread count from ``cluster.num_threads`` or ``OMP_NUM_THREADS``, or divide the cores among the ranks."""
    torch.set_num_threads(given_num_threads(num_threads) or max(1, num_cores() // num_processes))


def resolve_device(device: str, num_processes: int, on_cpu: str = "cluster.device=cpu") -> str:
    """Resolve ``auto`` to ``cuda`` or ``cpu``. With fewer GPUs than ranks, raise a ConfigError that suggests ``on_cpu``."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.device_count() < num_processes:
        raise ConfigError(
            f"The ranks of cluster.num_processes={num_processes} need a GPU each, but torch sees {torch.cuda.device_count()}. "
            f"Set {on_cpu}, or fewer processes"
        )
    return device


GLOO = "gloo_one_thread"
GROUP_TIMEOUT = timedelta(days=1)
"""torch's timeout for collective calls. Deadlines must expire first: their errors have names and stacks, torch's do not."""


def _gloo_with_one_thread(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Create torch's gloo group with one worker thread instead of two."""
    # PyTorch 2.13 has a race condition: its two threads assign the finished collective's name to a string without a lock. Names
    # longer than 15 characters, such as FSDP's gathers, are on the heap and are sometimes freed twice.
    options = dist.ProcessGroupGloo._Options()
    options._timeout, options._threads = timeout, 1
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


dist.Backend.register_backend(GLOO, _gloo_with_one_thread, devices=["cpu"])


def backend_of(device: str) -> str:
    """Return the collective backends for a device: gloo with one thread for CPU tensors, nccl for GPU tensors."""
    # GPU runs need both: the loop exchanges its values and objects as CPU tensors, without waiting for queued GPU work.
    return f"cpu:{GLOO},cuda:nccl" if device == "cuda" else GLOO


def new_group(backend: str = GLOO, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Create a group of all ranks or of ``ranks``. This is a collective call of all ranks, including those outside the group."""
    world = dist.group.WORLD
    # PyTorch 2.13 binds new groups to the default group's GPU, and then requires a CUDA backend, which gloo does not have.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(ranks, backend=backend, timeout=GROUP_TIMEOUT)
    finally:
        world.bound_device_id = bound


def new_mesh(device: str, num_groups: int) -> DeviceMesh:
    """Return a mesh of all ranks with ``num_groups`` replicas, each sharded over neighbouring ranks."""
    # In PyTorch 2.13, groups from `init_device_mesh` have timeouts of at most half an hour, and two gloo threads on GPUs.
    grid, rank_groups = torch.arange(world_size()).view(num_groups, -1), []
    for groups in (grid.T.tolist(), grid.tolist()):
        made = [(ranks, new_group(backend_of(device), ranks)) for ranks in groups]
        rank_groups += [group for ranks, group in made if rank() in ranks]
    return DeviceMesh.from_group(rank_groups, device, mesh=grid, mesh_dim_names=("replicas", "shards"))


def sum_over_ranks(values: list[float]) -> list[float]:
    """Return the elementwise sums of ``values`` over all ranks."""
    if world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def any_rank(flag: bool) -> bool:
    """Return, on every rank, whether ``flag`` is true on any rank."""
    return sum_over_ranks([float(flag)])[0] > 0


def barrier() -> None:
    """Wait until every rank has called this."""
    sum_over_ranks([0.0])


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather the values of all ranks on every rank, in rank order. ``group`` must contain all ranks."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, source: int) -> Any:
    """Return the value of rank ``source`` on every rank."""
    if world_size() == 1:
        return value
    values = [value if rank() == source else None]
    dist.broadcast_object_list(values, source)
    return values[0]


def rank_range(num_env_groups: int, rank: int, num_ranks: int) -> range:
    """Return a rank's env groups. Env group ``b`` belongs to rank ``b * num_ranks // num_env_groups``."""
    if num_env_groups % num_ranks:
        raise ValueError(f"{num_env_groups} env groups on {num_ranks} ranks; expected a multiple of the ranks")
    per_rank = num_env_groups // num_ranks
    return range(rank * per_rank, (rank + 1) * per_rank)


def gather_env_groups(values: Tensor) -> Tensor:
    """Gather the values of all ranks' env groups, ordered by env group: ``[K_rank, ...] -> [K, ...]``."""
    if world_size() == 1:
        return values
    gathered = values.new_empty((world_size(), *values.shape))
    dist.all_gather(list(gathered), values.contiguous())
    return gathered.flatten(0, 1)


def sum_env_groups(values: Tensor) -> Tensor:
    """Sum values over all env groups, bitwise identically for any number of ranks: float64 ``[K_rank, n] -> [n]``."""
    # Gather, then add sequentially. An all-reduce or `sum` would add in an order that depends on the number of ranks.
    return gather_env_groups(values).cumsum(0)[-1]


def sum_counts(*counts: int) -> tuple[int, ...]:
    """Return the sum of each count over all ranks."""
    if world_size() == 1:
        return counts
    total = torch.tensor(counts, dtype=torch.int64)
    dist.all_reduce(total)
    return tuple(total.tolist())


def maximum(*values: float) -> tuple[float, ...]:
    """Return the maximum of each value over all ranks. Values must not be NaN."""
    if world_size() == 1:
        return values
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return tuple(largest.tolist())
