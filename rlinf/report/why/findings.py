"""Input data for the rules of `rlinf why`, a run's outcome according to the best available evidence, and the rules' findings."""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from rlinf.evaluation.result import Success
from rlinf.files import Json
from rlinf.report.recipe_data import TokenRun, is_token_folder, read_token_run
from rlinf.report.run_data import RunData, read_run, setting_of
from rlinf.report.why.outcome import UNKNOWN, Outcome, outcome_of_counts, outcome_of_intervals, outcome_of_values

MIN_POINTS = 6
"""Minimum number of values of a metric for rules to evaluate it."""


class NotMeasured(Exception):
    """Raised if the run lacks data that a rule needs."""


@dataclass(frozen=True)
class Finding:
    """Result of a rule that applies to a run.

    Attributes:
        text: The measured value and its threshold.
        set: Overrides that should fix the problem; "" if the evidence does not indicate a setting.
        rule: The rule's name, set by ``diagnose``.
    """

    text: str
    set: str
    steps: tuple[int, int]
    rule: str = ""

    def __str__(self) -> str:
        first, last = self.steps
        return f"{self.text} (steps {first} to {last})." + (f" Set {self.set}" if self.set else "")


class MetricSeries:
    """At least ``MIN_POINTS`` values of a metric, with their steps.

    ``early``, ``middle`` and ``late`` are thirds of the values (``middle``: all values if the others leave nothing), ``late_steps`` is the first
    and last step of ``late``. Rules use the median of a third because individual steps are noisy.
    """

    def __init__(self, steps: list[int], values: list[float]) -> None:
        window = max(3, len(values) // 3)
        self.steps, self.values = steps, values
        self.early, self.late = values[:window], values[-window:]
        self.middle = values[window:-window] or values
        self.all_steps, self.late_steps = (steps[0], steps[-1]), (steps[-window], steps[-1])


@dataclass
class Record:
    """A run's metrics and configuration.

    Attributes:
        gain: Paired comparison of the evaluations before (a) and after (b), as in ``compare.json``; None without one.
    """

    lines: Sequence[Json]
    settings: Json = field(default_factory=dict)
    gain: Json | None = None

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the configuration value with the given dotted key."""
        return setting_of(self.settings, key, default)

    @property
    def is_recipe(self) -> bool:
        """Whether the run was started with `rlinf launch`; recipes have different keys."""
        return self.setting("train.train_policy") is not None

    @property
    def return_name(self) -> str:
        """Name of the metric that rises with learning."""
        return "rollout/reward_mean" if self.is_recipe else "rollout/return_mean"

    def _is_warmup(self, line: Json, name: str) -> bool:
        """Return whether a metric is from a warm-up, i.e. critic-only updates or rollouts with random actions."""
        if name.startswith("train/"):
            return line["step"] < self.setting("algorithm.critic_warmup_steps", 0)
        env_steps = line.get("rollout/env_steps_total", math.inf)
        return name.startswith("rollout/") and env_steps <= self.setting("algorithm.learning_starts", 0)

    def lines_with(self, *names: str) -> list[Json]:
        """Return the lines after any warm-up that contain all these metrics; raise NotMeasured if there are none."""
        lines = [
            line
            for line in self.lines
            if all(line.get(name) is not None and not self._is_warmup(line, name) for name in names)
        ]
        if not lines:
            raise NotMeasured
        return lines

    def series(self, name: str) -> MetricSeries:
        """Return the values of a metric; raise NotMeasured if there are fewer than ``MIN_POINTS``."""
        lines = self.lines_with(name)
        if len(lines) < MIN_POINTS:
            raise NotMeasured
        return MetricSeries([line["step"] for line in lines], [line[name] for line in lines])

    def total(self, name: str) -> float:
        """Return the sum of a metric over all steps, or 0 if it was not measured."""
        return sum(line.get(name) or 0 for line in self.lines)

    def evaluations(self, phase: str) -> list[tuple[int, Success]]:
        """Return the step and success counts of each evaluation in a phase; raise NotMeasured if there are none."""
        lines = [line for line in self.lines_with("eval/successes", "eval/episodes") if line["phase"] == phase]
        if not lines:
            raise NotMeasured
        return [(line["step"], Success(int(line["eval/successes"]), int(line["eval/episodes"]))) for line in lines]

    def validations(self) -> list[tuple[int, Success]]:
        """Return the step and counts of each of a recipe's validations; raise NotMeasured if a mean reward is not in [0, full reward]."""
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

    def rollout_ends(self, parts: int) -> list[tuple[int, Success]]:
        """Split the rollouts into ``parts`` and return step and counts of the first and last; raise NotMeasured if no success is logged."""
        lines = self.lines_with("rollout/success_rate", "rollout/num_episodes") if self.has_success else []
        if len(lines) < MIN_POINTS:
            raise NotMeasured
        window, ends = max(1, len(lines) // parts), []
        for part in (lines[:window], lines[-window:]):
            counts = [int(line["rollout/num_episodes"]) for line in part]
            successes = sum(
                round(line["rollout/success_rate"] * count) for line, count in zip(part, counts, strict=True)
            )
            ends.append((part[0]["step"], Success(successes, sum(counts))))
        return ends

    @property
    def has_success(self) -> bool:
        """Whether the env reports success or, for gymnasium without ``success_return``, whether any success was observed."""
        is_given = (self.setting("env") or {}).get("success_return", 0) is not None
        return is_given or self.total("rollout/success_rate") + self.total("eval/successes") > 0

    @property
    def has_rl(self) -> bool:
        """Whether RL has started."""
        return any(line["phase"] == "rl" for line in self.lines)

    @property
    def trained_phase(self) -> str:
        """The last phase of training; ``rl`` for DPO."""
        return "rl" if self.has_rl or self.is_preference else "sft"

    @property
    def is_preference(self) -> bool:
        """Whether the run uses DPO, which computes its loss over pairs."""
        return any("train/preference_accuracy" in line for line in self.lines)

    @property
    def full_reward(self) -> float:
        """Reward for a correct completion: the sum of the recipe's reward weights."""
        given = self.setting("train.train_policy.reward_function", "one")
        return sum(given.values()) if isinstance(given, dict) else 1 if isinstance(given, str) else len(given)

    @property
    def measure(self) -> str:
        """The quantity measured in training: ``return``, ``reward`` for recipes, or ``loss`` for behaviour cloning and DPO."""
        if self.is_preference or not self.has_rl:
            return "loss"
        return "reward" if self.is_recipe else "return"

    @cached_property
    def outcome(self) -> Outcome:
        """Outcome of the run by the best evidence available: evaluations, rollouts, or the return, reward or loss in training."""
        last = max((line["step"] for line in self.lines), default=0)
        clones = not self.is_recipe and not self.has_rl
        key = "train.max_num_steps" if self.is_recipe else "sft.max_steps" if clones else "trainer.max_steps"
        more_steps = f"{key}={2 * last + 2}"
        known: list[Outcome] = []
        # If success was measured, do not use the return or loss as the outcome.
        for evidence in (
            (self._validated, self._compared, self._evaluated, self._rollouts),
            (self._returns, self._trained),
        ):
            for outcome in evidence if not known else ():
                with suppress(NotMeasured):
                    known.append(outcome(more_steps))
        text = f"fewer than {MIN_POINTS} steps so far. To decide, set {more_steps}"
        known = known or [Outcome(UNKNOWN, self.measure, text, False, False, (0, 0))]
        return next((outcome for outcome in known if outcome.verdict != UNKNOWN), known[0])

    def _validated(self, _: str) -> Outcome:
        validations = self.validations()
        if len(validations) < 2:
            raise NotMeasured
        return outcome_of_counts(validations, "of the validations", "validation.dataset with more rows", "reward")

    def _compared(self, _: str) -> Outcome:
        """Compare a recipe's model with the baseline in its evaluation."""
        total = (self.gain or {}).get("total") if self.is_recipe else None
        if self.gain is None or total is None:
            raise NotMeasured
        place = f"of the {self.gain['unit']}, against {self.gain['a']}"
        return outcome_of_counts(
            self._ends_of(total), place, "questions=<a file with more rows>", "fraction of correct answers", total["interval"]
        )  # fmt: skip

    def _ends_of(self, total: Json) -> list[tuple[int, Success]]:
        steps = (0, max((line["step"] for line in self.lines), default=0))
        counts = (total["successes_a"], total["successes_b"])
        return [(step, Success(count, total["episodes"])) for step, count in zip(steps, counts, strict=True)]

    def _evaluated(self, _: str) -> Outcome:
        evaluations = self.evaluations("rl") if self.has_success else []
        if len(evaluations) < 2:
            raise NotMeasured
        total = (self.gain or {}).get("total")
        is_paired = total and [success for _, success in self._ends_of(total)] == [
            evaluations[0][1],
            evaluations[-1][1],
        ]
        more = f"evaluation.num_episodes={max(200, 2 * evaluations[-1][1].episodes)}"
        return outcome_of_counts(
            evaluations, "of the evaluations", more, interval=total["interval"] if is_paired else None
        )

    def _rollouts(self, more_steps: str) -> Outcome:
        return outcome_of_counts(self.rollout_ends(5), "of the rollouts (a fifth of the iterations each)", more_steps)

    def _returns(self, more_steps: str) -> Outcome:
        names = ("eval/return_mean", "eval/return_low", "eval/return_high")
        means = [
            (line["step"], *(line[name] for name in names)) for line in self.lines_with(*names) if line["phase"] == "rl"
        ]
        if len(means) < 2:
            raise NotMeasured
        total = ((self.gain or {}).get("returns") or {}).get("total")
        is_paired = total and (total["mean_a"], total["mean_b"]) == (means[0][1], means[-1][1])
        return outcome_of_intervals(means, more_steps, total["interval"] if is_paired else None)

    def _trained(self, more_steps: str) -> Outcome:
        loss = "train/loss" if self.is_preference else "sft/loss"
        values = self.series(loss if self.measure == "loss" else self.return_name)
        full = self.full_reward if self.measure == "reward" else math.inf
        return outcome_of_values(self.measure, values.steps, values.values, more_steps, full)


Rule = Callable[[Record], "Finding | None"]
"""Returns a finding, or None if the rule does not apply; may raise NotMeasured. The function's docstring states the condition."""


@dataclass
class Diagnosis:
    """A run's outcome and the results of the rules.

    Attributes:
        findings: Findings from the rules that apply.
        passed: Rules that were checked and do not apply.
    """

    outcome: Outcome
    findings: list[Finding] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)

    def as_dict(self) -> Json:
        """Return everything as JSON values."""
        return asdict(self)

    @property
    def lines(self) -> list[str]:
        """The outcome, then the findings, or the number of rules that passed."""
        none = "no problem found" if self.outcome.is_good else "no cause found in the metrics"
        # A good outcome needs no cause, so most rules are not checked.
        count = f" ({len(self.passed)} rule{'' if len(self.passed) == 1 else 's'} checked)" if self.passed else ""
        findings = [f"{finding.rule}: {finding}" for finding in self.findings]
        return [str(self.outcome), *(findings or [none + count])]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def read_record(folder: str | os.PathLike) -> Record:
    """Read a run folder written by `rlinf train`, `rlinf sft` or `rlinf launch`; raise CheckpointError for any other folder."""
    return record_of(read_token_run(folder) if is_token_folder(folder) else read_run(folder))


def record_of(run: RunData | TokenRun) -> Record:
    """Convert a run to a record."""
    gain = run.gain if isinstance(run, RunData) else run.comparison
    return Record(run.lines, run.settings, gain)
