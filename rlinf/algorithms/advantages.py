"""Advantage estimators, and statistics over the rollouts of all ranks, of time-major tensors ``[T, B]``.

The estimators are pure functions. The statistics (``masked_mean``, ``masked_normalize``, ``normalize_rows``, ``explained_variance``) are
collective calls: all ranks call the same ones in the same order, each with the rollout of its own envs. Values are summed per env in
float64, and the sums are added in env order (``rlinf.distributed.process_group``). The results are therefore bit-identical for any
number of ranks, which a mean of the ranks' means would not be.
"""

import torch
from torch import Tensor

from rlinf.distributed.process_group import maximum, sum_env_groups

ROUNDING = 1e-6
"""A standard deviation up to this fraction of the maximum magnitude is attributed to float32 rounding and treated as 0."""


def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap_values: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates (Schulman et al. 2016, eq. 16), which treat truncation and termination differently.

    ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)`` and ``A_t = delta_t + gamma lambda A_{t+1}`` within an episode, where
    ``V(s_{t+1})`` is 0 after a termination, ``bootstrap_values[t]`` (the value of the true final observation) after a
    truncation and at the last time step, and ``values[t + 1]`` elsewhere. Raise ValueError if a reward or a value is NaN or infinite.

    Args:
        rewards, values, bootstrap_values: ``[T, B]``.
        terminated, truncated: bool ``[T, B]``, as in gymnasium.
        gamma: Discount per policy call.
        gae_lambda: Between 0 (one-step) and 1 (Monte Carlo).

    Returns:
        Advantages ``[T, B]``, and returns ``advantages + values`` ``[T, B]``.
    """
    reject_not_finite(rewards=rewards, values=values, bootstrap_values=bootstrap_values)
    num_steps = rewards.shape[0]
    following = torch.cat([values[1:], bootstrap_values[-1:]])
    # A state at the time limit still has a value, so bootstrap from it. Adding the value to the reward would change the reported returns.
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
    """Return per-action advantages ``[T, B, C]`` from ``advantages [T, B]`` and ``action_rewards [T, B, C]``.

    ``A_{t,c} = A_t - sum_{c' < c} r_{t,c'}``, because an action cannot change earlier rewards. Given the observation and the earlier
    actions, these rewards act as a baseline, so the gradient stays unbiased. Rewards are not discounted within a chunk.
    """
    earlier = action_rewards.cumsum(-1) - action_rewards
    return advantages.unsqueeze(-1) - earlier


def episode_returns(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the undiscounted return of the episode in each column: ``[T, B] -> [B]``."""
    valid = torch.where(loss_mask, rewards, 0.0)
    # Otherwise, a NaN std would be mistaken for a group without variance.
    reject_not_finite(rewards=valid)
    # In float64, equal rewards in a different order sum to equal returns. Unlike `sum`, cumsum adds sequentially for any number of envs.
    return valid.double().cumsum(0)[-1].to(rewards.dtype)


def group_advantages(
    returns: Tensor, group_ids: Tensor, scale_by_std: bool, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return group relative advantages (Shao et al. 2024, eq. 3 of DeepSeekMath): ``(R_i - mean) / (std + eps)``.

    ``std`` is the population std (divided by the group size ``n``), so no advantage exceeds ``sqrt(n - 1)``. It is treated as 0 if it is at
    most ``eps`` or rounding error. Without ``scale_by_std``, they are not divided (Dr. GRPO, Liu et al. 2025).

    Returns:
        Advantages ``[B]``, and a bool ``[B]`` that is True where the group's returns differ.
    """
    centred, std, _, varied = _compare_in_groups(returns, group_ids, eps)
    advantages = centred / (std + eps) if scale_by_std else centred
    return torch.where(varied, advantages, 0.0).to(returns.dtype), varied


def leave_one_out_advantages(returns: Tensor, group_ids: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return leave-one-out advantages ``R_i - 1 / (n - 1) sum_{j != i} R_j`` within each group of size ``n``.

    RLOO (Kool et al. 2019; Ahmadian et al. 2024). The advantages equal ``n / (n - 1) (R_i - mean)``, so they sum to 0 in each group, and
    none exceeds the maximum difference between two returns. A group with only one episode has advantage 0, and a std of at most ``eps``
    or rounding error is treated as 0. Shapes are as in ``group_advantages``.
    """
    centred, _, counts, varied = _compare_in_groups(returns, group_ids, eps)
    # Do not divide by the std of the remaining episodes: in a group [y, x, x, x], it would be 0 for the first episode.
    advantages = centred * counts / (counts - 1).clamp_min(1)
    return torch.where(varied, advantages, 0.0).to(returns.dtype), varied


def _compare_in_groups(returns: Tensor, group_ids: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return for each episode ``[B]`` its return minus the group mean, the group's std and size, and whether the group's returns differ."""
    _, inverse = torch.unique(group_ids, return_inverse=True)
    values, num_groups = returns.double(), int(inverse.max()) + 1
    zeros = values.new_zeros(num_groups)
    counts = zeros.index_add(0, inverse, torch.ones_like(values))
    centred = values - (zeros.index_add(0, inverse, values) / counts)[inverse]
    std = (zeros.index_add(0, inverse, centred**2) / counts).sqrt()
    largest = zeros.scatter_reduce(0, inverse, values.abs(), "amax")
    equal = std <= eps + ROUNDING * largest
    # Use `~equal` instead of `std > ...`, so that a NaN std is treated as different returns.
    return centred, std[inverse], counts[inverse], ~equal[inverse]


def reject_not_finite(**tensors: Tensor) -> None:
    """Raise ValueError if a tensor ``[T, B]`` has a NaN or infinite element."""
    for name, tensor in tensors.items():
        bad = torch.nonzero(~torch.isfinite(tensor)).tolist()
        if bad:
            step, env = bad[0]
            raise ValueError(
                f"{name} of the rollout are not finite in {len(bad)} of {tensor.numel()} policy calls; the first one is "
                f"{tensor[step, env]} at call {step} of env {env}. No setting can fix this: check the code that computes them"
            )


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Return the mean of the elements selected by ``mask`` over all ranks, or 0 for an empty mask.

    ``values`` are ``[B]``, or time-major ``[T, B, ...]``, for this rank's ``B`` envs; ``mask`` is a bool tensor of the same shape.
    """
    return _means(mask, values)[0]


def masked_normalize(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale the elements selected by ``mask`` to mean 0 and std 1 over all ranks, and set all remaining elements to 0.

    If the std is zero up to rounding, all elements become 0. Shapes are as in ``masked_mean``.
    """
    valid = torch.where(mask, advantages, 0.0).double()
    (mean,) = _means(mask, valid)
    centred = valid - mean
    std = _means(mask, centred**2)[0] ** 0.5
    (largest,) = maximum(float(valid.abs().nan_to_num().max()))
    normal = torch.zeros_like(centred) if std <= ROUNDING * largest else centred / (std + eps)
    return torch.where(mask, normal, 0.0).to(advantages.dtype)


def normalize_rows(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale the rows ``[N, C]`` of a minibatch to mean 0 and std 1 over all ranks; ``N`` may differ between ranks.

    Divides by the sample std (``n - 1``), as Stable-Baselines3 does, and leaves a single element unchanged.
    """
    valid = torch.where(mask, advantages, 0.0).double()
    total, count = _sums(valid, mask.double())
    if count < 2:
        return advantages
    centred = torch.where(mask, valid - total / count, 0.0)
    (squares,) = _sums(centred**2)
    return (centred / ((squares / (count - 1)) ** 0.5 + eps)).to(advantages.dtype)


def _sums(*values: Tensor) -> list[float]:
    """Return the sum of each tensor over all ranks."""
    return sum_env_groups(torch.stack([tensor.sum() for tensor in values]).unsqueeze(0)).tolist()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return ``1 - Var[returns - values] / Var[returns]`` over the elements ``[T, B]`` selected by ``mask`` on all ranks.

    The result is 0 if the returns do not vary.
    """
    returns, errors = returns.double(), returns.double() - values.double()
    mean_return, mean_error = _means(mask, returns, errors)
    variance, error_variance = _means(mask, (returns - mean_return) ** 2, (errors - mean_error) ** 2)
    return 0.0 if variance < 1e-12 else 1 - error_variance / variance


def _means(mask: Tensor, *values: Tensor) -> list[float]:
    """Return the means of several tensors over the elements selected by ``mask`` on all ranks."""
    summands = [torch.where(mask, tensor, 0.0).double() for tensor in values] + [mask.double()]
    if mask.ndim > 1:
        summands = [summand.movedim(1, 0).flatten(1) for summand in summands]  # [B, T * ...]
    # cumsum adds sequentially, whereas the summation order of `sum` depends on the size.
    env_sums = torch.stack([summand.reshape(len(summand), -1).cumsum(1)[:, -1] for summand in summands], 1)
    *sums, count = sum_env_groups(env_sums).tolist()
    return [total / max(count, 1) for total in sums]
