"""How many steps a recipe takes, and the learning rate of each."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlinf.errors import ConfigError

DECAYS: dict[str, Callable[[float], float]] = {
    "none": lambda progress: 1.0,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
}
"""Share of the peak by the share of the decay that is over; none: the rate stays constant after the warm-up."""


def count_steps(num_rows: int, epochs: int, batch_size: int, rows_per_sample: int = 1, limit: int | None = None) -> int:
    """Return the optimiser steps of a run: ``epochs * num_rows * rows_per_sample / batch_size``, rounded down.

    Raise ConfigError if the data do not fill one batch.

    Args:
        num_rows: Rows of the dataset.
        epochs: Passes over them.
        batch_size: Of one step, over all ranks.
        rows_per_sample: What one row of the dataset counts in a batch: the completions of a prompt in GRPO, else 1.
        limit: Largest number of steps; None: no limit.
    """
    steps = epochs * num_rows * rows_per_sample // batch_size
    if steps < 1:
        fits = epochs * num_rows * rows_per_sample
        raise ConfigError(
            f"The dataset has {num_rows} rows, too few for one batch of train.train_batch_per_replica={batch_size} in "
            f"train.epoch={epochs} epochs. Set train.train_batch_per_replica={max(1, fits)}, or more epochs"
        )
    return steps if limit is None else min(steps, limit)


def count_steps_per_epoch(num_rows: int, batch_size: int, rows_per_sample: int = 1) -> int:
    """Return the optimiser steps of one pass over the dataset, rounded down but at least 1; arguments of ``count_steps``."""
    return max(1, num_rows * rows_per_sample // batch_size)


def learning_rate(
    step: int,
    num_steps: int,
    peak: float,
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
        num_steps: Steps of the run.
        peak: Learning rate after the warm-up.
        warmup_steps: Steps of the warm-up; a float up to 1.0 is a share of ``num_steps``. At most ``num_steps``.
        decay: Key of ``DECAYS``; None: none.
        decay_ratio: Share of all steps, the last ones, that decay; None: all after the warm-up.
        min_factor: Smallest share of the peak while it decays.
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
