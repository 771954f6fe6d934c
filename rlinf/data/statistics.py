"""Statistics of demonstrations, in LeRobotDataset's format and for normalisation in models."""

from __future__ import annotations

import logging

import numpy as np

from rlinf.distributed.process_group import rank
from rlinf.types import Statistics

logger = logging.getLogger("rlinf")

MIN_RANGE = 1e-4
"""A column with a smaller range (max - min) is treated as constant."""
MIN_FRACTION = 0.01
"""Minimum of a column's quantile span and std, as a fraction of its range (max - min)."""
GLITCH_ROWS = 500
"""At each end of a column, at most one row in this many can be a glitch (but two of 100 rows, and one of 10)."""
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
        self.histogram += other.histogram
        self.num_images += other.num_images

    def result(self) -> dict[str, np.ndarray]:
        """Return LeRobotDataset's format: levels / 255 with exact quantiles, ``[3, 1, 1]`` each, and the image ``count [1]``."""
        levels = np.arange(256) / 255
        frequency = self.histogram / self.histogram.sum(1, keepdims=True)
        mean = frequency @ levels
        cumulative = np.cumsum(self.histogram, axis=1)
        total = cumulative[:, -1:]
        result = {
            "min": levels[(self.histogram > 0).argmax(1)],
            "max": levels[255 - (self.histogram[:, ::-1] > 0).argmax(1)],
            "mean": mean,
            "std": np.sqrt(np.maximum(frequency @ levels**2 - mean**2, 0)),
        }
        for name, quantile in QUANTILES.items():
            result[name] = levels[(cumulative >= quantile * total).argmax(1)]
        return {name: value.reshape(3, 1, 1) for name, value in result.items()} | {"count": np.array([self.num_images])}


def normalization_statistics(actions: np.ndarray, state: np.ndarray | None) -> Statistics:
    """Return statistics for normalisation, in OpenVLA's ``norm_stats`` format (see ``VectorEnv.action_statistics``).

    Columns for which a model would divide by almost zero are adjusted. Except for constant ones, this is logged with a row:

    - Glitches (``glitches``) are excluded from their column's statistics.
    - For a constant column (``MIN_RANGE``), ``q01`` and ``q99`` are 0.5 below and above its midpoint, and ``std`` is 1.
    - If the rows between ``q01`` and ``q99`` span less than ``MIN_FRACTION`` of ``max - min`` (a gripper that closes in 1 % of the
      rows), ``q01`` and ``q99`` become ``min`` and ``max``. ``std`` is at least ``MIN_FRACTION`` of ``max - min``.
    """
    statistics = {"action": _as_lists(actions, "action")}
    if state is not None:
        statistics["proprio"] = _as_lists(state, "state")
    return statistics


def glitches(values: np.ndarray) -> np.ndarray:
    """Return bool ``[N, D]``: whether a value is far from all remaining ones, for at most two consecutive rows.

    "Far" means outside their range by half of it (binary grippers: all of it) over ``MIN_FRACTION``. A longer change is motion.
    """
    count = len(values)
    if count < 10:
        return np.zeros(values.shape, dtype=bool)
    few, ordered = max(1, min(2, count // 50), count // GLITCH_ROWS), np.sort(values.astype(np.float64), axis=0)
    usual = ordered[few : count - few]
    low, high = usual[0], usual[-1]
    is_binary = (np.diff(usual, axis=0) > 0).sum(0) == 1
    far = np.where(is_binary, 1.0, 0.5) / MIN_FRACTION * (high - low)
    is_far = np.pad((high - low >= MIN_RANGE) & ((values < low - far) | (values > high + far)), ((2, 2), (0, 0)))
    lasts = is_far[:-2] & is_far[1:-1] & is_far[2:]
    return is_far[2:-2] & ~(lasts[:-2] | lasts[1:-1] | lasts[2:])


def _as_lists(values: np.ndarray, name: str) -> dict[str, list]:
    stats, left_out = vector_statistics(values), glitches(values)
    for column in np.flatnonzero(left_out.any(0)):
        rows = np.flatnonzero(left_out[:, column])
        usual = vector_statistics(np.delete(values[:, column : column + 1], rows, axis=0))
        stats |= {part: np.where(np.arange(values.shape[1]) == column, usual[part], stats[part]) for part in stats}
        problem = f"far from all other rows ({usual['min'][0]:g} to {usual['max'][0]:g}): excluded from its statistics"
        _log_change(name, column, rows, values, f"{problem}, and clipped")
    low, high = stats["min"].astype(np.float64), stats["max"].astype(np.float64)
    constant, middle, span = high - low < MIN_RANGE, (high + low) / 2, high - low
    # Use quantiles that occur as values: interpolated ones may be between a gripper's two positions.
    inner = np.quantile(values, 0.99, 0, method="lower") - np.quantile(values, 0.01, 0, method="higher").astype(float)
    rare = abs(inner) < MIN_FRACTION * span
    for column in np.flatnonzero(rare & ~constant):
        moved = abs(values[:, column] - stats["q50"][column]) > span[column] / 2
        problem = f"rare: normalised by its full range, {low[column]:g} to {high[column]:g}"
        _log_change(name, column, np.flatnonzero(moved & ~left_out[:, column]), values, problem)
    usable = {
        "q01": np.where(constant, middle - 0.5, np.where(rare, low, stats["q01"])),
        "q99": np.where(constant, middle + 0.5, np.where(rare, high, stats["q99"])),
        "min": low,
        "max": high,
        "mean": stats["mean"],
        "std": np.where(constant, 1.0, np.maximum(stats["std"], MIN_FRACTION * span)),
    }
    return {name: numbers.tolist() for name, numbers in usable.items()} | {"mask": [True] * values.shape[1]}


def _log_change(name: str, column: int, rows: np.ndarray, values: np.ndarray, what: str) -> None:
    if rank() == 0 and len(rows):
        value, further = values[rows[0], column], f" and {len(rows) - 1} more rows" if len(rows) > 1 else ""
        logger.warning("column %d of the %s: row %d%s, %g: %s", column, name, rows[0], further, value, what)
