"""End the Ray processes that a killed run has started: a process of its own, which imports nothing of rlinf, waits for the run's death."""

from __future__ import annotations

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
    """Return the running children of a process; an empty list where the system does not tell."""
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    return []


def end_with_this_process(daemons: list[int]) -> None:
    """Kill ``daemons``, children of this process, with all that they have started, once this process has been killed."""
    command = [sys.executable, "-I", __file__, *map(str, (os.getpid(), *daemons))]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    _watchers.append(subprocess.Popen(command, **streams, start_new_session=True))


def watch(parent: int, daemons: list[int]) -> None:
    """Wait until the parent has died; return at once when it has ended all daemons itself."""
    tree: list[int] = []
    while daemons:
        running = children(parent)
        if os.getppid() != parent:
            break
        daemons = [pid for pid in daemons if pid in running]
        tree = list(daemons)  # as it is now: the daemons die with the parent, and their children get another parent
        for pid in tree:  # grows
            tree += children(pid)
        time.sleep(POLL_S)
    for pid in tree:
        with suppress(OSError):
            # Another process may have the number by now.
            if b"ray" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), [int(pid) for pid in sys.argv[2:]])
