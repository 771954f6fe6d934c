"""Worker process of ``ProcessVectorEnv``: simulators for some of the envs, and the loop that handles calls."""

from __future__ import annotations

import mmap
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.distributed.child_process import child_end, exit_with_parent, failure_of
from rlinf.envs.config import ProcessEnvConfig
from rlinf.envs.process.simulator import Simulator, load_simulator
from rlinf.envs.steps import SimulatorChunk
from rlinf.errors import ConfigError
from rlinf.flags import flag_of, number_of

if TYPE_CHECKING:
    from rlinf.types import EpisodeSpec

MARGIN_S = 2.0


@dataclass(frozen=True)
class SimulatorTask:
    """Class (``"module:Class"``) and arguments of a worker's simulators, and the layout of their shared memory."""

    simulator_class: str
    config: ProcessEnvConfig
    task_names: list[str]
    num_envs: int
    state_dim: int

    @property
    def row_type(self) -> np.dtype:
        """One env's shared memory: number of finished simulator calls, whether a call is running, state and images."""
        size = self.config.image_size
        images = (len(self.config.cameras), size, size, 3)
        state = ("state", np.float32, (self.state_dim,))
        return np.dtype([("num_calls", np.int64), ("busy", np.bool_), state, ("images", np.uint8, images)])


class SimulatorRows:
    """Simulators of some envs, built at their first reset. Observations are written to ``memory``, ``row_type [task.num_envs]``."""

    def __init__(self, task: SimulatorTask, memory: Any) -> None:
        self.task = task
        self.rows = np.frombuffer(memory, dtype=task.row_type)
        self._make = load_simulator(task.simulator_class)
        self._simulators: dict[int, Simulator] = {}

    def reset(self, ids: Sequence[int], specs: Sequence[EpisodeSpec]) -> tuple[None, list[str]]:
        """Start an episode in each of the envs ``ids``, write its observation, and return (None, instructions)."""
        instructions = []
        for index, spec in zip(self._marked(ids), specs, strict=True):
            if index not in self._simulators:
                self._simulators[index] = self._make(self.task.config, self.task.task_names)
                self._count(index)
            self._simulators[index].reset(spec)
            self._count(index)
            instructions.append(self._write(index))
        return None, instructions

    def step_chunk(
        self, ids: Sequence[int], actions: np.ndarray, steps_left: np.ndarray
    ) -> tuple[SimulatorChunk, list[str]]:
        """Step the envs ``ids`` as in ``VectorEnv._step_chunk``; write their observations and return (chunk, instructions)."""
        chunk = SimulatorChunk.empty(*actions.shape[:2])
        instructions, name = [], self.task.config.name
        for row, index in enumerate(self._marked(ids)):
            simulator = self._simulators[index]
            for position in range(min(len(actions[row]), steps_left[row])):
                step = simulator.step(actions[row, position])
                self._count(index)
                chunk.dense_reward[row, position] = number_of(step.dense_reward, f"The reward of env.name={name}")
                for flag in ("success", "terminated", "truncated"):
                    if (value := getattr(step, flag)) is not None:
                        getattr(chunk, flag)[row, position] = flag_of(value, f"`{flag}` of env.name={name}")
                chunk.executed[row, position], chunk.success_known[row, position] = True, step.success is not None
                if chunk.ended(self.task.config.terminate_on_success)[row, position]:
                    break
            instructions.append(self._write(index))
        return chunk, instructions

    def expert_actions(self, ids: Sequence[int], options: dict[str, Any]) -> np.ndarray:
        return np.stack([self._simulators[index].expert_action(**options) for index in self._marked(ids)])

    def render_frames(self, ids: Sequence[int], size: int) -> np.ndarray:
        frames = []
        for index in self._marked(ids):
            frames.append(self._simulators[index].render(size))
            self._count(index)
        return np.stack(frames)

    def chunk_paths(self, ids: Sequence[int], chunks: np.ndarray, size: int) -> np.ndarray | None:
        pairs = zip(self._marked(ids), chunks, strict=True)
        paths = [self._simulators[index].chunk_path(chunk, size) for index, chunk in pairs]
        known = [path for path in paths if path is not None]
        return np.stack(known) if len(known) == len(paths) else None

    def poses(self, ids: Sequence[int]) -> list[dict[str, list[float]]]:
        return [self._simulators[index].poses() for index in self._marked(ids)]

    def close(self) -> None:
        while self._simulators:
            self._simulators.popitem()[1].close()

    def _marked(self, ids: Sequence[int]) -> Iterator[int]:
        """Yield the envs ``ids``, marking each as busy while it is in use. An env whose simulator fails stays marked."""
        for index in ids:
            self.rows["busy"][index] = True
            # No `finally`: after a failure, the flag shows the parent which simulator was at fault.
            yield index
            self.rows["busy"][index] = False

    def _count(self, index: int) -> None:  # the parent sees this progress and extends the deadline
        self.rows["num_calls"][index] += 1

    def _write(self, index: int) -> str:
        images, state, instruction = self._simulators[index].observe()
        row = self.rows[index]
        for camera, place in zip(self.task.config.cameras, row["images"], strict=True):
            place[...] = _checked(f"images['{camera}']", images[camera], np.uint8, place.shape)
        if self.task.state_dim:
            row["state"][...] = _checked("state", state, np.float32, row["state"].shape)
        self._count(index)
        return instruction


def _checked(name: str, array: np.ndarray | None, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    if array is None or array.dtype != dtype or array.shape != shape:
        actual = "None" if array is None else f"{array.dtype} {array.shape}"
        raise ConfigError(f"Simulator.observe() returned {name} as {actual}; expected {np.dtype(dtype)} {shape}.")
    return array


def main() -> None:
    """Run a worker."""
    connection, (memory,), parent = child_end()
    with connection:
        _serve(connection, memory, parent)


def _serve(connection: Connection, memory: int, parent: int) -> None:
    """Serve calls until the parent closes its end of the pipe, or dies."""
    rows = None
    try:
        task = connection.recv()
        limit_s = max(task.config.step_timeout_s, task.config.reset_timeout_s) + MARGIN_S
        # If C code holds the GIL past all deadlines, the thread stalls and the alarm ends the process.
        alarm = partial(signal.setitimer, signal.ITIMER_REAL, limit_s)
        threading.Thread(target=exit_with_parent, args=(parent, alarm), daemon=True).start()
        rows = SimulatorRows(task, mmap.mmap(memory, task.row_type.itemsize * task.num_envs))
        while True:
            name, arguments = connection.recv()
            connection.send(_result(getattr(rows, name), arguments))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        pass
    except Exception as error:  # noqa: BLE001 - the parent reports it
        connection.send(failure_of(error))
    finally:
        if rows is not None:
            rows.close()


def _result(method: Callable[..., Any], arguments: tuple) -> Any:
    try:
        return method(*arguments)
    except BaseException as error:  # noqa: BLE001 - the parent reports it and replaces this process
        return failure_of(error)
