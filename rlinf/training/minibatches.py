"""Assign the rows of a rollout to minibatches and ranks."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlinf.distributed.process_group import gather_env_groups
from rlinf.seeding import derive_seed


class Minibatch(NamedTuple):
    """This rank's rows of a minibatch, int64, and the maximum number of its rows on any rank."""

    rows: Tensor
    max_rows: int


class MinibatchPlan:
    """Round-robin assignment of a rollout's valid rows to ``M = ceil(rows / minibatch_size)`` minibatches.

    The rows of each env group are shuffled. Row ``j`` of an env group preceded by ``P`` rows is assigned to minibatch ``(P + j) mod M``.
    As a result, minibatch sizes differ by at most one row, and minibatches do not depend on the number of ranks.

    Args:
        valid: Valid rows of this rank's envs, bool ``[T, B]``.
        env_groups: This rank's env groups; each consists of ``B / len(env_groups)`` adjacent envs.
        minibatch_size: Maximum minibatch size across all ranks.

    Attributes:
        num_rows: Number of valid rows across all ranks.
    """

    def __init__(self, valid: Tensor, env_groups: range, minibatch_size: int, seed: int) -> None:
        self._env_groups, self._seed = env_groups, seed
        rows = torch.arange(valid.numel()).view(valid.shape)
        parts = zip(*(tensor.tensor_split(len(env_groups), dim=1) for tensor in (rows, valid)), strict=True)
        self._rows = [part[is_valid] for part, is_valid in parts]
        # A rank only needs to know how many rows each env group of the other ranks has.
        counts = gather_env_groups(torch.tensor([len(part) for part in self._rows]))
        self.num_rows = int(counts.sum())
        self.num_minibatches = -(-self.num_rows // minibatch_size)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self._starts = ends[env_groups.start : env_groups.stop].tolist()
        self._ends_of_ranks = ends[:: len(env_groups)]

    def epoch(self, number: int) -> Iterator[Minibatch]:
        """Yield the minibatches of an epoch; every rank yields the same number."""
        if not self.num_minibatches:
            return
        numbers, rows = [], []
        for env_group, start, group_rows in zip(self._env_groups, self._starts, self._rows, strict=True):
            generator = torch.Generator().manual_seed(derive_seed(self._seed, number, env_group))
            rows.append(group_rows[torch.randperm(len(group_rows), generator=generator)])
            numbers.append(torch.arange(start, start + len(group_rows)) % self.num_minibatches)
        minibatch = torch.cat(numbers)
        ordered = torch.cat(rows)[minibatch.argsort(stable=True)]
        sizes = minibatch.bincount(minlength=self.num_minibatches)
        # A rank owns the rows start <= p < end; rows with p mod M = m are in minibatch m. ``before`` is the number of these rows before
        # each end, minus one; the constant cancels in the differences.
        before = (self._ends_of_ranks - torch.arange(self.num_minibatches).unsqueeze(1) - 1) // self.num_minibatches
        yield from map(Minibatch, ordered.split(sizes.tolist()), before.diff().amax(1).tolist())
