"""Advantage estimators: pure functions on tensors, float32, time-major ``[T, B]``."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """
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
    """Return the undiscounted sum of rewards over the valid steps of one episode per column: ``[T, B] -> [B]``."""
    return (rewards * loss_mask).sum(0)


def group_advantages(
    returns: Tensor, group_ids: Tensor, scale_by_std: bool, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Group relative advantages (Shao et al. 2024, eq. 3 of DeepSeekMath): ``(R_i - mean) / (std + eps)``.

    The standard deviation is the population's (divided by the group size), so a group of equal returns has exactly 0.

    Args:
        returns: ``[B]``, one per episode.
        group_ids: int64 ``[B]``.
        scale_by_std: False leaves the division out (Dr. GRPO, Liu et al. 2025).
        eps: Added to the deviation.

    Returns:
        Advantages ``[B]`` and bool ``[B]``: the episode's group has different returns.
    """
    _, inverse = torch.unique(group_ids, return_inverse=True)
    num_groups = int(inverse.max()) + 1
    counts = torch.zeros(num_groups).index_add_(0, inverse, torch.ones_like(returns))
    mean = torch.zeros(num_groups).index_add_(0, inverse, returns) / counts
    centred = returns - mean[inverse]
    std = (torch.zeros(num_groups).index_add_(0, inverse, centred**2) / counts).sqrt()
    varied = (std > eps)[inverse]
    advantages = centred / (std[inverse] + eps) if scale_by_std else centred
    return torch.where(varied, advantages, torch.zeros_like(advantages)), varied


def masked_normalize(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and deviation 1 over the elements where ``mask``; the others become 0."""
    count = mask.sum().clamp_min(1)
    mean = (advantages * mask).sum() / count
    std = (((advantages - mean) ** 2 * mask).sum() / count).sqrt()
    return (advantages - mean) / (std + eps) * mask
