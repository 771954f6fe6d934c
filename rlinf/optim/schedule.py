"""The learning-rate schedule used by all trainers: a linear warm-up, followed by a decay."""

import math
from collections.abc import Callable

DECAYS: dict[str, Callable[[float], float]] = {
    "none": lambda progress: 1.0,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
}
"""Functions from the decay's progress (0 to 1) to a fraction of the peak; with none, the rate is constant after the warm-up."""


def learning_rate(
    step: int,
    num_steps: float,
    peak: float = 1.0,
    warmup_steps: int | float = 0,
    decay: str | None = None,
    decay_ratio: float | None = None,
    min_factor: float = 0.0,
) -> float:
    """Return the learning rate for ``step`` (from 0): a linear increase to ``peak`` at the last warm-up step, then a decay.

    Args:
        num_steps: Number of steps in the run; if infinite, the rate does not decay.
        warmup_steps: Number of warm-up steps, or a float up to 1.0 for a fraction of ``num_steps``. At most ``num_steps``.
        decay: Key in ``DECAYS``; None for no decay.
        decay_ratio: Fraction of steps at the end during which the rate decays; None decays in all steps after the warm-up.
        min_factor: Final learning rate as a fraction of the peak.
    """
    is_fraction = isinstance(warmup_steps, float) and warmup_steps <= 1
    warmup = min(num_steps, round(warmup_steps * num_steps) if is_fraction else int(warmup_steps))
    # Use `step + 1`, because a first update with rate 0 would waste its batch.
    if step < warmup:
        return peak * (step + 1) / warmup
    first = warmup if decay_ratio is None else max(warmup, num_steps - round(decay_ratio * num_steps))
    if step < first:
        return peak
    progress = (step - first) / (num_steps - first)
    return peak * max(min_factor, DECAYS[decay or "none"](progress))
