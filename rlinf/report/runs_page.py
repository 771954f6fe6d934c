"""Write a page about several runs: one curve per configuration, the mean over its seeds with the 95 % interval."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlinf.evaluation.intervals import mean_interval
from rlinf.number_formats import format_interval
from rlinf.report.charts import NUM_COLOURS, SMALL, Series
from rlinf.report.page import card, write_page
from rlinf.report.run_data import RunData
from rlinf.report.run_page import RL_CURVES, with_axes
from rlinf.report.runs import RunGroup, closing_evaluation, group_runs, rates_in_words, repeated_seeds, seed_in_words
from rlinf.run_folder import REPORT_FILE

SUCCESS_CURVES = (
    ("Success of evaluations against env steps", "eval/success_rate", "env_steps", "env steps"),
    ("Success of evaluations against training time", "eval/success_rate", "minutes", "training time (minutes)"),
    ("Success of rollouts against env steps", "rollout/success_rate", "env_steps", "env steps"),
)
"""Title, metric, x axis and its label."""


def write_runs_report(runs: Sequence[RunData], output: str | os.PathLike) -> Path:
    """Write the page to ``output``, replacing it, and return its path; at most ``NUM_COLOURS`` configurations are drawn."""
    output, groups = Path(output), group_runs(runs)
    drawn = groups[:NUM_COLOURS]
    title = f"{len(runs)} runs of {len(groups)} configuration{'s' if len(groups) > 1 else ''}"
    cards = [
        card(name, _series(drawn, metric, x), x_label, "success rate", percent=True)
        for name, metric, x, x_label in SUCCESS_CURVES
    ]
    small = [
        card(name, _series(drawn, next(iter(metrics)), "step"), "RL iteration", y_label, size=SMALL, **options)
        for name, metrics, y_label, options in RL_CURVES
    ]
    rows = [_run_row(group, run, output) for group in groups for run in group.runs]
    return write_page(
        output, "runs.html", title, groups=groups, success_curves=cards, curves=small, rows=rows, note=_note(groups),
        rates_in_words=rates_in_words, mean_interval=mean_interval,
    )  # fmt: skip


def curve(group: RunGroup, metric: str, x: str) -> Series:
    """Return the mean of a metric over the counted runs of a group with its 95 % interval.

    Only RL iterations that all runs with this metric have are drawn, so that a run that ended early does not bend the curve.
    ``x`` is ``step``, or the mean over the runs of ``env_steps`` or ``minutes``.
    """
    found = [
        {line["step"]: line for line in with_axes(run.lines) if line["phase"] == "rl" and line.get(metric) is not None}
        for run in group.counted
    ]
    found = [lines for lines in found if lines]
    steps = sorted(set.intersection(*map(set, found))) if found else []
    points, bands = [], []
    for step in steps:
        lines = [lines[step] for lines in found]
        mean, low, high = mean_interval([line[metric] for line in lines])
        points.append((sum(line[x] for line in lines) / len(lines), mean))
        bands.append((low, high) if len(lines) > 1 else None)
    label = f"{group.label} ({len(found)} seed{'s' if len(found) > 1 else ''})"
    return Series(label, points, bands=bands, markers=len(points) < 30, filled=True)


def _series(groups: Sequence[RunGroup], metric: str, x: str) -> list[Series]:
    found = [curve(group, metric, x) for group in groups]
    for number, series in enumerate(found, 1):
        series.colour = number
    return found


def _note(groups: Sequence[RunGroup]) -> str:
    sentences = [
        "A curve is the mean over the seeds of a configuration at the iterations that all of them have; the area is its 95 % "
        "interval (Student's t), cut at the ends of the axis."
    ]
    if len(groups) > NUM_COLOURS:
        sentences.append(f"The first {NUM_COLOURS} of {len(groups)} configurations are drawn.")
    return " ".join([*sentences, *repeated_seeds(groups)])


def _run_row(group: RunGroup, run: RunData, output: Path) -> tuple[str, ...]:
    """Return label, seed, success, interval and folder of a run, and its page if there is one."""
    closing = closing_evaluation(run)
    total = None if closing is None else closing.result.total
    numbers = ("-", "-") if total is None else (str(total), format_interval(*total.interval))
    relative = os.path.relpath(run.folder.resolve(), output.resolve().parent)
    page = f"{relative}/{REPORT_FILE}" if (run.folder / REPORT_FILE).is_file() else ""
    return group.label, seed_in_words(group, run), *numbers, relative, page
