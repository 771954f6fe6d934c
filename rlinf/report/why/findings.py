"""Input data for the rules of `rlinf why`, a run's outcome according to the best available evidence, and the rules' findings."""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from rlinf.evaluation.result import Success
from rlinf.files import Json
from rlinf.report.run_data import RunData, kind_of, read_run, setting_of
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


Rule = Callable[[Any], Finding | None]
"""Takes a ``Record`` and returns a finding, or None if it does not apply; may raise NotMeasured. Its docstring states the condition."""


@dataclass
class Record:
    """A run's metrics and configuration.

    Attributes:
        gain: Paired comparison of the evaluations before (a) and after (b), as in ``compare.json``; None without one.
        return_name: Metric that rises with learning.
        kl_key, warmup_key: Keys of the weight of the KL penalty and of the learning rate's warm-up.
        own_rules: Rules of this kind of run, which are checked regardless of the outcome.
    """

    lines: Sequence[Json]
    settings: Json = field(default_factory=dict)
    gain: Json | None = None

    return_name: ClassVar[str] = "rollout/return_mean"
    kl_key: ClassVar[str] = "algorithm.kl_coef"
    warmup_key: ClassVar[str] = "trainer.warmup_steps"
    own_rules: ClassVar[tuple[Rule, ...]] = ()

    @property
    def loss_name(self) -> str:
        """Metric that falls with learning."""
        return "sft/loss"

    @property
    def full_return(self) -> float:
        """Return above which nothing is left to learn."""
        return math.inf

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the configuration value with the given dotted key."""
        return setting_of(self.settings, key, default)

    @property
    def rate_keys(self) -> list[str]:
        """Keys of the last phase's learning rate; the first one that is set applies."""
        # An off-policy actor has its own learning rate.
        keys = ["algorithm.learning_rate", "trainer.learning_rate"]
        return ["sft.learning_rate", *keys] if self.trained_phase == "sft" else keys

    @property
    def steps_key(self) -> str:
        """Key of the number of steps."""
        return "trainer.max_steps" if self.has_rl else "sft.max_steps"

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
        """The last phase of training."""
        return "rl" if self.has_rl else "sft"

    @property
    def measure(self) -> str:
        """The quantity measured in training: ``return``, or ``loss`` for behaviour cloning."""
        return "return" if self.has_rl else "loss"

    def return_spread(self) -> float:
        """Return the difference between the largest and the smallest return; raise NotMeasured if there are too few."""
        values = self.series(self.return_name).values
        return max(values) - min(values)

    def constant_return_text(self, value: float) -> str:
        """Describe a run whose returns all have one value."""
        return f"Every iteration has the return {value:.4g}, regardless of the actions: there is no learning signal"

    def updates_per_iteration(self) -> float:
        """Return the number of optimiser steps per iteration of the last phase; infinity if unknown."""
        if self.trained_phase == "sft":
            return 1.0
        samples = self.setting("rollout.num_envs", 0) * self.setting("rollout.num_chunks", 0)
        minibatch = self.setting("trainer.minibatch_size", 0)
        known = samples and minibatch
        return self.setting("algorithm.update_epochs", 1) * samples / minibatch if known else math.inf

    @property
    def measured_success(self) -> tuple[Callable[[str], Outcome], ...]:
        """Functions that return the outcome by measured success, the best evidence first; each may raise NotMeasured."""
        return self._evaluated, self._rollouts

    @cached_property
    def outcome(self) -> Outcome:
        """Outcome of the run by the best evidence available: evaluations, rollouts, or the return, reward or loss in training."""
        last = max((line["step"] for line in self.lines), default=0)
        more_steps = f"{self.steps_key}={2 * last + 2}"
        known: list[Outcome] = []
        # If success was measured, do not use the return or loss as the outcome.
        for evidence in (self.measured_success, (self._returns, self._trained)):
            for outcome in evidence if not known else ():
                with suppress(NotMeasured):
                    known.append(outcome(more_steps))
        text = f"fewer than {MIN_POINTS} steps so far. To decide, set {more_steps}"
        known = known or [Outcome(UNKNOWN, self.measure, text, False, (0, 0))]
        return next((outcome for outcome in known if outcome.verdict != UNKNOWN), known[0])

    def ends_of(self, total: Json) -> list[tuple[int, Success]]:
        """Return the first and the last step with the counts of a paired comparison."""
        steps = (0, max((line["step"] for line in self.lines), default=0))
        counts = (total["successes_a"], total["successes_b"])
        return [(step, Success(count, total["episodes"])) for step, count in zip(steps, counts, strict=True)]

    def _evaluated(self, _: str) -> Outcome:
        evaluations = self.evaluations("rl") if self.has_success else []
        if len(evaluations) < 2:
            raise NotMeasured
        total = (self.gain or {}).get("total")
        is_paired = total and [success for _, success in self.ends_of(total)] == [
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
        values = self.series(self.loss_name if self.measure == "loss" else self.return_name)
        return outcome_of_values(self.measure, values.steps, values.values, more_steps, self.full_return)


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
    """Read a run folder; raise CheckpointError for any other folder."""
    _, kind = kind_of(folder)
    return record_of(read_run(folder)) if kind is None else kind.read_record(Path(folder))


def record_of(run: RunData) -> Record:
    """Convert a run to a record."""
    return Record(run.lines, run.settings, run.gain)
