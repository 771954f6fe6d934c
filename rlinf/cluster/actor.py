"""The process of a rollout worker, an actor of Ray. The class of the rollout worker knows how to play."""

from __future__ import annotations

import faulthandler
import os
import pickle
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from rlinf.cluster.machine import CommandMachine
from rlinf.cluster.policy_replica import PolicyReplica
from rlinf.cluster.weights import StoredWeights
from rlinf.distributed.child_process import Failure, failure_in, failure_of
from rlinf.distributed.stack_dump import DUMP_SIGNAL
from rlinf.engines.weight_transfer import PushHeader
from rlinf.types import RolloutBatch


class Arrays(NamedTuple):
    """A rollout on its way between processes: its tensors as arrays, which a store of objects does not copy."""

    tensors: dict[str, np.ndarray]
    rest: RolloutBatch

    @classmethod
    def of(cls, batch: RolloutBatch) -> Arrays:
        """Take a rollout apart."""
        tensors = batch.tensors()
        rest = RolloutBatch(**{**vars(batch), **dict.fromkeys(tensors)})
        return cls({name: tensor.numpy() for name, tensor in tensors.items()}, rest)

    def batch(self) -> RolloutBatch:
        """Put it together without a copy; the arrays may be read-only."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensors = {name: torch.from_numpy(each) for name, each in self.tensors.items()}
        return RolloutBatch(**{**vars(self.rest), **tensors})


class RolloutWorkerProcess(NamedTuple):
    """The id that Ray gives the machine of a rollout worker, and its process there."""

    node: str
    pid: int


class RolloutWorkerActor:
    """A rollout worker in a process of its own. An error is returned as a ``Failure``; ``rlinf.cluster.rollout_workers`` raises it."""

    def __init__(self) -> None:
        faulthandler.enable()
        faulthandler.register(DUMP_SIGNAL)
        self.worker: PolicyReplica | None = None

    def where(self) -> RolloutWorkerProcess:
        """Return the machine and the number of this process."""
        import ray

        return RolloutWorkerProcess(ray.get_runtime_context().get_node_id(), os.getpid())

    def build(self, machine: CommandMachine, start: bytes) -> Failure | None:
        """Make the rollout worker from a pickled function and its arguments, if this machine matches the ranks'."""

        def make_rollout_worker() -> None:
            machine.check()  # imports the plugins, whose classes may occur in ``start``
            make, *arguments = pickle.loads(start)
            self.worker = make(*arguments)

        return failure_in(make_rollout_worker)

    def push(self, weights: StoredWeights) -> Any:
        """Bring the rollout worker to a version of the weights from any other; return that version."""
        import ray

        try:
            worker = self._rollout_worker()
            if worker.version == weights.version:
                return worker.version
            if worker.version is None:
                worker.start_push(PushHeader(weights.version, weights.manifest))
                for ref in weights.frozen:
                    worker.load(replace(ray.get(ref), version=weights.version))
            else:
                worker.start_push(PushHeader(weights.version, base=worker.version))
            for ref in weights.trained:
                worker.load(ray.get(ref))
            return worker.commit()
        except Exception as error:  # noqa: BLE001 - the rank raises it
            return failure_of(error)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the rollout worker."""
        try:
            answer = getattr(self._rollout_worker(), method)(*arguments)
            return Arrays.of(answer) if isinstance(answer, RolloutBatch) else answer
        except Exception as error:  # noqa: BLE001 - the rank raises it
            return failure_of(error)

    def _rollout_worker(self) -> PolicyReplica:
        if self.worker is None:
            raise RuntimeError("The rollout worker was not built")
        return self.worker
