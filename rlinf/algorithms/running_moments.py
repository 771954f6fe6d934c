"""Running mean and variance of the states that a policy reads, or of returns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf.distributed.sums import sum_env_groups

EPSILON = 1e-8
"""Added to a variance before its root is taken."""
CLIP = 10.0
"""Largest magnitude after normalisation."""
FIRST_COUNT = 1e-4
"""Weight of the first mean 0 and variance 1, in rows."""


class RunningMoments(nn.Module):
    """Mean and variance of ``n`` numbers over all rows so far, as buffers that a checkpoint holds.

    ``EPSILON``, ``CLIP`` and ``FIRST_COUNT`` have the values of Stable-Baselines3's ``VecNormalize``.

    Attributes:
        mean, var: float64 ``[n]``. The variance is the population's.
        count: float64 ``[1]``, rows.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("var", torch.ones(dim, dtype=torch.float64))
        self.register_buffer("count", torch.full((1,), FIRST_COUNT, dtype=torch.float64))

    @property
    def std(self) -> Tensor:
        """Divisor of the normalisation, float64 ``[n]``."""
        return (self.var + EPSILON).sqrt()

    def normalize(self, rows: Tensor) -> Tensor:
        """Return ``(rows - mean) / sqrt(var + EPSILON)``, clipped at ``CLIP``: ``[..., n]``, float32, computed in float64."""
        return ((rows.double() - self.mean) / self.std).clamp(-CLIP, CLIP).float()

    def update(self, values: Tensor, mask: Tensor) -> None:
        """Count the rows of a rollout (a collective call); the result has the same bits on any number of ranks.

        Args:
            values: Time-major ``[T, B, n]`` of the ``B`` envs of this rank.
            mask: bool ``[T, B]``: the row counts.
        """
        valid = mask.unsqueeze(-1)
        rows = torch.where(valid, values.double(), 0.0)
        *sums, count = _sum(torch.cat([rows, valid.double()], -1)).tolist()
        if count == 0:
            return
        mean = torch.tensor(sums, dtype=torch.float64) / count
        squares = _sum(torch.where(valid, rows - mean, 0.0) ** 2)
        self.merge(mean, squares / count, count)

    @torch.no_grad()
    def merge(self, mean: Tensor, var: Tensor, count: float) -> None:
        """Merge with the moments ``[n]`` of ``count`` other rows, in place (Chan et al. 1979, eq. 2.1).

        With ``d = mean_b - mean_a`` and ``n = n_a + n_b``: ``mean = mean_a + d n_b / n`` and
        ``n var = n_a var_a + n_b var_b + d^2 n_a n_b / n``.
        """
        mean, var = mean.to(self.mean), var.to(self.var)
        total = self.count + count
        delta = mean - self.mean
        squares = self.var * self.count + var * count + delta**2 * self.count * count / total
        # In place: processes that play share the memory.
        self.mean.add_(delta * count / total)
        self.var.copy_(squares / total)
        self.count.copy_(total)


def discounted_sums(rewards: Tensor, episode_ids: Tensor, gamma: float) -> Tensor:
    """Return ``R_t = gamma R_{t-1} + r_t`` within each episode, which starts at 0: float64 ``[T, B]``.

    This is the sum whose deviation scales rewards (Engstrom et al. 2020, section 3). Both arguments are ``[T, B]``.
    """
    sums = rewards.double().clone()
    for t in range(1, len(sums)):
        sums[t] += gamma * sums[t - 1] * (episode_ids[t] == episode_ids[t - 1])
    return sums


def _sum(rows: Tensor) -> Tensor:
    """Return the sums ``[n]`` of rows ``[T, B, n]`` over time and the envs of all ranks."""
    # cumsum adds one after the other. The order of `sum` depends on the number of rows.
    return sum_env_groups(rows.cumsum(0)[-1])
