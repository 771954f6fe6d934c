"""Named deadlines for the joint work of a run's ranks, and the report when a deadline expires.

A collective call that waits for a rank runs no Python, so a thread of each rank watches the clock. When a deadline
expires, the rank raises an alarm in the store. Each rank writes its stacks there, with those of its simulators and engines,
and the rank with the expired deadline prints all of them.
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
"""Seconds that other ranks, with their simulators, have to send their stacks."""
REPORT_S = 30.0
"""Seconds that the rank with the expired deadline has to collect the stacks and report the error."""
GRACE_S = 5.0
"""Seconds that a rank has to end on its own after a different rank has failed."""
FIRST_ROLLOUT_S, LEAST_ROLLOUT_S, ROLLOUT_FACTOR = 3600.0, 1200.0, 10.0
"""The derived deadline of a rollout: of the first one; its minimum later; its ratio to the median of the last five."""


class DeadlineError(RankError):
    """Joint work of the ranks took longer than its deadline."""


class Clock:
    """The present work of this rank, its seconds so far, and how long the last rollouts took."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.seconds = 0.0
        self.rollouts: deque[float] = deque(maxlen=5)
        # Reentrant: a signal handler may call `switch` on the main thread in the middle of a `switch`.
        self._lock = threading.RLock()

    def switch(self, name: str | None) -> str | None:
        """Start the deadline ``name`` (None: no deadline), and return the previous name."""
        with self._lock:
            before, self.name, self.seconds = self.name, name, 0.0
        return before

    def tick(self, seconds: float) -> None:
        """Add to the seconds of the present work."""
        with self._lock:
            self.seconds += seconds

    def add_rollout(self, seconds: float) -> None:
        """Record how long a complete RL rollout took, from which the next deadlines are derived."""
        with self._lock:
            self.rollouts.append(seconds)

    def limit(self, deadlines: Mapping[str, float | None]) -> float | None:
        """Return the limit of the present work in seconds; None: no limit."""
        with self._lock:
            return None if self.name is None else self.limit_of(self.name, deadlines)

    def limit_of(self, name: str, deadlines: Mapping[str, float | None]) -> float:
        """Return the limit of the work ``name`` in seconds."""
        with self._lock:
            if (given := deadlines[name]) is not None:
                return given
            if not self.rollouts:
                return FIRST_ROLLOUT_S
            return max(LEAST_ROLLOUT_S, ROLLOUT_FACTOR * statistics.median(self.rollouts))

    def expired(self, deadlines: Mapping[str, float | None]) -> tuple[str, float] | None:
        """Return the name and the limit of the present deadline if it has expired."""
        with self._lock:
            limit = self.limit(deadlines)
            return (self.name, limit) if limit is not None and self.seconds > limit else None


clock = Clock()


@contextmanager
def deadline(name: str) -> Iterator[None]:
    """Run the block under the deadline ``cluster.deadlines.<name>``; an enclosing deadline restarts after it."""
    # It includes this rank's own computation, because other ranks wait for it.
    before = clock.switch(name)
    try:
        yield
    finally:
        clock.switch(before)


def heartbeat() -> None:
    """Restart the present deadline, because the work has made progress."""
    clock.switch(clock.name)


def portable(error: Exception, rank: int) -> Exception:
    """Return a rank's error for other processes: a user error unchanged, any other error as a RankError with its traceback."""
    if isinstance(error, RLinfError):
        return error.with_message("\n".join([str(error), *getattr(error, "__notes__", [])]))
    if isinstance(error, RankError):
        return error
    text = "".join(traceback.format_exception(error))[-20000:]
    return RankError(f"Rank {rank} failed on {socket.gethostname()}.\n{text}")


def report(store: dist.Store, error: Exception) -> Exception:
    """Report an error to all ranks, and return the first error that any rank reported."""
    # The first error is the cause. Later errors (lost connections) follow from it.
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
    """Return a reported error; a RankError with its text if this process cannot unpickle it."""
    text, pickled = pickle.loads(data)
    try:
        return pickle.loads(pickled)
    except Exception as failure:  # noqa: BLE001 - code of its class runs
        return RankError(f"{text}\n(The error itself cannot be unpickled: {failure})")


class Watchdog:
    """Context manager with a thread that watches a rank's deadlines, in seconds by name (None: derived).

    With ``ends_process``, it ends this process ``GRACE_S`` after an error of a different rank; else the parent process does.
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
        # For reports about this rank when it no longer replies.
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
                # At most 2 polls count: a process that was stopped (Ctrl-Z), or slept with its machine, did not wait meanwhile.
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
            # The store is gone: rank 0 or the launcher has ended. If this rank is ending, too, its main thread raises the cause.
            if not self._ended.wait(GRACE_S):
                self._leave(
                    RankError(f"Rank {self.rank} lost the connection to other ranks: rank 0 or the launcher has ended")
                )

    def _raise_alarm(self, name: str, limit: float) -> None:
        """Collect the stacks of all ranks, print them, and end all ranks with a DeadlineError."""
        # Deadlines of several ranks may expire together: `compare_set` makes exactly one rank report.
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
            f"in the log. If it only needs longer, set cluster.deadlines.{name}={2 * limit:g}"
        )
        report(self.store, error)
        self._leave(error)

    def _send_stacks(self) -> None:
        doing = f"in '{clock.name}' for {clock.seconds:.0f} s" if clock.name else "between two waits"
        self.store.set(f"stacks/{self.rank}", f"process {os.getpid()}, {doing}\n{all_stacks()}")

    def _end_with_all_ranks(self, grace_s: float) -> None:
        """End this process with the error that a rank reported, unless it ends on its own meanwhile."""
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
        # Rank 0 may own the store, from which other ranks still read the error.
        if self.ends_process and self.rank == 0:
            time.sleep(2 * POLL_S)
        # Not sys.exit: the main thread may be in a collective call that never returns.
        os._exit(exit_status(error))
