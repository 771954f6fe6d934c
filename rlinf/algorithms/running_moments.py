"""Running mean and variance of the policy's input states, or of returns."""

import torch
from torch import Tensor, nn

from rlinf.distributed.process_group import sum_env_groups

EPSILON = 1e-8
"""Constant added to a variance before taking the square root."""
CLIP = 10.0
"""Maximum magnitude after normalisation."""
FIRST_COUNT = 1e-4
"""Weight of the initial mean 0 and variance 1, expressed as a number of samples."""


class RunningMoments(nn.Module):
    """Mean and variance of ``dim`` features over all samples so far, stored as buffers so that checkpoints contain them.

    ``EPSILON``, ``CLIP`` and ``FIRST_COUNT`` have the values of Stable-Baselines3's ``VecNormalize``.

    Attributes:
        mean, var: Mean and population variance, float64 ``[dim]``.
        count: Number of samples, float64 ``[1]``.
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
        """Divisor used by ``normalize``, float64 ``[dim]``."""
        return (self.var + EPSILON).sqrt()

    def normalize(self, values: Tensor) -> Tensor:
        """Return ``(values - mean) / sqrt(var + EPSILON)``, clipped at ``CLIP``: float32 ``[..., dim]``, computed in float64."""
        return ((values.double() - self.mean) / self.std).clamp(-CLIP, CLIP).float()

    def update(self, values: Tensor, mask: Tensor) -> None:
        """Add the rollout samples selected by ``mask`` (a collective call); the result is bit-identical for any number of ranks.

        ``values`` is time-major ``[T, B, dim]`` for the ``B`` envs of this rank, ``mask`` bool ``[T, B]``.
        """
        valid = mask.unsqueeze(-1)
        samples = torch.where(valid, values.double(), 0.0)
        *sums, count = _sum(torch.cat([samples, valid.double()], -1)).tolist()
        if count == 0:
            return
        mean = torch.tensor(sums, dtype=torch.float64) / count
        squares = _sum(torch.where(valid, samples - mean, 0.0) ** 2)
        self.merge(mean, squares / count, count)

    @torch.no_grad()
    def merge(self, mean: Tensor, var: Tensor, count: float) -> None:
        """Merge the moments ``[dim]`` of ``count`` new samples in place (Chan et al. 1979, eq. 2.1).

        With ``d = mean_b - mean_a`` and ``n = n_a + n_b``: ``mean = mean_a + d n_b / n`` and
        ``n var = n_a var_a + n_b var_b + d^2 n_a n_b / n``.
        """
        mean, var = mean.to(self.mean), var.to(self.var)
        total = self.count + count
        delta = mean - self.mean
        squares = self.var * self.count + var * count + delta**2 * self.count * count / total
        # Write in place, because rollout processes read the same shared memory.
        self.mean.add_(delta * count / total)
        self.var.copy_(squares / total)
        self.count.copy_(total)


def discounted_sums(rewards: Tensor, episode_ids: Tensor, gamma: float) -> Tensor:
    """Return ``R_t = gamma R_{t-1} + r_t`` within each episode, starting from 0: float64, in the arguments' shape ``[T, B]``.

    Reward scaling divides rewards by the std of this sum (Engstrom et al. 2020, section 3).
    """
    sums = rewards.double().clone()
    for t in range(1, len(sums)):
        sums[t] += gamma * sums[t - 1] * (episode_ids[t] == episode_ids[t - 1])
    return sums


def _sum(samples: Tensor) -> Tensor:
    """Return sums ``[dim]`` of samples ``[T, B, dim]`` over time and over the envs of all ranks."""
    # cumsum adds sequentially, whereas the summation order of `sum` depends on the size.
    return sum_env_groups(samples.cumsum(0)[-1])
