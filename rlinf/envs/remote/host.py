"""Hosts envs for a vector env in a different process. Runs in a Ray actor but does not depend on Ray."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlinf.distributed.child_process import Failure, failure_of
from rlinf.distributed.stack_dump import all_stacks
from rlinf.distributed.start import rank_fingerprint
from rlinf.envs import make_env
from rlinf.envs.config import EnvConfig, with_share_of_cores
from rlinf.types import Statistics

if TYPE_CHECKING:
    from rlinf.envs.steps import SimulatorChunk
    from rlinf.types import EpisodeSpec, Observation


COUNTERPARTS = ("reset", "step_chunk", "expert_actions", "offload")


@dataclass(frozen=True)
class HostTask:
    """Settings of a host's env, its number of envs, and the number of hosts among which a machine's cores are divided."""

    config: EnvConfig
    num_envs: int
    num_sharers: int


@dataclass(frozen=True)
class EnvFacts:
    """Properties of the env for the calling process, which does not build it. ``instructions`` contains one entry per task."""

    host: str
    pid: int
    software: dict[str, Any]
    action_low: np.ndarray
    action_high: np.ndarray
    state_dim: int
    task_names: list[str]
    action_statistics: Statistics
    state_bounds: tuple[np.ndarray, np.ndarray] | None
    instructions: list[str | None]
    metadata: dict[str, Any]


class HostReply(NamedTuple):
    """The result ``value`` of a call, and its side effects.

    ``rows``, int64 ``[K]``, are the envs that may have changed, and ``observation`` their observations. ``lost`` marks envs whose
    simulator was lost and which are in the first state of their episode. ``num_restarts`` is the number of simulators lost so far.
    """

    value: Any
    rows: np.ndarray
    observation: Observation | None
    lost: np.ndarray
    num_restarts: int


class EnvHost:
    """A vector env whose base class, with episodes, statistics and auto-reset, runs in the calling process.

    ``path`` is the caller's ``sys.path``; ``prepare`` (imports of user code) is called before the ``HostTask`` is unpickled.
    """

    # Ray calls all methods except `stacks` and `num_finished_calls` in one thread, which graphics contexts require.
    def __init__(self, path: Sequence[str], prepare: bytes, task: bytes) -> None:
        self._start = path, prepare, task
        self._env: Any = None

    def open(self) -> EnvFacts | Failure:
        return _caught(self._open)

    def call(self, name: str, *arguments: Any) -> HostReply | Failure:
        """Call a method of this class if listed in ``COUNTERPARTS``, otherwise of the env; return exceptions as a ``Failure``."""
        return _caught(
            lambda: getattr(self, name)(*arguments) if name in COUNTERPARTS else self._env_call(name, *arguments)
        )

    def _open(self) -> EnvFacts:
        path, prepare, pickled = self._start
        sys.path += [entry for entry in path if entry not in sys.path]
        pickle.loads(prepare)()
        task: HostTask = pickle.loads(pickled)
        config = with_share_of_cores(task.config, task.num_sharers)
        # Auto-reset is off, because the base class in the calling process manages episodes.
        env = self._env = make_env(config, task.num_envs, auto_reset=False)
        env._specs = [None] * task.num_envs
        return EnvFacts(
            host=socket.gethostname(),
            pid=os.getpid(),
            software=rank_fingerprint(()),
            action_low=env.action_low,
            action_high=env.action_high,
            state_dim=env.state_dim,
            task_names=env.task_names,
            action_statistics=env.action_statistics(),
            state_bounds=env.state_bounds(),
            instructions=[env.instruction_of(task_id) for task_id in range(len(env.task_names))],
            metadata=dict(env.metadata),
        )

    def reset(self, ids: np.ndarray, all_specs: Sequence[EpisodeSpec | None]) -> HostReply:
        """Start an episode in each of the envs ``ids``. ``all_specs`` are the resulting episodes of all envs."""
        self._env._specs = list(all_specs)
        if len(ids):
            self._env._reset_envs(ids, [all_specs[row] for row in ids])
        return self._reply(None, ids)

    def step_chunk(self, ids: np.ndarray, actions: np.ndarray, steps_left: np.ndarray) -> HostReply:
        chunk: SimulatorChunk = self._env._step_chunk(ids, actions, steps_left)
        return self._reply(chunk, ids)

    def expert_actions(self, ids: np.ndarray, options: dict[str, Any]) -> HostReply:
        return self._reply(self._env.expert_actions(**options)[ids], ())

    def _env_call(self, name: str, *arguments: Any) -> HostReply:
        return self._reply(getattr(self._env, name)(*arguments), ())

    def offload(self) -> HostReply:
        self._env.offload()
        self._env._specs = [None] * self._env.num_envs
        return self._reply(None, ())

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def num_finished_calls(self) -> int:
        return 0 if self._env is None else self._env.num_finished_calls()

    def stacks(self) -> str:
        return all_stacks()

    def _reply(self, value: Any, ids: Sequence[int] | np.ndarray) -> HostReply:
        env = self._env
        lost = env._lost.copy()
        env._lost[:] = False
        # Replies also contain the observations of lost envs, because the caller caches all observations.
        rows = np.union1d(np.asarray(ids, dtype=np.int64), np.intersect1d(np.flatnonzero(lost), env._rows_in_use()))
        return HostReply(value, rows, env._observe(rows) if len(rows) else None, lost, env.num_restarts)


def _caught(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the caller raises it
        return failure_of(error)
