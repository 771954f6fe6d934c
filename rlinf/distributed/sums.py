"""Sums, counts and maxima over ranks.

An *env group* is a group of envs, or a single env if groups are not used. Env groups are numbered across all ranks, and each rank
has the same number of consecutive env groups.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf.distributed.process_group import world_size


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
