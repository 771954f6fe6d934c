"""The metrics of a run as rules read them, its outcome by the best evidence, and what rules find: a measurement and an override."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from rlinf.evaluation.result import Success
from rlinf.report.recipe_data import TokenRun, is_token_folder, read_token_run
from rlinf.report.run_data import RunData, read_run, setting_of
from rlinf.report.why.outcome import UNKNOWN, Outcome, outcome_of_counts, outcome_of_intervals, outcome_of_values

MIN_POINTS = 6
"""Values of a metric below which nothing is said of it."""


class NotMeasured(Exception):
    """A rule lacks what it goes by."""


@dataclass(frozen=True)
class Finding:
    """What one rule says of a run.

    Attributes:
        text: The measured value, and its threshold.
        set: Overrides to type; "" where the evidence singles out no setting.
        steps: First and last step of the evidence, as in ``metrics.jsonl``.
        rule: Name of the rule; ``diagnose`` fills it in.
    """

    text: str
    set: str
    steps: tuple[int, int]
    rule: str = ""

    def __str__(self) -> str:
        first, last = self.steps
        return f"{self.text} (steps {first} to {last})." + (f" Set {self.set}" if self.set else "")


@dataclass(frozen=True)
class MetricSeries:
    """Values of a metric over the steps of a phase.

    Attributes:
        steps, values: Equally many, at least ``MIN_POINTS``.
    """

    steps: list[int]
    values: list[float]

    @property
    def _window(self) -> int:
        return max(3, len(self.values) // 3)

    @property
    def early(self) -> list[float]:
        """The first third of the values."""
        return self.values[: self._window]

    @property
    def middle(self) -> list[float]:
        """The values between ``early`` and ``late``, or all of so few that none is left."""
        return self.values[self._window : -self._window] or self.values

    @property
    def late(self) -> list[float]:
        """The last third of the values. Rules go by its median, because a single step is noise."""
        return self.values[-self._window :]

    @property
    def late_steps(self) -> tuple[int, int]:
        """First and last step of ``late``."""
        return self.steps[-self._window], self.steps[-1]

    @property
    def all_steps(self) -> tuple[int, int]:
        """First and last step."""
        return self.steps[0], self.steps[-1]


@dataclass
class Record:
    """What rules read: the metrics and the configuration of a run.

    Attributes:
        lines: Of ``metrics.jsonl``.
        manifest: Of the run, or else of its newest checkpoint.
        gain: Paired comparison of the evaluations before (a) and after (b), as in ``compare.json``; None without one.
    """

    lines: Sequence[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    gain: dict[str, Any] | None = None

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a value of the configuration by its dotted key."""
        return setting_of(self.settings, key, default)

    @property
    def is_recipe(self) -> bool:
        """Whether the run is one of `rlinf launch`, whose keys are others."""
        return self.setting("train.train_policy") is not None

    @property
    def return_name(self) -> str:
        """Name of the metric that rises with learning."""
        return "rollout/reward_mean" if self.is_recipe else "rollout/return_mean"

    @property
    def has_tokens(self) -> bool:
        """Whether the policy is known to sample tokens, whose entropy is never negative."""
        return self.is_recipe or "n_action_bins" in self.manifest.get("actions", {})

    def _is_warmup(self, line: dict[str, Any], name: str) -> bool:
        """Return whether a metric is one of a warm-up: updates of the critic alone, or rollouts of random actions."""
        if name.startswith("train/"):
            return line["step"] < self.setting("algorithm.critic_warmup_steps", 0)
        played = line.get("rollout/env_steps_total", math.inf)
        return name.startswith("rollout/") and played <= self.setting("algorithm.learning_starts", 0)

    def lines_with(self, *names: str) -> list[dict[str, Any]]:
        """Return the lines after a warm-up that have finite values of all these metrics; raise NotMeasured without such a line."""
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
        """Return the sum of a metric over all steps, 0 if it was not measured."""
        return sum(line.get(name) or 0 for line in self.lines)

    def evaluations(self, phase: str) -> list[tuple[int, Success]]:
        """Return step and counts of the evaluations of a phase, in their order; raise NotMeasured without any."""
        lines = [line for line in self.lines_with("eval/successes", "eval/episodes") if line["phase"] == phase]
        if not lines:
            raise NotMeasured
        return [(line["step"], Success(int(line["eval/successes"]), int(line["eval/episodes"]))) for line in lines]

    def answers(self) -> list[tuple[int, Success]]:
        """Return step and counts of the validations of a recipe by its rewards.

        A mean reward between 0 and the full one counts as that fraction of right answers. Rewards between the two vary less, so that the
        interval of these counts is wide enough. Raise NotMeasured without validations, or with other rewards.
        """
        lines = self.lines_with("eval/reward_mean", "eval/num_completions")
        rates = [
            (line["step"], line["eval/reward_mean"] / self.full_reward, int(line["eval/num_completions"])) for line in lines
        ]
        if not all(0 <= rate <= 1 for _, rate, _ in rates):
            raise NotMeasured
        return [(step, Success(round(rate * count), count)) for step, rate, count in rates]

    def rollout_ends(self, parts: int) -> list[tuple[int, Success]]:
        """Return the counts of the first and the last of ``parts`` of the rollouts; raise NotMeasured if these are few or have no success."""
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
        """Whether the env has successes. Without a return that counts as one (gymnasium) it has those that were seen."""
        is_given = (self.setting("env") or {}).get("success_return", 0) is not None
        return is_given or self.total("rollout/success_rate") + self.total("eval/successes") > 0

    @property
    def has_rl(self) -> bool:
        """Whether RL has started."""
        return any(line["phase"] == "rl" for line in self.lines)

    @property
    def trained_phase(self) -> str:
        """Return the last phase of training, which is ``rl`` of DPO too."""
        return "rl" if self.has_rl or self.is_preference else "sft"

    @property
    def is_preference(self) -> bool:
        """Whether the run is one of DPO, whose loss is of pairs."""
        return any("train/preference_accuracy" in line for line in self.lines)

    @property
    def full_reward(self) -> float:
        """Reward of right answers throughout: 1 for each reward of a recipe times its weight."""
        given = self.setting("train.train_policy.reward_function", "one")
        return sum(given.values()) if isinstance(given, dict) else 1 if isinstance(given, str) else len(given)

    @property
    def measure(self) -> str:
        """What training itself shows: ``return``, ``reward`` of a recipe, or ``loss`` of cloning and DPO."""
        if self.is_preference or not self.has_rl:
            return "loss"
        return "reward" if self.is_recipe else "return"

    @cached_property
    def outcome(self) -> Outcome:
        """What became of the run by the best evidence: evaluations, else rollouts, else return, reward or loss of training."""
        last = max((line["step"] for line in self.lines), default=0)
        clones = not self.is_recipe and not self.has_rl
        key = "train.max_num_steps" if self.is_recipe else "sft.max_steps" if clones else "trainer.max_steps"
        more_steps = f"{key}={2 * last + 2}"
        known: list[Outcome] = []
        for evidence in (self._answers, self._compared, self._evaluated, self._played, self._returns, self._trained):
            if any(one.measure != "return" for one in known) and evidence in (self._returns, self._trained):
                break  # where success was measured, neither return nor loss is the outcome
            with suppress(NotMeasured):
                known.append(evidence(more_steps))
        text = f"fewer than {MIN_POINTS} steps so far. To tell, set {more_steps}"
        known = known or [Outcome(UNKNOWN, self.measure, text, False, False, (0, 0))]
        return next((one for one in known if one.verdict != UNKNOWN), known[0])

    def _answers(self, _: str) -> Outcome:
        answers = self.answers()
        if len(answers) < 2:
            raise NotMeasured
        return outcome_of_counts(answers, "of the validations", "validation.dataset with more rows", "reward")

    def _compared(self, _: str) -> Outcome:
        """A recipe's model against the one that its evaluation names as the baseline."""
        total = (self.gain or {}).get("total") if self.is_recipe else None
        if self.gain is None or total is None:
            raise NotMeasured
        place = f"of the {self.gain['unit']}, against {self.gain['a']}"
        return outcome_of_counts(
            self._ends_of(total), place, "questions=<a file with more rows>", "fraction of correct answers", total["interval"]
        )  # fmt: skip

    def _ends_of(self, total: dict[str, Any]) -> list[tuple[int, Success]]:
        steps = (0, max((line["step"] for line in self.lines), default=0))
        counts = (total["successes_a"], total["successes_b"])
        return [(step, Success(count, total["episodes"])) for step, count in zip(steps, counts, strict=True)]

    def _evaluated(self, _: str) -> Outcome:
        evaluations = self.evaluations("rl") if self.has_success else []
        if len(evaluations) < 2:
            raise NotMeasured
        total = (self.gain or {}).get("total")
        is_paired = total and [one for _, one in self._ends_of(total)] == [evaluations[0][1], evaluations[-1][1]]
        more = f"evaluation.num_episodes={max(200, 2 * evaluations[-1][1].episodes)}"
        return outcome_of_counts(
            evaluations, "of the evaluations", more, interval=total["interval"] if is_paired else None
        )

    def _played(self, more_steps: str) -> Outcome:
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
"""Returns a finding, or None if the rule does not apply. Raises NotMeasured. Its docstring states the condition."""


@dataclass
class Diagnosis:
    """The outcome of a run, and what the rules say of it.

    Attributes:
        findings: The cause that was found, if any, and what else to know.
        passed: Rules that were checked and have nothing to say.
    """

    outcome: Outcome
    findings: list[Finding] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return asdict(self)

    @property
    def sentences(self) -> list[str]:
        """The outcome, then each finding, or else how many rules were checked."""
        none = "no problem found" if self.outcome.is_good else "no cause found in the metrics"
        count = f"{len(self.passed)} rule{'' if len(self.passed) == 1 else 's'} checked"
        findings = [f"{finding.rule}: {finding}" for finding in self.findings]
        return [str(self.outcome), *(findings or [f"{none} ({count})"])]

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def read_record(folder: str | os.PathLike) -> Record:
    """Read the folder of a run of `rlinf train`, `rlinf sft` or `rlinf launch`; raise CheckpointError for another folder."""
    return record_of(read_token_run(folder) if is_token_folder(folder) else read_run(folder))


def record_of(run: RunData | TokenRun) -> Record:
    """Return what rules read of a run."""
    gain = run.gain if isinstance(run, RunData) else run.comparison
    return Record(run.lines, run.settings, json.loads(run.manifest or "{}"), gain)
