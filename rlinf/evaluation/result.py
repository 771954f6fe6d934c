"""Results of an evaluation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlinf.errors import CheckpointError
from rlinf.evaluation.intervals import wilson_interval
from rlinf.files import write_text
from rlinf.number_formats import format_interval
from rlinf.types import EpisodeResult, EpisodeSpec


@dataclass(frozen=True)
class Success:
    """Number of successes and episodes; its text is ``85.0% (17/20)``."""

    successes: int
    episodes: int

    @property
    def success_rate(self) -> float:
        """Success rate; NaN without episodes."""
        return self.successes / self.episodes if self.episodes else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success rate."""
        return wilson_interval(self.successes, self.episodes)

    @property
    def count(self) -> str:
        """Both numbers as text: ``17/20``."""
        return f"{self.successes}/{self.episodes}"

    def __str__(self) -> str:
        return f"{self.success_rate:.1%} ({self.count})"

    def as_dict(self) -> dict[str, Any]:
        """Return ``success_rate``, ``successes``, ``episodes`` and ``interval``."""
        rate = self.success_rate if self.episodes else None
        return {"success_rate": rate, **asdict(self), "interval": list(self.interval)}


@dataclass
class EvaluationResult:
    """Results of a fixed list of episodes, in the order of the list.

    Attributes:
        results: One per ``EpisodeSpec``.
        greedy: The most likely actions were taken; else they were sampled with ``temperature`` and ``seed``.
        wall_s: Duration in seconds, including videos.
        warnings: Caveats about the numbers: accepted differences of conditions, a simulator that has changed.
        stopping: ``{"stop_when", "num_planned"}`` if the evaluation could end before its list did.
        videos: ``{"path", "task", "instruction", "success"}`` per MP4; paths are relative to the folder of
            ``result.json``.
    """

    results: list[EpisodeResult]
    greedy: bool = True
    temperature: float = 1.0
    seed: int = 0
    wall_s: float = 0.0
    warnings: list[str] = field(default_factory=list)
    videos: list[dict[str, Any]] = field(default_factory=list)
    stopping: dict[str, Any] | None = None

    @property
    def total(self) -> Success:
        """Success over all tasks."""
        return _count(self.results)

    @property
    def per_task(self) -> dict[str, Success]:
        """Success by task name, in order of first appearance."""
        tasks: dict[str, list[EpisodeResult]] = {}
        for result in self.results:
            tasks.setdefault(result.task, []).append(result)
        return {task: _count(results) for task, results in tasks.items()}

    @property
    def success_rate(self) -> float:
        """Success rate over all tasks."""
        return self.total.success_rate

    @property
    def successes(self) -> int:
        """Number of successful episodes."""
        return self.total.successes

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return self.total.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of ``success_rate``."""
        return self.total.interval

    def success_by_step(self) -> list[tuple[int, float]]:
        """Return ``(t, share)`` up to the longest episode: the share of episodes that succeeded within ``t`` env steps."""
        ends = [result.num_env_steps for result in self.results if result.success]
        longest = max(result.num_env_steps for result in self.results)
        return [(t, sum(end <= t for end in ends) / self.episodes) for t in range(longest + 1)]

    def metrics(self) -> dict[str, float]:
        """Return the ``eval/`` metrics, with the success rate of each task."""
        low, high = self.interval
        return {
            "eval/success_rate": self.success_rate,
            "eval/successes": self.successes,
            "eval/episodes": self.episodes,
            "eval/interval_low": low,
            "eval/interval_high": high,
            **{f"eval/success_rate/{task}": success.success_rate for task, success in self.per_task.items()},
        }

    def summary(self) -> dict[str, Any]:
        """Return ``success_rate``, ``successes``, ``episodes`` and ``interval`` for ``summary.json``."""
        return self.total.as_dict()

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = asdict(self)
        results = values.pop("results")
        per_task = {task: success.as_dict() for task, success in self.per_task.items()}
        return {**self.summary(), "per_task": per_task, **values, "results": results}

    def to_json(self, path: str | os.PathLike) -> Path:
        """Write ``as_dict()`` to ``path``, atomically."""
        return write_text(path, json.dumps(self.as_dict(), indent=1))

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> EvaluationResult:
        """Read a file of ``to_json``; raise CheckpointError if it is not one."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            results = [EpisodeResult(**{**row, "spec": EpisodeSpec(**row["spec"])}) for row in data["results"]]
            names = ("greedy", "temperature", "seed", "wall_s", "videos")
            return cls(
                results,
                **{name: data[name] for name in names},
                warnings=data.get("warnings", []),
                stopping=data.get("stopping"),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not an evaluation result ({type(error).__name__}: {error}).") from error

    def table(self) -> str:
        """Return a text table: one line per task and the total, with intervals."""
        return success_table([*self.per_task.items(), ("total", self.total)], "task", "success")


def success_table(rows: Sequence[tuple[str, Success]], first: str, second: str) -> str:
    """Return a text table with k/n and interval of each row; ``first`` and ``second`` head the names and the rates."""
    width = max(len(first), *(len(name) for name, _ in rows))
    lines = [f"{first.ljust(width)}  {second}     k/n  95 % interval"]
    for name, success in rows:
        interval = format_interval(*success.interval, " - ")
        lines.append(f"{name.ljust(width)}  {success.success_rate:6.1%}  {success.count:>7}  {interval}")
    return "\n".join(lines)


def _count(results: Sequence[EpisodeResult]) -> Success:
    return Success(sum(bool(result.success) for result in results), len(results))
