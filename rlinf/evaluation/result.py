"""Results of an evaluation."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlinf.errors import CheckpointError
from rlinf.evaluation.intervals import mean_interval, wilson_interval
from rlinf.files import Json, write_text
from rlinf.number_formats import format_interval
from rlinf.types import EpisodeResult, EpisodeSpec

MOST_FAR = 0.01
"""A result has a warning if a larger fraction of states is far outside the policy's statistics."""
MOST_CLIPPED = 0.05
"""A result has a warning if a larger fraction of action values was clipped."""


@dataclass(frozen=True)
class Success:
    """Number of successes and episodes, formatted as ``85.0% (17/20)``, or as the return if the task does not report success.

    Attributes:
        returns: Mean return of the same episodes and the ends of its 95 % interval (Student's t); None if unknown.
        is_reported: Whether the task reports success; if not, only ``returns`` is shown.
    """

    successes: int
    episodes: int
    returns: tuple[float, float, float] | None = field(default=None, compare=False)
    is_reported: bool = field(default=True, compare=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Success:
        """Create from the values returned by ``as_dict``; older files have no return."""
        low, high = values.get("return_interval") or (-math.inf, math.inf)
        returns = (values["return_mean"], low, high) if "return_mean" in values else None
        return cls(values["successes"] or 0, values["episodes"], returns, values.get("reports_success", True))

    @property
    def success_rate(self) -> float:
        """Success rate; NaN without episodes, or if the task reports no success."""
        return self.successes / self.episodes if self.episodes and self.is_reported else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success rate."""
        return wilson_interval(self.successes, self.episodes)

    @property
    def count(self) -> str:
        """Successes and episodes, formatted as ``17/20``."""
        return f"{self.successes}/{self.episodes}"

    def __str__(self) -> str:
        return f"{self.success_rate:.1%} ({self.count})" if self.is_reported else f"return {self.return_text}"

    @property
    def return_text(self) -> str:
        """Mean return with its interval, formatted as ``-512.3 (95 % -580.1 to -444.5)``; "" if unknown."""
        mean, low, high = self.returns or (None, -math.inf, math.inf)
        ends = f" (95 % {low:.4g} to {high:.4g})" if self.episodes > 1 else ""
        return "" if mean is None else f"{mean:.4g}{ends}"

    def as_dict(self) -> Json:
        """Return success (null if not reported) and return as JSON values; ``return_interval`` is null for a single episode."""
        values: Json = {"success_rate": None, "successes": None, "episodes": self.episodes, "interval": None}
        if self.is_reported:
            rate = self.success_rate if self.episodes else None
            values |= {"success_rate": rate, "successes": self.successes, "interval": list(self.interval)}
        if self.returns is not None:
            mean, *ends = self.returns
            values |= {"return_mean": mean, "return_interval": ends if self.episodes > 1 else None}
            values["reports_success"] = self.is_reported
        return values


@dataclass
class EvaluationResult:
    """Results for a fixed list of episodes, in list order.

    Attributes:
        greedy: Whether the most likely actions were taken; if not, they were sampled with ``temperature`` and ``seed``.
        warnings: Caveats about the results, such as accepted differences in conditions or a simulator that has changed.
        stopping: ``{"stop_when", "num_planned"}`` if the evaluation could end early.
        videos: ``{"path", "task", "instruction", "success"}`` per MP4; paths are relative to the folder of ``result.json``.
        reports_success: Whether the env reports success (``VectorEnv.reports_success``).
        baselines: ``{"name", "meaning", "note", "success"}`` per baseline (``evaluation.baselines``); ``success`` is as from
            ``Success.as_dict``, or null if the baseline was not run, for the reason in ``note``.
        twins: Maps each perturbed task to the kind of its perturbation and the unperturbed task.
        perturbations: Paired effect of each kind, as from ``rlinf.evaluation.twins.effects``.
    """

    results: list[EpisodeResult]
    greedy: bool = True
    temperature: float = 1.0
    seed: int = 0
    wall_s: float = 0.0
    warnings: list[str] = field(default_factory=list)
    videos: list[Json] = field(default_factory=list)
    stopping: Json | None = None
    reports_success: bool = True
    baselines: list[Json] = field(default_factory=list)
    twins: dict[str, tuple[str, str]] = field(default_factory=dict)
    perturbations: list[Json] = field(default_factory=list)

    def group_of(self, task: str) -> str:
        """Return the task's row in tables: its name, or the kind of its perturbation if there are perturbed tasks."""
        return self.twins.get(task, ("plain", ""))[0] if self.twins else task

    @property
    def total(self) -> Success:
        """Success over all tasks."""
        return self._count(self.results)

    @property
    def per_task(self) -> dict[str, Success]:
        """Success by task name (``group_of``), in order of first appearance."""
        tasks: dict[str, list[EpisodeResult]] = {}
        for result in self.results:
            tasks.setdefault(self.group_of(result.task), []).append(result)
        return {task: self._count(results) for task, results in tasks.items()}

    @property
    def true_success(self) -> Success | None:
        """Success reported by the simulator if ``total`` comes from a classifier; None if equal or unknown."""
        labels = [result.true_success for result in self.results if result.true_success is not None]
        return Success(sum(labels), len(labels)) if labels else None

    def success_label_warning(self) -> list[str]:
        """Return a warning that compares detected with true success, if they can differ."""
        true_success = self.true_success
        if true_success is None:
            return []
        false = sum(result.success and result.true_success is False for result in self.results)
        missed = sum(result.true_success is True and not result.success for result in self.results)
        interval = format_interval(*true_success.interval, " - ")
        return [
            "success is detected by the classifier (env.success_classifier); the simulator reports "
            f"{true_success} (95 % {interval}): {false} of {self.successes} detected successes are false, and {missed} of "
            f"{true_success.successes} were not detected"
        ]

    def _count(self, results: Sequence[EpisodeResult]) -> Success:
        returns = mean_interval([result.episode_return for result in results]) if results else None
        # Some envs report success only at the end of an episode, so it is known only once an episode has ended.
        is_reported = self.reports_success or any(result.success_reported or result.success for result in self.results)
        return Success(sum(bool(result.success) for result in results), len(results), returns, is_reported)

    @property
    def success_rate(self) -> float | None:
        """Success rate over all tasks; None if the env reports no success."""
        return self.total.success_rate if self.total.is_reported else None

    @property
    def successes(self) -> int | None:
        """Number of successful episodes; None if the env reports no success."""
        return self.total.successes if self.total.is_reported else None

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return self.total.episodes

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % Wilson interval of ``success_rate``; None if the env reports no success."""
        return self.total.interval if self.total.is_reported else None

    @property
    def return_mean(self) -> float:
        """Mean undiscounted return of the episodes."""
        return self.total.returns[0]

    @property
    def return_interval(self) -> tuple[float, float]:
        """95 % Student's t interval of ``return_mean``; infinite for a single episode."""
        return self.total.returns[1:]

    @property
    def actions_clipped_fraction(self) -> float | None:
        """Fraction of all action values that were clipped to the bounds; None if not recorded."""
        return actions_clipped(self.results)[0]

    @property
    def actions_max_abs(self) -> float | None:
        """Maximum magnitude of the actions before clipping; None if not recorded."""
        return actions_clipped(self.results)[1]

    @property
    def states_far_fraction(self) -> float | None:
        """Fraction of states far outside the policy's statistics; None without statistics."""
        known = [result for result in self.results if result.states_far_fraction is not None]
        steps = sum(result.num_env_steps for result in known)
        return sum(result.states_far_fraction * result.num_env_steps for result in known) / steps if steps else None

    def headline(self) -> str:
        """Return success, its interval and the return in one line that fits in 80 columns together with the evaluation's name."""
        total = self.total
        if not total.is_reported:
            return f"return {total.return_text} over {self.episodes} episodes; the env reports no success"
        interval = format_interval(*total.interval, " - ")
        simulator = "" if self.true_success is None else f", by the simulator {self.true_success}"
        return f"{total.count} = {total.success_rate:.1%} (95 % {interval}){simulator}, return {self.return_mean:.4g}"

    def success_by_step(self) -> list[tuple[int, float]]:
        """Return ``(t, fraction of episodes that succeeded within t env steps)`` up to the longest episode."""
        ends = [result.num_env_steps for result in self.results if result.success]
        longest = max(result.num_env_steps for result in self.results)
        return [(t, sum(end <= t for end in ends) / self.episodes) for t in range(longest + 1)]

    def metrics(self) -> dict[str, float]:
        """Return the ``eval/`` metrics, omitting success metrics if the env does not report success."""
        total, (return_low, return_high) = self.total, self.return_interval
        low, high = total.interval
        metrics = {
            "eval/success_rate": total.success_rate,
            "eval/successes": total.successes,
            "eval/episodes": total.episodes,
            "eval/interval_low": low,
            "eval/interval_high": high,
            "eval/return_mean": self.return_mean,
            "eval/return_low": return_low,
            "eval/return_high": return_high,
            **{f"eval/success_rate/{task}": success.success_rate for task, success in self.per_task.items()},
        }
        if self.true_success is not None:
            metrics["eval/true_success_rate"] = self.true_success.success_rate
        success_metrics = ("eval/success", "eval/interval")
        return {
            name: value for name, value in metrics.items() if total.is_reported or not name.startswith(success_metrics)
        }

    def summary(self) -> Json:
        """Return the values of ``Success.as_dict``, and any ``baselines``, for ``summary.json``."""
        return self.total.as_dict() | ({"baselines": self.baselines} if self.baselines else {})

    def as_dict(self) -> Json:
        """Return everything as JSON values."""
        values = asdict(self)
        results = values.pop("results")
        if not self.total.is_reported:
            results = [{**row, "success": None} for row in results]
        per_task = {task: success.as_dict() for task, success in self.per_task.items()}
        actions = {
            name: getattr(self, name) for name in ("actions_clipped_fraction", "actions_max_abs", "states_far_fraction")
        }
        return {**self.summary(), **actions, "per_task": per_task, **values, "results": results}

    def to_json(self, path: str | os.PathLike) -> Path:
        """Write ``as_dict()`` to ``path``, atomically."""
        return write_text(path, json.dumps(self.as_dict(), indent=1))

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> EvaluationResult:
        """Read a file written by ``to_json``; raise CheckpointError for any other file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            results = [
                EpisodeResult(**{**row, "spec": EpisodeSpec(**row["spec"]), "success": bool(row["success"])})
                for row in data["results"]
            ]
            names = ("greedy", "temperature", "seed", "wall_s", "videos")
            return cls(
                results,
                **{name: data[name] for name in names},
                warnings=data.get("warnings", []),
                stopping=data.get("stopping"),
                reports_success=data.get("reports_success", True),
                baselines=data.get("baselines", []),
                twins={task: (kind, twin) for task, (kind, twin) in data.get("twins", {}).items()},
                perturbations=data.get("perturbations", []),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not an evaluation result ({type(error).__name__}: {error}).") from error

    def table(self) -> str:
        """Return a text table with one line per task and for the total, including intervals."""
        return success_table([*self.per_task.items(), ("total", self.total)], "task", "success")


def success_table(rows: Sequence[tuple[str, Success]], first: str, second: str) -> str:
    """Return a text table of returns and, if reported, success; ``first`` and ``second`` are the column titles for names and rates."""
    width = max(len(first), *(len(name) for name, _ in rows))
    is_reported, with_returns = rows[-1][1].is_reported, rows[-1][1].returns is not None
    head = f"  {second}     k/n  {'95 % interval':15}" if is_reported else "  episodes"
    lines = [f"{first.ljust(width)}{head}{'  return' if with_returns else ''}".rstrip()]
    for name, success in rows:
        interval = format_interval(*success.interval, " - ")
        rate = f"{success.success_rate:6.1%}  {success.count:>7}  {interval:15}"
        cells = rate if is_reported else f"{success.episodes:>8}"
        lines.append(f"{name.ljust(width)}  {cells}  {success.return_text}".rstrip())
    return "\n".join(lines)


def actions_clipped(results: Sequence[EpisodeResult]) -> tuple[float | None, float | None]:
    """Return the fraction of all action values that were clipped, and the maximum magnitude; None if not recorded."""
    known = [
        result
        for result in results
        if result.actions_clipped_fraction is not None and result.actions_max_abs is not None
    ]
    if not known:
        return None, None
    num_steps = max(1, sum(result.num_env_steps for result in known))
    clipped = sum(result.actions_clipped_fraction * result.num_env_steps for result in known) / num_steps
    return clipped, max(result.actions_max_abs for result in known)


def far_warning(fraction: float | None) -> list[str]:
    """Return a warning if more than ``MOST_FAR`` of the states are far outside the policy's statistics."""
    if fraction is None or fraction <= MOST_FAR:
        return []
    return [
        f"{fraction:.1%} of the states have a dimension more than five half-widths from the middle of the policy's statistics. Likely "
        "cause: the units of the state differ from training, or the statistics come from a different dataset (model.unnorm_key)"
    ]


def clipping_warning(fraction: float | None, largest: float | None) -> list[str]:
    """Return a warning if more than ``MOST_CLIPPED`` of the action values were clipped."""
    if fraction is None or fraction <= MOST_CLIPPED:
        return []
    return [
        f"{fraction:.1%} of the action values were outside the env's bounds and were clipped (maximum magnitude: {largest:.4g}). Likely "
        "cause: the policy uses different units or a different normalisation. Compare its actions with the env's action_low and "
        "action_high, and set model.unnorm_key to the dataset it was trained on"
    ]
