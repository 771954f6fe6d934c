"""State of a run's loop, saved in every checkpoint."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoopState:
    """Progress of a run; every checkpoint contains it.

    Attributes:
        phase: Prefix of checkpoint names: ``sft``, then ``rl``; ``step`` in a recipe. Differs from ``Trainer.phase``, the phase in
            ``metrics.jsonl``, which is ``sft`` or ``rl`` even in a recipe.
        sft_step, step: Next optimiser step of behaviour cloning, and next RL iteration or recipe step.
        num_tokens: Number of tokens that a recipe has trained on or scored, without padding, across all ranks.
        train_wall_s: Training time so far in seconds (demonstrations, behaviour cloning and RL, but not evaluation).
        evaluations: Maps tags to summaries of the evaluations so far, including the name of the evaluated ``checkpoint``.
        scores: Score of each validation of a recipe, by the name of the following checkpoint; higher is better.
        dataset: Hash of the behaviour-cloning dataset (``StoredDemonstrations.digest``), or None.
        labels: Frame labels for ``sft.advantage_top_fraction``, as bits in hexadecimal; None without labels.
        data: Settings that determine a recipe's model and the rows of each step; they must be the same in a resumed run.
        rows: State of a recipe's dataset.
        rollbacks: Number of rollbacks to the best checkpoint, each of which halves the learning rates; reset when a new rate is set.
        start_saved: Whether the initial policy of RL without behaviour cloning is saved as ``rl_000000``.
        start: Folder of the initial policy; None for random weights.
        rollouts_ahead: Saved fields of each ``PendingRollout``.
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
        """Number of finished steps in the current phase."""
        return self.sft_step if self.phase == "sft" else self.step

    def advance(self) -> None:
        """Increment the step counter of the current phase."""
        if self.phase == "sft":
            self.sft_step += 1
        else:
            self.step += 1

    @property
    def name(self) -> str:
        """Name for a checkpoint of the current state."""
        return f"step_{self.step}" if self.phase == "step" else f"{self.phase}_{self.done:06d}"

    @property
    def checkpoint_name(self) -> str | None:
        """Name of the checkpoint that will contain the current policy, or ``start``; None if it is never saved."""
        if self.phase == "rl" and (self.step > 0 or self.start_saved):
            return self.name
        return f"sft_{self.sft_step:06d}" if self.sft_step > 0 else self.start

    def best_evaluation(self, names: Collection[str]) -> str | None:
        """Return the tag of the newest evaluation with the highest success rate above 0, or highest return if the env reports no success.

        Only considers evaluations of ``start`` or of a checkpoint in ``names``.
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
