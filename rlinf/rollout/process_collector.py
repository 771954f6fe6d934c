"""Collect rollouts in several processes, each with some of the envs and a policy in shared memory."""

import copy
import logging
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import rlinf.errors
from rlinf.distributed.child_process import POLL_S, ChildProcess, Failure, SharedMemory, end_all
from rlinf.distributed.process_group import rank_range
from rlinf.errors import ConfigError, RankError, RLinfError
from rlinf.models.embodiment.base import ActionModel
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.shared_memory import SharedTask, read_reply
from rlinf.rollout.worker_process import READY, RolloutTask, WorkerStart
from rlinf.seeding import derive_seed
from rlinf.types import RolloutBatch

CLOSE_TIMEOUT_S = 5.0


class _RolloutWorker(ChildProcess):
    """A process with its shared memory for replies, its pending requests in order, and its unread replies."""

    def __init__(self, number: int, num_threads: int, task: SharedTask, num_slots: int) -> None:
        self.number = number
        self.requests: deque[Hashable] = deque([READY])
        self.replies: dict[Hashable, Any] = {}
        self.buffers = [SharedMemory(1) for _ in range(num_slots)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        memories = [task.memory, *self.buffers]
        self.launch("rlinf.rollout.worker_process:main", f"rollout worker {number}", memories, environment)


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of each rollout process; ``prepare`` (imports of user code) is called first, and ``seed`` differs per process."""

    num_threads: int = 1
    precision: str = "fp32"
    seed: int = 0
    prepare: Callable[[], object] = bool


class ProcessCollector:
    """Collects the rollouts of a ``RolloutCollector`` in several processes, to avoid contention for the GIL.

    Each process runs the envs of consecutive groups and acts in them. The policy's tensors are moved into shared memory, so the
    processes see every in-place update. Episodes and random numbers derive from the iteration and the env group, so
    the number of processes changes only the rounding of matrix products.

    With ``max_ahead`` of at least 1, the processes collect while the policy is trained: each pending rollout uses its own copy of
    the trained weights, made by ``submit``. Frozen weights are stored only once.

    The processes start in the background; their log records and warnings appear here while this process waits for them. If a
    process cannot start or an object cannot be sent to it, ConfigError is raised, with all processes ended and the policy unchanged.

    Args:
        make_collector: ``make_collector(rank=, num_ranks=, autocast=)`` returns a process's collector; all classes must be importable.
        model: The policy, on the CPU. Its tensors must not be moved or replaced from now on.
        num_env_groups: Number of groups across all ranks; a multiple of the number of processes across all ranks.
        max_ahead: Maximum pending rollouts; 0: one, using ``model``'s own weights, which must not change until its result is read.
    """

    def __init__(
        self,
        make_collector: Callable[..., RolloutCollector],
        model: ActionModel,
        settings: ProcessSettings = ProcessSettings(),
        *,
        num_env_groups: int,
        num_processes: int,
        max_ahead: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.model = model
        self.env_groups = rank_range(num_env_groups, rank, num_ranks)
        rank_range(num_env_groups, 0, num_processes * num_ranks)  # raises if they cannot be divided
        self.num_processes = num_processes
        self._warned: dict[Any, Any] = {}
        self._versions: list[int | None] = [None] * max(1, max_ahead)  # of the replicas' weights
        self._unread: dict[int, tuple[int, int]] = {}  # replica to the (step, attempt) of its rollout
        self.workers: list[_RolloutWorker] = []
        level, num_threads = logging.getLogger("rlinf").getEffectiveLevel(), settings.num_threads
        try:
            self.replicas = [_copy_of_trained(model) for _ in range(max_ahead)] or [model]
            models = nn.ModuleList(self.replicas)
            self._task = task = SharedTask(RolloutTask(make_collector, models, settings.precision), models)
            for number in range(num_processes):
                self.workers.append(_RolloutWorker(number, num_threads, task, len(models)))
                place, of = rank * num_processes + number, num_processes * num_ranks
                seed = derive_seed(settings.seed, "rollout process", place)
                # User code is imported by `prepare`, so the task follows in shared memory instead of in this message.
                start = WorkerStart(settings.prepare, task.start, task.size, place, of, seed, num_threads, level)
                self._send(self.workers[-1], start)
        except BaseException as error:
            end_all(self.workers, 0.0)
            if isinstance(error, ConfigError) or not isinstance(error, Exception):
                raise
            raise ConfigError(f"A rollout process cannot be started: {type(error).__name__}: {error}.") from error

    def wait_until_ready(self) -> None:
        """Wait for all processes to start. Re-raise a process's user error; raise RankError if a process died or hit a bug."""
        self._replies(READY)

    def close(self) -> None:
        end_all(self.workers, CLOSE_TIMEOUT_S)

    def submit(
        self, model: ActionModel, step: int, policy_version: int, needs_values: bool, attempt: int = 0,
        env_groups: Sequence[int] | None = None,
    ) -> tuple[int, int]:  # fmt: skip
        """Request a rollout of the shared ``model``; return ``step`` and ``attempt``, the handle for ``result``.

        The arguments are described in ``RolloutCollector.collect``. Steps cycle through the copies of the weights. A copy is updated
        unless it already contains ``policy_version``. Raise RLinfError if the result of ``step - max_ahead`` has not been read.
        """
        moved = self._task.moved() if model is self.model else ["all"]
        if moved:
            raise RLinfError(
                f"{len(moved)} tensors of the policy are not in the shared memory of the rollout processes ({', '.join(moved[:3])}); "
                "expected in-place updates of the original tensors. Rollouts would use outdated weights. "
                "Set rollout.worker_processes=0"
            )
        self._check_running()
        slot = step % len(self.replicas)
        if slot in self._unread:
            raise RLinfError(
                f"The result of rollout {self._unread[slot]} (step, attempt) must be read before {(step, attempt)} is submitted, because "
                f"both use the same copy of the weights (of {len(self.replicas)})"
            )
        self._unread[slot] = (step, attempt)
        if self._versions[slot] != policy_version:
            self._versions[slot] = policy_version
            _copy_tensors(self.model, self.replicas[slot])
        wanted = {"step": step, "policy_version": policy_version, "needs_values": needs_values, "attempt": attempt}
        parts = np.array_split(
            np.array(self.env_groups if env_groups is None else env_groups, dtype=np.int64), len(self.workers)
        )
        for worker, part in zip(self.workers, parts, strict=True):
            if len(part):
                worker.requests.append((step, attempt))
                self._send(worker, (slot, wanted | {"env_groups": part.tolist()}))
        return step, attempt

    def result(self, pending: tuple[int, int]) -> RolloutBatch:
        """Wait for a submitted rollout and return it; raise as ``wait_until_ready`` does."""
        self._check_running()
        replies, slot = self._replies(pending), pending[0] % len(self.replicas)
        memories = [worker.buffers[slot].file for worker in replies]
        parts = [read_reply(reply, file.fileno()) for reply, file in zip(replies.values(), memories, strict=True)]
        batch = RolloutBatch.concatenate(parts)  # copies the arrays out of the shared memory
        for file in memories:
            file.truncate(0)  # frees the memory during the updates
        del self._unread[slot]
        return batch

    def _check_running(self) -> None:
        if any(worker.process is None for worker in self.workers):
            raise RLinfError("The rollout processes have ended, by close() or an error. Build a new collector")

    def _send(self, worker: _RolloutWorker, message: Any) -> None:
        try:
            worker.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process has died; `_replies` raises the cause

    def _replies(self, wanted: Hashable) -> dict[_RolloutWorker, Any]:
        """Wait for the replies of all workers with the request ``wanted``; on a failure, end all workers and raise the error."""
        workers = [worker for worker in self.workers if wanted in worker.requests or wanted in worker.replies]
        try:
            while waiting := [worker for worker in workers if wanted not in worker.replies]:
                wait([worker.connection for worker in waiting], timeout=POLL_S)
                for worker in waiting:
                    # A worker handles its requests in order, so a reply belongs to the oldest request.
                    if (message := self._receive(worker)) is not None:
                        worker.replies[worker.requests.popleft()] = message
        except BaseException:  # also Ctrl-C: the next call must not read replies to this one
            for worker in self.workers:
                worker.kill()
            raise
        return {worker: worker.replies.pop(wanted) for worker in workers}

    def _receive(self, worker: _RolloutWorker) -> Any:
        """Return a reply if available, or raise the worker's error; forward its log records and warnings."""
        try:
            if not worker.connection.poll():
                return None
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            status, ending = worker.ending()
            if status == -signal.SIGKILL:
                ending += ", probably because memory ran out. Lower rollout.num_envs, or set rollout.worker_processes=0"
            text = f"Rollout worker {worker.number} was lost: {ending}\n{worker.read_log()}"
            raise RankError(text.rstrip()) from None
        if isinstance(message, logging.LogRecord):
            logging.getLogger(message.name).handle(message)
            return None
        if isinstance(message, warnings.WarningMessage):
            where = (message.filename, message.lineno)
            warnings.warn_explicit(str(message.message), message.category, *where, registry=self._warned)
            return None
        if isinstance(message, Failure):
            if message.error is not None:
                raise getattr(rlinf.errors, message.error)(message.message)
            raise RankError(f"Rollout worker {worker.number} failed: {message.message}\n{message.traceback}".rstrip())
        return message


def _copy_of_trained(model: ActionModel) -> ActionModel:
    """Return a copy of a policy with its own trained weights but shared frozen weights."""
    frozen = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    return copy.deepcopy(model, frozen)


@torch.no_grad()
def _copy_tensors(source: nn.Module, target: nn.Module) -> None:
    new = _tensors(source)
    for name, tensor in _tensors(target).items():
        if tensor is not new[name]:
            tensor.copy_(new[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])
