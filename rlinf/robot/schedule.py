"""Determines the order in which the actions of chunks are executed."""

import math

import numpy as np


class ChunkSchedule:
    """Assigns the actions of chunks to positions on a timeline; one position is due at each step.

    If all action dimensions are absolute, the due position counts steps, because targets in the past are obsolete. Otherwise
    it counts executed actions, because a displacement that was not executed is still due.

    A late chunk assumes that its own first actions were executed. Instead, the previous chunk's were, so its displacements would
    end elsewhere. The difference is added to the next action, and any unexecuted part of it to the one after.

    Args:
        overlaps: If true, action ``k`` of a chunk is due ``k`` positions after its observation, and actions whose positions
            have passed are dropped; otherwise it is due ``k`` positions after the chunk's arrival.
        is_relative: Action dimensions that are displacements, bool ``[D]``.
    """

    def __init__(self, overlaps: bool, is_relative: np.ndarray) -> None:
        self.overlaps, self.is_relative = overlaps, is_relative
        self._chunk, self._first = np.zeros((0, len(is_relative)), np.float32), 0
        self._executed: list[np.ndarray] = []
        self._missing = np.zeros(len(is_relative), np.float32)

    def offer(self, chunk: np.ndarray, seen_at: int, due: int) -> int:
        """Use ``chunk [C, D]``, observed at position ``seen_at``, from position ``due`` on. Return the number of dropped actions."""
        self._chunk, self._first = chunk, seen_at if self.overlaps else due
        dropped = due - self._first
        self._missing[:] = 0
        if dropped and self.is_relative.any():
            # While this chunk was computed, actions of the previous one moved the robot: correct for the difference.
            executed = np.sum(self._executed[-dropped:], axis=0)
            self._missing = np.where(self.is_relative, chunk[:dropped].sum(0) - executed, 0).astype(np.float32)
        return dropped

    def action(self, due: int) -> np.ndarray | None:
        """Return the action ``[D]`` at a position, or None if the chunk has none there."""
        index = due - self._first
        return self._chunk[index] + self._missing if 0 <= index < len(self._chunk) else None

    def execute(self, action: np.ndarray, sent: np.ndarray) -> None:
        """Record that the robot executed ``sent`` instead of ``action``."""
        self._executed.append(sent)
        self._missing = np.where(self._missing == 0, 0, action - sent).astype(np.float32)

    def clear(self) -> None:
        """Drop the chunk, because an operator is acting."""
        self._chunk = self._chunk[:0]
        self._missing[:] = 0

    def needs_chunk(self, due: int, lead: int) -> bool:
        """Return whether the next chunk must be requested now, if it arrives ``lead`` steps later."""
        num_left = max(0, self._first + len(self._chunk) - due)
        return num_left <= (lead if self.overlaps else 0)


def lead_steps(latency_s: float, grace_s: float, fps: float) -> int:
    """Return the number of steps before a reply of ``latency_s`` is used, if a step waits up to ``grace_s`` for it."""
    # The small term keeps a latency of exactly n periods from being rounded up to n + 1.
    return max(0, math.ceil((latency_s - grace_s) * fps - 1e-9))
