"""Notice that a run has lost its Ray cluster: the head, or Ray's daemon on this machine. Without them it must end."""

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
"""Seconds that a process on its way to its end has to reject or accept a connection."""
LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's variable: seconds without the head after which Ray ends each process without a word of Python."""
_watches: list[ClusterWatch] = []
"""Those of the blocks of ``watched`` that this process is in."""
WAY_ON = "Start the cluster again, then continue with rlinf train resume=<run folder>"


class ClusterWatch:
    """Asks the head of a cluster whether it is there, and ends this process with an error before Ray would end it."""

    def __init__(self, ray: ModuleType) -> None:
        context = ray.get_runtime_context()
        own = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        self.limit_s = float(os.environ.get(LIMIT, 60)) / 2
        self.head: str = context.gcs_address
        self.daemon = f"{own['NodeManagerAddress']}:{own['NodeManagerPort']}"
        self.silent_s = 0.0
        self._ray = ray
        self._ended = threading.Event()

    def start(self) -> None:
        """Watch from now on."""
        for work in (self._ask, self._count):
            threading.Thread(target=work, name="cluster watch", daemon=True).start()

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def lost(self) -> RankError | None:
        """Return the error to raise if the head or the daemon rejects connections."""
        if not _listens(self.daemon):
            return RankError(
                f"Ray's daemon on this machine (raylet at {self.daemon}) has ended, and with it the connection to rollout workers and ranks "
                "elsewhere; often memory ran out. Look for the cause in "
                f"Ray's logs. {WAY_ON}"
            )
        return None if _listens(self.head) else self._actor_is_lost("has ended")

    def _actor_is_lost(self, how: str) -> RankError:
        return RankError(
            f"The head of the Ray cluster at {self.head} {how}. {WAY_ON}. If your head is one that comes back, give it longer, on all "
            f"machines and for the run: {LIMIT}={4 * self.limit_s:g}"
        )

    def _ask(self) -> None:
        while not self._ended.wait(POLL_S):
            with suppress(self._ray.exceptions.RayError, OSError):  # ``_count`` says so when it has lasted
                self._ray.nodes()
                self.silent_s = 0.0

    def _count(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(POLL_S):
            now = time.monotonic()
            self.silent_s += min(now - last, 2 * POLL_S)  # this process may have been stopped (Ctrl-Z)
            last = now
            if self.silent_s > self.limit_s:
                error = self._actor_is_lost(f"has not answered for {self.limit_s:g} s")
                print_error(error)
                kill_children()
                os._exit(exit_status(error))  # the main thread may wait for the cluster; ranks end with this process


@contextmanager
def watched(ray: ModuleType) -> Iterator[None]:
    """Watch the cluster during the block. An error that follows from its loss is raised as what it is.

    Raise RankError if the head of the cluster or Ray's daemon on this machine has ended.
    """
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
    """Return the error to raise if the cluster that this process watches is lost; None also if it watches none."""
    return next((error for watch in _watches if (error := watch.lost()) is not None), None)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
