"""Where a run is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RolloutAhead:
    """A rollout that is played ahead.

    Attributes:
        step: Iteration that trains on it.
        policy_version: Of the weights that play it.
        issued_at: Iteration before whose updates it was asked for.
        updated: The policy was updated since the rollout before was asked for.
    """

    step: int
    policy_version: int
    issued_at: int
    updated: bool

    @property
    def lag(self) -> int:
        """Iterations of training between its weights and those that are trained on it."""
        return self.step - self.issued_at

    @property
    def name(self) -> str:
        """Begin the names of its weights in a checkpoint."""
        return f"rollout_{self.step}"


@dataclass
class LoopState:
    """Where a run is; saved with every checkpoint.

    Attributes:
        phase: ``sft`` or ``rl``; names checkpoints and lines of metrics.
        sft_step, step: Next optimiser step of cloning, next iteration of RL.
        env_steps: Env steps of RL so far.
        policy_version: Weight updates so far.
        train_wall_s: Seconds of training so far (demonstrations, cloning, RL; not evaluation).
        tracker_run_id: Identity of the metric run.
        evaluations: Tag to summary of each evaluation so far, with the name of the ``checkpoint`` that holds the policy.
        dataset: Hash of the dataset that is cloned (``StoredDemonstrations.digest``), or None.
        rollbacks: Times that the run went back to its best checkpoint; each halves the learning rate. A newly typed rate begins at 0.
        start_saved: The policy with which RL began without cloning is saved as ``rl_000000``.
        rollouts_ahead: Fields of the ``RolloutAhead`` that are under way.
    """

    phase: str = "sft"
    sft_step: int = 0
    step: int = 0
    env_steps: int = 0
    policy_version: int = 0
    train_wall_s: float = 0.0
    tracker_run_id: str | None = None
    evaluations: dict[str, Any] = field(default_factory=dict)
    dataset: str | None = None
    rollbacks: int = 0
    start_saved: bool = False
    rollouts_ahead: list[dict[str, Any]] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Steps of the present phase that are done."""
        return self.sft_step if self.phase == "sft" else self.step

    @property
    def checkpoint_name(self) -> str | None:
        """Name of the checkpoint that holds the present policy, once it is saved; None: it never is."""
        if self.phase == "rl" and (self.step > 0 or self.start_saved):
            return f"rl_{self.step:06d}"
        return f"sft_{self.sft_step:06d}" if self.sft_step > 0 else None

    def best_evaluation(self, names: Collection[str]) -> str | None:
        """Return the tag of the evaluation with the highest success rate above 0, the newest of equals.

        Where the env tells no success, it is that with the highest return.

        Args:
            names: Checkpoints that there are; other evaluations are left out.
        """
        found = {tag: one for tag, one in reversed(self.evaluations.items()) if one.get("checkpoint") in names}
        if found and not any(one.get("tells_success", True) for one in found.values()):
            return max(found, key=lambda tag: found[tag]["return_mean"])
        found = {tag: one for tag, one in found.items() if one["success_rate"] > 0}
        return max(found, key=lambda tag: found[tag]["success_rate"], default=None)
