"""Detects the loss of the Ray cluster's head or of Ray's daemon on this machine, without which a run cannot continue."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

from rlinf.distributed.stack_dump import kill_children
from rlinf.errors import RankError, RLinfError, exit_status, print_error

POLL_S = 1.0
CONNECT_S = 2.0
"""Timeout for connections to a process that may be ending, in seconds."""
LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's environment variable: seconds without the head before Ray ends each process without a Python error."""
_watches: list[ClusterWatch] = []
"""Watches of all active ``watched`` blocks in this process."""
RESUME_HINT = "Start the cluster again, then continue with rlinf train resume=<run folder>"


class ClusterWatch:
    """Polls the head of a cluster, and if it is lost, ends this process with an error before Ray would end it without one."""

    def __init__(self, ray: ModuleType) -> None:
        context = ray.get_runtime_context()
        this_node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        self.limit_s = float(os.environ.get(LIMIT, 60)) / 2
        self.head: str = context.gcs_address
        self.daemon = f"{this_node['NodeManagerAddress']}:{this_node['NodeManagerPort']}"
        self.silent_s = 0.0
        self._ray = ray
        self._ended = threading.Event()

    def start(self) -> None:
        """Start watching."""
        # A call to an unresponsive head may block for minutes, so a second thread measures the time.
        for work in (self._poll_head, self._count):
            threading.Thread(target=work, name="cluster watch", daemon=True).start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def lost(self) -> RankError | None:
        """Return the error to raise if the head or the daemon is unreachable, otherwise None."""
        if not _listens(self.daemon):
            return RankError(
                f"Ray's daemon on this machine (raylet at {self.daemon}) has ended, so the connection to remote rollout workers and ranks "
                f"is lost. A common cause is running out of memory; see Ray's logs. {RESUME_HINT}"
            )
        return None if _listens(self.head) else self._head_is_lost("has ended")

    def _head_is_lost(self, how: str) -> RankError:
        return RankError(
            f"The head of the Ray cluster at {self.head} {how}. {RESUME_HINT}. If your head restarts by itself, allow more time, on all "
            f"machines and for the run: {LIMIT}={4 * self.limit_s:g}"
        )

    def _poll_head(self) -> None:
        while not self._ended.wait(POLL_S):
            # Ignore short interruptions. `_count` ends the process after a long one.
            with suppress(self._ray.exceptions.RayError, OSError):
                self._ray.nodes()
                self.silent_s = 0.0

    def _count(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(POLL_S):
            now = time.monotonic()
            # Limit the time to 2 polls, because this process may have been stopped (Ctrl-Z).
            self.silent_s += min(now - last, 2 * POLL_S)
            last = now
            if self.silent_s > self.limit_s:
                error = self._head_is_lost(f"has not replied for {self.limit_s:g} s")
                print_error(error)
                kill_children()
                # Do not use sys.exit, because the main thread may be waiting for the cluster. Ranks end with this process.
                os._exit(exit_status(error))


@contextmanager
def watched(ray: ModuleType) -> Iterator[None]:
    """Watch the cluster during the block. Replace errors by RankError if its head or this machine's daemon has ended."""
    watch = ClusterWatch(ray)
    watch.start()
    _watches.append(watch)
    try:
        yield
    except RLinfError:
        raise
    except Exception as error:
        if (lost := watch.lost()) is not None:
            raise lost from error
        raise
    finally:
        _watches.remove(watch)
        watch.end()


def cluster_lost() -> RankError | None:
    """Return the error to raise if a cluster watched by this process is lost, otherwise None."""
    return next((error for watch in _watches if (error := watch.lost()) is not None), None)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
