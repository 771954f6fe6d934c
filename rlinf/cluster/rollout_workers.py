"""The rollout workers of a rank: it calls them, waits for their answers, and replaces those that are lost."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

import rlinf.errors
from rlinf.cluster.actor import RolloutWorkerActor, RolloutWorkerProcess
from rlinf.cluster.policy_replica import PolicyReplica
from rlinf.cluster.reservation import Reservation
from rlinf.cluster.weights import StoredWeights, WeightStore
from rlinf.distributed.child_process import Failure
from rlinf.distributed.config import DeadlinesConfig
from rlinf.distributed.deadlines import clock, heartbeat
from rlinf.distributed.process_group import rank
from rlinf.distributed.stack_dump import DUMP_SIGNAL, own_remote
from rlinf.distributed.sums import rank_range
from rlinf.errors import RankError
from rlinf.evaluation.evaluator import Video
from rlinf.files import write_bytes
from rlinf.preflight.placement import Placement
from rlinf.types import EpisodeResult, EpisodeSpec, RolloutBatch

logger = logging.getLogger("rlinf")

POLL_S = 0.5
CLOSE_S = 5.0
"""Seconds that rollout workers have to close their envs."""
DUMP_S = 2.0
"""Seconds that a silent rollout worker has to write its stacks, which Ray passes on to the log of the run."""
SIGNAL_S = 4.0
"""Seconds to wait until a process of another machine has sent a signal there; the machine may be silent, too."""
FETCH_S = 30.0
"""Seconds in which what a lost rollout worker has answered must come from its machine; else it is played again."""
SHARE_OF_RANKS = 0.5
"""Part of a deadline after which a silent rollout worker is replaced where several ranks train. The others wait for its rank within the same
deadline, so another rollout worker must play the same env groups in the rest of it."""


class ClusterSettings(Protocol):
    """Settings of rollout workers, of ``rlinf train`` or of a recipe."""

    deadlines: DeadlinesConfig
    max_restarts: int


@dataclass(eq=False)
class Call:
    """A call of a rollout worker without an answer so far; ``method`` is of ``RolloutWorkerActor``."""

    worker: int  # over all machines
    deadline: str  # key of ``cluster.deadlines``
    method: str
    arguments: tuple
    weights: StoredWeights | None  # the rollout worker's when it starts the call
    ref: Any = None  # Ray's reference to the answer
    before: list[Any] = field(default_factory=list)  # references to earlier work: being built, taking weights
    built_s: float = 0.0  # seconds waited during ``before``
    waited_s: float = 0.0  # and after
    missed: bool = False  # a rollout worker was replaced because it was too late with this call


class RolloutWorkers:
    """The rollout workers of this rank.

    A rollout worker answers calls in their order. One that is lost (its process or machine ends, or it misses a deadline) is
    replaced: the new one gets the unanswered calls again, each with the weights that the old one had for it. Its
    answers are the same, because a rollout depends on weights, iteration, attempt and env group alone.

    Args:
        make: Makes a ``PolicyReplica`` in the process of a rollout worker, from its number and the number of rollout workers on its machine.
        model: The trained model, sharded or not, from which weights come.
        way_on: How a user continues after an error that ends the run.
    """

    def __init__(
        self,
        make: Callable[[int, int], PolicyReplica],
        cluster: ClusterSettings,
        placement: Placement,
        reservation: Reservation,
        model: nn.Module,
        way_on: str = "continue with rlinf train resume=<run folder>",
    ) -> None:
        self.make, self.placement, self.reservation = make, placement, reservation
        self.max_restarts, self.way_on = cluster.max_restarts, way_on
        self.numbers = self.placement.rollout_workers_of(rank())  # of this rank
        self.env_groups = rank_range(self.placement.num_env_groups, rank(), self.placement.num_ranks)
        self.num_replaced = 0
        self.weights: StoredWeights | None = None
        self._deadlines = asdict(cluster.deadlines)
        self._open: dict[int, list[Call]] = {number: [] for number in self.numbers}
        self._setup: dict[int, list[Any]] = {}
        self._held: dict[int, StoredWeights] = {}  # by a rollout worker that has done what it was asked
        self._where: dict[int, Any] = {}
        self._actors: dict[int, Any] = {}
        reservation.join()
        self._store = WeightStore(model, reservation.group)
        for number in self.numbers:
            self._start(number)
        own_remote(self)

    def wait_until_ready(self) -> None:
        """Wait until all rollout workers are built, or raise why one cannot be."""
        self.answers([self.call(number, "start", "where") for number in self.numbers])

    def ask(self, number: int, deadline: str, method: str, *arguments: Any) -> Call:
        """Ask a rollout worker to call one of its methods; do not wait."""
        return self.call(number, deadline, "ask", method, *arguments)

    def call(self, number: int, deadline: str, method: str, *arguments: Any) -> Call:
        """Call a method of a rollout worker's ``RolloutWorkerActor``; do not wait."""
        call = Call(number, deadline, method, arguments, self._held.get(number))
        self._send(call)
        self._open[number].append(call)
        return call

    def answers(self, calls: Sequence[Call]) -> list[Any]:
        """Return the answers to some calls in their order; see ``as_answered``."""
        found = dict(self.as_answered(list(calls)))
        return [found[call] for call in calls]

    def as_answered(self, calls: list[Call]) -> Iterator[tuple[Call, Any]]:
        """Yield each call with its answer as soon as it is there. The caller may append further calls meanwhile.

        Raise a user error of a rollout worker unchanged, RankError for a bug or after more losses than
        ``cluster.max_restarts``.
        """
        import ray

        while calls:
            start = time.monotonic()
            ready, _ = ray.wait([call.ref for call in calls], timeout=POLL_S)
            waited = min(time.monotonic() - start, 2 * POLL_S)  # this process may have been stopped (Ctrl-Z)
            heartbeat()  # the deadlines of the rollout workers apply
            for call in [call for call in calls if call.ref in ready]:
                try:
                    for each in ray.get(call.before):
                        _checked(each, call.worker)
                    answer = _checked(ray.get(call.ref), call.worker)
                except ray.exceptions.RayTaskError as error:
                    raise RankError(f"RolloutWorker {call.worker} failed: {error}") from None
                except ray.exceptions.RayError as error:
                    first_line = str(error).strip().partition("\n")[0].rstrip(".")
                    self._replace(call.worker, first_line or type(error).__name__)
                    break  # its other calls have other references now
                calls.remove(call)
                self._open[call.worker].remove(call)
                yield call, answer
            for number in {call.worker for call in calls}:
                self._watch(number, waited)

    def shared_out(self, deadline: str, method: str, parts: Sequence[tuple]) -> Iterator[tuple[int, Any]]:
        """Call a method with each of ``parts``; a free rollout worker takes the next. Yield each part's number and answer.

        The rollout workers start at once, and continue while answers are taken.
        """
        left, calls, places = deque(enumerate(parts)), [], {}

        def give_next(number: int) -> None:
            if left:
                place, arguments = left.popleft()
                calls.append(self.ask(number, deadline, method, *arguments))
                places[calls[-1]] = place

        for number in self.numbers:
            give_next(number)

        def answers() -> Iterator[tuple[int, Any]]:
            for call, answer in self.as_answered(calls):
                give_next(call.worker)
                yield places[call], answer

        return answers()

    def update_weights(self, version: int) -> None:
        """Bring all rollout workers of this rank to the trained weights (a collective call of all ranks)."""
        weights, self.weights = self.weights, None  # if this breaks off, the next push stores them again
        if weights is None or weights.version != version:
            weights = None
            for number in self.numbers:
                if not self._open[number]:  # else a question that may be asked again needs the weights
                    self._held.pop(number, None)
            weights = self._store.put(version)
        calls = []
        for number in self.numbers:
            if self._held.get(number) is not weights:
                calls.append(self.call(number, "push", "push", weights))
                self._held[number] = weights
        self.answers(calls)
        self.weights = weights

    def sleep(self) -> None:
        """Do nothing: rollout workers have memory of their own."""

    def close(self) -> None:
        """End the rollout workers."""
        import ray

        if not self._actors or not ray.is_initialized():
            return
        closing = [actor.ask.remote("close") for actor in self._actors.values()]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}

    def _start(self, number: int) -> None:
        """Start a rollout worker; Ray queues what it is asked meanwhile."""
        self._actors[number] = actor = self.reservation.start(RolloutWorkerActor, number)
        neighbours = self.reservation.num_neighbours(number)
        start = pickle.dumps((self.make, number, neighbours))
        self._where[number] = actor.where.remote()
        self._setup[number] = [actor.build.remote(self.reservation.machine, start)]

    def _send(self, call: Call) -> None:
        call.ref = getattr(self._actors[call.worker], call.method).remote(*call.arguments)
        call.before, self._setup[call.worker] = self._setup[call.worker], []
        call.built_s = call.waited_s = 0.0

    def _replace(self, number: int, cause: str) -> None:
        """Start another rollout worker for one that is lost, and repeat its unanswered calls."""
        import ray

        self.num_replaced += 1
        text, limit = f"RolloutWorker {number} was lost: {cause}", self.max_restarts
        if self.num_replaced > limit:
            raise RankError(
                f"{text}. {self.num_replaced} rollout workers of this rank have been lost (cluster.max_restarts={limit}). Look for the cause in the "
                f"log, then {self.way_on}, or raise it: cluster.max_restarts={2 * limit + 2}"
            )
        logger.warning("%s. Another one takes its place and plays the same env groups again.", text)
        again = [call for call in self._open[number] if not _has_answer(call)]
        ray.kill(self._actors[number])
        self._start(number)
        held = None
        for call in again:
            held = self._push(number, held, call.weights)
            self._send(call)
            held = call.arguments[0] if call.method == "push" else held
        self._push(number, held, self._held.get(number))

    def _push(self, number: int, held: StoredWeights | None, wanted: StoredWeights | None) -> StoredWeights | None:
        """Bring a new rollout worker from some weights to others before its next call; return the latter."""
        if wanted is not held and wanted is not None:
            self._setup[number].append(self._actors[number].push.remote(wanted))
        return wanted

    def _watch(self, number: int, waited_s: float) -> None:
        """Replace a rollout worker that is too late with its present call; its stacks go to the log."""
        call = next((call for call in self._open[number] if _pending([call.ref])), None)
        if call is None:
            return
        if _pending(call.before):
            call.built_s += waited_s
            deadline, seconds = "start", call.built_s
        else:
            call.waited_s += waited_s
            deadline, seconds = call.deadline, call.waited_s
        limit = clock.limit_of(deadline, self._deadlines) * (SHARE_OF_RANKS if self.placement.num_ranks > 1 else 1)
        if seconds <= limit:
            return
        if _pending([self._where[number]]):
            raise RankError(
                f"No machine of the Ray cluster has had room for rollout worker {number} for {limit:g} s. Add a machine in place of the one that is "
                f"lost, or set a smaller cluster.num_rollout_workers, then {self.way_on}"
            )
        self._signal_and_wait(number, DUMP_SIGNAL)
        time.sleep(DUMP_S)
        fix = f"If it only needs longer, set cluster.deadlines.{deadline}={2 * clock.limit_of(deadline, self._deadlines):g}"
        cause = f"it was in '{deadline}' for more than {limit:g} s. Its stacks are in the log. {fix}"
        # Ray asks a process to end, and this one may be stopped.
        self._signal_and_wait(number, signal.SIGKILL)
        if call.missed:
            raise RankError(f"RolloutWorker {number} was lost: {cause}. So was the one before it, with the same work")
        call.missed = True
        self._replace(number, cause)

    def ask_stacks(self) -> Callable[[float], str]:
        """Make all rollout workers write their stacks to the log of the run; see ``RemoteProcesses``."""
        sent = [self._signal(number, DUMP_SIGNAL) for number in self._actors]
        names = ", ".join(f"rollout worker {number}" for number in self._actors)

        def wait(deadline: float) -> str:
            time.sleep(max(0.0, min(DUMP_S, deadline - time.monotonic())))
            return f"\n{names}: what answers has written its stacks to the log\n" if sent else ""

        return wait

    def _signal(self, number: int, signal_number: int) -> Any:
        """Send a signal to a rollout worker's process; return Ray's reference to the sending if it is on another machine."""
        import ray

        with suppress(ray.exceptions.RayError, ProcessLookupError):  # it has ended, or it has not told where it is
            where: RolloutWorkerProcess = ray.get(self._where[number], timeout=POLL_S)
            if where.node != ray.get_runtime_context().get_node_id():
                return self.reservation.signal(where.node, where.pid, signal_number)
            os.kill(where.pid, signal_number)
        return None

    def _signal_and_wait(self, number: int, signal_number: int) -> None:
        import ray

        if (sent := self._signal(number, signal_number)) is not None:
            ray.wait([sent], timeout=SIGNAL_S)


def _checked(answer: Any, number: int) -> Any:
    """Return a rollout worker's answer, or raise its error."""
    if not isinstance(answer, Failure):
        return answer
    if answer.error is not None:
        raise getattr(rlinf.errors, answer.error)(answer.message)
    raise RankError(f"RolloutWorker {number} failed: {answer.message}\n{answer.traceback}".rstrip())


def _pending(refs: Sequence[Any]) -> bool:
    """Return whether any answer is still to come."""
    import ray

    if not refs:
        return False
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
    return len(ready) < len(refs)


def _has_answer(call: Call) -> bool:
    """Return whether a lost rollout worker's answer to a call has survived it."""
    import ray

    if _pending([call.ref]):
        return False
    try:
        ray.get(call.ref, timeout=FETCH_S)
    except ray.exceptions.RayTaskError:
        return True
    except ray.exceptions.RayError:
        return False
    return True


class RemoteCollector:
    """Collects rollouts by rollout workers; the same calls as ``RolloutCollector``, and ``collect`` in two parts."""

    def __init__(self, workers: RolloutWorkers) -> None:
        self.workers, self.env_groups = workers, workers.env_groups

    def wait_until_ready(self) -> None:
        """Wait until all rollout workers can play, or raise why one cannot."""
        self.workers.wait_until_ready()

    def collect(
        self, model: Any, step: int, policy_version: int, needs_values: bool, attempt: int = 0,
        env_groups: Sequence[int] | None = None,
    ) -> RolloutBatch:  # fmt: skip
        """Play one rollout with the weights that the rollout workers hold; see ``RolloutCollector.collect``."""
        return self.result(self.submit(model, step, policy_version, needs_values, attempt, env_groups))

    def submit(
        self, model: Any, step: int, policy_version: int, needs_values: bool, attempt: int = 0,
        env_groups: Sequence[int] | None = None,
    ) -> list[Call]:  # fmt: skip
        """Ask the rollout workers for one rollout, with the last push's weights, and return at once; ``take`` waits for it."""
        wanted = np.array(self.env_groups if env_groups is None else env_groups, dtype=np.int64)
        numbers = self.workers.numbers
        shares = zip(numbers, np.array_split(wanted, len(numbers)), strict=True)
        return [
            self.workers.ask(number, "rollout", "collect", step, needs_values, attempt, share.tolist())
            for number, share in shares
            if len(share)
        ]

    def result(self, calls: Sequence[Call]) -> RolloutBatch:
        """Return a submitted rollout, in the order of its env groups."""
        return RolloutBatch.concatenate([answer.batch() for answer in self.workers.answers(calls)])  # copies the arrays

    def close(self) -> None:
        """End the rollout workers."""
        self.workers.close()


class RemoteEpisodes:
    """Plays the episodes of evaluations on the rollout workers of this rank (``Episodes`` of ``rlinf.evaluation.evaluator``)."""

    def __init__(self, workers: RolloutWorkers, num_envs: int) -> None:
        self.workers, self.num_envs = workers, num_envs  # ``num_envs``: over all rollout workers of all ranks
        self.num_restarts = 0

    def run(self, specs: Sequence[EpisodeSpec], on_result: Callable[[EpisodeResult], None]) -> list[EpisodeResult]:
        """See ``Episodes.run``. A free rollout worker takes the next episodes, one for each of its envs."""
        num_rollout_workers = self.workers.placement.num_rollout_workers
        count = max(1, min(-(-self.num_envs // num_rollout_workers), -(-len(specs) // len(self.workers.numbers))))
        parts = [(specs[first : first + count],) for first in range(0, len(specs), count)]
        found: dict[int, list[EpisodeResult]] = {}
        for part, (results, num_restarts) in self.workers.shared_out("evaluate", "evaluate", parts):
            self.num_restarts += num_restarts
            found[part] = results
            for result in results:
                on_result(result)
        return [result for part in sorted(found) for result in found[part]]

    def record(self, numbered: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int) -> list[Video]:
        numbers = self.workers.numbers
        shares = [(number, list(numbered[number - numbers.start :: len(numbers)])) for number in numbers]
        calls = [
            self.workers.ask(each, "evaluate", "record", share, folder.name, size) for each, share in shares if share
        ]
        recorded = [each for answer in self.workers.answers(calls) for each in answer]
        for (_, about, _), content in recorded:
            write_bytes(folder.parent / about["path"], content)
        return [video for video, _ in recorded]
