"""Which rows of a rollout each rank trains on, minibatch by minibatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlinf.distributed.sums import gather_env_groups
from rlinf.seeding import derive_seed


class Minibatch(NamedTuple):
    """This rank's rows of a minibatch, int64, and the largest number of rows that a rank has of it."""

    rows: Tensor
    max_rows: int


class MinibatchPlan:
    """Deals the valid rows of a rollout to ``M = ceil(rows / minibatch_size)`` minibatches, as cards are dealt.

    Each env group shuffles its rows. Row ``j`` of the env group before which there are ``P`` rows goes to minibatch ``(P + j) mod M``. So
    minibatches differ by at most one row, each takes its fraction of every env group, and only the numbers of rows need to be known
    of other ranks. The rows of a minibatch do not depend on the number of ranks.

    Args:
        valid: bool ``[T, B]``, of this rank's envs.
        env_groups: This rank's env groups; each has ``B / len(env_groups)`` neighbouring envs.
        minibatch_size: Largest number of rows of a minibatch over all ranks.
        seed: Fixes the order.

    Attributes:
        num_rows: Valid rows of all ranks.
        num_minibatches: In an epoch.
    """

    def __init__(self, valid: Tensor, env_groups: range, minibatch_size: int, seed: int) -> None:
        self._env_groups, self._seed = env_groups, seed
        rows = torch.arange(valid.numel()).view(valid.shape)
        parts = zip(*(each.tensor_split(len(env_groups), dim=1) for each in (rows, valid)), strict=True)
        self._rows = [part[is_valid] for part, is_valid in parts]
        counts = gather_env_groups(torch.tensor([len(part) for part in self._rows]))
        self.num_rows = int(counts.sum())
        self.num_minibatches = -(-self.num_rows // minibatch_size)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self._starts = ends[env_groups.start : env_groups.stop].tolist()
        self._ends_of_ranks = ends[:: len(env_groups)]

    def epoch(self, number: int) -> Iterator[Minibatch]:
        """Yield the minibatches of an epoch: as many on every rank, together all valid rows."""
        if not self.num_minibatches:
            return
        places, rows = [], []
        for env_group, start, own in zip(self._env_groups, self._starts, self._rows, strict=True):
            generator = torch.Generator().manual_seed(derive_seed(self._seed, number, env_group))
            rows.append(own[torch.randperm(len(own), generator=generator)])
            places.append(torch.arange(start, start + len(own)) % self.num_minibatches)
        place = torch.cat(places)
        dealt = torch.cat(rows)[place.argsort(stable=True)]
        sizes = place.bincount(minlength=self.num_minibatches)
        # Of the rows start <= p < end of a rank, those with p mod M = m are in minibatch m. ``before`` is one less than their number
        # before each end; the differences are not changed by that.
        before = (self._ends_of_ranks - torch.arange(self.num_minibatches).unsqueeze(1) - 1) // self.num_minibatches
        yield from map(Minibatch, dealt.split(sizes.tolist()), before.diff().amax(1).tolist())
