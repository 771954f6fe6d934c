"""Compare normalisation statistics with the values they are applied to, in cloning, acting and serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlinf.errors import ConfigError
from rlinf.models.loading import check_statistics
from rlinf.types import Statistics

FAR, GARBAGE = 5.0, 1e6
"""Distances from the middle, in half-widths, beyond which a state has wrong units, and beyond which no unit explains it."""
BEYOND = 1.1
"""Distance in half-widths beyond which a dataset row is outside; uniform data reach 1.02 with quantile bounds."""
MOST_BEYOND, ALL_BEYOND, LEAST_USED = 0.05, 0.5, 0.01
"""Fractions of rows outside the statistics that cause a warning and an error, and used fraction of the range for a warning."""
STDS = 4.5
"""Half-width in std, chosen so that at most 5 % of any data are outside (Chebyshev)."""


class Range:
    """Range of statistics in env units: float64 ``middle`` and half-width ``half`` ``[D]``, where 0 disables comparison."""

    def __init__(self, low: Any, high: Any, mask: Any = True) -> None:
        low, high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
        self.middle, self.half = (low + high) / 2, np.where(mask, abs(high - low) / 2, 0.0)

    @classmethod
    def of(cls, stats: Statistics, names: Sequence[str], place: str | None) -> Range:
        """Return the range given by the lists ``names`` in statistics, checking them with ``check_statistics`` if ``place`` is set."""
        if place is not None:
            check_statistics(stats, place, names)
        first, second = (np.array(stats[name], dtype=np.float64) for name in names)
        bounds = (first - STDS * second, first + STDS * second) if names[1] == "std" else (first, second)
        return cls(*bounds, np.array(stats.get("mask") or True, dtype=bool))

    def widths(self, values: np.ndarray) -> np.ndarray:
        """Return the distances of ``values [N, S]`` from the middle, in half-widths; padding in the statistics is ignored."""
        width = min(values.shape[1], len(self.half))
        half, distance = self.half[:width], abs(values[:, :width] - self.middle[:width])
        return np.where(half > 0, distance / np.where(half > 0, half, 1.0), 0.0)

    def far(self, states: np.ndarray) -> np.ndarray:
        """Return a bool ``[N]`` for rows in ``[N, S]``, or ``[N, T, S]`` with several steps, that have a value beyond ``FAR``."""
        widths = self.widths(states.reshape(-1, states.shape[-1])).max(1, initial=0.0)
        return (widths > FAR).reshape(len(states), -1).any(1)

    def farthest(self, states: np.ndarray) -> tuple[str, float]:
        """Describe the value in ``[N, S]`` farthest from its range; also return its distance in half-widths."""
        widths = self.widths(states)
        row, k = np.unravel_index(int(widths.argmax()), widths.shape)
        text = f"state[{k}] is {states[row, k]:.4g}, but the statistics range from {self.describe(k)}; are the units wrong?"
        return text, float(widths[row, k])

    def describe(self, dimension: int) -> str:
        """Format both ends of a dimension's range."""
        middle, half = self.middle[dimension], self.half[dimension]
        return f"{middle - half:.4g} to {middle + half:.4g}"

    def compare(self, values: np.ndarray, name: str, fix: str) -> tuple[float, list[str]]:
        """Compare dataset rows ``[N, S]``; return the maximum fraction of rows outside any dimension's range, and warnings."""
        # Ignore the outermost row at each end, which is beyond the quantiles in any data set.
        beyond = ((self.widths(values) > BEYOND).sum(0) - 2).clip(0) / len(values)
        low, high, half = (numbers[: len(beyond)] for numbers in (values.min(0), values.max(0), self.half))
        unused, warnings = (high > low) & (high - low < 2 * LEAST_USED * half), []
        for k in np.flatnonzero((beyond > MOST_BEYOND) | unused):
            rows = f"rows ({low[k]:.4g} to {high[k]:.4g})"
            part = f"the {rows} cover less than 1 % of" if unused[k] else f"{beyond[k]:.1%} of the {rows} are outside"
            warnings.append(f"dimension {k} of the {name}: {part} the statistics in use, {self.describe(k)}. Set {fix}")
            if beyond[k] > ALL_BEYOND:
                raise ConfigError(warnings[-1][:1].upper() + warnings[-1][1:])
        return float(beyond.max(initial=0.0)), warnings
