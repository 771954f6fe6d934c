"""Calls to a rank's rollout workers, with deadlines and replacement of lost workers."""

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
from rlinf.cluster.ray_actor import RolloutWorkerActor, RolloutWorkerProcess
from rlinf.cluster.reservation import Reservation
from rlinf.cluster.weights import StoredWeights, WeightStore
from rlinf.distributed.child_process import Failure
from rlinf.distributed.config import DeadlinesConfig
from rlinf.distributed.deadlines import clock, heartbeat
from rlinf.distributed.process_group import rank, rank_range
from rlinf.distributed.stack_dump import DUMP_SIGNAL, register_remote
from rlinf.errors import RankError
from rlinf.evaluation.evaluator import Video
from rlinf.files import write_bytes
from rlinf.preflight.placement import Placement
from rlinf.rollout.policy_skeleton import PolicyReplica
from rlinf.types import EpisodeResult, EpisodeSpec, RolloutBatch

logger = logging.getLogger("rlinf")

POLL_S = 0.5
CLOSE_S = 5.0
"""Time allowed for rollout workers to close their envs, in seconds."""
DUMP_S = 2.0
"""Time allowed for an unresponsive rollout worker to write its stacks, which Ray forwards to the run's log, in seconds."""
SIGNAL_S = 4.0
"""Seconds to wait for a signal to be sent on a different machine, which may itself be unresponsive."""
FETCH_S = 30.0
"""Seconds to wait for a lost rollout worker's completed result before repeating the call."""
MULTI_RANK_FRACTION = 0.5
"""With several ranks, the fraction of a deadline after which an unresponsive rollout worker is replaced."""


class ClusterSettings(Protocol):
    """Settings of rollout workers in ``rlinf train`` or a recipe."""

    deadlines: DeadlinesConfig
    max_restarts: int


@dataclass(eq=False)
class Call:
    """A pending call of a ``RolloutWorkerActor`` method."""

    worker: int  # index across all machines
    deadline: str  # key of ``cluster.deadlines``
    method: str
    arguments: tuple
    weights: StoredWeights | None  # weights that the rollout worker must have for this call
    ref: Any = None  # Ray's reference to the result
    before: list[Any] = field(default_factory=list)  # references to preceding setup: construction, pushes
    built_s: float = 0.0  # seconds waited for ``before``
    waited_s: float = 0.0  # seconds waited for the call itself
    missed: bool = False  # a rollout worker was replaced because it missed the deadline of this call


class RolloutWorkers:
    """Manages the rollout workers of this rank.

    A rollout worker runs calls in order. If it is lost (its process or machine ends, or it misses a deadline), a replacement repeats
    its pending calls with the original weights. The results are identical, because a rollout depends only on weights, iteration,
    attempt and env group.

    Args:
        make: Builds a ``PolicyReplica`` in a rollout worker's process, given its index and the number of workers on its machine.
        model: The trained model, sharded or not, whose weights are pushed.
        resume_hint: Instructions for error messages on how to resume the run.
    """

    def __init__(
        self,
        make: Callable[[int, int], PolicyReplica],
        cluster: ClusterSettings,
        placement: Placement,
        reservation: Reservation,
        model: nn.Module,
        resume_hint: str = "continue with rlinf train resume=<run folder>",
    ) -> None:
        self.make, self.placement, self.reservation = make, placement, reservation
        self.max_restarts, self.resume_hint = cluster.max_restarts, resume_hint
        self.numbers = self.placement.rollout_workers_of(rank())  # of this rank
        self.env_groups = rank_range(self.placement.num_env_groups, rank(), self.placement.num_ranks)
        self.num_replaced = 0
        self.weights: StoredWeights | None = None
        self._deadlines = asdict(cluster.deadlines)
        self._open: dict[int, list[Call]] = {number: [] for number in self.numbers}
        self._setup: dict[int, list[Any]] = {}
        self._held: dict[int, StoredWeights] = {}  # by a rollout worker after its pending calls
        self._where: dict[int, Any] = {}
        self._actors: dict[int, Any] = {}
        reservation.join()
        self._store = WeightStore(model, reservation.group)
        for number in self.numbers:
            self._start(number)
        register_remote(self)

    def wait_until_ready(self) -> None:
        """Wait until all rollout workers are built; raise an error if one cannot be built."""
        self.results([self._submit(number, "start", "where") for number in self.numbers])

    def submit(self, number: int, deadline: str, method: str, *arguments: Any) -> Call:
        """Call a rollout worker's method without waiting for the result."""
        return self._submit(number, deadline, "run", method, *arguments)

    def _submit(self, number: int, deadline: str, method: str, *arguments: Any) -> Call:
        """Call a method of a ``RolloutWorkerActor`` without waiting for the result."""
        call = Call(number, deadline, method, arguments, self._held.get(number))
        self._send(call)
        self._open[number].append(call)
        return call

    def results(self, calls: Sequence[Call]) -> list[Any]:
        """Wait for calls and return their results in the same order; see ``as_completed``."""
        results = dict(self.as_completed(list(calls)))
        return [results[call] for call in calls]

    def as_completed(self, calls: list[Call]) -> Iterator[tuple[Call, Any]]:
        """Yield each call with its result as soon as it is available. The caller may append to ``calls`` in the meantime.

        Raise a rollout worker's user errors unchanged; raise RankError for a bug or after more than ``cluster.max_restarts`` losses.
        """
        import ray

        while calls:
            start = time.monotonic()
            ready, _ = ray.wait([call.ref for call in calls], timeout=POLL_S)
            # Limit the time to 2 polls: this process may have been stopped (Ctrl-Z), which does not mean that workers were slow.
            waited = min(time.monotonic() - start, 2 * POLL_S)
            # Restart this rank's own deadline; `_watch` enforces the deadlines of individual rollout workers.
            heartbeat()
            for call in [call for call in calls if call.ref in ready]:
                try:
                    for setup_result in ray.get(call.before):
                        _checked(setup_result, call.worker)
                    result = _checked(ray.get(call.ref), call.worker)
                except ray.exceptions.RayTaskError as error:
                    raise RankError(f"Rollout worker {call.worker} failed: {error}") from None
                except ray.exceptions.RayError as error:
                    first_line = str(error).strip().partition("\n")[0].rstrip(".")
                    self._replace(call.worker, first_line or type(error).__name__)
                    # `ready` is outdated: the replacement's calls have new references.
                    break
                calls.remove(call)
                self._open[call.worker].remove(call)
                yield call, result
            for number in {call.worker for call in calls}:
                self._watch(number, waited)

    def distribute(self, deadline: str, method: str, parts: Sequence[tuple]) -> Iterator[tuple[int, Any]]:
        """Call a method with each of ``parts`` on the next free rollout worker. Yield each part's index and result.

        The rollout workers start immediately, and continue while the caller consumes results.
        """
        remaining, calls, indices = deque(enumerate(parts)), [], {}

        def submit_next(number: int) -> None:
            if remaining:
                index, arguments = remaining.popleft()
                calls.append(self.submit(number, deadline, method, *arguments))
                indices[calls[-1]] = index

        for number in self.numbers:
            submit_next(number)

        # Use a nested generator: if `distribute` itself were one, calls would not start until the caller requests a result.
        def results() -> Iterator[tuple[int, Any]]:
            for call, result in self.as_completed(calls):
                submit_next(call.worker)
                yield indices[call], result

        return results()

    def update_weights(self, version: int) -> None:
        """Push the trained weights to all rollout workers of this rank (a collective call)."""
        # Reset until the push completes: after an exception, the next push must store the weights again.
        weights, self.weights = self.weights, None
        if weights is None or weights.version != version:
            weights = None
            for number in self.numbers:
                # Drop references to old weights so that Ray can free them, unless a pending call may have to be repeated with them.
                if not self._open[number]:
                    self._held.pop(number, None)
            weights = self._store.put(version)
        calls = []
        for number in self.numbers:
            if self._held.get(number) is not weights:
                calls.append(self._submit(number, "push", "push", weights))
                self._held[number] = weights
        self.results(calls)
        self.weights = weights

    def sleep(self) -> None:
        """Do nothing, because rollout workers use their own memory."""

    def close(self) -> None:
        """Shut down the rollout workers."""
        import ray

        if not self._actors or not ray.is_initialized():
            return
        closing = [actor.run.remote("close") for actor in self._actors.values()]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}

    def _start(self, number: int) -> None:
        """Start a rollout worker. Ray queues its calls until it has been built."""
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
        """Replace a lost rollout worker and repeat its pending calls."""
        import ray

        self.num_replaced += 1
        text, limit = f"Rollout worker {number} was lost: {cause}", self.max_restarts
        if self.num_replaced > limit:
            raise RankError(
                f"{text}. {self.num_replaced} rollout workers of this rank have been lost (cluster.max_restarts={limit}). Find the cause "
                f"in the log, then {self.resume_hint}, or raise the limit: cluster.max_restarts={2 * limit + 2}"
            )
        logger.warning("%s. A replacement will rerun the same env groups.", text)
        again = [call for call in self._open[number] if not _has_result(call)]
        ray.kill(self._actors[number])
        self._start(number)
        # Each call is repeated with its original weights, so a push may be needed between two calls.
        held = None
        for call in again:
            held = self._push(number, held, call.weights)
            self._send(call)
            held = call.arguments[0] if call.method == "push" else held
        self._push(number, held, self._held.get(number))

    def _push(self, number: int, held: StoredWeights | None, wanted: StoredWeights | None) -> StoredWeights | None:
        """Push the weights ``wanted`` to a new rollout worker before its next call, unless it already has them; return them."""
        if wanted is not held and wanted is not None:
            self._setup[number].append(self._actors[number].push.remote(wanted))
        return wanted

    def _watch(self, number: int, waited_s: float) -> None:
        """If a rollout worker's current call has missed its deadline, log its stacks and replace it."""
        call = next((call for call in self._open[number] if _pending([call.ref])), None)
        if call is None:
            return
        if _pending(call.before):
            call.built_s += waited_s
            deadline, seconds = "start", call.built_s
        else:
            call.waited_s += waited_s
            deadline, seconds = call.deadline, call.waited_s
        # Other ranks wait for this rank under the same deadline, so leave a replacement enough time to finish the work.
        fraction = MULTI_RANK_FRACTION if self.placement.num_ranks > 1 else 1
        limit = clock.limit_of(deadline, self._deadlines) * fraction
        if seconds <= limit:
            return
        if _pending([self._where[number]]):
            raise RankError(
                f"The Ray cluster has had no free place for rollout worker {number} for {limit:g} s. Replace the lost machine, "
                f"or set a smaller cluster.num_rollout_workers, then {self.resume_hint}"
            )
        self._signal_and_wait(number, DUMP_SIGNAL)
        time.sleep(DUMP_S)
        fix = f"If it only needs more time, set cluster.deadlines.{deadline}={2 * clock.limit_of(deadline, self._deadlines):g}"
        cause = f"it was in '{deadline}' for more than {limit:g} s. Its stacks are in the log. {fix}"
        # Do not use `ray.kill`: it asks the process to end, and a stopped process would not.
        self._signal_and_wait(number, signal.SIGKILL)
        if call.missed:
            raise RankError(f"Rollout worker {number} was lost: {cause}. Its predecessor was lost in the same call")
        call.missed = True
        self._replace(number, cause)

    def request_stacks(self) -> Callable[[float], str]:
        """Have all rollout workers write their stacks to the run's log; see ``RemoteProcesses``."""
        sent = [self._signal(number, DUMP_SIGNAL) for number in self._actors]
        names = ", ".join(f"rollout worker {number}" for number in self._actors)

        def wait(deadline: float) -> str:
            time.sleep(max(0.0, min(DUMP_S, deadline - time.monotonic())))
            return f"\n{names}: all responsive processes have written their stacks to the log\n" if sent else ""

        return wait

    def _signal(self, number: int, signal_number: int) -> Any:
        """Send a signal to a rollout worker. If it runs on a different machine, return Ray's reference to the task that sends it."""
        import ray

        # These errors mean that the process has ended, or has not reported its machine yet.
        with suppress(ray.exceptions.RayError, ProcessLookupError):
            where: RolloutWorkerProcess = ray.get(self._where[number], timeout=POLL_S)
            if where.node != ray.get_runtime_context().get_node_id():
                return self.reservation.signal(where.node, where.pid, signal_number)
            os.kill(where.pid, signal_number)
        return None

    def _signal_and_wait(self, number: int, signal_number: int) -> None:
        import ray

        if (sent := self._signal(number, signal_number)) is not None:
            ray.wait([sent], timeout=SIGNAL_S)


def _checked(result: Any, number: int) -> Any:
    """Return a rollout worker's result, or raise its error."""
    if not isinstance(result, Failure):
        return result
    if result.error is not None:
        raise getattr(rlinf.errors, result.error)(result.message)
    raise RankError(f"Rollout worker {number} failed: {result.message}\n{result.traceback}".rstrip())


def _pending(refs: Sequence[Any]) -> bool:
    """Return whether any of the results is pending."""
    import ray

    if not refs:
        return False
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
    return len(ready) < len(refs)


def _has_result(call: Call) -> bool:
    """Return whether a lost rollout worker's result for a call is still available."""
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
    """Collects rollouts with rollout workers (implements ``rlinf.rollout.collector.Collector``)."""

    def __init__(self, workers: RolloutWorkers) -> None:
        self.workers, self.env_groups = workers, workers.env_groups

    def wait_until_ready(self) -> None:
        """See ``RolloutWorkers.wait_until_ready``."""
        self.workers.wait_until_ready()

    def submit(
        self, model: Any, step: int, policy_version: int, needs_values: bool, attempt: int = 0,
        env_groups: Sequence[int] | None = None,
    ) -> list[Call]:  # fmt: skip
        """Start a rollout with the most recently pushed weights without waiting; ``result`` waits for it."""
        wanted = np.array(self.env_groups if env_groups is None else env_groups, dtype=np.int64)
        numbers = self.workers.numbers
        return [
            self.workers.submit(number, "rollout", "collect", step, needs_values, attempt, worker_groups.tolist())
            for number, worker_groups in zip(numbers, np.array_split(wanted, len(numbers)), strict=True)
            if len(worker_groups)
        ]

    def result(self, calls: Sequence[Call]) -> RolloutBatch:
        """Return a submitted rollout, ordered by env group."""
        # `concatenate` copies the arrays, which are in the read-only memory of Ray's object store.
        return RolloutBatch.concatenate([arrays.batch() for arrays in self.workers.results(calls)])

    def close(self) -> None:
        """Shut down the rollout workers."""
        self.workers.close()


class RemoteEpisodes:
    """Runs evaluation episodes on this rank's rollout workers (implements ``rlinf.evaluation.evaluator.Episodes``)."""

    def __init__(self, workers: RolloutWorkers, num_envs: int) -> None:
        self.workers, self.num_envs = workers, num_envs  # ``num_envs`` is the total over all ranks' rollout workers
        self.num_restarts = 0

    def run(self, specs: Sequence[EpisodeSpec], on_result: Callable[[EpisodeResult], None]) -> list[EpisodeResult]:
        """See ``Episodes.run``. Each free rollout worker is assigned the next episodes, one per env."""
        num_rollout_workers = self.workers.placement.num_rollout_workers
        count = max(1, min(-(-self.num_envs // num_rollout_workers), -(-len(specs) // len(self.workers.numbers))))
        parts = [(specs[first : first + count],) for first in range(0, len(specs), count)]
        results_of_part: dict[int, list[EpisodeResult]] = {}
        for part, (results, num_restarts) in self.workers.distribute("evaluate", "evaluate", parts):
            self.num_restarts += num_restarts
            results_of_part[part] = results
            for result in results:
                on_result(result)
        return [result for part in sorted(results_of_part) for result in results_of_part[part]]

    def record(self, numbered: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int) -> list[Video]:
        numbers = self.workers.numbers
        parts = [(number, list(numbered[number - numbers.start :: len(numbers)])) for number in numbers]
        calls = [
            self.workers.submit(number, "evaluate", "record", part, folder.name, size) for number, part in parts if part
        ]
        recorded = [video for videos in self.workers.results(calls) for video in videos]
        for (_, about, _), content in recorded:
            write_bytes(folder.parent / about["path"], content)
        return [video for video, _ in recorded]
