"""A vector env whose simulators run on other machines, in Ray actors.

The base class (episodes, statistics, auto-reset) runs here, so callers see no difference. Each actor runs consecutive envs: it
receives actions and returns rewards and changed observations. An actor that is lost or makes no progress is replaced, and
its envs restart their episodes (``ChunkStep.lost_env_ids``).
"""

import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

import rlinf.errors
from rlinf.distributed.child_process import Failure
from rlinf.distributed.ray.cluster import connect
from rlinf.distributed.stack_dump import REMOTE_S, register_remote
from rlinf.distributed.start import describe_differences, rank_fingerprint
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.envs.remote.host import EnvFacts, EnvHost, HostReply, HostTask
from rlinf.envs.spread import Call, Part, SpreadVectorEnv
from rlinf.errors import ConfigError, RankError, SimulatorError
from rlinf.types import EpisodeSpec, Observation, Statistics

RESOURCE = "rlinf_env"
"""All actors run on machines with this Ray resource; without any, actors are spread over all machines."""
NOWHERE = "a machine that has not replied yet"
SILENT = "it is stopped or lost, or it holds the GIL"
POLL_S = 1.0
CLOSE_TIMEOUT_S = 5.0
MAX_REASON = 1500
"""Maximum number of characters quoted from Ray's report of a lost actor."""


@dataclass(frozen=True)
class EnvNodes:
    """Number and time limits of a run's env actors: ``count`` per env, each of which may be replaced ``max_restarts`` times.

    ``num_parallel_envs`` vector envs step at the same time, across all ranks. ``start_s`` limits the time to start an actor and
    build its env, and ``timeout_s`` the time without progress afterwards. ``prepare`` (imports of user code) is called first.
    """

    count: int
    num_parallel_envs: int = 1
    start_s: float = 900.0
    timeout_s: float = 600.0
    max_restarts: int = 20
    prepare: Callable[[], object] = bool


class _Actor(Part):
    """The envs in one Ray actor, which may be replaced. ``handle`` is None before the actor starts and after it ends."""

    def __init__(self, ids: np.ndarray) -> None:
        super().__init__(ids, first=int(ids[0]))
        self.handle: Any = None
        self.host, self.pid, self.num_restarts = NOWHERE, 0, 0

    def __str__(self) -> str:
        return f"The env actor of the envs {self.ids[0]} to {self.ids[-1]} on {self.host} (process {self.pid})"


class RemoteVectorEnv(SpreadVectorEnv):
    """A registered env, divided among Ray actors. ``RemoteVectorEnv.of`` builds the subclass for the env class ``kind``.

    Raises ConfigError for different software versions, and SimulatorError after ``nodes.max_restarts`` lost actors or if closed.
    """

    kind: ClassVar[type[VectorEnv]]
    nodes: ClassVar[EnvNodes]
    workers_name = "env actors"
    restarts_key = "cluster.env_worker_restarts"

    @classmethod
    def of(cls, kind: type[VectorEnv], nodes: EnvNodes) -> type[Self]:
        """Return a subclass for ``kind`` on ``nodes``, with the class attributes and class methods of ``kind``."""
        names = ("config_class", "suite", "camera_names", "packages", "free_settings", "on_gpu")
        inherited: dict[str, Any] = {name: getattr(kind, name) for name in names}
        # Use the class methods of `kind`, so that checks before a run need neither Ray nor an actor.
        for name, value in vars(VectorEnv).items():
            if isinstance(value, classmethod):
                inherited[name] = staticmethod(getattr(kind, name))
        if kind.render_frames is VectorEnv.render_frames:
            inherited["render_frames"] = VectorEnv.render_frames
        return type(f"Remote{kind.__name__}", (cls,), {**inherited, "kind": kind, "nodes": nodes})

    def __init__(self, config: EnvConfig, num_envs: int, auto_reset: bool) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs={num_envs}; expected at least 1.")
        self.kind.check_names(config)
        self._ray = connect(f"cluster.num_env_workers={self.nodes.count}")
        self._task_config = config
        count = min(self.nodes.count, num_envs)
        self._workers: list[_Actor] = [_Actor(ids) for ids in np.array_split(np.arange(num_envs), count)]
        self._num_lost, self._past_restarts = 0, 0
        self._software = rank_fingerprint(())
        register_remote(self)
        try:
            facts, lost = self._open(self._workers)
            for actor, why in lost.items():
                raise SimulatorError(
                    f"{actor} did not start: {why}. Check the cluster's machines and resources with `ray status`; if actors just start "
                    f"slowly, set cluster.deadlines.start={2 * self.nodes.start_s:g}"
                )
            self._facts = facts[self._workers[0]]
            super().__init__(config, num_envs, auto_reset, self._facts.action_low, self._facts.action_high)
        except BaseException:
            self._kill(self._workers)
            raise
        if "render_fps" in self._facts.metadata:
            self.metadata["render_fps"] = self._facts.metadata["render_fps"]
        size = config.image_size
        self._images = {camera: np.zeros((num_envs, size, size, 3), np.uint8) for camera in config.cameras}
        self._state = np.zeros((num_envs, self.state_dim), np.float32)
        self._instructions = np.full(num_envs, "", dtype=object)

    @property
    def state_dim(self) -> int:
        return self._facts.state_dim

    @property
    def num_restarts(self) -> int:  # type: ignore[override]
        return self._num_lost + self._past_restarts + sum(actor.num_restarts for actor in self._workers)

    def action_statistics(self) -> Statistics:
        return self._facts.action_statistics

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        return self._facts.state_bounds

    def instruction_of(self, task_id: int) -> str | None:
        return self._facts.instructions[task_id]

    def episode_specs(self, split: str) -> Sequence[EpisodeSpec]:
        first = self._workers[0]
        return self._call_all({first: ("episode_specs", (split,))})[first]

    def places(self) -> list[tuple[str, int]]:
        """Return each actor's host and process id, in env order."""
        return [(actor.host, actor.pid) for actor in self._workers]

    def offload(self) -> None:
        self._call_all({actor: ("offload", ()) for actor in self._workers})
        self._specs = None

    def close_extras(self, **kwargs: object) -> None:
        closings = [actor.handle.close.remote() for actor in self._alive()]
        if closings:
            self._ray.wait(closings, num_returns=len(closings), timeout=CLOSE_TIMEOUT_S)
        self._kill(self._workers)

    def request_stacks(self) -> Callable[[float], str]:
        """Request the stacks of all actors and their simulators; see ``RemoteProcesses``."""
        requests = {actor: actor.handle.stacks.options(concurrency_group="control").remote() for actor in self._alive()}
        return lambda deadline: self._stacks(requests, deadline)

    def _alive(self) -> list[_Actor]:
        return [actor for actor in self._workers if actor.handle is not None and self._ray.is_initialized()]

    def _stacks(self, requests: dict[_Actor, Any], deadline: float) -> str:
        text, left = "", max(0.0, deadline - time.monotonic())
        ready = self._ray.wait(list(requests.values()), num_returns=len(requests), timeout=left)[0] if requests else []
        for actor, reference in requests.items():
            text += f"\n{actor}:\n"
            try:
                text += self._ray.get(reference) if reference in ready else f"no reply: {SILENT}\n"
            except self._ray.exceptions.RayError as error:
                text += f"no reply: {_reason(error)}\n"
        return text

    def _reset_call(self, part: _Actor, rows: np.ndarray) -> Call:
        specs = [None] * len(part.ids) if self._specs is None else [self._specs[row] for row in part.ids]
        return "reset", (rows - part.first, specs)

    def _observe(self, ids: np.ndarray) -> Observation:
        images = {camera: image[ids] for camera, image in self._images.items()}
        return Observation(images, self._state[ids] if self.state_dim else None, self._instructions[ids].tolist())

    def _call(self, calls: dict[_Actor, Call]) -> dict[_Actor, Any]:
        if any(actor.handle is None for actor in calls):
            raise self._closed_error(calls, self._task_config.name)
        # All envs of a lost actor restart, so its replacement, which may also be lost, resets those with an episode.
        values, lost = self._exchange_and_store(calls)
        while lost:
            for actor, why in lost.items():
                self._replace(actor, why)
            opened, lost = self._open(list(lost))
            used = self._rows_in_use() if self._specs is not None else np.zeros(0, dtype=np.int64)
            resets = {actor: self._reset_call(actor, used[actor.positions(used)]) for actor in opened}
            lost |= self._exchange_and_store(resets)[1]
        return values

    def _exchange_and_store(self, calls: dict[_Actor, Call]) -> tuple[dict[_Actor, Any], dict[_Actor, str]]:
        """Call methods of ``EnvHost`` and store the observations. Return the values, and the reasons why actors were lost."""
        requests = {actor: ("call", (name, *arguments)) for actor, (name, arguments) in calls.items()}
        replies, lost = self._exchange(requests, self.nodes.timeout_s, "cluster.env_worker_timeout_s")
        return {actor: self._store(actor, reply) for actor, reply in replies.items()}, lost

    def _store(self, actor: _Actor, reply: HostReply) -> Any:
        rows = reply.rows + actor.first
        if reply.observation is not None:
            for camera, image in reply.observation.images.items():
                self._images[camera][rows] = image
            if reply.observation.state is not None:
                self._state[rows] = reply.observation.state
            self._instructions[rows] = reply.observation.instruction
        self._lost[actor.ids] |= reply.lost
        actor.num_restarts = reply.num_restarts
        return reply.value

    def _exchange(
        self, calls: dict[_Actor, Call], limit_s: float, key: str
    ) -> tuple[dict[_Actor, Any], dict[_Actor, str]]:
        """Send all calls; return the replies, and why actors were lost. ``key`` sets ``limit_s``, the limit on time without progress."""
        ray = self._ray
        replies: dict[_Actor, Any] = {}
        lost: dict[_Actor, str] = {}
        waits = {}
        for actor, (name, arguments) in calls.items():
            waits[actor] = _Wait(getattr(actor.handle, name).remote(*arguments), arguments[0] if arguments else name)
        poll_s, now = min(POLL_S, limit_s / 4), time.monotonic()
        try:
            while waiting := [actor for actor in calls if actor not in replies and actor not in lost]:
                ready, _ = ray.wait([waits[actor].reference for actor in waiting], num_returns=1, timeout=poll_s)
                before, now = now, time.monotonic()
                for actor in waiting:
                    wait = waits[actor]
                    try:
                        if wait.reference in ready:
                            replies[actor] = ray.get(wait.reference)
                            continue
                        # Exclude time during which this process itself was stopped.
                        wait.silent_s += min(now - before, poll_s)
                        # An actor whose simulators still complete calls is slow but not lost.
                        if wait.has_progressed(ray, actor.handle):
                            wait.silent_s = 0.0
                    except ray.exceptions.RayTaskError as error:
                        raise RankError(f"{actor} failed: {error}") from None
                    except ray.exceptions.RayError as error:
                        lost[actor] = f"it was lost during {wait.name}: {_reason(error)}"
                    if wait.silent_s > limit_s:
                        lost[actor] = (
                            f"{wait.name} made no progress for {limit_s:g} s ({key}). "
                            f"Stack traces:{self.request_stacks()(time.monotonic() + REMOTE_S)}"
                        )
        except BaseException:  # also Ctrl-C: the next call must not read replies to this one
            self._kill(calls)
            raise
        for failure in replies.values():
            if isinstance(failure, Failure):
                if failure.error is not None:
                    raise getattr(rlinf.errors, failure.error)(failure.message)
                raise RankError(f"An env actor failed: {failure.message}\n{failure.traceback}".rstrip())
        return replies, lost

    def _replace(self, actor: _Actor, why: str) -> None:
        self._kill([actor])
        self._num_lost += 1
        self._past_restarts += actor.num_restarts
        actor.num_restarts = 0
        self._restart_rows(actor.ids, f"{actor}: {why}", self._num_lost, self.nodes.max_restarts)

    def _open(self, actors: Sequence[_Actor]) -> tuple[dict[_Actor, EnvFacts], dict[_Actor, str]]:
        """Start actors that build their envs. Return their facts and reasons for failed starts; reject different software."""
        nodes, config = self.nodes, self._task_config
        machines = [machine["Resources"] for machine in self._ray.nodes() if machine["Alive"]]
        chosen = [machine for machine in machines if RESOURCE in machine]
        total = nodes.count * nodes.num_parallel_envs
        sharers = -(-total // max(1, len(chosen or machines)))
        options = {
            "num_cpus": 0,  # `HostTask.num_sharers` divides the cores
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
            "concurrency_groups": {"control": 2},
            "resources": {RESOURCE: 0.001} if chosen else {},
        }
        for actor in actors:
            task = pickle.dumps(HostTask(replace(config, success_classifier=None), len(actor.ids), sharers))
            path = [entry or os.getcwd() for entry in sys.path]
            actor.host, actor.pid = NOWHERE, 0
            actor.handle = self._ray.remote(**options)(EnvHost).remote(path, pickle.dumps(nodes.prepare), task)
        replies, lost = self._exchange(
            {actor: ("open", ()) for actor in actors}, nodes.start_s, "cluster.deadlines.start"
        )
        for actor, facts in replies.items():
            actor.host, actor.pid = facts.host, facts.pid
            lines = describe_differences([(socket.gethostname(), self._software), (facts.host, facts.software)])
            if lines:
                self._kill(self._workers)
                differences = "\n  ".join(lines).replace("rank 1 on", "the actor on").replace("rank 0 on", "the run on")
                raise ConfigError(
                    f"{actor} has different software than the run:\n  {differences}\nStart all machines of the cluster in the same "
                    "environment, from the same code"
                )
        return replies, lost

    def _kill(self, actors: Sequence[_Actor] | dict[_Actor, Any]) -> None:
        for actor in actors:
            if actor.handle is not None and self._ray.is_initialized():
                self._ray.kill(actor.handle)
            actor.handle = None


class _Wait:
    """A pending call to an actor; ``silent_s`` is the time since its last progress, in seconds."""

    def __init__(self, reference: Any, name: str) -> None:
        self.reference, self.name, self.silent_s = reference, name, 0.0
        self._poll: Any = None
        self._num_calls = -1

    def has_progressed(self, ray: Any, handle: Any) -> bool:
        """Return whether the actor's simulators have finished calls since the last poll, without waiting."""
        if self._poll is None:
            self._poll = handle.num_finished_calls.options(concurrency_group="control").remote()
            return False
        if not ray.wait([self._poll], timeout=0)[0]:
            return False
        before, self._num_calls = self._num_calls, ray.get(self._poll)
        self._poll = None
        return before not in (-1, self._num_calls)


def _reason(error: Exception) -> str:
    """Return the first line of Ray's report, or the full report if an actor could not be created."""
    text = str(error).strip() or type(error).__name__
    return text[:MAX_REASON] if "creation task" in text else text.splitlines()[0]
