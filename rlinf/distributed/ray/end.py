"""A watcher process that ends the Ray processes of a killed run. It imports nothing of rlinf."""

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
    """Return the running children of a process; an empty list without ``/proc``."""
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    return []


def end_with_this_process(daemons: list[int]) -> None:
    """Start a watcher that kills ``daemons``, children of this process, and their descendants once this process has been killed."""
    command = [sys.executable, "-I", __file__, *map(str, (os.getpid(), *daemons))]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    _watchers.append(subprocess.Popen(command, **streams, start_new_session=True))


def watch(parent: int, daemons: list[int]) -> None:
    """Wait until the parent has died, and kill its daemons; return as soon as it has ended all daemons itself."""
    tree: list[int] = []
    while daemons:
        running = children(parent)
        if os.getppid() != parent:
            break
        daemons = [pid for pid in daemons if pid in running]
        # Updated while the parent runs: the daemons die with it, and then their children have a different parent.
        tree = list(daemons)
        for pid in tree:  # grows
            tree += children(pid)
        time.sleep(POLL_S)
    for pid in tree:
        with suppress(OSError):
            # A new process may have the same id by now.
            if b"ray" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), [int(pid) for pid in sys.argv[2:]])
