"""What lies in the folder of a run or of an evaluation, read for its report."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rlinf.errors import CheckpointError
from rlinf.evaluation.compare import COMPARISON_FILE, compare, sampling_differences
from rlinf.evaluation.result import EvaluationResult
from rlinf.tracking.tracker import read_metrics

TAG_NAMES = {
    "before_training": "before training",
    "after_sft": "after SFT",
    "before_rl": "before RL",
    "after_rl": "after RL",
}


@dataclass
class Evaluation:
    """An evaluation found in the run folder; ``folder`` is relative to it."""

    tag: str
    folder: str
    result: EvaluationResult

    @property
    def name(self) -> str:
        """The tag in words."""
        return TAG_NAMES.get(self.tag, self.tag.replace("_", " "))


@dataclass
class RunData:
    """What lies in a run folder.

    Attributes:
        lines: Of ``metrics.jsonl``.
        evaluations: Of ``eval/<tag>/result.json`` (or ``result.json``), oldest first.
        summary: Of ``summary.json``.
        comparison: Of ``compare.json``; of a training run without one: before against after RL. None: neither.
        config, manifest: Texts of ``config.yaml`` and ``manifest.json``, of the run or else of its newest checkpoint.
    """

    folder: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    comparison: dict[str, Any] | None = None
    config: str = ""
    manifest: str = ""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration as a mapping; empty: there is none."""
        return yaml.safe_load(self.config) or {}

    @property
    def episodes(self) -> str:
        """What was evaluated on, in words."""
        split = (self.settings.get("evaluation") or {}).get("split")
        return "training episodes" if split == "train" else "held-out episodes"

    @property
    def suite(self) -> str | None:
        """The suite of the episodes that were evaluated; None: there are none."""
        return self.evaluations[-1].result.results[0].spec.suite if self.evaluations else None

    def evaluation(self, *tags: str) -> Evaluation | None:
        """Return the first of the tags that there is."""
        found = {one.tag: one for one in self.evaluations}
        return next((found[tag] for tag in tags if tag in found), None)

    @property
    def before(self) -> Evaluation | None:
        """The evaluation with which RL began, or else the earliest phase's."""
        return self.evaluation("before_rl", "after_sft", "before_training")

    @property
    def after(self) -> Evaluation | None:
        """The evaluation after RL."""
        return self.evaluation("after_rl")

    @cached_property
    def gain(self) -> dict[str, Any] | None:
        """``before`` (a) against ``after`` (b), paired, as in ``compare.json``; None where one is missing, or where the
        episodes or the way of drawing actions were changed between them."""
        if self.before is None or self.after is None:
            return None
        first, second = self.before.result, self.after.result
        if {one.spec for one in first.results} != {one.spec for one in second.results}:
            return None
        if sampling_differences(first, second):
            return None
        comparison = compare(first, second)
        comparison.a, comparison.b = self.before.name, self.after.name
        return comparison.as_dict()


def read_run(folder: str | os.PathLike) -> RunData:
    """Read a run folder; parts that are missing are empty.

    Raises:
        CheckpointError: It has neither metrics nor an evaluation.
    """
    folder = Path(folder)
    data = RunData(folder, lines=read_metrics(folder))
    paths = sorted(folder.glob("eval/*/result.json"), key=lambda path: (path.stat().st_mtime, path.parent.name))
    for path in [*paths, *folder.glob("result.json")]:
        relative = path.parent.relative_to(folder).as_posix()
        data.evaluations.append(
            Evaluation(
                path.parent.name if relative != "." else "evaluation", relative, EvaluationResult.from_json(path)
            )
        )
    if not data.lines and not data.evaluations:
        raise CheckpointError(
            f"{folder} is not a run folder: it has neither metrics.jsonl nor eval/*/result.json nor result.json."
        )
    if (folder / "summary.json").exists():
        data.summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if (folder / COMPARISON_FILE).exists():
        data.comparison = json.loads((folder / COMPARISON_FILE).read_text(encoding="utf-8"))
    else:
        data.comparison = data.gain
    newest_first = sorted(folder.glob("checkpoints/*/state.json"), key=lambda path: -path.stat().st_mtime)
    places = [folder, *(path.parent for path in newest_first)]
    for name in ("config", "manifest"):
        file = {"config": "config.yaml", "manifest": "manifest.json"}[name]
        found = next((place / file for place in places if (place / file).exists()), None)
        if found is not None:
            setattr(data, name, found.read_text(encoding="utf-8"))
    return data
