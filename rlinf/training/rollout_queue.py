"""Submitted rollouts and the weights that they use: at most ``cluster.max_staleness`` iterations older than the trained ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlinf.distributed import deadlines
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.process_group import sum_counts
from rlinf.errors import RLinfError
from rlinf.optim.reference import Reference
from rlinf.rollout.collector import Collector
from rlinf.types import RolloutBatch

if TYPE_CHECKING:
    from rlinf.training.action_trainer import TrainerContext

SAVED = ("step", "policy_version", "issued_at", "updated")
"""Fields of a ``PendingRollout`` in a checkpoint's state; its weights are saved as tensors."""


@dataclass
class PendingRollout:
    """A rollout that has been submitted and not yet trained on.

    Attributes:
        step: Iteration that trains on the rollout.
        policy_version: Version of the weights that it uses.
        issued_at: Iteration in which it was submitted, before the updates.
        updated: Whether the policy was updated between the previous submission and this one.
        weights: Copy of the weights that it uses; None if they are still the current weights when it is trained on.
        handle: What ``Collector.submit`` returned.
        since: Time of the submission, in seconds.
    """

    step: int
    policy_version: int
    issued_at: int
    updated: bool
    weights: Reference | None = None
    handle: Any = None
    since: float = 0.0

    @property
    def lag(self) -> int:
        """Staleness: number of training iterations between the rollout's weights and the weights trained on it."""
        return self.step - self.issued_at

    def tensors(self) -> dict[str, Tensor]:
        """Return the copied weights by their names in a checkpoint."""
        parts = {} if self.weights is None else self.weights.parts()
        return {f"rollout_{self.step}.{name}": part for name, part in parts.items()}

    def with_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the rollout's weights."""
        return nullcontext() if self.weights is None else self.weights.in_place()


class RolloutQueue:
    """The pending rollouts of one rank, in the order of the iterations that train on them. All ranks submit, collect and repeat together.

    With ``cluster.max_staleness`` = s (here 2), rollout Rk uses the weights from before the update of iteration k - s, and runs during
    s updates. Each rollout is trained on once; its weights are exactly s iterations old, except at the start::

        iteration      0                1           2           3
        submit         R0 R1 R2 (w0)    R3 (w1)     R4 (w2)     R5 (w3)
        collect        R0               R1          R2          R3
        update         w0 -> w1         w1 -> w2    w2 -> w3    w3 -> w4
        staleness      0                1           2           2

    With s = 0, a rollout is submitted and collected in the same iteration. Pending rollouts are saved in checkpoints with their weights,
    so that a resumed run submits the same ones again.
    """

    def __init__(self, context: TrainerContext, collector: Collector, needs_values: bool, num_steps: int) -> None:
        self.loop, self.sync, self.model = context.loop, context.sync, context.worker.model
        self.collector, self.needs_values, self.num_steps = collector, needs_values, num_steps
        self.max_staleness = context.config.cluster.max_staleness
        self._pending: dict[int, PendingRollout] = {}  # by the iteration that trains on it
        self._updated = False  # whether the policy has changed since the last submission

    def policy_changed(self) -> None:
        """Record that the policy has been updated."""
        self._updated = True

    def submit(self, last: int, step: int) -> None:
        """In iteration ``step``, submit the missing rollouts for all iterations up to ``last``, with the current weights."""
        for number in range(max(self._pending, default=step - 1) + 1, min(last, self.num_steps - 1) + 1):
            # A rollout for this iteration is collected before the next update, so its weights need not be copied.
            weights = None if number == step else Reference(self.model)
            self._submit(PendingRollout(number, self.loop.state.policy_version, step, self._updated, weights))
            self._updated = False

    def submit_again(self) -> None:
        """Submit the pending rollouts of a resumed checkpoint, with their original weights."""
        saved = [PendingRollout(**fields) for fields in self.loop.state.rollouts_ahead]
        # If max_staleness was reduced when resuming, they are submitted with the current weights instead.
        if self.loop.resumed_from is None or any(pending.lag > self.max_staleness for pending in saved):
            return
        for pending in saved:
            pending.weights = Reference(self.model)
            self.loop.restore(pending.tensors())
            with pending.with_weights():
                self._submit(pending)

    def _submit(self, pending: PendingRollout) -> None:
        self.sync.push(pending.policy_version)
        pending.handle, pending.since = self._request(pending), time.monotonic()
        self._pending[pending.step] = pending

    def _request(self, pending: PendingRollout, attempt: int = 0, env_groups: Sequence[int] | None = None) -> Any:
        """Request the rollout, or the rollout of some env groups, with the weights of the last push."""
        policy, version = self.sync.rollout_policy, pending.policy_version
        return self.collector.submit(policy, pending.step, version, self.needs_values, attempt, env_groups)

    @deadline("rollout")
    def collect(self, step: int) -> RolloutBatch:
        """Wait for the rollout of this rank's env groups for iteration ``step``, and count its env steps."""
        pending = self._pending[step]
        batch = self._receive(pending, pending.handle)
        self._count_env_steps(batch)
        deadlines.clock.add_rollout(time.monotonic() - pending.since)
        return batch

    @deadline("rollout")
    def repeat(self, step: int, attempt: int, env_groups: Sequence[int]) -> RolloutBatch | None:
        """Roll out some env groups again, from other initial states, with the weights of iteration ``step``'s rollout; None without groups."""
        pending, batch = self._pending[step], None
        with pending.with_weights():
            if self.sync.version != pending.policy_version:  # equal on all ranks, so all of them push
                self.sync.push(pending.policy_version)
            handle = self._request(pending, attempt, env_groups) if env_groups else None
        if env_groups:
            batch = self._receive(pending, handle)
        self._count_env_steps(batch)
        return batch

    def _receive(self, pending: PendingRollout, handle: Any) -> RolloutBatch:
        batch = self.collector.result(handle)
        self.sync.rest()
        used = batch.policy_version.unique().tolist()
        if used != [pending.policy_version]:
            raise RLinfError(
                f"The rollout of step {pending.step} used weights {used}; expected weights {pending.policy_version}"
            )
        return batch

    def _count_env_steps(self, batch: RolloutBatch | None) -> None:
        self.loop.state.env_steps += sum_counts(0 if batch is None else int(batch.action_mask.sum()))[0]

    def remove(self, step: int) -> PendingRollout:
        """Return the rollout that iteration ``step`` trains on, which is then no longer pending."""
        return self._pending.pop(step)

    def state_dict(self) -> dict[str, Tensor]:
        """Record the pending rollouts in the loop's state, and return their weights."""
        pending = self._pending.values()
        self.loop.state.rollouts_ahead = [{name: getattr(rollout, name) for name in SAVED} for rollout in pending]
        return {name: part for rollout in pending for name, part in rollout.tensors().items()}
