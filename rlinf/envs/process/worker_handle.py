"""The parent's side of a worker process of ``ProcessVectorEnv``: start, pipe, memory and end."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from typing import Any

import numpy as np

from rlinf.distributed.stack_dump import dump_stacks, own_child
from rlinf.envs.process.worker_process import Failure, SimulatorTask

POLL_S = 1.0
_START = """
import os, signal, sys
# These signals reach the whole process group (SIGHUP when a terminal closes); the parent decides when this process ends.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.path[:] = sys.argv[1].split(os.pathsep)
from rlinf.envs.process.worker_process import main
main()
"""


class SharedMemory:
    """Anonymous memory, which is freed when the last process that maps it has ended."""

    def __init__(self, num_bytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self.file = os.fdopen(os.memfd_create("rlinf-env"), "r+b")
        else:
            self.file = tempfile.TemporaryFile()
        self.file.truncate(max(1, num_bytes))
        self.map = mmap.mmap(self.file.fileno(), max(1, num_bytes))


class Worker:
    """The parent's end of a worker process and the rows that it owns. The process may be replaced."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self.process: subprocess.Popen | None = None

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions of this worker's rows in ``ids``."""
        return np.flatnonzero((ids >= self.ids[0]) & (ids <= self.ids[-1]))

    def start(self, task: SimulatorTask, memory: SharedMemory) -> None:
        self.connection, theirs = Pipe()
        self.log = tempfile.TemporaryFile()
        files = (theirs.fileno(), memory.file.fileno(), self.log.fileno())
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, path, str(os.getpid()), *map(str, files)],
                stdin=subprocess.DEVNULL,
                pass_fds=files,
                # Threads of the simulator and of Mesa's rasteriser would compete with the other workers for the cores.
                env={"LP_NUM_THREADS": "0", **os.environ, "OMP_NUM_THREADS": "1"},
            )
        own_child(self.process, f"simulators of rows {self.ids[0]} to {self.ids[-1]}", self.log)
        self.send(task, task.config.reset_timeout_s)

    def send(self, message: Any, timeout_s: float) -> bool:
        """Send a message. Return False if a stopped process did not read it before the deadline."""
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                pipe.setsockopt(socket.SOL_SOCKET, option, limit)
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # The process has died; ``receive`` reports why.
        except BlockingIOError:
            return False
        return True

    def receive(self, timeout_s: float, name: str) -> Any:
        """Return the answer to ``name``, or a ``Failure`` if the process died or stopped while answering."""
        try:
            if self.connection.poll():
                return self.connection.recv()
        except BlockingIOError:
            return self.give_up(timeout_s, name)
        except (EOFError, OSError):
            pass
        self.end(deadline=time.monotonic() + POLL_S)
        status = self.process.returncode
        ending = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        outside = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
        return Failure(None, ending, self._read_log(), from_outside=-status in outside)

    def give_up(self, timeout_s: float, name: str) -> Failure:
        """Kill a process that has been silent for too long, after it has dumped its stacks."""
        dump_stacks(self.process, self.log)
        self.process.kill()
        key = "env.reset_timeout_s" if name == "reset" else "env.step_timeout_s"
        return Failure(None, f"{name} made no progress for {timeout_s:g} s ({key}). Stack traces:", self._read_log())

    def kill(self) -> None:
        """Kill the process. The next call starts another."""
        self.end(deadline=0.0)
        self.process = None

    def ask_to_end(self) -> None:
        if self.process is not None:
            self.connection.close()

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

    def _read_log(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")
