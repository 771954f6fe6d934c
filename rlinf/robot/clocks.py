"""Real and simulated clocks, and the policy thread that runs under them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np

from rlinf.types import Observation


class ChunkReply(NamedTuple):
    """A chunk ``[C, D]`` or the call's error, the position that was due at the observation, and the call's duration."""

    chunk: np.ndarray | BaseException
    seen_at: int
    latency_s: float


class Timekeeper(ABC):
    """A clock, and a thread for the policy ``act``, with at most one pending call and ``latency_s`` added to each."""

    def __init__(self, act: Callable[[Observation], np.ndarray], latency_s: float) -> None:
        self._act, self.latency_s = act, latency_s
        self._requests: SimpleQueue[tuple[Future, Observation] | None] = SimpleQueue()
        # A daemon: Python joins all other threads at exit, and a remote policy may be unreachable for minutes.
        Thread(target=self._serve, name="policy", daemon=True).start()
        self._pending: tuple[Future, int, float] | None = None
        self.begin()

    def begin(self) -> None:
        """Start an episode: wait for and discard a pending call, and reset the clock."""
        if self._pending is not None:
            wait([self._pending[0]])
        self._pending = None
        self._reset()

    def submit(self, observation: Observation, seen_at: int) -> None:
        """Request the chunk for an observation that was made when position ``seen_at`` was due."""
        self._pending = Future(), seen_at, self.now()
        self._requests.put((self._pending[0], observation))

    @property
    def is_pending(self) -> bool:
        """Whether a call is pending."""
        return self._pending is not None

    def poll(self, wait_s: float) -> ChunkReply | None:
        """Return the reply, waiting up to ``wait_s`` for it, or None if it is not ready."""
        if self._pending is None:
            return None
        future, seen_at, submitted_at = self._pending
        if not self._is_ready(future, submitted_at, wait_s):
            return None
        self._pending = None
        error = future.exception()
        chunk, latency_s = (error, 0.0) if error is not None else future.result()
        return ChunkReply(chunk, seen_at, latency_s)

    def drop(self) -> None:
        """Discard the pending call."""
        if self._pending is not None:
            self._pending[0].cancel()
        self._pending = None

    def close(self) -> None:
        """End the thread; wait up to a second for its reply, because torch code must not run while Python exits."""
        self._requests.put(None)
        if self._pending is not None and not self._pending[0].cancel():
            wait([self._pending[0]], 1.0)

    def _serve(self) -> None:
        for future, observation in iter(self._requests.get, None):
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._timed(observation))
                except BaseException as error:  # noqa: BLE001 whatever a policy raises is re-raised by the caller
                    future.set_exception(error)

    @abstractmethod
    def now(self) -> float:
        """Return seconds since the start."""

    @abstractmethod
    def sleep_until(self, moment: float) -> None:
        """Return at ``moment``, or immediately if it has passed."""

    @abstractmethod
    def _reset(self) -> None:
        """Set the clock to 0."""

    @abstractmethod
    def _timed(self, observation: Observation) -> tuple[np.ndarray, float]:
        """Return a chunk, and how long it took in seconds."""

    @abstractmethod
    def _is_ready(self, future: Future, submitted_at: float, wait_s: float) -> bool:
        """Return whether the reply is ready within ``wait_s``."""


class RealTime(Timekeeper):
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic() - self._start

    def sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))

    def _reset(self) -> None:
        self._start = time.monotonic()

    def _timed(self, observation: Observation) -> tuple[np.ndarray, float]:
        start = time.monotonic()
        chunk = self._act(observation)
        time.sleep(self.latency_s)
        return chunk, time.monotonic() - start

    def _is_ready(self, future: Future, submitted_at: float, wait_s: float) -> bool:
        return bool(wait([future], wait_s).done)


class SimulatedTime(Timekeeper):
    """A clock that jumps from step to step. Each call takes ``latency_s``, however long it really takes."""

    def now(self) -> float:
        return self._now

    def sleep_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def _reset(self) -> None:
        self._now = 0.0

    def _timed(self, observation: Observation) -> tuple[np.ndarray, float]:
        return self._act(observation), self.latency_s

    def _is_ready(self, future: Future, submitted_at: float, wait_s: float) -> bool:
        # The small term absorbs the rounding of `step * period`.
        return self._now + wait_s + 1e-9 >= submitted_at + self.latency_s
