"""Data for the report on a run or an evaluation."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rlinf import run_folder, wings
from rlinf.errors import CheckpointError
from rlinf.evaluation.compare import EPISODES, Comparison, compare, sampling_differences
from rlinf.evaluation.result import EvaluationResult, Success
from rlinf.files import Json
from rlinf.tracking.tracker import read_metrics

TAG_NAMES = {"after_sft": "after SFT", "before_rl": "before RL", "after_rl": "after RL"}

CLOSING_TAGS = ("after_rl", "after_sft")
"""Possible names in ``eval/`` of a run's closing evaluation, after RL or, without RL, after behaviour cloning."""


@dataclass
class Evaluation:
    """An evaluation in a run; ``folder`` is relative to the run folder."""

    tag: str
    folder: str
    result: EvaluationResult

    @property
    def name(self) -> str:
        """Human-readable name of the tag."""
        return TAG_NAMES.get(self.tag, self.tag.replace("_", " "))


@dataclass
class FolderData:
    """Content that run and evaluation folders have in common; missing parts are empty.

    Attributes:
        traces: Profiler traces, see ``traces_of``.
        config, manifest: Contents of ``config.yaml`` and ``manifest.json`` from the run or, if missing, its newest checkpoint.
    """

    folder: Path
    lines: list[Json] = field(default_factory=list)
    comparison: Json | None = None
    traces: list[str] = field(default_factory=list)
    config: str = ""
    manifest: str = ""

    @cached_property
    def settings(self) -> Json:
        """The configuration as a mapping; empty without one."""
        return yaml.safe_load(self.config) or {}

    def setting(self, key: str) -> Any:
        """Return the configuration value with the given dotted key, or None if it is missing."""
        return setting_of(self.settings, key)


@dataclass
class RunData(FolderData):
    """Content of a run folder; without ``compare.json``, ``comparison`` equals ``gain``.

    Attributes:
        evaluations: Evaluations from ``eval/<tag>/result.json`` (or ``result.json``), oldest first, without ``fresh``.
        fresh: The best checkpoint's evaluation on fresh episodes, which is the one to report; None if it was not made.
    """

    evaluations: list[Evaluation] = field(default_factory=list)
    fresh: Evaluation | None = None
    summary: Json = field(default_factory=dict)

    @property
    def episodes(self) -> str:
        """Kind of evaluation episodes as text."""
        split = (self.settings.get("evaluation") or {}).get("split")
        return "training episodes" if split == "train" else "held-out episodes"

    @property
    def suite(self) -> str | None:
        """The suite of the evaluation episodes; None without evaluations."""
        return self.evaluations[-1].result.results[0].spec.suite if self.evaluations else None

    def evaluation(self, *tags: str) -> Evaluation | None:
        """Return the evaluation for the first of the tags that exists, or None."""
        by_tag = {evaluation.tag: evaluation for evaluation in self.evaluations}
        return next((by_tag[tag] for tag in tags if tag in by_tag), None)

    @property
    def before(self) -> Evaluation | None:
        """The evaluation before RL if available, otherwise after SFT, otherwise before training."""
        return self.evaluation("before_rl", "after_sft", "before_training")

    @property
    def in_the_table(self) -> list[tuple[Evaluation, int]]:
        """Evaluations shown in the task table, with their colours: before and after RL if available, otherwise the newest."""
        shown = [evaluation for evaluation in (self.before, self.after) if evaluation] or self.evaluations[-1:]
        return list(zip(shown, [1] if len(shown) == 1 else [2, 1], strict=False))

    @property
    def after(self) -> Evaluation | None:
        """The evaluation after RL."""
        return self.evaluation("after_rl")

    @cached_property
    def gain(self) -> Json | None:
        """Paired comparison of ``before`` (a) with ``after`` (b), as in ``compare.json``; None if they cannot be paired."""
        if self.before is None or self.after is None:
            return None
        first, second = self.before.result, self.after.result
        same_episodes = {result.spec for result in first.results} == {result.spec for result in second.results}
        if not same_episodes or sampling_differences(first, second):
            return None
        comparison = compare(first, second)
        comparison.a, comparison.b = self.before.name, self.after.name
        return comparison.as_dict()


@dataclass(frozen=True)
class RunFolders:
    """Run and evaluation folders of a wing (``Wing.run_folders``), which have their own contents and page.

    Attributes:
        name: What a run is, with its article, for messages.
        recognises: Return whether a folder is of this kind.
        write_report: Write the folder's ``report.html`` and return its path.
        read_record: Read the ``rlinf.report.why.findings.Record`` of a run.
        compare: Compare two result files of this kind, given the accepted mismatches.
    """

    name: str
    recognises: Callable[[Path], bool]
    write_report: Callable[[Path], Path]
    read_record: Callable[[Path], Any]
    compare: Callable[[Path, Path, Sequence[str]], Comparison]


def kind_of(folder: str | os.PathLike) -> tuple[str, RunFolders | None]:
    """Return what the folder's evaluations count, and its kind; ``episodes`` and None for folders of action policies."""
    kinds = {units: wings.load("run_folders", units) for units in wings.added("run_folders")}
    return next(((units, kind) for units, kind in kinds.items() if kind.recognises(Path(folder))), (EPISODES, None))


def setting_of(settings: Json, key: str, default: Any = None) -> Any:
    """Return the configuration value with the given dotted key, or ``default`` if it is missing or null."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return default if value is None else value


def closing_tags(lines: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """Return the ``CLOSING_TAGS`` that are possible for a run with these metrics; only ``after_rl`` once RL has started."""
    return CLOSING_TAGS[:1] if any(line["phase"] == "rl" for line in lines) else CLOSING_TAGS


def read_run(folder: str | os.PathLike) -> RunData:
    """Read a run folder; raise CheckpointError if it has neither metrics nor an evaluation."""
    folder = Path(folder)
    data = RunData(folder, lines=read_metrics(folder))
    for path in sorted(results_of(folder), key=lambda path: (path.parent == folder, path.stat().st_mtime, path)):
        relative = path.parent.relative_to(folder).as_posix()
        tag = path.parent.name if relative != "." else "evaluation"
        evaluation = Evaluation(tag, relative, EvaluationResult.from_json(path))
        if tag == run_folder.FRESH_EVALUATION:
            data.fresh = evaluation
        else:
            data.evaluations.append(evaluation)
    if not data.lines and not data.evaluations:
        missing = "neither metrics.jsonl nor eval/*/result.json nor result.json"
        raise CheckpointError(f"{folder} is not a run folder: it has {missing}.")
    for name, file in (
        ("summary", run_folder.SUMMARY_FILE), ("comparison", run_folder.COMPARISON_FILE),
    ):  # fmt: skip
        if (folder / file).exists():
            setattr(data, name, json.loads((folder / file).read_text(encoding="utf-8")))
    if "reported" not in data.summary:
        data.fresh = None  # not finished
    data.comparison = data.comparison or data.gain
    data.traces = traces_of(folder)
    data.config, data.manifest = saved_texts(folder)
    return data


def reported_lines(summary: Json) -> list[str]:
    """Return what to report of a finished run, and how the policy with sampled actions differs from it; empty without a choice."""
    if "not_fresh" in summary:
        best = summary["best_checkpoint"]
        return [
            f"no fresh evaluation ({summary['not_fresh']}): the number of {best['name']} is from the episodes that chose it among "
            f"{best['num_candidates']} checkpoints, so on average it is too high"
        ]
    if "reported" not in summary:
        return []
    reported = summary["reported"]
    checkpoint, num_candidates = reported["checkpoint"], reported["num_candidates"]
    episodes = f"{reported['episodes']} fresh episodes (evaluation.first_episode={reported['first_episode']})"
    lines = [f"to report: {checkpoint}, chosen among {num_candidates} checkpoints, on {episodes}"]
    sampled = summary.get("sampled", {})
    paired = sampled.get("paired_with_greedy")
    if paired is not None and not paired["interval"][0] <= 0 <= paired["interval"][1]:
        greedy = Success(paired["successes_a"], paired["episodes"])
        lines.append(
            f"sampled at temperature {sampled['temperature']:g}: {Success.from_dict(sampled)}, greedy on the same episodes: {greedy}"
        )
    return lines


def results_of(folder: Path) -> list[Path]:
    """Return all ``result.json`` files in a run or an evaluation."""
    below = f"{run_folder.EVALUATIONS_FOLDER}/*/{run_folder.RESULT_FILE}"
    return [*sorted(folder.glob(below)), *folder.glob(run_folder.RESULT_FILE)]


def saved_texts(folder: Path, others: Sequence[Path] = ()) -> list[str]:
    """Return the contents of configuration and manifest ("" if missing) from a folder, its newest checkpoint, or ``others``."""
    states = folder.glob(f"{run_folder.CHECKPOINTS_FOLDER}/*/{run_folder.STATE_FILE}")
    newest_first = sorted(states, key=lambda path: -path.stat().st_mtime)
    places = [folder, *(path.parent for path in newest_first), *others]
    paths = ([place / file for place in places] for file in (run_folder.CONFIG_FILE, run_folder.MANIFEST_FILE))
    return [next((path.read_text(encoding="utf-8") for path in group if path.is_file()), "") for group in paths]


def traces_of(folder: Path) -> list[str]:
    """Return the paths of the profiler traces, one per rank, relative to the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob(f"{run_folder.PROFILE_FOLDER}/trace_*.json.gz"))
