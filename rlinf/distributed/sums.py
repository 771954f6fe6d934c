"""Sums, counts and maxima over ranks.

An *env group* is one group of envs, or one env without groups. Env groups are numbered over all ranks, and each rank has the same
number of consecutive env groups.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf.distributed.process_group import world_size


def rank_range(num_env_groups: int, rank: int, num_ranks: int) -> range:
    """Return the env groups of a rank: env group ``b`` belongs to rank ``b * num_ranks // num_env_groups``."""
    if num_env_groups % num_ranks:
        raise ValueError(f"{num_env_groups} env groups on {num_ranks} ranks; required: a multiple of the ranks")
    per_rank = num_env_groups // num_ranks
    return range(rank * per_rank, (rank + 1) * per_rank)


def gather_env_groups(values: Tensor) -> Tensor:
    """Gather the values of each rank's env groups, in the order of the env groups: ``[K_rank, ...] -> [K, ...]``."""
    if world_size() == 1:
        return values
    gathered = values.new_empty((world_size(), *values.shape))
    dist.all_gather(list(gathered), values.contiguous())
    return gathered.flatten(0, 1)


def sum_env_groups(values: Tensor) -> Tensor:
    """Sum the values of all env groups, with equal bits on any number of ranks: float64 ``[K_rank, n] -> [n]``."""
    # Gather and add in sequence. An all-reduce adds in an order that depends on the number of ranks, and so would `sum`.
    return gather_env_groups(values).cumsum(0)[-1]


def sum_counts(*counts: int) -> tuple[int, ...]:
    """Return the sums of integers over all ranks."""
    if world_size() == 1:
        return counts
    total = torch.tensor(counts, dtype=torch.int64)
    dist.all_reduce(total)
    return tuple(total.tolist())


def maximum(*values: float) -> tuple[float, ...]:
    """Return the maximum of each value over the ranks; no value may be NaN."""
    if world_size() == 1:
        return values
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return tuple(largest.tolist())
