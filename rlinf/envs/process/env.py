"""Vector env whose simulators run one environment each, in worker processes.

Each worker owns some envs. Calls are sent over pipes to all workers before any reply is awaited. Images and states are stored in
anonymous shared memory, which is freed however a process ends. A worker that dies, raises or misses its deadline is
replaced, and its envs restart their episodes (``ChunkStep.lost_env_ids``).
"""

import inspect
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, ClassVar

import numpy as np

import rlinf.errors
from rlinf.distributed.child_process import POLL_S, ChildProcess, Failure, SharedMemory, end_all
from rlinf.distributed.stack_dump import dump_stacks
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import ProcessEnvConfig
from rlinf.envs.process.simulator import Simulator, load_simulator
from rlinf.envs.process.worker_process import SimulatorRows, SimulatorTask
from rlinf.envs.spread import Call, Part, SpreadVectorEnv
from rlinf.errors import ConfigError, SimulatorError
from rlinf.memory import num_cores
from rlinf.types import EpisodeSpec, Observation

MAX_FAILURES = 3
"""Number of failures in one episode that ends the run."""
CLOSE_TIMEOUT_S = 5.0
SLOW_CALLS = ("construction", "reset")
"""Calls subject to the time limit ``env.reset_timeout_s``."""


class Worker(Part, ChildProcess):
    """The parent's end of a worker process and its envs. The process may be replaced."""

    def start(self, task: SimulatorTask, memory: SharedMemory) -> None:
        # Threads of the simulator and Mesa's rasteriser would compete with the other workers for cores.
        environment = {"LP_NUM_THREADS": "0", **os.environ, "OMP_NUM_THREADS": "1"}
        name = f"simulators of envs {self.ids[0]} to {self.ids[-1]}"
        self.launch("rlinf.envs.process.worker_process:main", name, [memory], environment)
        self.send(task, task.config.reset_timeout_s)

    def send(self, message: Any, timeout_s: float) -> bool:
        """Send a message. Return False if a stopped process did not read it before the deadline."""
        # Use socket timeouts, because sending more bytes than the pipe can buffer to a stopped process would block for ever.
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                pipe.setsockopt(socket.SOL_SOCKET, option, limit)
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process has died; `receive` reports the cause
        except BlockingIOError:
            return False
        return True

    def receive(self, timeout_s: float, name: str) -> Any:
        """Return the reply to call ``name``, or a ``Failure`` if the process died or stopped while replying."""
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
        """Kill a process that has exceeded its time limit, after dumping its stacks."""
        dump_stacks(self.process, self.log)
        self.process.kill()
        key = "env.reset_timeout_s" if name in SLOW_CALLS else "env.step_timeout_s"
        return Failure(
            None, f"{name} made no progress for {timeout_s:g} s ({key}); stack traces follow", self.read_log()
        )


class ProcessVectorEnv(SpreadVectorEnv):
    """``num_envs`` simulators of one kind, divided among worker processes that start at the first reset.

    A subclass sets ``simulator_class`` (``"module:Class"`` of a ``rlinf.envs.process.simulator.Simulator``, which the workers
    import), ``config_class``, ``suite``, ``all_task_names`` and ``state_dim``. Any call raises SimulatorError if the env is
    closed. The env is closed once more than ``config.max_restarts`` workers are lost, or a simulator has failed ``MAX_FAILURES``
    times in one episode.
    """

    config_class: ClassVar[type[ProcessEnvConfig]] = ProcessEnvConfig
    simulator_class: ClassVar[str] = ""
    workers_name = "worker processes"
    restarts_key = "env.max_restarts"
    free_settings: ClassVar[tuple[str, ...]] = (
        *VectorEnv.free_settings, "num_processes", "step_timeout_s", "reset_timeout_s", "max_restarts",
    )  # fmt: skip
    config: ProcessEnvConfig

    def __init__(
        self, config: ProcessEnvConfig, num_envs: int, auto_reset: bool, action_low: np.ndarray, action_high: np.ndarray
    ) -> None:
        self._workers: list[Worker] = []
        self._local: SimulatorRows | None = None
        super().__init__(config, num_envs, auto_reset, action_low, action_high)
        if config.num_processes != 0 and self.simulator_class.startswith("__main__:"):
            raise ConfigError(
                f"The simulator '{self.simulator_class}' of env.name={config.name} is defined in the main script, which "
                "worker processes cannot import. Move it to a module, or set env.num_processes=0"
            )
        self._task = SimulatorTask(self.simulator_class, config, self.task_names, self.num_envs, self.state_dim)
        self._memory = SharedMemory(self._task.row_type.itemsize * self.num_envs)
        # Workers write their rows while this process waits, so no other code may access them; observations are copied out.
        self._rows = np.frombuffer(self._memory.map, dtype=self._task.row_type)
        self._instructions = np.full(self.num_envs, "", dtype=object)
        self._num_failures = np.zeros(self.num_envs, dtype=np.int64)  # in the current episode of each env
        count = 1 if config.num_processes == 0 else min(config.num_processes or num_cores(), self.num_envs)
        self._workers = [Worker(ids) for ids in np.array_split(np.arange(self.num_envs), count)]

    @classmethod
    def has_expert(cls, config: ProcessEnvConfig) -> bool:
        return load_simulator(cls.simulator_class).expert_action is not Simulator.expert_action

    @classmethod
    def expert_options(cls) -> list[str]:
        return list(inspect.signature(load_simulator(cls.simulator_class).expert_action).parameters)[1:]

    def worker_processes(self) -> list[subprocess.Popen]:
        return [worker.process for worker in self._workers if worker.process is not None]

    def num_finished_calls(self) -> int:
        return int(self._rows["num_calls"].sum())

    def offload(self) -> None:
        self.close_extras()
        self._specs = None

    def close_extras(self, **kwargs: object) -> None:
        if self._local is not None:
            self._local.close()
        end_all(self._workers, CLOSE_TIMEOUT_S)

    def _reset_envs(self, ids: np.ndarray, specs: Sequence[EpisodeSpec]) -> None:
        self._num_failures[ids] = 0
        super()._reset_envs(ids, specs)

    def _reset_call(self, part: Worker, rows: np.ndarray) -> Call:
        return "reset", (rows, [self._specs[row] for row in rows])

    def _observe(self, ids: np.ndarray) -> Observation:
        images = {camera: self._rows["images"][ids, k] for k, camera in enumerate(self.config.cameras)}
        state = self._rows["state"][ids] if self.state_dim else None
        return Observation(images, state, self._instructions[ids].tolist())

    def _call_rows(
        self, name: str, ids: np.ndarray, *arguments: Any, per_env: Sequence[np.ndarray] = ()
    ) -> Mapping[Worker, Any]:
        idle = np.setdiff1d(ids, self._rows_in_use()).tolist()
        if idle:
            raise ConfigError(f"{name} was called for the envs {idle}, which have no episode since the last reset.")
        return super()._call_rows(name, ids, *arguments, per_env=per_env)

    def _call(self, calls: dict[Worker, Call]) -> dict[Worker, Any]:
        if self.closed:
            raise self._closed_error(calls, self.config.name)
        if self.config.num_processes == 0:
            if self._local is None:
                self._local = SimulatorRows(self._task, self._memory.map)
            results = {worker: getattr(self._local, name)(*arguments) for worker, (name, arguments) in calls.items()}
            return self._store_instructions(calls, results)
        for worker in calls:
            if worker.process is None:
                worker.start(self._task, self._memory)
        results, failed = self._exchange(calls)
        # A replacement may also fail during its reset, until the limit on failures or restarts is reached.
        while failed:
            for worker, failure in failed.items():
                self._replace(worker, failure)
            used = self._rows_in_use()
            resets = {worker: self._reset_call(worker, used[worker.positions(used)]) for worker in failed}
            reset_results, failed = self._exchange(resets)
            self._store_instructions(resets, reset_results)
        return self._store_instructions(calls, results)

    def _store_instructions(self, calls: dict[Worker, Call], results: dict[Worker, Any]) -> dict[Worker, Any]:
        """Store the instructions returned by resets and steps, and return the remaining results."""
        for worker, result in results.items():
            name, arguments = calls[worker]
            if name in ("reset", "step_chunk"):
                results[worker], self._instructions[arguments[0]] = result
        return results

    def _exchange(self, calls: dict[Worker, Call]) -> tuple[dict[Worker, Any], dict[Worker, Failure]]:
        """Send all calls, then collect results and failures.

        A worker fails if a simulator call exceeds the time limit. An error that the user must fix is re-raised once all workers
        have replied.
        """
        names = {name for name, _ in calls.values()}
        timeout_s = self.config.reset_timeout_s if names == {"reset"} else self.config.step_timeout_s
        results: dict[Worker, Any] = {}
        try:
            num_calls, silent_s = {}, dict.fromkeys(calls, 0.0)
            for worker, call in calls.items():
                # Clear the flags of earlier calls, which would blame the wrong simulator for a crash.
                self._rows["busy"][worker.ids] = False
                num_calls[worker] = self._num_calls(worker)
                if not worker.send(call, timeout_s):
                    results[worker] = worker.give_up(timeout_s, call[0])
            poll_s, now = min(POLL_S, timeout_s / 4), time.monotonic()
            while waiting := [worker for worker in calls if worker not in results]:
                ready = wait([worker.connection for worker in waiting], timeout=poll_s)
                before, now = now, time.monotonic()
                for worker in waiting:
                    # Exclude time during which this process itself was stopped (Ctrl-Z, a stalled machine).
                    silent_s[worker] += min(now - before, poll_s)
                    if worker.connection in ready or worker.process.poll() is not None:
                        results[worker] = worker.receive(timeout_s, calls[worker][0])
                    elif (finished := self._num_calls(worker)) != num_calls[worker]:
                        num_calls[worker], silent_s[worker] = finished, 0.0
                    elif silent_s[worker] > timeout_s:
                        results[worker] = worker.give_up(timeout_s, calls[worker][0])
        except BaseException:  # also Ctrl-C: the next call must not read replies to this one
            for worker in calls:
                worker.kill()
            raise
        failed = {worker: result for worker, result in results.items() if isinstance(result, Failure)}
        for failure in failed.values():
            if failure.error is not None:
                raise getattr(rlinf.errors, failure.error)(failure.message)
        return {worker: result for worker, result in results.items() if worker not in failed}, failed

    def _num_calls(self, worker: Worker) -> int:
        return int(self._rows["num_calls"][worker.ids].sum())

    def _replace(self, worker: Worker, failure: Failure) -> None:
        """Start a new process for ``worker``; close the env and raise SimulatorError if too many have been lost."""
        worker.end(deadline=0.0)
        self.num_restarts += 1
        busy = worker.ids[self._rows["busy"][worker.ids]]
        failed = busy if len(busy) else worker.ids  # no env is busy if the process died before building a simulator
        self._num_failures[failed] += not failure.from_outside
        what = (
            f"A worker process of env.name={self.config.name} with the envs {worker.ids.tolist()} was lost: "
            f"{failure.message}\n{failure.traceback}".rstrip()
        )
        if self._num_failures[failed[0]] >= MAX_FAILURES:
            self.close()
            raise SimulatorError(
                f"{what}\nThis was failure {MAX_FAILURES} in {self._episode_of(busy)}. To debug it in this process, set "
                "env.num_processes=0"
            )
        self._restart_rows(worker.ids, what, self.num_restarts, self.config.max_restarts)
        worker.start(self._task, self._memory)

    def _episode_of(self, busy: np.ndarray) -> str:
        spec = self._specs[busy[0]] if len(busy) else None
        if spec is None:
            return "these envs while starting, before any simulator ran"
        return f"one episode: {spec} of the task '{self.task_names[spec.task_id]}' in env {busy[0]}"
