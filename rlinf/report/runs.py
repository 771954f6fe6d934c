"""Group runs that differ only in their seed, and summarise the groups in a table or on a page with mean curves."""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rlinf.checkpoints.folders import flat, read_saved_config
from rlinf.errors import CheckpointError, ConfigError, ManifestMismatchError
from rlinf.evaluation.compare import compare
from rlinf.evaluation.intervals import mean_interval
from rlinf.evaluation.result import Success
from rlinf.files import Json, follow_latest
from rlinf.number_formats import format_duration, format_interval
from rlinf.options import override_text
from rlinf.report.charts import NUM_COLOURS, SMALL, Series, legend
from rlinf.report.page import card, write_page
from rlinf.report.run_data import Evaluation, RunData, closing_tags, kind_of, read_run
from rlinf.report.run_page import RL_CURVES, with_axes
from rlinf.run_folder import CHECKPOINTS_FOLDER, CONFIG_FILE, LATEST, METRICS_FILE, REPORT_FILE, SUMMARY_FILE

SAME_IN_A_GROUP = ("seed", "output_dir", "resume", "checkpoint", "dataset", "experiment_name")
"""Keys that are ignored when grouping runs; the experiment's name is always considered."""
PRESETS = {"algorithm.name": "algorithm.", "model.model_type": "model.", "env.name": "env."}
"""Maps each key that selects a preset to the prefix of the keys set by the preset."""
MAX_KEYS = 3
"""Maximum number of keys in a label."""
NO_NAME = r"[\d\W_T]*"
"""Matches folder names that consist of a number or a time, as in sweeps and runs without `output_dir`."""

RUNS_FILE = "runs.html"
"""Name of the page about several runs."""


@dataclass(frozen=True)
class Pooled:
    """Results of the same evaluation of several seeds, one per seed."""

    totals: list[Success]

    @property
    def rates(self) -> list[float]:
        """Success rates of the results that report success."""
        return [total.success_rate for total in self.totals if total.is_reported]

    @property
    def success(self) -> tuple[float, float, float] | None:
        """Mean success and the ends of its 95 % interval, over seeds (clipped to [0, 1]) or, for a single run, over episodes (Wilson)."""
        if not self.rates:
            return None
        if len(self.rates) == 1:
            return self.rates[0], *next(total for total in self.totals if total.is_reported).interval
        mean, low, high = mean_interval(self.rates)
        return mean, max(low, 0.0), min(high, 1.0)

    @property
    def texts(self) -> tuple[str, ...]:
        """Mean success with its interval, minimum and maximum, and the return with its interval, as text; "-" if not measured."""
        if self.success is None:
            return "-", "-", "-", "-", self._return_text
        mean, *ends = self.success
        least, most = min(self.rates), max(self.rates)
        return f"{mean:.1%}", format_interval(*ends), f"{least:.1%}", f"{most:.1%}", self._return_text

    @property
    def _return_text(self) -> str:
        returns = [total.returns[0] for total in self.totals if total.returns]
        if len(returns) < 2:
            return self.totals[0].return_text or "-" if self.totals else "-"
        mean, low, high = mean_interval(returns)
        return f"{mean:.4g} (95 % {low:.4g} to {high:.4g})"


@dataclass
class RunGroup:
    """Runs with the same configuration.

    Attributes:
        label: A single run's folder name, or the experiment's name and up to ``MAX_KEYS`` keys in which groups of that name differ.
        runs: All runs, including those that repeat a seed.
        settings: Their common configuration.
    """

    label: str
    runs: list[RunData]
    settings: Json

    @property
    def counted(self) -> list[RunData]:
        """One run per seed, the newest one that has finished."""
        # A repeated seed is not an independent sample: counting it would make the interval over seeds too narrow.
        by_seed: dict[Any, RunData] = {}
        for number, run in enumerate(self.runs):
            seed = seed_of(run)
            key = f"run {number}" if seed is None else seed
            if key not in by_seed or _age(run) > _age(by_seed[key]):
                by_seed[key] = run
        return list(by_seed.values())

    @property
    def closing(self) -> list[Evaluation]:
        """The closing evaluations of the counted runs."""
        return [evaluation for run in self.counted if (evaluation := closing_evaluation(run)) is not None]

    @property
    def pooled(self) -> dict[str, Pooled]:
        """Each of ``STAGES`` that was measured, over the counted runs that have finished; ``AT_THE_END`` even if none has."""
        runs = [run for run in self.counted if closing_evaluation(run) is not None]
        stages = {name: Pooled([total for run in runs if (total := stage(run))]) for name, stage in STAGES.items()}
        return {name: pooled for name, pooled in stages.items() if pooled.totals or name == AT_THE_END}

    @property
    def training_text(self) -> str:
        """Mean training time of the counted runs that have finished, as text."""
        times = [run.summary["train_wall_s"] for run in self.counted if "train_wall_s" in run.summary]
        return f"{format_duration(sum(times) / len(times))} each" if times else "-"


def closing_evaluation(run: RunData) -> Evaluation | None:
    """Return a run's closing evaluation, or None if the run was stopped before it."""
    return run.evaluation(*closing_tags(run.lines)) if run.summary else None


def closing_total(run: RunData) -> Success | None:
    """Return the success of a run's closing evaluation; None if the run was stopped before it."""
    closing = closing_evaluation(run)
    return None if closing is None else closing.result.total


def total_before(run: RunData) -> Success | None:
    """Return the success of the policy with which RL, or else cloning, started; None if it was not evaluated."""
    before = run.before
    return None if before is None or before is closing_evaluation(run) else before.result.total


def reported_total(run: RunData) -> Success | None:
    """Return the success of the chosen checkpoint on episodes that were not used to choose it; None if it was not measured."""
    values = run.summary.get("reported")
    return None if values is None else Success.from_dict(values)


AT_THE_END = "at the end"
STAGES: dict[str, Callable[[RunData], Success | None]] = {
    "before RL": total_before, AT_THE_END: closing_total, "reported": reported_total,
}  # fmt: skip
"""Evaluations of a run that are compared over seeds."""


def _age(run: RunData) -> tuple[bool, float]:
    """Return a sort key for runs with the same seed: unfinished runs first, then oldest to newest."""
    files = [run.folder / name for name in (METRICS_FILE, SUMMARY_FILE)]
    times = [file.stat().st_mtime for file in files if file.is_file()]
    return closing_evaluation(run) is not None, max(times, default=0.0)


def seed_of(run: RunData) -> int | None:
    """Return a run's seed, or None if it is not recorded."""
    return run.summary.get("seed", run.settings.get("seed"))


def first_weights(run: RunData) -> str | None:
    """Return a run's ``init_from``; for a resumed run, read it from earlier checkpoints."""
    if run.settings.get("resume") is None:
        return run.settings.get("init_from")
    saved = [read_saved_config(path.parent) for path in run.folder.glob(f"{CHECKPOINTS_FOLDER}/*/{CONFIG_FILE}")]
    return next((config["init_from"] for config in saved if config.get("init_from") is not None), None)


def read_runs(folders: Sequence[str | os.PathLike]) -> list[RunData]:
    """Read the runs found by ``run_folders``."""
    return [read_run(folder) for folder in run_folders(folders)]


def run_folders(folders: Sequence[str | os.PathLike]) -> list[Path]:
    """Resolve folders to run folders: follow ``latest``, and replace a checkpoint by its run and a sweep by all of its runs.

    A folder with several runs of a wing is replaced by the newest one.
    """
    resolved: dict[Path, Path] = {}
    for name in folders:
        folder = follow_latest(name)
        if folder.parent.name == CHECKPOINTS_FOLDER:
            folder = folder.parents[1]
        below = [path for path in folder.glob("*") if (path / METRICS_FILE).is_file()]
        below.sort(key=lambda path: (len(path.name), path.name))  # job 2 before job 10
        if below and kind_of(below[-1])[1] is not None:
            below = [follow_latest(folder / LATEST) if folder / LATEST in below else below[-1]]
        is_run = (folder / METRICS_FILE).is_file() or not below
        for place in [folder] if is_run else below:
            if not place.is_dir():
                raise CheckpointError(f"There is no folder {place}; expected a run folder, or the folder of a sweep.")
            resolved.setdefault(place.resolve(), place)
    return list(resolved.values())


def group_runs(runs: Sequence[RunData]) -> list[RunGroup]:
    """Group runs that differ only in their seed and folder."""
    named: dict[str, dict[str, list[tuple[Json, RunData]]]] = {}
    for run in runs:
        settings = {"init_from": None} | {k: v for k, v in flat(run.settings).items() if k not in SAME_IN_A_GROUP}
        settings["init_from"] = first_weights(run)
        name = run.summary.get("experiment") or run.settings.get("experiment_name") or run.folder.resolve().parent.name
        same = json.dumps(settings, sort_keys=True, default=str)
        named.setdefault(str(name), {}).setdefault(same, []).append((settings, run))
    groups = []
    for name, by_settings in named.items():
        keys = differing_keys([members[0][0] for members in by_settings.values()])
        for members in by_settings.values():
            settings = members[0][0]
            shown = [f"{key}={override_text(settings[key])}" for key in _label_keys(keys) if key in settings]
            groups.append(RunGroup(" ".join([name, *shown]), [run for _, run in members], settings))
    folders = [group.runs[0].folder.resolve().name if len(group.runs) == 1 else "" for group in groups]
    num_folders, num_labels = Counter(folders), Counter(group.label for group in groups)
    for group, folder in zip(groups, folders, strict=True):
        if folder and num_folders[folder] == 1 and not re.fullmatch(NO_NAME, folder):
            group.label = folder
        elif num_labels[group.label] > 1:  # the keys do not distinguish these groups
            group.label += f" {os.path.relpath(group.runs[0].folder)}"
    return groups


def differing_keys(settings: Sequence[Json]) -> list[str]:
    """Return the keys in which flat configurations differ."""
    keys = dict.fromkeys(key for config in settings for key in config)
    first = settings[0]
    return [key for key in keys if any(key not in config or config[key] != first.get(key) for config in settings)]


def _label_keys(keys: Sequence[str]) -> list[str]:
    """Return at most ``MAX_KEYS`` keys, presets first, omitting keys that are set by a preset."""
    presets = [key for key in PRESETS if key in keys]
    followers = tuple(PRESETS[key] for key in presets)
    return [*presets, *(key for key in keys if not key.startswith(followers))][:MAX_KEYS]


RUN_COLUMNS = ("run", "seed", *STAGES, "training", "folder")
POOLED_COLUMNS = ("evaluation", "seeds", "mean", "95 % interval", "min", "max", "return", "training")
INTERVALS = "Intervals are over seeds (Student's t) or, for a single seed, over its episodes (Wilson)."


def runs_table(groups: Sequence[RunGroup]) -> str:
    """Return one line per run, and one line per configuration and evaluation with mean, interval, minimum and maximum over seeds."""
    rows = [RUN_COLUMNS, *(run_row(group, run) for group in groups for run in group.runs)]
    pooled = [(group.label, *row) for group in groups for row, _ in pooled_rows(group)]
    lines = ["", *_columns(rows), "", *_columns([("configuration", *POOLED_COLUMNS), *pooled])]
    return "\n".join([*lines, INTERVALS, *repeated_seeds(groups)])


def pooled_rows(group: RunGroup) -> list[tuple[tuple[str, ...], Pooled]]:
    """Return the ``POOLED_COLUMNS`` of each evaluation of a configuration as text, and the numbers."""
    rows = []
    for stage, pooled in group.pooled.items():
        seeds = f"{len(pooled.totals)} of {len(group.counted)}"
        training = group.training_text if stage == AT_THE_END else ""
        rows.append(((stage, seeds, *pooled.texts, training), pooled))
    return rows


def run_row(group: RunGroup, run: RunData) -> tuple[str, ...]:
    """Return the ``RUN_COLUMNS`` of a run as text; without a reported success, the best checkpoint's is shown and labelled."""
    totals = {name: stage(run) for name, stage in STAGES.items()}
    cells = {name: "-" if total is None else str(total) for name, total in totals.items()}
    best = run.summary.get("best_checkpoint", {})
    if totals["reported"] is None and best.get("success_rate") is not None:
        cells["reported"] = f"best checkpoint: {best['success_rate']:.1%}"
    seconds = run.summary.get("train_wall_s")
    training = "-" if seconds is None else format_duration(seconds)
    return group.label, seed_text(group, run), *cells.values(), training, os.path.relpath(run.folder)


def seed_text(group: RunGroup, run: RunData) -> str:
    """Return a run's seed as text, with a note if a different run with the same seed is counted instead."""
    return f"{seed_of(run)}{'' if run in group.counted else ' (not counted)'}"


def repeated_seeds(groups: Sequence[RunGroup]) -> list[str]:
    """Return a note about runs with repeated seeds, or an empty list."""
    count = sum(len(group.runs) - len(group.counted) for group in groups)
    runs = f"{count} run{'s' if count > 1 else ''} with a repeated seed of the same configuration not counted"
    return [f"{runs}: only the newest finished run of each seed counts."] if count else []


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


SUCCESS_CURVES = (
    ("Success of evaluations against env steps", "eval/success_rate", "env_steps", "env steps"),
    ("Success of evaluations against training time", "eval/success_rate", "minutes", "training time (minutes)"),
    ("Success of rollouts against env steps", "rollout/success_rate", "env_steps", "env steps"),
)
"""For each chart: title, metric, x axis and its label."""
EPISODE_INTERVALS = {
    "eval/success_rate": ("eval/interval_low", "eval/interval_high"),
    "eval/return_mean": ("eval/return_low", "eval/return_high"),
}
"""Maps metrics to the ends of their 95 % intervals over episodes."""


def write_runs_report(runs: Sequence[RunData], output: str | os.PathLike) -> Path:
    """Write a page about several runs to ``output`` and return its path; at most ``NUM_COLOURS`` configurations are drawn."""
    output, groups = Path(output), group_runs(runs)
    drawn = groups[:NUM_COLOURS]
    title = f"{len(runs)} runs"
    if len(groups) < len(runs):
        title += f" of {len(groups)} configuration{'s' if len(groups) > 1 else ''}"
    is_reported = any(group.pooled[AT_THE_END].rates or not group.closing for group in groups)
    cards = [
        card(name, _series(drawn, metric, x), x_label, "success rate", percent=True, has_legend=False)
        for name, metric, x, x_label in SUCCESS_CURVES
        if is_reported
    ]
    returns = _series(drawn, "eval/return_mean", "env_steps")
    cards.append(card("Return of evaluations against env steps", returns, "env steps", "return", has_legend=False))
    small = [
        card(
            name, _series(drawn, next(iter(metrics)), "step"), "RL iteration", y_label, size=SMALL, has_legend=False, **options
        )
        for name, metrics, y_label, options in RL_CURVES
    ]  # fmt: skip
    rows = [(run_row(group, run)[:-1], *_link(run, output)) for group in groups for run in group.runs]
    names = legend([Series(group.label, [(0.0, 0.0)], number) for number, group in enumerate(drawn, 1)])
    return write_page(
        output, "runs.html", title, groups=groups, success_curves=cards, curves=small, rows=rows, note=_note(groups), legend=Markup(names),
        pooled_rows=pooled_rows, pooled_columns=POOLED_COLUMNS, run_columns=RUN_COLUMNS, intervals=INTERVALS,
        pairs=compared_pairs(groups), keys=differing_keys([group.settings for group in groups]), override_text=override_text,
    )  # fmt: skip


def compared_pairs(groups: Sequence[RunGroup]) -> list[tuple[str, str, Json | str]]:
    """Return names and paired comparisons of single runs: all pairs for up to three runs, otherwise each run with the first.

    The evaluations on fresh episodes are compared if both runs have one, otherwise the last ones. The comparison is as in
    ``compare.json``, or the reason as text if two runs cannot be compared.
    """
    closed = [(group.label, [run for run in group.counted if closing_evaluation(run) is not None]) for group in groups]
    single = [(label, runs[0]) for label, runs in closed if len(runs) == 1]
    pairs = itertools.combinations(single, 2) if len(single) <= 3 else ((single[0], other) for other in single[1:])
    comparisons: list[tuple[str, str, Json | str]] = []
    for (name_a, run_a), (name_b, run_b) in pairs:
        both = [run_a.fresh, run_b.fresh]
        a, b = map(closing_evaluation, (run_a, run_b)) if None in both else both
        try:
            comparisons.append((name_a, name_b, compare(a.result, b.result).as_dict()))
        except (ConfigError, ManifestMismatchError) as error:
            comparisons.append((name_a, name_b, str(error).partition(". ")[0]))
    return comparisons


def curve(group: RunGroup, metric: str, x: str) -> Series:
    """Return the mean of a metric over a group's counted runs, with its 95 % interval.

    ``x`` is ``step``, or the mean of ``env_steps`` or ``minutes`` over the runs.
    """
    by_step = [lines for run in group.counted if (lines := measured(run, metric))]
    # Only use iterations that all of these runs have, so that a run that ended early does not bend the curve.
    steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
    points, bands = [], []
    for step in steps:
        lines = [lines[step] for lines in by_step]
        mean, low, high = mean_interval([line[metric] for line in lines])
        points.append((sum(line[x] for line in lines) / len(lines), mean))
        if len(lines) == 1:  # for a single seed, the interval is over its episodes
            low, high = (lines[0].get(name) for name in EPISODE_INTERVALS.get(metric, ("", "")))
        bands.append(None if low is None or high is None else (low, high))
    label = f"{group.label} ({len(by_step)} seeds)" if len(by_step) > 1 else group.label
    return Series(label, points, bands=bands, markers=len(points) < 30, filled=True)


def measured(run: RunData, metric: str) -> dict[int, Json]:
    """Return a run's RL metrics that contain ``metric``, with its axes, by step."""
    lines = (line for line in with_axes(run.lines) if line["phase"] == "rl" and line.get(metric) is not None)
    return {line["step"]: line for line in lines}


def seed_curves(group: RunGroup, metric: str, x: str) -> list[Series]:
    """Return a thin curve of a metric for each of a group's counted runs; empty for a single run."""
    return [
        Series(f"seed {seed_of(run)}", [(line[x], line[metric]) for line in measured(run, metric).values()], thin=True)
        for run in group.counted
        if len(group.counted) > 1
    ]


def _series(groups: Sequence[RunGroup], metric: str, x: str) -> list[Series]:
    """Return each group's mean curve in its own colour, after the curves of its seeds."""
    curves = []
    for colour, group in enumerate(groups, 1):
        seeds = seed_curves(group, metric, x)
        if len(groups) > 1:  # too many for the box on hover
            seeds = [replace(series, label="") for series in seeds]
        curves += [replace(series, colour=colour) for series in (*seeds, curve(group, metric, x))]
    return curves


def _note(groups: Sequence[RunGroup]) -> str:
    note = [
        "Thick curves show the mean over a configuration's seeds at their common iterations, thin ones each seed. Areas show the 95 % interval over seeds "
        "(Student's t) or, for a single seed, over the episodes of an evaluation."
    ]
    if len(groups) > NUM_COLOURS:
        note.append(f"Only the first {NUM_COLOURS} of {len(groups)} configurations are drawn.")
    return " ".join([*note, *repeated_seeds(groups)])


def _link(run: RunData, output: Path) -> tuple[str, str]:
    """Return the path from the page to a run's folder, and to its report ("" if missing)."""
    relative = os.path.relpath(run.folder.resolve(), output.resolve().parent)
    return relative, f"{relative}/{REPORT_FILE}" if (run.folder / REPORT_FILE).is_file() else ""
