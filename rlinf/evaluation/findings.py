"""What the metrics of a run say, in sentences: what was measured, what it should be, and what to type."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rlinf.evaluation.report_data import RunData, read_run
from rlinf.evaluation.result import Success
from rlinf.evaluation.token_data import TokenRun, is_token_folder, read_token_run

MIN_POINTS = 6
"""Values of a metric below which nothing is said of it."""


class NotMeasured(Exception):
    """A rule lacks what it goes by."""


@dataclass(frozen=True)
class Finding:
    """What one rule says of a run.

    Attributes:
        text: What was measured, and what it should be.
        set: Overrides to type.
        steps: First and last step of the evidence, as in ``metrics.jsonl``.
        rule: Name of the rule; ``diagnose`` fills it in.
    """

    text: str
    set: str
    steps: tuple[int, int]
    rule: str = ""

    def __str__(self) -> str:
        first, last = self.steps
        return f"{self.text} (steps {first} to {last}). Set {self.set}"


@dataclass(frozen=True)
class Series:
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
        settings: The configuration as a mapping.
        manifest: Of the run, or else of its newest checkpoint.
    """

    lines: Sequence[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a value of the configuration by its dotted key."""
        value: Any = self.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    @property
    def is_recipe(self) -> bool:
        """Whether the run is one of `rlinf launch`, whose keys are others."""
        return self.setting("train.train_policy") is not None

    @property
    def has_tokens(self) -> bool:
        """Whether the policy is known to sample tokens, whose entropy is never negative."""
        return self.is_recipe or "n_action_bins" in self.manifest.get("actions", {})

    def lines_with(self, *names: str) -> list[dict[str, Any]]:
        """Return the lines that have finite values of all these metrics; of ``train/*``, without those of the warm-up of the critic.

        Raises:
            NotMeasured: There are none.
        """
        of_updates = all(name.startswith("train/") for name in names)
        warmup = self.setting("algorithm.critic_warmup_steps", 0) if of_updates else 0
        found = [
            line for line in self.lines if line["step"] >= warmup and all(line.get(name) is not None for name in names)
        ]
        if not found:
            raise NotMeasured(f"no {' and '.join(names)}")
        return found

    def series(self, name: str) -> Series:
        """Return the values of a metric.

        Raises:
            NotMeasured: There are fewer than ``MIN_POINTS``.
        """
        lines = self.lines_with(name)
        if len(lines) < MIN_POINTS:
            raise NotMeasured(f"{name} of {len(lines)} steps only; required: {MIN_POINTS}")
        return Series([line["step"] for line in lines], [line[name] for line in lines])

    def total(self, name: str) -> float:
        """Return the sum of a metric over all steps, 0 if it was not measured."""
        return sum(line.get(name) or 0 for line in self.lines)

    def evaluations(self, phase: str) -> list[tuple[int, Success]]:
        """Return step and counts of the evaluations of a phase, in their order.

        Raises:
            NotMeasured: There are none.
        """
        lines = [line for line in self.lines_with("eval/successes", "eval/episodes") if line["phase"] == phase]
        if not lines:
            raise NotMeasured(f"no evaluation of phase {phase}")
        return [(line["step"], Success(int(line["eval/successes"]), int(line["eval/episodes"]))) for line in lines]

    def rollouts(self) -> list[tuple[int, Success]]:
        """Return step and counts of the first episodes of each iteration.

        Raises:
            NotMeasured: There are fewer than ``MIN_POINTS`` iterations, or the env has no success.
        """
        # gymnasium: an env without this setting has returns alone, and its successes are all 0
        if "success_return" in (self.setting("env") or {}) and self.setting("env.success_return") is None:
            raise NotMeasured("the env has no success (env.success_return is null)")
        lines = self.lines_with("rollout/success_rate", "rollout/num_episodes")
        if len(lines) < MIN_POINTS:
            raise NotMeasured(f"{len(lines)} iterations only; required: {MIN_POINTS}")
        found = []
        for line in lines:
            episodes = int(line["rollout/num_episodes"])
            found.append((line["step"], Success(round(line["rollout/success_rate"] * episodes), episodes)))
        return found


Rule = Callable[[Record], "Finding | None"]
"""Returns what to say, or None: nothing is wrong. Raises NotMeasured. Its docstring tells when it speaks."""


@dataclass
class Diagnosis:
    """What all rules say of a run.

    Attributes:
        findings: The worst first.
        fine: Rules that were evaluated and have nothing to say.
        silent: Rules that could not be evaluated, and why.
    """

    findings: list[Finding] = field(default_factory=list)
    fine: list[str] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{finding.rule}: {finding}" for finding in self.findings]
        if not lines:
            lines = [f"nothing to say: {len(self.fine)} rules found nothing"]
        if self.silent:
            reasons: dict[str, list[str]] = {}
            for name, reason in self.silent.items():
                reasons.setdefault(reason, []).append(name)
            lines.append(f"not evaluated ({len(self.silent)} rules):")
            lines += [f"  {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        return "\n".join(lines)


def diagnose(record: Record, rules: Sequence[Rule]) -> Diagnosis:
    """Ask every rule, in the order given."""
    diagnosis = Diagnosis()
    for rule in rules:
        try:
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
    """Read the folder of a run of `rlinf train`, `rlinf sft` or `rlinf launch`.

    Raises:
        CheckpointError: It is not the folder of a run.
    """
    return record_of(read_token_run(folder) if is_token_folder(folder) else read_run(folder))


def record_of(run: RunData | TokenRun) -> Record:
    """Return what rules read of a run."""
    return Record(run.lines, run.settings, json.loads(run.manifest or "{}"))
