"""Statistics of demonstrations, as LeRobotDataset stores them, and as models normalise by them."""

from __future__ import annotations

from typing import Any

import numpy as np

MIN_RANGE = 1e-4
"""A column with a smaller range (max - min) counts as constant."""
MIN_SHARE = 0.01
"""Minimum of a column's quantile span and standard deviation, as a share of its range (max - min)."""
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

    Columns that a model could not divide by are changed, but for ``min`` and ``max``:

    - A constant column (``MIN_RANGE``) gets ``q01`` 0.5 below and ``q99`` 0.5 above its middle, and ``std`` 1.
    - If ``q99 - q01`` is less than ``MIN_SHARE`` of ``max - min`` (a gripper that closes in few rows), ``q01`` and ``q99``
      become ``min`` and ``max``. A ``std`` below that share becomes that share.
    """
    statistics = {"action": _as_lists(actions)}
    if state is not None:
        statistics["proprio"] = _as_lists(state)
    return statistics


def _as_lists(values: np.ndarray) -> dict[str, list]:
    found = vector_statistics(values)
    low, high = found["min"].astype(np.float64), found["max"].astype(np.float64)
    constant, middle, span = high - low < MIN_RANGE, (high + low) / 2, high - low
    rare = found["q99"] - found["q01"] < MIN_SHARE * span
    usable = {
        "q01": np.where(constant, middle - 0.5, np.where(rare, low, found["q01"])),
        "q99": np.where(constant, middle + 0.5, np.where(rare, high, found["q99"])),
        "min": low,
        "max": high,
        "mean": found["mean"],
        "std": np.where(constant, 1.0, np.maximum(found["std"], MIN_SHARE * span)),
    }
    return {name: numbers.tolist() for name, numbers in usable.items()} | {"mask": [True] * values.shape[1]}
