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
        """Start the names of its weights in a checkpoint."""
        return f"rollout_{self.step}"


@dataclass
class LoopState:
    """Where a run is; every checkpoint holds it.

    Attributes:
        phase: Starts the names of checkpoints: ``sft``, then ``rl``; ``step`` in a recipe, which has one phase. Lines of metrics have
            ``Trainer.phase``.
        sft_step, step: Next optimiser step of cloning, next iteration of RL or step of a recipe.
        env_steps: Env steps of RL so far.
        num_tokens: Tokens that a recipe has trained on or scored, without padding, over all ranks.
        policy_version: Weight updates so far.
        train_wall_s: Seconds of training so far (demonstrations, cloning, RL; not evaluation).
        tracker_run_id: Identity of the metric run.
        evaluations: Tag to summary of each evaluation so far, with the name of the ``checkpoint`` that holds the policy.
        scores: Of each validation of a recipe, by the name of the checkpoint that follows it; higher is better.
        last_validation: Metrics of the last one.
        dataset: Hash of the dataset that is cloned (``StoredDemonstrations.digest``), or None.
        labels: Bits of ``sft.advantage_top_fraction`` of its rows, in hexadecimal; None: without labels.
        data: What determines the rows of a recipe's step, and its model; a resumed run must have the same.
        rows: State of a recipe's dataset.
        rollbacks: Times that the run went back to its best checkpoint; each halves the learning rates. A newly typed rate starts at 0.
        start_saved: The policy with which RL started without cloning is saved as ``rl_000000``.
        start: Folder of the policy with which the run started; None: its weights were random.
        rollouts_ahead: Fields of the ``RolloutAhead`` that are under way.
    """

    phase: str = "sft"
    sft_step: int = 0
    step: int = 0
    env_steps: int = 0
    num_tokens: float = 0.0
    policy_version: int = 0
    train_wall_s: float = 0.0
    tracker_run_id: str | None = None
    evaluations: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    last_validation: dict[str, float] = field(default_factory=dict)
    dataset: str | None = None
    labels: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    rollbacks: int = 0
    start_saved: bool = False
    start: str | None = None
    rollouts_ahead: list[dict[str, Any]] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Steps of the present phase that are done."""
        return self.sft_step if self.phase == "sft" else self.step

    def advance(self) -> None:
        """Count a step of the present phase."""
        if self.phase == "sft":
            self.sft_step += 1
        else:
            self.step += 1

    @property
    def name(self) -> str:
        """Name of a checkpoint of the present state."""
        return f"step_{self.step}" if self.phase == "step" else f"{self.phase}_{self.done:06d}"

    @property
    def checkpoint_name(self) -> str | None:
        """Name of the checkpoint that holds the present policy, once it is saved, or ``start``; None: it never is."""
        if self.phase == "rl" and (self.step > 0 or self.start_saved):
            return self.name
        return f"sft_{self.sft_step:06d}" if self.sft_step > 0 else self.start

    def best_evaluation(self, names: Collection[str]) -> str | None:
        """Return the tag of the evaluation with the highest success rate above 0, the newest of equals.

        Where the env tells no success, it is the one with the highest return. Evaluations whose checkpoint is not among
        ``names`` are left out, but for the one of ``start``.
        """
        kept = {*names, self.start} - {None}
        found = {tag: one for tag, one in reversed(self.evaluations.items()) if one.get("checkpoint") in kept}
        if found and not any(one.get("reports_success", True) for one in found.values()):
            return max(found, key=lambda tag: found[tag]["return_mean"])
        found = {tag: one for tag, one in found.items() if (one["success_rate"] or 0) > 0}
        return max(found, key=lambda tag: found[tag]["success_rate"], default=None)

    def best_checkpoint(self, names: Collection[str]) -> str | None:
        """Return the checkpoint of ``best_evaluation``."""
        tag = self.best_evaluation(names)
        return None if tag is None else self.evaluations[tag]["checkpoint"]
