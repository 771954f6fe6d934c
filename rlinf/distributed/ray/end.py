"""A watcher process that ends a killed run's Ray processes. It does not import rlinf."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.5
_watchers: list[subprocess.Popen] = []


def children(pid: int) -> list[int]:
    """Return the process IDs of a process's running children, or an empty list without ``/proc``."""
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    return []


def end_with_this_process(daemons: list[int]) -> None:
    """Start a watcher that kills ``daemons`` (children of this process) and their descendants if this process is killed."""
    command = [sys.executable, "-I", __file__, *map(str, (os.getpid(), *daemons))]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    _watchers.append(subprocess.Popen(command, **streams, start_new_session=True))


def watch(parent: int, daemons: list[int]) -> None:
    """Wait for the parent to die, then kill its daemons. Return early if the parent has ended all daemons itself."""
    tree: list[int] = []
    while daemons:
        running = children(parent)
        if os.getppid() != parent:
            break
        daemons = [pid for pid in daemons if pid in running]
        # Update the list while the parent is running: the daemons die with it, and their children are then reparented.
        tree = list(daemons)
        for pid in tree:  # grows during the loop
            tree += children(pid)
        time.sleep(POLL_S)
    for pid in tree:
        with suppress(OSError):
            # The process ID may have been reused by now.
            if b"ray" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), [int(pid) for pid in sys.argv[2:]])
