"""The parent's side of a worker process of ``ProcessVectorEnv``."""

from __future__ import annotations

import os
import signal
import socket
import struct
from typing import Any

from rlinf.distributed.child_process import ChildProcess, Failure, SharedMemory
from rlinf.distributed.stack_dump import dump_stacks
from rlinf.envs.process.worker_process import SimulatorTask
from rlinf.envs.spread import Part


class Worker(Part, ChildProcess):
    """The parent's end of a worker process and the rows that it owns. The process may be replaced."""

    def start(self, task: SimulatorTask, memory: SharedMemory) -> None:
        # Threads of the simulator and of Mesa's rasteriser would compete with the other workers for the cores.
        environment = {"LP_NUM_THREADS": "0", **os.environ, "OMP_NUM_THREADS": "1"}
        name = f"simulators of rows {self.ids[0]} to {self.ids[-1]}"
        self.launch("rlinf.envs.process.worker_process:main", name, [memory], environment)
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
        status, ending = self.ending()
        outside = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
        return Failure(None, ending, self.read_log(), from_outside=-status in outside)

    def give_up(self, timeout_s: float, name: str) -> Failure:
        """Kill a process that has been silent for too long, after it has dumped its stacks."""
        dump_stacks(self.process, self.log)
        self.process.kill()
        key = "env.reset_timeout_s" if name == "reset" else "env.step_timeout_s"
        return Failure(None, f"{name} made no progress for {timeout_s:g} s ({key}). Stack traces:", self.read_log())
