"""The metrics that rules read of a run, and their findings: the outcome, a measured value, its usual range, and the override to type."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
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
        text: The measured value, and its usual range.
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
    """

    lines: Sequence[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)

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

    def lines_with(self, *names: str) -> list[dict[str, Any]]:
        """Return the lines that have finite values of all these metrics; of ``train/*``, from the end of the critic's warm-up.

        Raise NotMeasured without such a line.
        """
        of_updates = all(name.startswith("train/") for name in names)
        warmup = self.setting("algorithm.critic_warmup_steps", 0) if of_updates else 0
        begun = [line for line in self.lines if line["step"] >= warmup]
        found = [line for line in begun if all(line.get(name) is not None for name in names)]
        if not found:
            raise NotMeasured(f"no {' and '.join(names)}")
        return found

    def series(self, name: str) -> MetricSeries:
        """Return the values of a metric; raise NotMeasured if there are fewer than ``MIN_POINTS``."""
        lines = self.lines_with(name)
        if len(lines) < MIN_POINTS:
            raise NotMeasured(f"{name} of {len(lines)} steps only; required: {MIN_POINTS}")
        return MetricSeries([line["step"] for line in lines], [line[name] for line in lines])

    def total(self, name: str) -> float:
        """Return the sum of a metric over all steps, 0 if it was not measured."""
        return sum(line.get(name) or 0 for line in self.lines)

    def evaluations(self, phase: str) -> list[tuple[int, Success]]:
        """Return step and counts of the evaluations of a phase, in their order; raise NotMeasured without any."""
        lines = [line for line in self.lines_with("eval/successes", "eval/episodes") if line["phase"] == phase]
        if not lines:
            raise NotMeasured(f"no evaluation of phase {phase}")
        return [(line["step"], Success(int(line["eval/successes"]), int(line["eval/episodes"]))) for line in lines]

    def answers(self) -> list[tuple[int, Success]]:
        """Return step and counts of the validations of a recipe by its rewards.

        A mean reward between 0 and the full one counts as that share of right answers. Rewards between the two vary less, so that the
        interval of these counts is wide enough. Raise NotMeasured without validations, or with other rewards.
        """
        lines = self.lines_with("eval/reward_mean", "eval/num_answers")
        shares = [
            (line["step"], line["eval/reward_mean"] / self.full_reward, int(line["eval/num_answers"])) for line in lines
        ]
        if not all(0 <= share <= 1 for _, share, _ in shares):
            raise NotMeasured("rewards of the validation are not between 0 and the full one")
        return [(step, Success(round(share * count), count)) for step, share, count in shares]

    def rollouts(self) -> list[tuple[int, Success]]:
        """Return step and counts of the first episodes of each iteration; raise NotMeasured if these are few or have no success."""
        if not self.has_success:
            raise NotMeasured("the env has no success (env.success_return is null)")
        lines = self.lines_with("rollout/success_rate", "rollout/num_episodes")
        if len(lines) < MIN_POINTS:
            raise NotMeasured(f"{len(lines)} iterations only; required: {MIN_POINTS}")
        counts = ((line["step"], line["rollout/success_rate"], int(line["rollout/num_episodes"])) for line in lines)
        return [(step, Success(round(rate * episodes), episodes)) for step, rate, episodes in counts]

    @property
    def has_success(self) -> bool:
        """Whether the env has successes. Without a return that counts as one (gymnasium) it has those that were seen."""
        is_given = (self.setting("env") or {}).get("success_return", 0) is not None
        return is_given or self.total("rollout/success_rate") + self.total("eval/successes") > 0

    @cached_property
    def outcome(self) -> Outcome:
        """What became of RL, or of cloning alone: success by evaluations, or by rollouts where these cannot tell; else return or loss."""
        measure, name, key = "return", self.return_name, "trainer.max_steps"
        if self.is_recipe:
            measure, key = "reward", "train.max_num_steps"
        if self.is_preference or not any(line["phase"] == "rl" for line in self.lines):
            measure, name = "loss", "train/loss" if self.is_preference else "sft/loss"
            key = key if self.is_recipe else "sft.max_steps"
        cure = f"{key}={2 * max((line['step'] for line in self.lines), default=0) + 2}"
        found: list[Outcome] = []
        with suppress(NotMeasured):
            answers = self.answers()
            if len(answers) > 1:
                found.append(
                    outcome_of_counts(answers, "of the validations", "validation.dataset with more rows", "reward")
                )
        with suppress(NotMeasured):
            evaluations = self.evaluations("rl") if self.has_success else []
            if len(evaluations) > 1:
                more = f"evaluation.num_episodes={max(200, 2 * evaluations[-1][1].episodes)}"
                found.append(outcome_of_counts(evaluations, "of the evaluations", more))
        with suppress(NotMeasured):
            rollouts = self.rollouts()
            window = max(1, len(rollouts) // 5)
            ends = [(part[0][0], sum_of(part)) for part in (rollouts[:window], rollouts[-window:])]
            found.append(outcome_of_counts(ends, f"of the rollouts ({window} iterations each)", cure))
        with suppress(NotMeasured):
            names = ("eval/return_mean", "eval/return_low", "eval/return_high")
            means = [
                (line["step"], *(line[each] for each in names))
                for line in self.lines_with(*names)
                if line["phase"] == "rl"
            ]
            if not found and len(means) > 1:
                found.append(outcome_of_intervals(means, cure))
        with suppress(NotMeasured):
            values = self.series(name)
            full = self.full_reward if measure == "reward" else math.inf
            if not found or found[0].measure == "return":
                found.append(outcome_of_values(measure, values.steps, values.values, cure, full))
        text = f"fewer than {MIN_POINTS} steps so far. To tell, set {cure}"
        found += [Outcome(UNKNOWN, measure, text, False, False, (0, 0))]
        return next((one for one in found if one.verdict != UNKNOWN), found[0])

    @property
    def is_preference(self) -> bool:
        """Whether the run is one of DPO, whose loss is of pairs."""
        return any("train/preference_accuracy" in line for line in self.lines)

    @property
    def full_reward(self) -> float:
        """Reward of right answers throughout: 1 for each reward of a recipe times its weight."""
        given = self.setting("train.train_policy.reward_function", "one")
        return sum(given.values()) if isinstance(given, dict) else 1 if isinstance(given, str) else len(given)


def sum_of(counts: Sequence[tuple[int, Success]]) -> Success:
    """Return the sum of counts by step."""
    return Success(sum(one.successes for _, one in counts), sum(one.episodes for _, one in counts))


Rule = Callable[[Record], "Finding | None"]
"""Returns a finding, or None if the rule does not apply. Raises NotMeasured. Its docstring states the condition."""


@dataclass
class Diagnosis:
    """The outcome of a run, and what all rules say of it.

    Attributes:
        findings: The worst first.
        fine: Rules that were evaluated and have nothing to say.
        silent: Rules that could not be evaluated, and why.
    """

    outcome: Outcome
    findings: list[Finding] = field(default_factory=list)
    fine: list[str] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return asdict(self)

    @property
    def sentences(self) -> list[str]:
        """The outcome, then each finding, or a sentence that all rules found nothing."""
        found = [f"{finding.rule}: {finding}" for finding in self.findings]
        none = "nothing else to say" if self.outcome.is_good else "no cause found in the metrics"
        return [str(self.outcome), *(found or [f"{none}: {len(self.fine)} rules found nothing"])]

    def __str__(self) -> str:
        lines = self.sentences
        if self.silent:
            reasons: dict[str, list[str]] = {}
            for name, reason in self.silent.items():
                reasons.setdefault(reason, []).append(name)
            lines.append(f"not evaluated ({len(self.silent)} rules):")
            lines += [f"  {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        return "\n".join(lines)


MASTERED, GOOD = "the task is mastered", "the outcome is good"
DOES_WELL, NAMED = "the run does well, or another rule has spoken", "the outcome is good, or another rule has spoken"


def diagnose(record: Record, rules: Mapping[str, Sequence[Rule]]) -> Diagnosis:
    """Tell the outcome, and ask the rules, in their order, of which the condition that rules them out does not hold."""
    outcome, diagnosis = record.outcome, Diagnosis(record.outcome)
    for condition, rule in ((condition, rule) for condition, group in rules.items() for rule in group):
        good, named = outcome.is_good, bool(diagnosis.findings)
        spared = {
            MASTERED: outcome.is_mastered,
            GOOD: good,
            DOES_WELL: named or (good and not outcome.is_poor),
            NAMED: named or good,
        }
        try:
            if spared.get(condition):
                raise NotMeasured(condition)
            finding = rule(record)
        except NotMeasured as reason:
            diagnosis.silent[rule.__name__] = str(reason)
            continue
        if finding is None:
            diagnosis.fine.append(rule.__name__)
        else:
            diagnosis.findings.append(replace(finding, rule=rule.__name__))
    return diagnosis


def read_record(folder: str | os.PathLike) -> Record:
    """Read the folder of a run of `rlinf train`, `rlinf sft` or `rlinf launch`; raise CheckpointError for another folder."""
    return record_of(read_token_run(folder) if is_token_folder(folder) else read_run(folder))


def record_of(run: RunData | TokenRun) -> Record:
    """Return what rules read of a run."""
    return Record(run.lines, run.settings, json.loads(run.manifest or "{}"))
