"""Simulators that run one environment at a time, in worker processes, as one vector env.

Each worker owns some rows. Commands go over pipes, to all workers before any answer is awaited; images and states lie in
memory that parent and workers share and that has no name, so that nothing is left behind however a process ends. A worker
that dies, raises or misses its deadline is replaced: its rows begin their episodes anew (``ChunkStep.lost_env_ids``).
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, ClassVar

import numpy as np

import rlinf.errors
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import ProcessEnvConfig
from rlinf.envs.simulator import Simulator
from rlinf.envs.steps import SimulatorChunk
from rlinf.envs.worker_process import DUMP_SIGNAL, Failure, SimulatorRows, SimulatorTask, load_simulator
from rlinf.errors import ConfigError, SimulatorError
from rlinf.types import EpisodeSpec, Observation

logger = logging.getLogger("rlinf")

MAX_FAILURES_IN_A_ROW = 3
"""Failures of a simulator in one worker, without a call that went well in between, that end the run."""
POLL_S = 1.0
CLOSE_TIMEOUT_S = 5.0
DUMP_WAIT_S = 0.3
_START = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what becomes of this process
sys.path[:] = sys.argv[1].split(os.pathsep)
from rlinf.envs.worker_process import main
main()
"""


class ProcessVectorEnv(VectorEnv):
    """``num_envs`` simulators of one kind, spread over worker processes.

    A subclass sets ``simulator_class`` and what ``VectorEnv`` asks for besides the simulation: ``config_class``, ``suite``,
    ``all_task_names``, ``state_dim``. The processes start at the first reset.

    Attributes:
        simulator_class: ``"module:Class"`` of a ``rlinf.envs.simulator.Simulator``; a worker imports it.
        num_restarts: Workers that were replaced so far.

    Args:
        config: Settings.
        num_envs: ``B``.
        auto_reset: See ``VectorEnv``.
        action_low: float32 ``[D]``.
        action_high: float32 ``[D]``.

    Raises:
        ConfigError: See ``VectorEnv``; or the simulator's class is in the main script, where no worker can import it.
        SimulatorError: From any call: more workers were lost than ``config.max_restarts``, or one several times in a row.
    """

    config_class: ClassVar[type[ProcessEnvConfig]] = ProcessEnvConfig
    simulator_class: ClassVar[str] = ""
    free_settings: ClassVar[tuple[str, ...]] = (
        *VectorEnv.free_settings, "num_processes", "step_timeout_s", "reset_timeout_s", "max_restarts",
    )  # fmt: skip
    config: ProcessEnvConfig

    def __init__(
        self,
        config: ProcessEnvConfig,
        num_envs: int,
        auto_reset: bool,
        action_low: np.ndarray,
        action_high: np.ndarray,
    ) -> None:
        self._workers: list[_Worker] = []
        self._local: SimulatorRows | None = None
        super().__init__(config, num_envs, auto_reset, action_low, action_high)
        if config.num_processes != 0 and self.simulator_class.startswith("__main__:"):
            raise ConfigError(
                f"The simulator '{self.simulator_class}' of env.name={config.name} is defined in the main script, which "
                "worker processes cannot import. Move it into a file of its own, or type env.num_processes=0"
            )
        self.num_restarts = 0
        self._task = SimulatorTask(self.simulator_class, config, self.task_names, self.num_envs, self.state_dim)
        self._memory = _SharedMemory(self._task.row_type.itemsize * self.num_envs)
        self._rows = np.frombuffer(self._memory.map, dtype=self._task.row_type)
        self._instructions = np.full(self.num_envs, "", dtype=object)
        if config.num_processes == 0:
            self._workers = [_Worker(np.arange(self.num_envs))]
        else:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            count = min(config.num_processes or cores, self.num_envs)
            self._workers = [_Worker(ids) for ids in np.array_split(np.arange(self.num_envs), count)]

    @classmethod
    def has_expert(cls) -> bool:
        """Whether the simulator has a scripted expert."""
        return load_simulator(cls.simulator_class).expert_action is not Simulator.expert_action

    def expert_actions(self, aim_offset_m: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
        """Return what the scripted experts would do now, float32 ``[B, D]``; 0 in idle rows."""
        self._check_reset()
        ids = self._rows_in_use()
        actions = np.zeros((self.num_envs, self.action_dim), dtype=np.float32)
        for worker, answer in self._ask("expert_actions", ids, aim_offset_m).items():
            actions[ids[worker.positions(ids)]] = answer
        return actions

    def render_frames(self, ids: Sequence[int], size: int) -> np.ndarray:
        """Return uint8 ``[K, size, size, 3]``."""
        self._check_reset()
        ids = np.asarray(ids, dtype=np.int64)
        frames = np.empty((len(ids), size, size, 3), dtype=np.uint8)
        for worker, answer in self._ask("render_frames", ids, size).items():
            frames[worker.positions(ids)] = answer
        return frames

    def poses(self, ids: Sequence[int]) -> list[dict[str, list[float]]]:
        """Return the poses of the rows ``ids``."""
        self._check_reset()
        ids = np.asarray(ids, dtype=np.int64)
        found = {}
        for worker, answer in self._ask("poses", ids).items():
            found |= dict(zip(worker.positions(ids).tolist(), answer, strict=True))
        return [found[position] for position in range(len(ids))]

    def worker_processes(self) -> list[subprocess.Popen]:
        """Return the processes that run now, in the order of their rows."""
        return [worker.process for worker in self._workers if worker.process is not None]

    def close_extras(self, **kwargs: object) -> None:
        """End the workers: they are asked to, then terminated, then killed."""
        if self._local is not None:
            self._local.close()
        for worker in self._workers:
            worker.ask_to_end()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for worker in self._workers:
            worker.end(deadline)

    def _reset_envs(self, ids: np.ndarray, specs: Sequence[EpisodeSpec]) -> None:
        wanted = dict(zip(ids.tolist(), specs, strict=True))
        calls = {
            worker: ("reset", (rows, [wanted[index] for index in rows]))
            for worker in self._workers
            if (rows := [index for index in worker.ids.tolist() if index in wanted])
        }
        # A worker that is lost here is replaced by one in which all its rows have begun ``self._specs``: these, too.
        self._read_resets(calls, self._call(calls, self.config.reset_timeout_s))

    def _step_chunk(self, ids: np.ndarray, actions: np.ndarray, steps_left: np.ndarray) -> SimulatorChunk:
        chunk = SimulatorChunk.empty(*actions.shape[:2])
        places = {worker: worker.positions(ids) for worker in self._workers}
        calls = {
            worker: ("step_chunk", (ids[at].tolist(), actions[at], steps_left[at]))
            for worker, at in places.items()
            if len(at)
        }
        for worker, (part, instructions) in self._call(calls, self.config.step_timeout_s).items():
            at = places[worker]
            for array, values in zip(chunk, part, strict=True):
                array[at] = values
            self._instructions[ids[at]] = instructions
        return chunk

    def _observe(self, ids: np.ndarray) -> Observation:
        images = {camera: self._rows["images"][ids, k] for k, camera in enumerate(self.config.cameras)}
        state = self._rows["state"][ids] if self.state_dim else None
        return Observation(images, state, self._instructions[ids].tolist())

    def _ask(self, name: str, ids: np.ndarray, *arguments: Any) -> dict[_Worker, Any]:
        """Have each worker answer for those of the rows ``ids`` that it owns; a replaced worker is asked again.

        Raises:
            ConfigError: One of the rows is idle.
        """
        idle = np.setdiff1d(ids, self._rows_in_use()).tolist()
        if idle:
            raise ConfigError(f"{name} was called for the rows {idle}, which the last reset left without an episode.")
        calls = {
            worker: (name, (ids[at].tolist(), *arguments))
            for worker in self._workers
            if len(at := worker.positions(ids))
        }
        answers: dict[_Worker, Any] = {}
        while len(answers) < len(calls):
            pending = {worker: call for worker, call in calls.items() if worker not in answers}
            answers |= self._call(pending, self.config.step_timeout_s)
        return {worker: answers[worker] for worker in calls}

    def _call(self, calls: dict[_Worker, tuple[str, tuple]], timeout_s: float) -> dict[_Worker, Any]:
        """Have the workers do their calls, all at the same time.

        Args:
            calls: Method of ``SimulatorRows`` and its arguments, for each worker.
            timeout_s: How long a worker may go without finishing a simulator's call.

        Returns:
            The answers. Workers that are missing there were lost, and are replaced: all their rows are in the first state
            of their episodes.
        """
        if self.config.num_processes == 0:
            if self._local is None:
                self._local = SimulatorRows(self._task, self._memory.map)
            return {worker: getattr(self._local, name)(*arguments) for worker, (name, arguments) in calls.items()}
        for worker in calls:
            if worker.process is None:
                worker.start(self._task, self._memory)
        answers, failed = self._exchange(calls, timeout_s)
        for worker in answers:
            worker.num_failures = 0
        while failed:
            for worker, failure in failed.items():
                self._replace(worker, failure)
            used = self._rows_in_use()
            owned = {worker: used[worker.positions(used)].tolist() for worker in failed}
            resets = {worker: ("reset", (rows, [self._specs[row] for row in rows])) for worker, rows in owned.items()}
            shown, failed = self._exchange(resets, self.config.reset_timeout_s)
            self._read_resets(resets, shown)
        return answers

    def _read_resets(self, calls: dict[_Worker, tuple[str, tuple]], answers: dict[_Worker, list[str]]) -> None:
        for worker, instructions in answers.items():
            self._instructions[calls[worker][1][0]] = instructions

    def _exchange(
        self, calls: dict[_Worker, tuple[str, tuple]], timeout_s: float
    ) -> tuple[dict[_Worker, Any], dict[_Worker, Failure]]:
        """Send all calls, then collect answers and failures.

        Raises:
            RLinfError: What a simulator raised for the user to mend, once all workers have answered.
        """
        results: dict[_Worker, Any] = {}
        try:
            last = {}
            for worker, call in calls.items():
                worker.send(call)
                last[worker] = (self._num_calls(worker), time.monotonic())
            while waiting := [worker for worker in calls if worker not in results]:
                ready = wait([worker.connection for worker in waiting], timeout=min(POLL_S, timeout_s / 4))
                for worker in waiting:
                    num_calls, since = last[worker]
                    if worker.connection in ready or worker.process.poll() is not None:
                        results[worker] = worker.receive()
                    elif self._num_calls(worker) != num_calls:
                        last[worker] = (self._num_calls(worker), time.monotonic())
                    elif time.monotonic() - since > timeout_s:
                        results[worker] = worker.give_up(timeout_s, calls[worker][0])
        except BaseException:  # Ctrl-C: nobody will read the answers, and the next call must not take them for its own.
            for worker in calls:
                worker.forget()
            raise
        failed = {worker: result for worker, result in results.items() if isinstance(result, Failure)}
        for failure in failed.values():
            if failure.error is not None:
                raise getattr(rlinf.errors, failure.error)(failure.message)
        return {worker: result for worker, result in results.items() if worker not in failed}, failed

    def _num_calls(self, worker: _Worker) -> int:
        return int(self._rows["num_calls"][worker.ids].sum())

    def _replace(self, worker: _Worker, failure: Failure) -> None:
        """Start another process in the place of ``worker``'s.

        Raises:
            SimulatorError: Too many have been lost.
        """
        worker.end(deadline=0.0)
        worker.num_failures += not failure.from_outside
        self.num_restarts += 1
        what = (
            f"A worker process of env.name={self.config.name} with the rows {worker.ids.tolist()} was lost: "
            f"{failure.message}\n{failure.traceback}".rstrip()
        )
        if worker.num_failures >= MAX_FAILURES_IN_A_ROW:
            raise SimulatorError(
                f"{what}\nThat was the failure number {worker.num_failures} in a row of these rows. To look at it in a "
                "debugger, type env.num_processes=0"
            )
        if self.num_restarts > self.config.max_restarts:
            raise SimulatorError(
                f"{what}\nIt is the worker number {self.num_restarts} that was lost, and env.max_restarts="
                f"{self.config.max_restarts}. To go on for longer, type env.max_restarts={2 * self.num_restarts}"
            )
        logger.warning("%s\nIts episodes begin anew (restart %d of %d).", what, self.num_restarts, self.config.max_restarts)
        self._lost[worker.ids] = True
        worker.start(self._task, self._memory)


class _SharedMemory:
    """Memory without a name: it is gone when the last process that maps it has ended."""

    def __init__(self, num_bytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self.file = os.fdopen(os.memfd_create("rlinf-env"), "r+b")
        else:
            self.file = tempfile.TemporaryFile()
        self.file.truncate(max(1, num_bytes))
        self.map = mmap.mmap(self.file.fileno(), max(1, num_bytes))


class _Worker:
    """The parent's end of a worker process, which may be replaced by another one, and the rows that it owns."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self.num_failures = 0
        self.process: subprocess.Popen | None = None

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Return where in ``ids`` the rows of this worker are."""
        return np.flatnonzero((ids >= self.ids[0]) & (ids <= self.ids[-1]))

    def start(self, task: SimulatorTask, memory: _SharedMemory) -> None:
        self.connection, theirs = Pipe()
        self.log = tempfile.TemporaryFile()
        files = (theirs.fileno(), memory.file.fileno(), self.log.fileno())
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, path, str(os.getpid()), *map(str, files)],
                stdin=subprocess.DEVNULL,
                pass_fds=files,
                # A simulator's own threads, and those of Mesa's rasteriser, cost more than they bring.
                env={"LP_NUM_THREADS": "0", **os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.send(task)

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # It has died; ``receive`` says of what.

    def receive(self) -> Any:
        """Return the answer, or the ``Failure``."""
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, OSError):
            pass
        self.end(deadline=time.monotonic() + POLL_S)
        status = self.process.returncode
        ending = f"killed by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"
        return Failure(None, ending, self._read_log(), from_outside=-status in (signal.SIGKILL, signal.SIGTERM))

    def give_up(self, timeout_s: float, name: str) -> Failure:
        """Kill a process that has been silent for too long, after it has told where it is."""
        self.process.send_signal(DUMP_SIGNAL)
        time.sleep(DUMP_WAIT_S)
        self.process.kill()
        key = "env.reset_timeout_s" if name == "reset" else "env.step_timeout_s"
        return Failure(None, f"{name} did not get on for {key}={timeout_s:g} seconds; it was here:", self._read_log())

    def forget(self) -> None:
        """Kill the process; the next call starts another."""
        self.end(deadline=0.0)
        self.process = None

    def ask_to_end(self) -> None:
        if self.process is not None:
            self.connection.close()

    def end(self, deadline: float) -> None:
        """Wait for the process until ``deadline`` (of ``time.monotonic``), then terminate it, then kill it."""
        if self.process is None:
            return
        self.connection.close()
        for stop in (self.process.terminate, self.process.kill):
            try:
                self.process.wait(max(0.0, deadline - time.monotonic()))
                return
            except subprocess.TimeoutExpired:
                stop()
                deadline = max(deadline, time.monotonic() + 0.5)
        self.process.wait()

    def _read_log(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")
