"""Advantage estimators: pure functions on tensors, float32, time-major ``[T, B]``."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-6
"""A deviation of at most this times the largest magnitude is rounding of float32, and counts as none."""


def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap_values: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), with truncation told from termination.

    ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)`` and ``A_t = delta_t + gamma lambda A_{t+1}`` within an episode, where
    ``V(s_{t+1})`` is 0 after a termination, ``bootstrap_values[t]`` (the value of the true final observation) after a
    truncation and in the last row, and ``values[t + 1]`` elsewhere. Unlike implementations that treat a time limit as
    an end, nothing is lost at a truncation; unlike those that add the bootstrap to the reward, rewards stay as they are.

    Args:
        rewards: ``[T, B]``.
        values: ``[T, B]``.
        terminated: bool ``[T, B]``, the episode ended by its own rules at ``t``.
        truncated: bool ``[T, B]``, the episode was cut at ``t``.
        bootstrap_values: ``[T, B]``.
        gamma: Discount per policy call.
        gae_lambda: Between 0 (one-step) and 1 (Monte Carlo).

    Returns:
        Advantages ``[T, B]`` and returns ``advantages + values [T, B]``.

    Raises:
        ValueError: A reward or a value is NaN or infinite.
    """
    refuse_not_finite(rewards=rewards, values=values, bootstrap_values=bootstrap_values)
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
    """Spread chunk advantages over the actions of the chunk, leaving out rewards that came before each action.

    ``A_{t,c} = A_t - sum_{c' < c} r_{t,c'}``: an action cannot change what was already paid, and given the observation
    and the earlier actions these rewards are a baseline, so the gradient stays unbiased. Rewards inside a chunk are
    not discounted, as in the chunk's reward.

    Args:
        advantages: ``[T, B]``.
        action_rewards: ``[T, B, C]``.

    Returns:
        ``[T, B, C]``.
    """
    earlier = action_rewards.cumsum(-1) - action_rewards
    return advantages.unsqueeze(-1) - earlier


def episode_returns(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the undiscounted sum of rewards over the valid steps of one episode per column: ``[T, B] -> [B]``.

    Summed in float64, so that equal rewards in another order give equal returns.

    Raises:
        ValueError: A valid reward is NaN or infinite; a NaN deviation would pass for a group without variance.
    """
    valid = torch.where(loss_mask, rewards, 0.0)
    refuse_not_finite(rewards=valid)
    return valid.double().sum(0).to(rewards.dtype)


def group_advantages(
    returns: Tensor, group_ids: Tensor, scale_by_std: bool, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Group relative advantages (Shao et al. 2024, eq. 3 of DeepSeekMath): ``(R_i - mean) / (std + eps)``.

    The standard deviation is the population's (divided by the group size ``n``), so no advantage is larger than
    ``sqrt(n - 1)``. A deviation of at most ``eps`` or of the size of rounding counts as 0.

    Args:
        returns: ``[B]``, one per episode.
        group_ids: int64 ``[B]``.
        scale_by_std: False leaves the division out (Dr. GRPO, Liu et al. 2025).
        eps: Added to the deviation.

    Returns:
        Advantages ``[B]`` and bool ``[B]``: the episode's group has different returns.
    """
    centred, std, _, varied = _compare_in_groups(returns, group_ids, eps)
    advantages = centred / (std + eps) if scale_by_std else centred
    return torch.where(varied, advantages, 0.0).to(returns.dtype), varied


def leave_one_out_advantages(returns: Tensor, group_ids: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """RLOO (Kool et al. 2019; Ahmadian et al. 2024): ``R_i - 1 / (n - 1) sum_{j != i} R_j`` in a group of ``n``.

    Equal to ``n / (n - 1) (R_i - mean)``: the advantages of a group sum to 0, and none is larger than the largest difference
    of two returns. Nothing is divided by a deviation, least of all by that of the other episodes, which is 0 in a group
    ``[y, x, x, x]``.

    Args:
        returns: ``[B]``, one per episode.
        group_ids: int64 ``[B]``; an episode without others has advantage 0.
        eps: A deviation of at most this, or of the size of rounding, counts as 0.

    Returns:
        Advantages ``[B]`` and bool ``[B]``: the episode's group has different returns.
    """
    centred, _, counts, varied = _compare_in_groups(returns, group_ids, eps)
    advantages = centred * counts / (counts - 1).clamp_min(1)
    return torch.where(varied, advantages, 0.0).to(returns.dtype), varied


def _compare_in_groups(returns: Tensor, group_ids: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return less the mean of its group, deviation and size of the group, and whether its returns differ, ``[B]`` each.

    A deviation that is not a number is none of rounding, so it is not taken for equal returns.
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


def masked_normalize(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and deviation 1 over the elements where ``mask``; the others become 0.

    Where the deviation is of the size of rounding, all become 0.
    """
    count = mask.sum().clamp_min(1)
    mean = (advantages * mask).sum() / count
    std = (((advantages - mean) ** 2 * mask).sum() / count).sqrt()
    equal = std <= ROUNDING * (advantages * mask).abs().max()
    return torch.where(equal, 0.0, (advantages - mean) / (std + eps)) * mask


def refuse_not_finite(**tensors: Tensor) -> None:
    """Refuse numbers that no advantage can be computed from.

    Args:
        **tensors: ``[T, B]`` by name.

    Raises:
        ValueError: Names the first number that is NaN or infinite.
    """
    for name, tensor in tensors.items():
        bad = torch.nonzero(~torch.isfinite(tensor)).tolist()
        if bad:
            step, env = bad[0]
            raise ValueError(
                f"{name} of the rollout are not finite in {len(bad)} of {tensor.numel()} policy calls; the first is {tensor[step, env]} "
                f"at call {step} of env {env}. No setting mends it: look at what gives these numbers"
            )
