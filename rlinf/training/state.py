"""State of a run's loop, saved in every checkpoint."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RolloutAhead:
    """A pending asynchronous rollout.

    Attributes:
        step: Iteration that trains on it.
        issued_at: Iteration in which it was submitted, before the updates.
        updated: The policy was updated between the previous submission and this one.
    """

    step: int
    policy_version: int
    issued_at: int
    updated: bool

    @property
    def lag(self) -> int:
        """Iterations of training between its weights and those that are trained on it (staleness)."""
        return self.step - self.issued_at

    @property
    def name(self) -> str:
        """Prefix of this rollout's weights in a checkpoint."""
        return f"rollout_{self.step}"


@dataclass
class LoopState:
    """Progress of a run; every checkpoint contains it.

    Attributes:
        phase: Prefix of checkpoint names: ``sft``, then ``rl``; ``step`` in a recipe. Not ``Trainer.phase``, which is the phase in
            ``metrics.jsonl``: ``sft`` or ``rl``, also in a recipe.
        sft_step, step: Next optimiser step of behaviour cloning, next iteration of RL or step of a recipe.
        num_tokens: Tokens that a recipe has trained on or scored, without padding, over all ranks.
        train_wall_s: Seconds of training so far (demonstrations, behaviour cloning, RL; not evaluation).
        evaluations: Tag to summary of each evaluation so far, with the name of the ``checkpoint`` of its policy.
        scores: Score of each validation of a recipe, by the name of the following checkpoint; higher is better.
        dataset: Hash of the behaviour-cloning dataset (``StoredDemonstrations.digest``), or None.
        labels: Bits of ``sft.advantage_top_fraction`` of its frames, in hexadecimal; None: without labels.
        data: Settings that determine the rows of a recipe's step, and its model; a resumed run must have the same.
        rows: State of a recipe's dataset.
        rollbacks: Number of rollbacks to the best checkpoint; each halves the learning rates. A newly set rate resets it.
        start_saved: The initial policy of RL without behaviour cloning is saved as ``rl_000000``.
        start: Folder of the initial policy; None: random weights.
        rollouts_ahead: Fields of the pending ``RolloutAhead``.
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
        """Finished steps of the current phase."""
        return self.sft_step if self.phase == "sft" else self.step

    def advance(self) -> None:
        """Count a step of the current phase."""
        if self.phase == "sft":
            self.sft_step += 1
        else:
            self.step += 1

    @property
    def name(self) -> str:
        """Name of a checkpoint of the current state."""
        return f"step_{self.step}" if self.phase == "step" else f"{self.phase}_{self.done:06d}"

    @property
    def checkpoint_name(self) -> str | None:
        """Name of the checkpoint of the current policy, once it is saved, or ``start``; None: never saved."""
        if self.phase == "rl" and (self.step > 0 or self.start_saved):
            return self.name
        return f"sft_{self.sft_step:06d}" if self.sft_step > 0 else self.start

    def best_evaluation(self, names: Collection[str]) -> str | None:
        """Return the tag of the newest evaluation with the highest success rate above 0, or return if the env reports no success.

        Only evaluations with a checkpoint in ``names`` or of ``start`` count.
        """
        saved = {*names, self.start} - {None}
        candidates = {
            tag: summary for tag, summary in reversed(self.evaluations.items()) if summary.get("checkpoint") in saved
        }
        if candidates and not any(summary.get("reports_success", True) for summary in candidates.values()):
            return max(candidates, key=lambda tag: candidates[tag]["return_mean"])
        candidates = {tag: summary for tag, summary in candidates.items() if (summary["success_rate"] or 0) > 0}
        return max(candidates, key=lambda tag: candidates[tag]["success_rate"], default=None)

    def best_checkpoint(self, names: Collection[str]) -> str | None:
        """Return the checkpoint of ``best_evaluation``."""
        tag = self.best_evaluation(names)
        return None if tag is None else self.evaluations[tag]["checkpoint"]
