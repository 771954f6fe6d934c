"""Statistics of demonstrations, as LeRobotDataset stores them, and as models normalise by them."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from rlinf.distributed.process_group import rank

logger = logging.getLogger("rlinf")

MIN_RANGE = 1e-4
"""A column with a smaller range (max - min) counts as constant."""
MIN_FRACTION = 0.01
"""Minimum of a column's quantile span and standard deviation, as a fraction of its range (max - min)."""
GLITCH_ROWS = 500
"""At most one row in so many at each end of a column is a glitch (two of 100 rows, one of 10)."""
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def vector_statistics(values: np.ndarray) -> dict[str, np.ndarray]:
    """Return the statistics of each column of ``[N, D]``: min, max, mean, std (population), quantiles; and ``count [1]``."""
    low, high = values.min(0), values.max(0)
    values = np.asarray(values, dtype=np.float64)
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    return {
        "min": low,
        "max": high,
        "mean": values.mean(0),
        "std": values.std(0),
        "count": np.array([len(values)]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


class ImageStatistics:
    """Exact statistics of uint8 images per channel, from histograms of the 256 levels."""

    def __init__(self) -> None:
        self.histogram = np.zeros((3, 256), dtype=np.int64)
        self.num_images = 0

    def add(self, images: np.ndarray) -> None:
        """Count the pixels of uint8 ``[T, H, W, 3]``."""
        for channel in range(3):
            self.histogram[channel] += np.bincount(images[..., channel].ravel(), minlength=256)
        self.num_images += len(images)

    def merge(self, other: ImageStatistics) -> None:
        """Add the counts of ``other``."""
        self.histogram += other.histogram
        self.num_images += other.num_images

    def result(self) -> dict[str, np.ndarray]:
        """Return the statistics in LeRobotDataset's form: levels / 255, each ``[3, 1, 1]``, and ``count`` of images ``[1]``.

        A quantile is the smallest level whose cumulative share reaches it.
        """
        levels = np.arange(256) / 255
        share = self.histogram / self.histogram.sum(1, keepdims=True)
        mean = share @ levels
        cumulative = np.cumsum(self.histogram, axis=1)
        total = cumulative[:, -1:]
        found = {
            "min": levels[(self.histogram > 0).argmax(1)],
            "max": levels[255 - (self.histogram[:, ::-1] > 0).argmax(1)],
            "mean": mean,
            "std": np.sqrt(np.maximum(share @ levels**2 - mean**2, 0)),
        }
        for name, quantile in QUANTILES.items():
            found[name] = levels[(cumulative >= quantile * total).argmax(1)]
        return {name: value.reshape(3, 1, 1) for name, value in found.items()} | {"count": np.array([self.num_images])}


def normalization_statistics(actions: np.ndarray, state: np.ndarray | None) -> dict[str, Any]:
    """Return the statistics that models normalise by, in OpenVLA's ``norm_stats`` format (see ``VectorEnv.action_statistics``).

    Columns that a model could not divide by are changed; all but a constant one are named with a row in the log:

    - Glitches (``glitches``) are left out of their column's statistics.
    - A constant column (``MIN_RANGE``) gets ``q01`` 0.5 below and ``q99`` 0.5 above its middle, and ``std`` 1.
    - If the rows between ``q01`` and ``q99`` span less than ``MIN_FRACTION`` of ``max - min`` (a gripper that closes in 1 % of the rows),
      ``q01`` and ``q99`` become ``min`` and ``max``. A ``std`` below that share becomes that share.
    """
    statistics = {"action": _as_lists(actions, "action")}
    if state is not None:
        statistics["proprio"] = _as_lists(state, "state")
    return statistics


def glitches(values: np.ndarray) -> np.ndarray:
    """Return which numbers of ``[N, D]`` are far from all others for one row or two, bool ``[N, D]``.

    Far is beyond the others by half their span over ``MIN_FRACTION``; of a gripper with two values, the whole. Where the others are
    constant, none is. What lasts for longer is a motion.
    """
    count = len(values)
    if count < 10:
        return np.zeros(values.shape, dtype=bool)
    few, ordered = max(1, min(2, count // 50), count // GLITCH_ROWS), np.sort(values.astype(np.float64), axis=0)
    others = ordered[few : count - few]
    low, high = others[0], others[-1]
    is_binary = (np.diff(others, axis=0) > 0).sum(0) == 1
    far = np.where(is_binary, 1.0, 0.5) / MIN_FRACTION * (high - low)
    is_far = np.pad((high - low >= MIN_RANGE) & ((values < low - far) | (values > high + far)), ((2, 2), (0, 0)))
    lasts = is_far[:-2] & is_far[1:-1] & is_far[2:]
    return is_far[2:-2] & ~(lasts[:-2] | lasts[1:-1] | lasts[2:])


def _as_lists(values: np.ndarray, name: str) -> dict[str, list]:
    found, left_out = vector_statistics(values), glitches(values)
    for column in np.flatnonzero(left_out.any(0)):
        rows = np.flatnonzero(left_out[:, column])
        kept = vector_statistics(np.delete(values[:, column : column + 1], rows, axis=0))
        found |= {part: np.where(np.arange(values.shape[1]) == column, kept[part], found[part]) for part in found}
        others = f"far from all other rows ({kept['min'][0]:g} to {kept['max'][0]:g}): left out of its statistics"
        _tell(name, column, rows, values, f"{others}, and cut")
    low, high = found["min"].astype(np.float64), found["max"].astype(np.float64)
    constant, middle, span = high - low < MIN_RANGE, (high + low) / 2, high - low
    # Of rows: the quantiles themselves may lie where no row is, between a gripper's two positions.
    inner = np.quantile(values, 0.99, 0, method="lower") - np.quantile(values, 0.01, 0, method="higher").astype(float)
    rare = abs(inner) < MIN_FRACTION * span
    for column in np.flatnonzero(rare & ~constant):
        moved = abs(values[:, column] - found["q50"][column]) > span[column] / 2
        whole = f"rare: normalised by its whole range, {low[column]:g} to {high[column]:g}"
        _tell(name, column, np.flatnonzero(moved & ~left_out[:, column]), values, whole)
    usable = {
        "q01": np.where(constant, middle - 0.5, np.where(rare, low, found["q01"])),
        "q99": np.where(constant, middle + 0.5, np.where(rare, high, found["q99"])),
        "min": low,
        "max": high,
        "mean": found["mean"],
        "std": np.where(constant, 1.0, np.maximum(found["std"], MIN_FRACTION * span)),
    }
    return {name: numbers.tolist() for name, numbers in usable.items()} | {"mask": [True] * values.shape[1]}


def _tell(name: str, column: int, rows: np.ndarray, values: np.ndarray, what: str) -> None:
    """Log which rows made a rule change a column."""
    if rank() == 0 and len(rows):
        value, others = values[rows[0], column], f" and {len(rows) - 1} more rows" if len(rows) > 1 else ""
        logger.warning("column %d of the %s: row %d%s, %g: %s", column, name, rows[0], others, value, what)
