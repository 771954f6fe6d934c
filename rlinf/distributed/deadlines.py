"""Named deadlines for joint work of a run's ranks, and the report printed when a deadline expires.

A collective call that waits for a rank runs no Python code, so each rank has a thread that watches the clock. When a
deadline expires, the rank raises an alarm in the store. Each rank then writes its own stacks and its simulators' and engines'
stacks to the store, and the rank with the expired deadline prints all of them.
"""

import os
import pickle
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import torch.distributed as dist

from rlinf.distributed.stack_dump import REMOTE_S, all_stacks, kill_children
from rlinf.errors import RankError, RLinfError, exit_status, print_error

POLL_S = 0.5
REPLY_S = REMOTE_S + 1.5
"""Time allowed for other ranks and their simulators to send their stacks, in seconds."""
REPORT_S = 30.0
"""Time allowed for the rank with the expired deadline to collect stacks and report the error, in seconds."""
GRACE_S = 5.0
"""Time allowed for a rank to exit by itself after a different rank has failed, in seconds."""
FIRST_ROLLOUT_S, LEAST_ROLLOUT_S, ROLLOUT_FACTOR = 3600.0, 1200.0, 10.0
"""Rollout deadlines: for the first rollout, the minimum for later ones, and the ratio to the median duration of the last five."""


class DeadlineError(RankError):
    """Raised when joint work of the ranks exceeds its deadline."""


class Clock:
    """Tracks this rank's current work, the time spent on it, and the durations of recent rollouts."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.seconds = 0.0
        self.rollouts: deque[float] = deque(maxlen=5)
        # Reentrant because a signal handler on the main thread may interrupt `switch` and call it again.
        self._lock = threading.RLock()

    def switch(self, name: str | None) -> str | None:
        """Start the deadline ``name`` (or none, if None), and return the previous deadline's name."""
        with self._lock:
            before, self.name, self.seconds = self.name, name, 0.0
        return before

    def tick(self, seconds: float) -> None:
        """Add to the time spent on the current work."""
        with self._lock:
            self.seconds += seconds

    def add_rollout(self, seconds: float) -> None:
        """Record the duration of a complete RL rollout, from which later deadlines are derived."""
        with self._lock:
            self.rollouts.append(seconds)

    def limit(self, deadlines: Mapping[str, float | None]) -> float | None:
        """Return the time limit of the current work in seconds, or None for no limit."""
        with self._lock:
            return None if self.name is None else self.limit_of(self.name, deadlines)

    def limit_of(self, name: str, deadlines: Mapping[str, float | None]) -> float:
        """Return the time limit of the work ``name`` in seconds."""
        with self._lock:
            if (given := deadlines[name]) is not None:
                return given
            if not self.rollouts:
                return FIRST_ROLLOUT_S
            return max(LEAST_ROLLOUT_S, ROLLOUT_FACTOR * statistics.median(self.rollouts))

    def expired(self, deadlines: Mapping[str, float | None]) -> tuple[str, float] | None:
        """Return the name and limit of the current deadline if it has expired, otherwise None."""
        with self._lock:
            limit = self.limit(deadlines)
            return (self.name, limit) if limit is not None and self.seconds > limit else None


clock = Clock()


@contextmanager
def deadline(name: str) -> Iterator[None]:
    """Run the block under the deadline ``cluster.deadlines.<name>``. On exit, any enclosing deadline restarts."""
    # The time includes this rank's own computation, because other ranks wait for it.
    before = clock.switch(name)
    try:
        yield
    finally:
        clock.switch(before)


def heartbeat() -> None:
    """Restart the current deadline after the work has made progress."""
    clock.switch(clock.name)


def portable(error: Exception, rank: int) -> Exception:
    """Convert a rank's error for other processes: user errors are unchanged; any other error becomes a RankError with its traceback."""
    if isinstance(error, RLinfError):
        return error.with_message("\n".join([str(error), *getattr(error, "__notes__", [])]))
    if isinstance(error, RankError):
        return error
    text = "".join(traceback.format_exception(error))[-20000:]
    return RankError(f"Rank {rank} failed on {socket.gethostname()}.\n{text}")


def report(store: dist.Store, error: Exception) -> Exception:
    """Report an error to all ranks, and return the first error that any rank reported."""
    # The first error is the cause. Later errors, such as lost connections, are consequences.
    text = f"{type(error).__name__}: {error}"
    try:
        pickled = pickle.dumps(error)
    except Exception as failure:  # noqa: BLE001 - code of its class runs
        pickled = pickle.dumps(RankError(f"{text}\n(The error itself cannot be pickled: {failure})"))
    return _unpickled(store.compare_set("error", "", pickle.dumps((text, pickled))))


def reported(store: dist.Store) -> Exception | None:
    """Return the first error that any rank reported."""
    return _unpickled(store.get("error")) if store.check(["error"]) else None


def _unpickled(data: bytes) -> Exception:
    """Unpickle a reported error. If that fails, return a RankError with the error's text."""
    text, pickled = pickle.loads(data)
    try:
        return pickle.loads(pickled)
    except Exception as failure:  # noqa: BLE001 - code of its class runs
        return RankError(f"{text}\n(The error itself cannot be unpickled: {failure})")


class Watchdog:
    """Context manager that watches a rank's deadlines in a thread. Deadlines are in seconds, by name; None means derived.

    With ``ends_process``, it ends this process ``GRACE_S`` after a different rank's error; otherwise the parent process does.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, deadlines: Mapping[str, float | None], ends_process: bool
    ) -> None:
        self.store, self.rank, self.size, self.deadlines = store.clone(), rank, size, dict(deadlines)
        self.ends_process = ends_process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deadlines", daemon=True)

    def __enter__(self) -> Self:
        clock.rollouts.clear()
        # Used in reports if this rank stops responding.
        self.store.set(f"host/{self.rank}", f"{socket.gethostname()} (process {os.getpid()})")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        try:
            while not self._ended.wait(POLL_S):
                now = time.monotonic()
                # Limit the time to 2 polls: while stopped (Ctrl-Z) or suspended with its machine, the process was not waiting.
                clock.tick(min(now - last, 2 * POLL_S))
                last = now
                if self.store.check(["alarm"]):
                    self._send_stacks()
                    self._end_with_all_ranks(0.0)
                elif self.store.check(["error"]):
                    self._end_with_all_ranks(GRACE_S)
                elif expired := clock.expired(self.deadlines):
                    self._raise_alarm(*expired)
        except dist.DistError:
            # The store is gone because rank 0 or the launcher has ended. If this rank is also ending, its main thread raises the cause.
            if not self._ended.wait(GRACE_S):
                self._leave(
                    RankError(f"Rank {self.rank} lost the connection to other ranks: rank 0 or the launcher has ended")
                )

    def _raise_alarm(self, name: str, limit: float) -> None:
        """Collect the stacks of all ranks, print them, and end all ranks with a DeadlineError."""
        # Deadlines of several ranks may expire together; `compare_set` selects exactly one rank to report.
        this_rank = f"{self.rank}"
        first = self.store.compare_set("alarm", "", this_rank).decode()
        self._send_stacks()
        if first != this_rank:
            return self._end_with_all_ranks(0.0)
        deadline = time.monotonic() + REPLY_S
        keys = {rank: f"stacks/{rank}" for rank in range(self.size)}
        silent = set(keys)
        while silent and time.monotonic() < deadline:
            silent -= {rank for rank in silent if self.store.check([keys[rank]])}
            time.sleep(0.1)
        for rank, key in keys.items():
            host = self.store.get(f"host/{rank}").decode() if self.store.check([f"host/{rank}"]) else "its machine"
            no_reply = "no reply: it is stopped or lost, or it holds Python's lock"
            stacks = no_reply if rank in silent else self.store.get(key).decode()
            print(f"\n--- rank {rank} on {host}: {stacks}", file=sys.stderr)
        missing = f"; no reply from rank {', '.join(map(str, sorted(silent)))}" if silent else ""
        error = DeadlineError(
            f"Rank {self.rank} on {socket.gethostname()} was in '{name}' for more than {limit:g} s{missing}. The stacks of all ranks are "
            f"in the log. If it only needs more time, set cluster.deadlines.{name}={2 * limit:g}"
        )
        report(self.store, error)
        self._leave(error)

    def _send_stacks(self) -> None:
        doing = f"in '{clock.name}' for {clock.seconds:.0f} s" if clock.name else "between two waits"
        self.store.set(f"stacks/{self.rank}", f"process {os.getpid()}, {doing}\n{all_stacks()}")

    def _end_with_all_ranks(self, grace_s: float) -> None:
        """End this process with the error reported by a rank, unless it ends by itself in the meantime."""
        deadline = time.monotonic() + REPORT_S
        while (error := reported(self.store)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if error is None:
            error = DeadlineError("A deadline expired, and the rank that noticed it ended before it could report it")
        if not self._ended.wait(grace_s) and (self.ends_process or isinstance(error, DeadlineError)):
            self._leave(error)

    def _leave(self, error: Exception) -> None:
        """End this process and its children immediately."""
        if self.ends_process:
            print_error(error)
        kill_children()
        sys.stdout.flush()
        sys.stderr.flush()
        # Rank 0 may own the store, from which other ranks still have to read the error.
        if self.ends_process and self.rank == 0:
            time.sleep(2 * POLL_S)
        # Do not use sys.exit: the main thread may be stuck in a collective call that never returns.
        os._exit(exit_status(error))
