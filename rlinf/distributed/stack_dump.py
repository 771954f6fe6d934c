"""Stack dumps of unresponsive processes. On a signal, ``faulthandler`` writes Python stacks even while C code is running."""

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
"""The signal registered with ``faulthandler``. SIGUSR1 is avoided because batch systems send it shortly before a job ends."""
POLL_S = 0.3
MAX_POLLS = 10
"""Maximum number of polls before a process is killed without its stacks; a stopped process cannot write them."""
CHILDREN_S = 2.0
"""Total time allowed for all children to write their stacks, in seconds."""
REMOTE_S = CHILDREN_S + 1.5
"""Time allowed for remote processes and their children to send their stacks, in seconds."""


class RemoteProcesses(Protocol):
    """Processes that are not children of this process, such as simulators on other machines."""

    def request_stacks(self) -> Callable[[float], str]:
        """Request stacks. Return a function that waits until a given ``time.monotonic()`` time and returns stacks with process names."""
        ...


_remote: weakref.WeakSet[RemoteProcesses] = weakref.WeakSet()
_children: weakref.WeakKeyDictionary[subprocess.Popen, tuple[str, IO]] = weakref.WeakKeyDictionary()


def dump_stacks(process: subprocess.Popen, log: IO) -> None:
    """Make ``process`` write its stacks to ``log``. Return when it has written them or ended, or after ``MAX_POLLS`` polls."""
    size = before = os.fstat(log.fileno()).st_size
    process.send_signal(DUMP_SIGNAL)
    for _ in range(MAX_POLLS):
        time.sleep(POLL_S)
        last, size = size, os.fstat(log.fileno()).st_size
        # If the log has stopped growing, the last stack is complete.
        if size == last > before or process.poll() is not None:
            return


def register_child(process: subprocess.Popen, name: str, log: IO) -> None:
    """Register a simulator or engine process for ``stacks_of_children``. It must dump its stacks to ``log``."""
    _children[process] = (name, log)


def register_remote(processes: RemoteProcesses) -> None:
    """Register remote processes for ``stacks_of_children``."""
    _remote.add(processes)


def running_children() -> dict[subprocess.Popen, tuple[str, IO]]:
    """Return the registered processes that are still running."""
    children = list(_children.items())
    return {process: about for process, about in children if process.returncode is None and not about[1].closed}


def stacks_of_children() -> str:
    """Return the stacks of this process's simulators and engines, then of remote processes, within ``REMOTE_S``.

    Identical stacks are listed once, with the names of all processes that have them.
    """
    # Signal remote processes first, so that they respond while this process waits for its children.
    remote_deadline = time.monotonic() + REMOTE_S
    waits = [processes.request_stacks() for processes in list(_remote)]
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
        # Use pread instead of read because the child writes at a file position shared with this process.
        text = os.pread(log.fileno(), written[process] - size, size).decode(errors="replace")
        text = re.sub(r"0x[0-9a-f]+", "", text) or "no reply: it is stopped or holds Python's lock\n"
        names.setdefault(text, []).append(f"{name} (process {process.pid})")
    texts = [f"\n{', '.join(all_names)}:\n{text}" for text, all_names in names.items()]
    return "".join([*texts, *(wait(remote_deadline) for wait in waits)])


def all_stacks() -> str:
    """Return the Python stacks of this process, its children and remote processes."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace") + stacks_of_children()


def kill_children() -> None:
    """Kill this process's simulators and engines immediately."""
    for process in running_children():
        with contextlib.suppress(ProcessLookupError):
            # An engine leads its own session; kill the other processes of the session, too.
            is_session = os.getpgid(process.pid) == process.pid
            (os.killpg if is_session else os.kill)(process.pid, signal.SIGKILL)
