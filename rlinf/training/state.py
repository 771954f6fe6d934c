"""State of a run's loop, saved in every checkpoint."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoopState:
    """Progress of a run; every checkpoint contains it.

    Attributes:
        phase: ``Trainer.phase`` of the current trainer: ``sft`` or ``rl``, as in ``metrics.jsonl``.
        sft_step, step: Next step of the phase ``sft``, and of the phase ``rl``.
        train_wall_s: Training time so far in seconds (demonstrations, behaviour cloning and RL, but not evaluation).
        evaluations: Maps tags to summaries of the evaluations so far, including the name of the evaluated ``checkpoint``.
        rollbacks: Number of rollbacks to the best checkpoint, each of which halves the learning rates; reset when a new rate is set.
        start_saved: Whether the initial policy of RL without behaviour cloning is saved as ``rl_000000``.
        start: Folder of the initial policy; None for random weights.
        rollouts_ahead: Saved fields of each ``PendingRollout``.
        trainer: ``Trainer.loop_state`` of the trainer that saved the checkpoint.
    """

    phase: str = "sft"
    sft_step: int = 0
    step: int = 0
    env_steps: int = 0
    policy_version: int = 0
    train_wall_s: float = 0.0
    tracker_run_id: str | None = None
    evaluations: dict[str, Any] = field(default_factory=dict)
    rollbacks: int = 0
    start_saved: bool = False
    start: str | None = None
    rollouts_ahead: list[dict[str, Any]] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)

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
    def checkpoint_name(self) -> str:
        """Name for a checkpoint of the current state of an action policy."""
        return f"{self.phase}_{self.done:06d}"

    @property
    def policy_checkpoint(self) -> str | None:
        """Name of the checkpoint that will contain the current action policy, or ``start``; None if it is never saved."""
        if self.phase == "rl" and (self.step > 0 or self.start_saved):
            return self.checkpoint_name
        return f"sft_{self.sft_step:06d}" if self.sft_step > 0 else self.start

    @property
    def candidates(self) -> set[str]:
        """Names of the evaluated checkpoints, also of those that were not saved because they were not the best."""
        return {summary.get("checkpoint") for summary in self.evaluations.values()} - {None}

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
