"""Statistics for normalisation, compared with the values that pass through them: in cloning, acting and serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlinf.errors import ConfigError
from rlinf.models.loading import check_statistics

FAR, GARBAGE = 5.0, 1e6
"""Half-widths from the middle beyond which a state is in other units, and beyond which no unit explains it."""
BEYOND = 1.1
"""Half-widths beyond which a dataset row counts as outside: quantile bounds of uniform data are at 1.02."""
MOST_BEYOND, ALL_BEYOND, LEAST_USED = 0.05, 0.5, 0.01
"""Fractions of rows outside the statistics: warning, error; and used fraction of the range: warning."""
STDS = 4.5
"""Half-width in std: at most 5 % of any data are outside (Chebyshev)."""


class Range:
    """Range of statistics in env units: float64 ``middle`` and ``half`` width ``[D]``; ``half`` 0: not compared."""

    def __init__(self, low: Any, high: Any, mask: Any = True) -> None:
        low, high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
        self.middle, self.half = (low + high) / 2, np.where(mask, abs(high - low) / 2, 0.0)

    @classmethod
    def of(cls, stats: Mapping[str, Any], names: Sequence[str], place: str | None) -> Range:
        """Return the range of the lists ``names`` of statistics; with ``place``, check them by ``check_statistics``."""
        if place is not None:
            check_statistics(stats, place, names)
        first, second = (np.array(stats[name], dtype=np.float64) for name in names)
        bounds = (first - STDS * second, first + STDS * second) if names[1] == "std" else (first, second)
        return cls(*bounds, np.array(stats.get("mask") or True, dtype=bool))

    def widths(self, values: np.ndarray) -> np.ndarray:
        """Return distances of ``values [N, S]`` from the middle in half-widths; padding of the statistics is ignored."""
        width = min(values.shape[1], len(self.half))
        half, distance = self.half[:width], abs(values[:, :width] - self.middle[:width])
        return np.where(half > 0, distance / np.where(half > 0, half, 1.0), 0.0)

    def far(self, states: np.ndarray) -> np.ndarray:
        """Return which rows of ``[N, S]``, or of several steps ``[N, T, S]``, have a value beyond ``FAR``: bool ``[N]``."""
        widths = self.widths(states.reshape(-1, states.shape[-1])).max(1, initial=0.0)
        return (widths > FAR).reshape(len(states), -1).any(1)

    def farthest(self, states: np.ndarray) -> tuple[str, float]:
        """Describe the value of ``[N, S]`` that is farthest from its range; return its half-widths, too."""
        widths = self.widths(states)
        row, k = np.unravel_index(int(widths.argmax()), widths.shape)
        text = f"state[{k}] is {states[row, k]:.4g}, and the statistics reach from {self.describe(k)}: other units?"
        return text, float(widths[row, k])

    def describe(self, dimension: int) -> str:
        """Return both ends of a dimension's range as text."""
        middle, half = self.middle[dimension], self.half[dimension]
        return f"{middle - half:.4g} to {middle + half:.4g}"

    def compare(self, values: np.ndarray, name: str, fix: str) -> tuple[float, list[str]]:
        """Compare dataset rows ``[N, S]``; return the largest fraction of rows outside a dimension's range, and warnings."""
        # The outermost row at each end does not count: it is beyond the quantiles of any data.
        beyond = ((self.widths(values) > BEYOND).sum(0) - 2).clip(0) / len(values)
        low, high, half = (numbers[: len(beyond)] for numbers in (values.min(0), values.max(0), self.half))
        unused, warnings = (high > low) & (high - low < 2 * LEAST_USED * half), []
        for k in np.flatnonzero((beyond > MOST_BEYOND) | unused):
            part = "use less than 1 % of" if unused[k] else f"lie to {beyond[k]:.1%} beyond"
            warnings.append(
                f"dimension {k} of the {name}: the rows ({low[k]:.4g} to {high[k]:.4g}) {part} the statistics in use, "
                f"{self.describe(k)}. Set {fix}"
            )
            if beyond[k] > ALL_BEYOND:
                raise ConfigError(warnings[-1][:1].upper() + warnings[-1][1:])
        return float(beyond.max(initial=0.0)), warnings
