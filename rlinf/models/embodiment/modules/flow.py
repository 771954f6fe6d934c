"""Pure functions for flow-matching policies: denoising steps, their Gaussian densities, and supervised targets.

The convention is pi0's (Black et al. 2024): ``x_t = t * noise + (1 - t) * action``, so ``t = 1`` is noise, and the network predicts
the velocity ``v = noise - action``.
"""

import math

import torch
from torch import Tensor

NOISE_METHODS = ("flow_sde", "flow_ode", "flow_cps", "flow_noise")
MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0


def denoising_times(num_steps: int, device: torch.device | None = None) -> Tensor:
    """Return the grid ``1, 1 - 1/n, ..., 1/n, 0`` as float32 ``[n + 1]``."""
    times = torch.linspace(1.0, 1.0 / num_steps, num_steps, device=device)
    return torch.cat([times, times.new_zeros(1)])


def time_embedding(t: Tensor, width: int) -> Tensor:
    """Return sines, followed by cosines, of ``2 pi t / period`` for ``t [B]`` in [0, 1], as float64 ``[B, width]``."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=t.device)
    period = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** fraction
    angle = 2.0 * math.pi * t.double()[:, None] / period
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def step_moments(
    method: str,
    x: Tensor,
    velocity: Tensor,
    t: Tensor,
    t_next: Tensor,
    t_second: Tensor,
    noise_level: float,
    noise_std: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return mean and std of ``x`` at ``t_next``, given ``x`` at ``t``.

    With ``d = t - t_next``, the predicted action ``x0 = x - v t`` and noise ``x1 = x + v (1 - t)``, the mean is
    ``w0 x0 + w1 x1`` with ``w0 = 1 - t_next`` and, for the noise level ``a``,

    * ``flow_ode``: ``w1 = t_next``, std 0, i.e. the Euler step ``x - v d``.
    * ``flow_sde`` (Liu et al. 2025, Flow-GRPO: mean ``x - v d - s^2 d / (2 t) (x + (1 - t) v)``):
      ``w1 = t_next - s^2 d / (2 t)``, std ``s sqrt(d)``, with ``s = a sqrt(t / (1 - t))``.
    * ``flow_cps`` (Wang et al. 2025, Coefficients-Preserving Sampling): ``w1 = t_next cos(pi a / 2)``, std
      ``t_next sin(pi a / 2)``.
    * ``flow_noise`` (Zhang et al. 2025, ReinFlow): mean as for ``flow_ode``, std ``noise_std`` predicted by a trained head.

    ``x``, ``velocity`` and ``noise_std`` are ``[B, H, D]``; times must broadcast. ``t_second`` is the grid's second point.
    """
    d = t - t_next
    action, noise = x - velocity * t, x + velocity * (1.0 - t)
    noise_weight, std = t_next, torch.zeros_like(t)
    if method == "flow_sde":
        # At t = 1 the denominator would be 0, so the second grid point is used.
        s = noise_level * torch.sqrt(t / (1.0 - torch.where(t == 1.0, t_second, t)))
        noise_weight, std = t_next - s.square() * d / (2.0 * t), d.sqrt() * s
    elif method == "flow_cps":
        noise_weight = t_next * math.cos(0.5 * math.pi * noise_level)
        std = t_next * math.sin(0.5 * math.pi * noise_level)
    elif method == "flow_noise":
        std = noise_std
    return action * (1.0 - t_next) + noise * noise_weight, std.expand_as(x)


def gaussian_logprobs(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return elementwise ``log N(x; mean, std)``; 0 where ``std`` is 0, which marks a deterministic step."""
    fixed = std == 0.0
    std = std.masked_fill(fixed, 1.0)
    logprobs = -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)
    return logprobs.masked_fill(fixed, 0.0)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Return elementwise ``0.5 log(2 pi e std^2)`` in nats; 0 where ``std`` is 0."""
    fixed = std == 0.0
    return (std.masked_fill(fixed, 1.0).log() + 0.5 * math.log(2.0 * math.pi * math.e)).masked_fill(fixed, 0.0)


def training_times(uniforms: Tensor) -> Tensor:
    """Return times for the flow-matching loss, ``0.999 b + 0.001`` with ``b ~ Beta(1.5, 1)``, mostly near 1 (noise)."""
    # The CDF of Beta(1.5, 1) is b^1.5, so b = u^(2/3).
    return uniforms.float() ** (2.0 / 3.0) * 0.999 + 0.001


def noisy_actions(actions: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x_t = t noise + (1 - t) actions`` and its velocity ``noise - actions`` (``t`` broadcastable)."""
    return t * noise + (1.0 - t) * actions, noise - actions
