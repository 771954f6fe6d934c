"""The learning rate of each step: a linear warm-up, then a decay. All trainers have it."""

from __future__ import annotations

import math
from collections.abc import Callable

DECAYS: dict[str, Callable[[float], float]] = {
    "none": lambda progress: 1.0,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
}
"""Fraction of the peak by the fraction of the decay that is over; none: the rate stays constant after the warm-up."""


def learning_rate(
    step: int,
    num_steps: float,
    peak: float = 1.0,
    warmup_steps: int | float = 0,
    decay: str | None = None,
    decay_ratio: float | None = None,
    min_factor: float = 0.0,
) -> float:
    """Return the learning rate of a step.

    It rises linearly over the warm-up, whose last step has the peak, and then decays. No step has the rate 0 unless the peak is 0:
    an update with rate 0 would waste its batch.

    Args:
        step: Number of the step, from 0.
        num_steps: Steps of the run; infinite: it does not decay.
        peak: Learning rate after the warm-up.
        warmup_steps: Steps of the warm-up; a float up to 1.0 is a fraction of ``num_steps``. At most ``num_steps``.
        decay: Key of ``DECAYS``; None: none.
        decay_ratio: Fraction of all steps, the last ones, that decay; None: all after the warm-up.
        min_factor: Smallest fraction of the peak while it decays.
    """
    share = isinstance(warmup_steps, float) and warmup_steps <= 1
    warmup = min(num_steps, round(warmup_steps * num_steps) if share else int(warmup_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    first = warmup if decay_ratio is None else max(warmup, num_steps - round(decay_ratio * num_steps))
    if step < first:
        return peak
    progress = (step - first) / (num_steps - first)
    return peak * max(min_factor, DECAYS[decay or "none"](progress))
