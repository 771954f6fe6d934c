"""Real and simulated time, and a policy that is asked in each of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np

from rlinf.types import Observation


class Answer(NamedTuple):
    """A chunk ``[C, D]``, or the error in its place; the place that was due at its observation, and the seconds that it took."""

    chunk: np.ndarray | BaseException
    seen_at: int
    latency_s: float


class Timekeeper(ABC):
    """Time, and a policy in a thread of its own, which answers one question at a time.

    Args:
        act: Returns the chunk ``[C, D]`` of one row.
        latency_s: Seconds that are added to each answer.
    """

    def __init__(self, act: Callable[[Observation], np.ndarray], latency_s: float) -> None:
        self._act, self.latency_s = act, latency_s
        self._questions: SimpleQueue[tuple[Future, Observation] | None] = SimpleQueue()
        # Python waits for all other threads when it ends, and a policy elsewhere may be gone for minutes.
        Thread(target=self._answer_all, name="policy", daemon=True).start()
        self._open: tuple[Future, int, float] | None = None
        self.begin()

    def begin(self) -> None:
        """Start an episode: it is 0 o'clock, and no question is open."""
        if self._open is not None:
            wait([self._open[0]])
        self._open = None
        self._set_to_zero()

    def ask(self, row: Observation, seen_at: int) -> None:
        """Ask for the chunk of a row; the place ``seen_at`` was due when it was seen."""
        self._open = Future(), seen_at, self.now()
        self._questions.put((self._open[0], row))

    @property
    def is_asked(self) -> bool:
        """Whether a question is open."""
        return self._open is not None

    def answer(self, wait_s: float) -> Answer | None:
        """Return the answer, for which this waits up to ``wait_s``; None: it is not there."""
        if self._open is None:
            return None
        future, seen_at, asked_at = self._open
        if not self._is_there(future, asked_at, wait_s):
            return None
        self._open = None
        error = future.exception()
        chunk, latency_s = (error, 0.0) if error is not None else future.result()
        return Answer(chunk, seen_at, latency_s)

    def drop(self) -> None:
        """Forget the open question, whose answer nobody waits for."""
        if self._open is not None:
            self._open[0].cancel()
        self._open = None

    def close(self) -> None:
        """End the thread; wait a second for its answer, because code of torch must not run while Python ends."""
        self._questions.put(None)
        if self._open is not None and not self._open[0].cancel():
            wait([self._open[0]], 1.0)

    def _answer_all(self) -> None:
        for future, row in iter(self._questions.get, None):
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._timed(row))
                except BaseException as error:  # noqa: BLE001 whatever a policy raises goes to who asked
                    future.set_exception(error)

    @abstractmethod
    def now(self) -> float:
        """Return seconds since ``begin``."""

    @abstractmethod
    def sleep_until(self, moment: float) -> None:
        """Return when it is ``moment``, or at once if it was."""

    @abstractmethod
    def _set_to_zero(self) -> None:
        """Let it be 0 o'clock."""

    @abstractmethod
    def _timed(self, row: Observation) -> tuple[np.ndarray, float]:
        """Return a chunk, and how long it took."""

    @abstractmethod
    def _is_there(self, future: Future, asked_at: float, wait_s: float) -> bool:
        """Return whether the answer is there within ``wait_s``."""


class RealTime(Timekeeper):
    """Time as it passes."""

    def now(self) -> float:
        return time.monotonic() - self._start

    def sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))

    def _set_to_zero(self) -> None:
        self._start = time.monotonic()

    def _timed(self, row: Observation) -> tuple[np.ndarray, float]:
        start = time.monotonic()
        chunk = self._act(row)
        time.sleep(self.latency_s)
        return chunk, time.monotonic() - start

    def _is_there(self, future: Future, asked_at: float, wait_s: float) -> bool:
        return bool(wait([future], wait_s).done)


class SimulatedTime(Timekeeper):
    """Time that jumps from step to step. An answer takes ``latency_s``, however long it takes."""

    def now(self) -> float:
        return self._now

    def sleep_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def _set_to_zero(self) -> None:
        self._now = 0.0

    def _timed(self, row: Observation) -> tuple[np.ndarray, float]:
        return self._act(row), self.latency_s

    def _is_there(self, future: Future, asked_at: float, wait_s: float) -> bool:
        return self._now + wait_s + 1e-9 >= asked_at + self.latency_s
