"""The Ray actor that runs a rollout worker."""

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
from rlinf.cluster.weights import StoredWeights
from rlinf.distributed.child_process import Failure, failure_in, failure_of
from rlinf.distributed.stack_dump import DUMP_SIGNAL
from rlinf.engines.weight_transfer import PushHeader
from rlinf.rollout.policy_skeleton import PolicyReplica
from rlinf.types import RolloutBatch


class Arrays(NamedTuple):
    """A rollout sent between processes, with tensors as NumPy arrays so that Ray's object store does not copy them."""

    tensors: dict[str, np.ndarray]
    rest: RolloutBatch

    @classmethod
    def of(cls, batch: RolloutBatch) -> Arrays:
        """Convert a rollout to arrays."""
        tensors = batch.tensors()
        rest = RolloutBatch(**{**vars(batch), **dict.fromkeys(tensors)})
        return cls({name: tensor.numpy() for name, tensor in tensors.items()}, rest)

    def batch(self) -> RolloutBatch:
        """Return the rollout without copying the arrays, which may be read-only."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensors = {name: torch.from_numpy(array) for name, array in self.tensors.items()}
        return RolloutBatch(**{**vars(self.rest), **tensors})


class RolloutWorkerProcess(NamedTuple):
    """A rollout worker's location: Ray's node ID and the process ID on that machine."""

    node: str
    pid: int


class RolloutWorkerActor:
    """A rollout worker in its own process. Errors are returned as ``Failure`` and raised in ``rlinf.cluster.rollout_workers``."""

    def __init__(self) -> None:
        faulthandler.enable()
        faulthandler.register(DUMP_SIGNAL)
        self.worker: PolicyReplica | None = None

    def where(self) -> RolloutWorkerProcess:
        """Return the machine and process ID of this process."""
        import ray

        return RolloutWorkerProcess(ray.get_runtime_context().get_node_id(), os.getpid())

    def build(self, machine: CommandMachine, start: bytes) -> Failure | None:
        """Build the rollout worker from a pickled function and its arguments. Fail if this machine differs from the ranks' machines."""

        def make_rollout_worker() -> None:
            # Check before unpickling: this imports the plugins, whose classes `start` may contain.
            machine.check()
            make, *arguments = pickle.loads(start)
            self.worker = make(*arguments)

        return failure_in(make_rollout_worker)

    def push(self, weights: StoredWeights) -> Any:
        """Load weights into the rollout worker, which may have an earlier version or none; return the new version."""
        import ray

        try:
            worker = self._rollout_worker()
            if worker.version == weights.version:
                return worker.version
            # Send frozen weights once, to a worker without weights. Later pushes contain only trained weights.
            if worker.version is None:
                worker.start_push(PushHeader(weights.version, weights.manifest))
                for ref in weights.frozen:
                    worker.load(replace(ray.get(ref), version=weights.version))
            else:
                worker.start_push(PushHeader(weights.version, base=worker.version))
            for ref in weights.trained:
                worker.load(ray.get(ref))
            return worker.commit()
        except Exception as error:  # noqa: BLE001 - raised by the rank
            return failure_of(error)

    def run(self, method: str, *arguments: Any) -> Any:
        """Call a method of the rollout worker."""
        try:
            result = getattr(self._rollout_worker(), method)(*arguments)
            return Arrays.of(result) if isinstance(result, RolloutBatch) else result
        except Exception as error:  # noqa: BLE001 - raised by the rank
            return failure_of(error)

    def _rollout_worker(self) -> PolicyReplica:
        if self.worker is None:
            raise RuntimeError("The rollout worker was not built")
        return self.worker
