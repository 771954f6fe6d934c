"""Child processes, such as simulators and rollout processes, that communicate through a pipe and shared memory."""

import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from rlinf.distributed.stack_dump import DUMP_SIGNAL, register_child
from rlinf.errors import RLinfError

ROOT = Path(__file__).parents[2]
POLL_S = 1.0
PARENT_POLL_S = 0.5
_START = """
import os, signal, sys
# These signals reach the entire process group or job (SIGHUP when a terminal closes, SIGUSR1 from a batch system); the parent
# decides when this process ends.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
given = sys.argv[1].split(os.pathsep)
sys.path[:] = given if given[-1] else [*given[:-1], *filter(None, sys.path)]  # the second case is for a different interpreter
from {module} import {function}
{function}()
"""


class Failure(NamedTuple):
    """Describes why a call in a different process failed."""

    error: str | None  # name of a class in ``rlinf.errors`` for user errors
    message: str  # the error's text, or how the process ended
    traceback: str  # of the child; may be empty
    from_outside: bool = False  # the process was killed externally, not by its simulator


class SharedMemory:
    """Anonymous memory that is freed when the last process that maps it ends."""

    def __init__(self, num_bytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self.file = os.fdopen(os.memfd_create("rlinf"), "r+b")
        else:
            self.file = tempfile.TemporaryFile()
        self.file.truncate(max(1, num_bytes))
        self.map = mmap.mmap(self.file.fileno(), max(1, num_bytes))


class ChildProcess:
    """The parent's handle of a restartable child process, with a pipe and a log for native crashes."""

    process: subprocess.Popen | None = None
    connection: Connection

    def launch(
        self,
        main: str,
        name: str,
        memories: Sequence[SharedMemory],
        environment: Mapping[str, str],
        interpreter: str | None = None,
        logs_output: bool = False,
    ) -> None:
        """Start ``main`` (``"module:function"``), which must first call ``child_end``, in a process with exactly this environment.

        Args:
            name: Name of the process in reports.
            interpreter: Path of a different Python interpreter, which uses its own packages and this project's code.
            logs_output: Whether to redirect the process's output to the log.
        """
        module, _, function = main.partition(":")
        start = _START.format(module=module, function=function)
        self.connection, theirs = Pipe()
        self.log = tempfile.TemporaryFile()
        files = (theirs.fileno(), self.log.fileno(), *(memory.file.fileno() for memory in memories))
        path = (
            os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            if interpreter is None
            else f"{ROOT}{os.pathsep}"
        )
        with theirs:
            self.process = subprocess.Popen(
                [interpreter or sys.executable, "-c", start, path, str(os.getpid()), *map(str, files)],
                stdin=subprocess.DEVNULL,
                stdout=self.log if logs_output else None,
                stderr=subprocess.STDOUT if logs_output else None,
                pass_fds=files,
                env=dict(environment),
            )
        register_child(self.process, name, self.log)

    def ending(self) -> tuple[int, str]:
        """Wait briefly for a process that has closed its pipe, then kill it. Return its status and a description."""
        self.end(deadline=time.monotonic() + POLL_S)
        status = self.process.returncode
        return status, f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def kill(self) -> None:
        """Kill the process."""
        self.end(deadline=0.0)
        self.process = None

    def end(self, deadline: float) -> None:
        """Wait for the process until ``deadline`` (of ``time.monotonic``), then kill it."""
        if self.process is None:
            return
        self.connection.close()
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def read_log(self) -> str:
        """Return the stack dumps written by the process."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


def end_all(children: Sequence[ChildProcess], timeout_s: float) -> None:
    """Ask processes to exit, and kill any still running after a total of ``timeout_s``."""
    for child in children:
        if child.process is not None:
            # A process exits when its pipe is closed, after finishing its current work. Close all pipes before the first wait.
            child.connection.close()
    deadline = time.monotonic() + timeout_s
    for child in children:
        child.end(deadline)
        child.process = None


def child_end() -> tuple[Connection, list[int], int]:
    """Return the child's end of the pipe, the file descriptors of shared memory, and the parent's process ID."""
    parent, pipe, log, *memories = (int(number) for number in sys.argv[2:])
    # Clear sys.argv because some simulators parse it.
    del sys.argv[1:]
    faulthandler.enable(log)
    faulthandler.register(DUMP_SIGNAL, log)
    return Connection(pipe), memories, parent


def exit_with_parent(parent: int, while_running: Callable[[], object] = lambda: None) -> None:
    """Exit this process once its parent has died. Run this in a thread."""
    while os.getppid() == parent:
        while_running()
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def failure_in(work: Callable[[], object]) -> Failure | None:
    """Call ``work``. Return any error in a form that a different process can raise, or None on success."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - raised by the other process
        return failure_of(error)
    return None


def failure_of(error: BaseException) -> Failure:
    """Describe an exception that is being handled, so that a different process can raise it."""
    known = [cls.__name__ for cls in type(error).__mro__ if cls.__module__ == RLinfError.__module__]
    message = str(error) if known else f"{type(error).__name__}: {error}"
    return Failure(known[0] if known else None, message, traceback.format_exc())
