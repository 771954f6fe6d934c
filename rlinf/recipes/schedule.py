"""Compute a recipe's number of steps."""

from rlinf.errors import ConfigError


def count_steps(num_rows: int, epochs: int, batch_size: int, rows_per_sample: int = 1, limit: int | None = None) -> int:
    """Return a run's number of optimiser steps: ``epochs * num_rows * rows_per_sample / batch_size``, rounded down.

    ``rows_per_sample`` is the number of completions per prompt in GRPO, otherwise 1. Raise ConfigError if the data does not fill a batch.
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
    """Return the number of optimiser steps per epoch, rounded down but at least 1; see ``count_steps``."""
    return max(1, num_rows * rows_per_sample // batch_size)
