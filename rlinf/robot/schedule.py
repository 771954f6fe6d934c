"""The order in which the actions of chunks are executed."""

from __future__ import annotations

import math

import numpy as np


class ChunkSchedule:
    """Assigns the actions of chunks to places. One place is due at each step.

    The place that is due counts steps, if all numbers of an action are positions: past ones are over. Otherwise it counts
    executed actions, because a displacement that was not executed is still to be made.

    A chunk whose first actions come too late was planned as if they were executed. Others were, so the displacements lead elsewhere.
    The difference is added to the next action, and any part of it that was not executed to the one after.

    Args:
        overlaps: Action ``k`` of a chunk belongs to the place ``k`` after its observation, so the actions are dropped in whose
            places others were executed meanwhile. False: to the place ``k`` after its arrival.
        displaces: bool ``[D]``: which numbers of an action are displacements.
    """

    def __init__(self, overlaps: bool, displaces: np.ndarray) -> None:
        self.overlaps, self.displaces = overlaps, displaces
        self._chunk, self._first = np.zeros((0, len(displaces)), np.float32), 0
        self._executed: list[np.ndarray] = []
        self._missing = np.zeros(len(displaces), np.float32)

    def offer(self, chunk: np.ndarray, seen_at: int, due: int) -> int:
        """Execute ``chunk [C, D]`` from the place ``due`` on; ``seen_at`` was due at its observation. Return how many were dropped."""
        self._chunk, self._first = chunk, seen_at if self.overlaps else due
        dropped = due - self._first
        self._missing[:] = 0
        if dropped and self.displaces.any():
            instead = np.sum(self._executed[-dropped:], axis=0)
            self._missing = np.where(self.displaces, chunk[:dropped].sum(0) - instead, 0).astype(np.float32)
        return dropped

    def action(self, due: int) -> np.ndarray | None:
        """Return the action ``[D]`` of a place; None: it has none."""
        place = due - self._first
        return self._chunk[place] + self._missing if 0 <= place < len(self._chunk) else None

    def execute(self, wanted: np.ndarray, sent: np.ndarray) -> None:
        """Note that the robot has made ``sent`` of an action."""
        self._executed.append(sent)
        self._missing = np.where(self._missing == 0, 0, wanted - sent).astype(np.float32)

    def clear(self) -> None:
        """Drop the chunk: somebody else acts, so it leads elsewhere."""
        self._chunk = self._chunk[:0]
        self._missing[:] = 0

    def asks(self, due: int, lead: int) -> bool:
        """Return whether the next chunk must be asked for now, if it comes ``lead`` steps later."""
        left = max(0, self._first + len(self._chunk) - due)
        return left <= (lead if self.overlaps else 0)


def lead_steps(latency_s: float, grace_s: float, fps: float) -> int:
    """Return the steps after which an answer is used that takes ``latency_s``, if a step waits up to ``grace_s`` for it."""
    return max(0, math.ceil((latency_s - grace_s) * fps - 1e-9))
