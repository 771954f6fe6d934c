"""Advantage estimators: pure functions on tensors, float32, time-major ``[T, B]``."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-6
"""A deviation of at most this times the largest magnitude is float32 rounding and counts as 0."""


def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap_values: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates (Schulman et al. 2016, eq. 16), which tell truncation from termination.

    ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)`` and ``A_t = delta_t + gamma lambda A_{t+1}`` within an episode, where
    ``V(s_{t+1})`` is 0 after a termination, ``bootstrap_values[t]`` (the value of the true final observation) after a
    truncation and in the last row, and ``values[t + 1]`` elsewhere. Unlike implementations that treat a time limit as a
    termination, this one bootstraps there; unlike those that add the bootstrap to the reward, it leaves rewards alone. Raise ValueError if
    a reward or a value is NaN or infinite.

    Args:
        rewards, values, bootstrap_values: ``[T, B]``.
        terminated: bool ``[T, B]``: the episode ended by its own rules at ``t``.
        truncated: bool ``[T, B]``: the episode was cut at ``t``.
        gamma: Discount per policy call.
        gae_lambda: Between 0 (one-step) and 1 (Monte Carlo).

    Returns:
        Advantages ``[T, B]`` and returns ``advantages + values [T, B]``.
    """
    reject_not_finite(rewards=rewards, values=values, bootstrap_values=bootstrap_values)
    num_steps = rewards.shape[0]
    following = torch.cat([values[1:], bootstrap_values[-1:]])
    following = torch.where(truncated, bootstrap_values, following)
    following = torch.where(terminated, torch.zeros_like(following), following)
    deltas = rewards + gamma * following - values
    carries = gamma * gae_lambda * (~(terminated | truncated)).to(rewards.dtype)
    advantages = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[0])
    for t in range(num_steps - 1, -1, -1):
        running = deltas[t] + carries[t] * running
        advantages[t] = running
    return advantages, advantages + values


def action_advantages(advantages: Tensor, action_rewards: Tensor) -> Tensor:
    """Spread chunk advantages over the actions of the chunk, without the rewards paid before each action.

    ``A_{t,c} = A_t - sum_{c' < c} r_{t,c'}``: an action cannot change earlier rewards. Given the observation and the
    earlier actions they are a baseline, so the gradient stays unbiased. Rewards inside a chunk are not discounted, as in
    the chunk's reward. From ``advantages [T, B]`` and ``action_rewards [T, B, C]`` to ``[T, B, C]``.
    """
    earlier = action_rewards.cumsum(-1) - action_rewards
    return advantages.unsqueeze(-1) - earlier


def episode_returns(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the undiscounted return of the episode in each column: ``[T, B] -> [B]``.

    The sum is in float64, so that equal rewards in another order give equal returns. Raises ValueError if a valid reward
    is NaN or infinite: a NaN deviation would pass for a group without variance.
    """
    valid = torch.where(loss_mask, rewards, 0.0)
    reject_not_finite(rewards=valid)
    return valid.double().cumsum(0)[-1].to(rewards.dtype)  # one after the other, whatever the number of envs


def group_advantages(
    returns: Tensor, group_ids: Tensor, scale_by_std: bool, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return group relative advantages (Shao et al. 2024, eq. 3 of DeepSeekMath): ``(R_i - mean) / (std + eps)``.

    The standard deviation is the population's (divided by the group size ``n``), so no advantage exceeds
    ``sqrt(n - 1)``. A deviation within ``eps`` or rounding counts as 0.

    Args:
        returns: ``[B]``, one per episode.
        group_ids: int64 ``[B]``.
        scale_by_std: False omits the division (Dr. GRPO, Liu et al. 2025).
        eps: Added to the deviation.

    Returns:
        Advantages ``[B]`` and bool ``[B]``: the returns of the episode's group differ.
    """
    centred, std, _, varied = _compare_in_groups(returns, group_ids, eps)
    advantages = centred / (std + eps) if scale_by_std else centred
    return torch.where(varied, advantages, 0.0).to(returns.dtype), varied


def leave_one_out_advantages(returns: Tensor, group_ids: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return leave-one-out advantages: ``R_i - 1 / (n - 1) sum_{j != i} R_j`` in a group of ``n``.

    RLOO (Kool et al. 2019; Ahmadian et al. 2024). Equal to ``n / (n - 1) (R_i - mean)``: the advantages of a group sum to
    0, and none exceeds the largest difference of two returns. Dividing by the deviation of the other episodes would
    fail in a group ``[y, x, x, x]``, where it is 0. A group of one episode has advantage 0, and a deviation within ``eps``
    or rounding counts as 0. Shapes are as in ``group_advantages``.
    """
    centred, _, counts, varied = _compare_in_groups(returns, group_ids, eps)
    advantages = centred * counts / (counts - 1).clamp_min(1)
    return torch.where(varied, advantages, 0.0).to(returns.dtype), varied


def _compare_in_groups(returns: Tensor, group_ids: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return for each episode ``[B]``: return minus group mean, the group's deviation and size, and whether its returns differ.

    A NaN deviation counts as different returns.
    """
    _, inverse = torch.unique(group_ids, return_inverse=True)
    values, num_groups = returns.double(), int(inverse.max()) + 1
    zeros = values.new_zeros(num_groups)
    counts = zeros.index_add(0, inverse, torch.ones_like(values))
    centred = values - (zeros.index_add(0, inverse, values) / counts)[inverse]
    std = (zeros.index_add(0, inverse, centred**2) / counts).sqrt()
    largest = zeros.scatter_reduce(0, inverse, values.abs(), "amax")
    equal = std <= eps + ROUNDING * largest
    return centred, std[inverse], counts[inverse], ~equal[inverse]


def reject_not_finite(**tensors: Tensor) -> None:
    """Raise ValueError for a NaN or infinite number in one of the tensors ``[T, B]``."""
    for name, tensor in tensors.items():
        bad = torch.nonzero(~torch.isfinite(tensor)).tolist()
        if bad:
            step, env = bad[0]
            raise ValueError(
                f"{name} of the rollout are not finite in {len(bad)} of {tensor.numel()} policy calls; the first is "
                f"{tensor[step, env]} at call {step} of env {env}. No setting fixes this: check what computes these numbers"
            )
