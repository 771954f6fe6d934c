"""Sums, counts and maxima over ranks.

An *env group* is one group of envs, or one env without groups. Env groups are numbered over all ranks, and each rank owns
equally many neighbouring ones.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf.distributed.process_group import world_size


def rank_range(num_env_groups: int, rank: int, num_ranks: int) -> range:
    """Return the env groups of a rank: env group ``b`` belongs to rank ``b * num_ranks // num_env_groups``."""
    if num_env_groups % num_ranks:
        raise ValueError(f"{num_env_groups} env groups on {num_ranks} ranks; required: a multiple of the ranks")
    share = num_env_groups // num_ranks
    return range(rank * share, (rank + 1) * share)


def gather_env_groups(own: Tensor) -> Tensor:
    """Gather the rows of each rank's env groups, in the order of the env groups: ``[K_own, ...] -> [K, ...]``."""
    if world_size() == 1:
        return own
    joined = own.new_empty((world_size(), *own.shape))
    dist.all_gather(list(joined), own.contiguous())
    return joined.flatten(0, 1)


def sum_env_groups(own: Tensor) -> Tensor:
    """Sum the rows of all env groups, with equal bits on any number of ranks: float64 ``[K_own, n] -> [n]``."""
    return gather_env_groups(own).cumsum(0)[-1]


def sum_counts(*counts: int) -> tuple[int, ...]:
    """Return the sums of integers over all ranks."""
    if world_size() == 1:
        return counts
    total = torch.tensor(counts, dtype=torch.int64)
    dist.all_reduce(total)
    return tuple(total.tolist())


def maximum(*values: float) -> tuple[float, ...]:
    """Return the maximum of each number over the ranks; none may be NaN."""
    if world_size() == 1:
        return values
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return tuple(largest.tolist())
