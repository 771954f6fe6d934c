"""What `rlinf why` knows of recipes: their keys and metrics, and the rule that finds overfitting."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import ClassVar

from rlinf.evaluation.result import Success
from rlinf.recipes.report_data import TokenRun, read_token_run
from rlinf.report.why.findings import Finding, NotMeasured, Record, Rule
from rlinf.report.why.outcome import Outcome, outcome_of_counts


def overfitted(record: Record) -> Finding | None:
    """A recipe's held-out loss rises by 5 % and by 5 % of its earlier decrease, while the training loss falls."""
    held_out, loss = record.lines_with("eval/loss"), record.series("sft/loss")
    if len(held_out) < 4:
        raise NotMeasured
    values = [line["eval/loss"] for line in held_out]
    least = min(range(len(values)), key=values.__getitem__)
    # Require the rise in both of the last two validations, so that noise in a single one is ignored.
    rises = min(values[-2:]) - values[least]
    is_slight = rises < 0.05 * max(values[least], values[0] - values[least])
    if is_slight or least >= len(values) - 2 or median(loss.late) >= median(loss.early):
        return None
    text = f"The loss on held-out rows rose from {values[least]:.3g} to {values[-1]:.3g} while the training loss fell: the model overfits"
    fewer = f"train.epoch={max(1, record.setting('train.epoch', 1) // 2)}"
    return Finding(text, fewer, (held_out[least]["step"], held_out[-1]["step"]))


class RecipeRecord(Record):
    """Metrics and configuration of a run of `rlinf launch`; ``gain`` compares its model with the baseline of an evaluation."""

    return_name: ClassVar[str] = "rollout/reward_mean"
    kl_key: ClassVar[str] = "train.train_policy.kl_beta"
    warmup_key: ClassVar[str] = "train.optm_warmup_steps"
    steps_key = "train.max_num_steps"
    rate_keys: ClassVar[list[str]] = ["train.optm_lr"]
    has_success = False
    own_rules: ClassVar[tuple[Rule, ...]] = (overfitted,)

    @property
    def is_preference(self) -> bool:
        """Whether the run uses DPO, which computes its loss over pairs."""
        return any("train/preference_accuracy" in line for line in self.lines)

    @property
    def loss_name(self) -> str:
        """Metric that falls with learning."""
        return "train/loss" if self.is_preference else "sft/loss"

    @property
    def measure(self) -> str:
        """The quantity measured in training: ``reward``, or ``loss`` for SFT and DPO."""
        return "loss" if self.is_preference or not self.has_rl else "reward"

    @property
    def full_reward(self) -> float:
        """Reward for a correct completion: the sum of the recipe's reward weights."""
        given = self.setting("train.train_policy.reward_function", "one")
        return sum(given.values()) if isinstance(given, dict) else 1 if isinstance(given, str) else len(given)

    @property
    def full_return(self) -> float:
        """Return above which nothing is left to learn."""
        return self.full_reward if self.measure == "reward" else super().full_return

    @property
    def measured_success(self) -> tuple[Callable[[str], Outcome], ...]:
        """Functions that return the outcome by measured success, the best evidence first."""
        return self._validated, self._compared

    def return_spread(self) -> float:
        """Return the largest std of the rewards in a step."""
        return max(self.series("rollout/reward_std").values)

    def constant_return_text(self, value: float) -> str:
        """Describe a run whose completions all have one reward."""
        if median(self.series("rollout/truncated_fraction").late) >= 0.3:
            raise NotMeasured  # rewards of truncated completions are not informative
        return f"Every completion has the reward {value:g}: the reward function or column is wrong, or no completion is correct"

    def updates_per_iteration(self) -> float:
        """Return the number of optimiser steps per step of the recipe."""
        return self.setting("train.train_policy.mu_iterations", 1)

    def validations(self) -> list[tuple[int, Success]]:
        """Return the step and counts of each validation; raise NotMeasured if a mean reward is not in [0, full reward]."""
        # Treat the mean reward as the fraction of correct completions. Non-binary rewards have a smaller variance than binary rewards
        # with the same mean, so the interval computed from these counts is wide enough.
        lines = self.lines_with("eval/reward_mean", "eval/num_completions")
        rates = [
            (line["step"], line["eval/reward_mean"] / self.full_reward, int(line["eval/num_completions"]))
            for line in lines
        ]
        if not all(0 <= rate <= 1 for _, rate, _ in rates):
            raise NotMeasured
        return [(step, Success(round(rate * count), count)) for step, rate, count in rates]

    def _validated(self, _: str) -> Outcome:
        validations = self.validations()
        if len(validations) < 2:
            raise NotMeasured
        return outcome_of_counts(validations, "of the validations", "validation.dataset with more rows", "reward")

    def _compared(self, _: str) -> Outcome:
        """Compare the model with the baseline in its evaluation."""
        total = (self.gain or {}).get("total")
        if self.gain is None or total is None:
            raise NotMeasured
        place = f"of the {self.gain['unit']}, against {self.gain['a']}"
        return outcome_of_counts(
            self.ends_of(total), place, "questions=<a file with more rows>", "fraction of correct answers", total["interval"]
        )  # fmt: skip


def read_record(folder: Path) -> RecipeRecord:
    """Read the folder of a recipe's run."""
    return record_of(read_token_run(folder))


def record_of(run: TokenRun) -> RecipeRecord:
    """Convert a run to a record."""
    return RecipeRecord(run.lines, run.settings, run.comparison)
