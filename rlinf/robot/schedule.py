"""Which action of which chunk is executed when."""

from __future__ import annotations

import math

import numpy as np


class ChunkSchedule:
    """Deals the actions of chunks to the steps of a robot, which are numbered from 0.

    Args:
        overlaps: Action ``k`` of a chunk belongs to the step ``k`` after its observation, so the first ones are dropped that
            were computed too late. False: to the step ``k`` after its arrival.
    """

    def __init__(self, overlaps: bool) -> None:
        self.overlaps = overlaps
        self._chunk, self._first = np.zeros((0, 0), np.float32), 0

    def offer(self, chunk: np.ndarray, seen_at: int, step: int) -> None:
        """Execute ``chunk [C, D]`` from the present ``step`` on; its observation was made at the step ``seen_at``."""
        self._chunk, self._first = chunk, seen_at if self.overlaps else step

    def forget(self) -> None:
        """Drop the actions that are left."""
        self._chunk = self._chunk[:0]

    def action(self, step: int) -> np.ndarray | None:
        """Return the action ``[D]`` of a step; None: it has none."""
        place = step - self._first
        return self._chunk[place] if 0 <= place < len(self._chunk) else None

    def asks(self, step: int, lead: int) -> bool:
        """Return whether the next chunk must be asked for now, if it comes ``lead`` steps later."""
        left = max(0, self._first + len(self._chunk) - step)
        return left <= (lead if self.overlaps else 0)


def lead_steps(latency_s: float, grace_s: float, fps: float) -> int:
    """Return the steps after which an answer is used that takes ``latency_s``, if a step waits up to ``grace_s`` for it."""
    return max(0, math.ceil((latency_s - grace_s) * fps - 1e-9))
