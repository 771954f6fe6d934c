"""Dump the Python stacks of a silent process; ``faulthandler`` writes them on a signal even while C code runs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import IO, Protocol

DUMP_SIGNAL = signal.SIGUSR2
"""The signal that the process has registered with ``faulthandler``. Batch systems announce the end of a job by SIGUSR1."""
POLL_S = 0.3
MAX_POLLS = 10
"""After these the process is killed without its stacks; a stopped process writes none."""
CHILDREN_S = 2.0
"""Seconds that all children together have to write their stacks."""
REMOTE_S = CHILDREN_S + 1.5
"""Seconds that processes elsewhere, with their own children, have to send their stacks."""


class RemoteProcesses(Protocol):
    """Simulators or other processes that are not children of this one."""

    def ask_stacks(self) -> Callable[[float], str]:
        """Ask for their stacks; return a function that waits for them until a time of ``time.monotonic()`` at most.

        It returns them, each below a line with the name of its process.
        """
        ...


_remote: weakref.WeakSet[RemoteProcesses] = weakref.WeakSet()
_children: weakref.WeakKeyDictionary[subprocess.Popen, tuple[str, IO]] = weakref.WeakKeyDictionary()


def dump_stacks(process: subprocess.Popen, log: IO) -> None:
    """Make ``process`` write its stacks to ``log``; return once it has, it has ended, or after ``MAX_POLLS``."""
    size = before = os.fstat(log.fileno()).st_size
    process.send_signal(DUMP_SIGNAL)
    for _ in range(MAX_POLLS):
        time.sleep(POLL_S)
        last, size = size, os.fstat(log.fileno()).st_size
        if size == last > before or process.poll() is not None:
            return


def own_child(process: subprocess.Popen, name: str, log: IO) -> None:
    """Register a simulator's or an engine's process, which dumps its stacks to ``log``, for ``stacks_of_children``."""
    _children[process] = (name, log)


def own_remote(processes: RemoteProcesses) -> None:
    """Register processes elsewhere for ``stacks_of_children``."""
    _remote.add(processes)


def running_children() -> dict[subprocess.Popen, tuple[str, IO]]:
    """Return the registered processes that still run."""
    children = list(_children.items())
    return {process: about for process, about in children if process.returncode is None and not about[1].closed}


def stacks_of_children() -> str:
    """Return the stacks of this process's simulators and engines, then of processes elsewhere, in ``REMOTE_S`` at most.

    Equal stacks appear once, with the names of all their processes.
    """
    remote_deadline = time.monotonic() + REMOTE_S
    waits = [processes.ask_stacks() for processes in list(_remote)]
    before = {process: os.fstat(log.fileno()).st_size for process, (_, log) in running_children().items()}
    for process in before:
        process.send_signal(DUMP_SIGNAL)
    deadline = time.monotonic() + CHILDREN_S
    written = dict(before)
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        last = written
        written = {process: os.fstat(_children[process][1].fileno()).st_size for process in before}
        if all(written[process] == last[process] > before[process] for process in before):
            break
    names: dict[str, list[str]] = {}
    for process, size in before.items():
        name, log = _children[process]
        # Not read: the process writes at the position that it shares with this one.
        text = os.pread(log.fileno(), written[process] - size, size).decode(errors="replace")
        text = re.sub(r"0x[0-9a-f]+", "", text) or "no answer: it is stopped or holds Python's lock\n"
        names.setdefault(text, []).append(f"{name} (process {process.pid})")
    texts = [f"\n{', '.join(all_names)}:\n{text}" for text, all_names in names.items()]
    return "".join([*texts, *(wait(remote_deadline) for wait in waits)])


def all_stacks() -> str:
    """Return the Python stacks of this process, and of its children and processes elsewhere."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace") + stacks_of_children()


def kill_children() -> None:
    """Kill this process's simulators and engines."""
    for process in running_children():
        with contextlib.suppress(ProcessLookupError):
            is_session = os.getpgid(process.pid) == process.pid  # an engine's, which has processes of its own
            (os.killpg if is_session else os.kill)(process.pid, signal.SIGKILL)
