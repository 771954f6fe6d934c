"""Policy-gradient and value losses: pure functions of tensors that return *sums over valid elements*.

The caller divides by the number of valid elements in the minibatch across all micro-batches and ranks (``LossCounts``), so that
results do not depend on how the minibatch is split.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def aggregate_logprobs(logprobs: Tensor, action_mask: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """Sum token log-probabilities per token, action or chunk; return the sums and a bool mask of valid sums, in the same shape.

    Args:
        logprobs: ``[N, A]`` with ``A = C * D``.
        action_mask: bool ``[N, C]``, True for executed actions.
        level: ``token`` -> ``[N, C, D]``; ``action`` -> ``[N, C, 1]``; ``chunk`` -> ``[N, 1, 1]`` (executed actions only).
    """
    num_rows, num_actions = action_mask.shape
    # Spell out the last size instead of -1, because a rank's part of a minibatch may be empty.
    tokens = logprobs.reshape(num_rows, num_actions, logprobs.shape[1] // num_actions)
    if level == "token":
        return tokens, action_mask.unsqueeze(-1).expand_as(tokens)
    actions = tokens.sum(-1, keepdim=True)
    if level == "action":
        return actions, action_mask.unsqueeze(-1)
    # Mask with torch.where rather than a product, to exclude masked non-finite values from the sum and its gradient.
    mask = action_mask.unsqueeze(-1)
    return torch.where(mask, actions, 0.0).sum(1, keepdim=True), mask.any(1, keepdim=True)


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range_low: float,
    clip_range_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate loss (Schulman et al. 2017, eq. 7) with asymmetric bounds (DAPO, Yu et al. 2025).

    The loss is ``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(logprobs - old_logprobs)``. With ``dual_clip = c``, the
    loss for a negative advantage is at most ``c |A|`` (Ye et al. 2020, eq. 5).

    Args:
        logprobs, old_logprobs, mask: Tensors of the same shape.
        advantages: Tensor broadcastable to that shape.
        weights: Factors multiplied with the losses, in the same shape and without gradient; None means 1.

    Returns:
        The sum over valid elements, and sums of the metrics ``approx_kl`` (k3, Schulman 2020), ``clip_fraction`` (the clipped loss
        is larger) and ``outside_fraction`` (the ratio is outside the bounds).
    """
    # Mask before exp: an infinite ratio in a masked element, multiplied by 0, would turn the gradient into NaN.
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    bounded = ratio.clamp(1 - clip_range_low, 1 + clip_range_high)
    clipped = -advantages * bounded
    losses = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    if weights is not None:
        losses = losses * weights
    with torch.no_grad():
        metrics = {
            "approx_kl": torch.where(mask, (ratio - 1) - log_ratio, 0.0).sum(),
            "clip_fraction": ((clipped > unclipped) & mask).sum().float(),
            # No mask is needed, because masked ratios are 1 and therefore inside the bounds.
            "outside_fraction": (bounded != ratio).sum().float(),
        }
    return torch.where(mask, losses, 0.0).sum(), metrics


def truncated_importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Return ``min(p_trainer / p_rollout, cap)`` before the update, and 1 where masked; all tensors have the same shape.

    Truncated importance sampling corrects for small differences between rollout and trainer probabilities (Yao et al. 2025,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").
    """
    return torch.where(mask, old_logprobs - rollout_logprobs, 0.0).exp().clamp_max(cap)


def kl_estimates(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per element (Schulman 2020, "Approximating KL divergence"); masked elements are 0.

    With ``d = logprobs - ref_logprobs``, k1 is ``d``, k2 is ``d^2 / 2`` and k3 is ``exp(-d) - 1 + d``. All tensors have the same shape.
    """
    d = torch.where(mask, logprobs - ref_logprobs, 0.0)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    return torch.exp(-d) - 1 + d


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str, weights: Tensor | float = 1.0
) -> Tensor:
    """Return the sum of ``kl_estimates`` over valid elements, each multiplied by ``weights`` (broadcastable)."""
    return (weights * kl_estimates(logprobs, ref_logprobs, mask, estimator)).sum()


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float | None = None,
    huber_delta: float | None = None,
) -> Tensor:
    """Return the sum of value losses over valid rows ``[N]``: half the squared error, or the Huber loss with ``huber_delta``.

    With ``clip_range`` (PPO), a row's loss is the maximum of its losses at ``values`` and at
    ``old_values + clamp(values - old_values)``.
    """

    def error(prediction: Tensor) -> Tensor:
        if huber_delta is None:
            return 0.5 * (prediction - returns) ** 2
        return F.huber_loss(prediction, returns, reduction="none", delta=huber_delta)

    losses = error(values)
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        losses = torch.maximum(losses, error(clipped))
    return torch.where(mask, losses, 0.0).sum()
