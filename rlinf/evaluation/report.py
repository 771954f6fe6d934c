"""The report of a run: one HTML file with headline, curves, tasks, videos, configuration and manifest.

It needs nothing but the run folder: no script, no font and no picture from elsewhere. Videos are linked by relative
paths, so the folder can be moved or served as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlinf.errors import CheckpointError
from rlinf.evaluation.charts import SMALL, Series, interval_bar, legend, line_chart
from rlinf.evaluation.report_style import CSS
from rlinf.evaluation.result import EvaluationResult, Success
from rlinf.files import write_text
from rlinf.tracking.progress import format_duration
from rlinf.tracking.tracker import read_metrics

REPORT_FILE = "report.html"
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
        config, manifest: Texts of ``config.yaml`` and ``manifest.json``, of the run or else of its newest checkpoint.
    """

    folder: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    manifest: str = ""

    def evaluation(self, *tags: str) -> Evaluation | None:
        """Return the first of the tags that there is."""
        found = {one.tag: one for one in self.evaluations}
        return next((found[tag] for tag in tags if tag in found), None)


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
            f"{folder} is no run folder: it has neither metrics.jsonl nor eval/*/result.json nor result.json."
        )
    if (folder / "summary.json").exists():
        data.summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    newest_first = sorted(folder.glob("checkpoints/*/state.json"), key=lambda path: -path.stat().st_mtime)
    places = [folder, *(path.parent for path in newest_first)]
    for name in ("config", "manifest"):
        file = {"config": "config.yaml", "manifest": "manifest.json"}[name]
        found = next((place / file for place in places if (place / file).exists()), None)
        if found is not None:
            setattr(data, name, found.read_text(encoding="utf-8"))
    return data


def write_report(run_folder: str | os.PathLike) -> Path:
    """Write ``report.html`` into a run folder, from what lies there.

    Args:
        run_folder: Folder with ``metrics.jsonl``, ``eval/<tag>/result.json``, ``config.yaml``, ``manifest.json`` and
            ``summary.json``, or of an evaluation (``result.json``); what is missing is left out of the page.

    Returns:
        The path of the report.

    Raises:
        CheckpointError: The folder has neither metrics nor an evaluation.
    """
    data = read_run(run_folder)
    title = str(data.summary.get("experiment") or data.folder.resolve().name)
    parts = (_headline, _success_curves, _tasks, _all_evaluations, _gallery, _training_curves, _texts)
    sections = [_header(title, data), *(part(data) for part in parts)]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - rlinf report</title><style>{CSS}</style></head><body><main>"
        f"{''.join(sections)}</main></body></html>\n"
    )
    return write_text(data.folder / REPORT_FILE, page)


def _header(title: str, data: RunData) -> str:
    config = _yaml(data.config)
    facts = {
        "model": _get(config, "model", "model_type"), "env": _get(config, "env", "name"),
        "algorithm": _get(config, "algorithm", "name"), "seed": data.summary.get("seed", config.get("seed")),
        "env steps": f"{data.summary['env_steps']:,}" if "env_steps" in data.summary else None,
        "training time": format_duration(data.summary["train_wall_s"]) if "train_wall_s" in data.summary else None,
    }  # fmt: skip
    chips = "".join(
        f"<span>{name} <b>{escape(str(value))}</b></span>" for name, value in facts.items() if value is not None
    )
    return f'<header><h1>{escape(title)}</h1><div class="facts">{chips}</div></header>'


def _headline(data: RunData) -> str:
    before = data.evaluation("before_rl", "after_sft", "before_training")
    after = data.evaluation("after_rl")
    if after is None:
        last = data.evaluations[-1] if data.evaluations else None
        tiles = [_tile(f"Success {last.name}", last.result.total, 1)] if last else []
        return f'<section class="headline">{"".join(tiles)}</section>' if tiles else ""
    tiles = []
    if before is not None:
        tiles.append(_tile(f"Success {before.name}", before.result.total, 2))
    tiles.append(_tile("Success after RL", after.result.total, 1))
    if before is not None:
        gain = 100 * (after.result.success_rate - before.result.success_rate)
        apart = (
            after.result.interval[0] > before.result.interval[1] or before.result.interval[0] > after.result.interval[1]
        )
        verdict = "the 95 % intervals do not overlap" if apart else "the 95 % intervals overlap"
        tiles.append(
            f'<div class="card"><div class="name">Gain by RL</div><div class="value">{gain:+.1f}</div>'
            f'<div class="detail">percentage points; {verdict}</div></div>'
        )
    return f'<section class="headline">{"".join(tiles)}</section>'


def _tile(name: str, success: Success, colour: int) -> str:
    low, high = success.interval
    return (
        f'<div class="card"><div class="name">{escape(name)}</div><div class="value">{success.success_rate:.1%}</div>'
        f'<div class="detail">{success.successes}/{success.episodes} episodes, '
        f"95 % interval {low:.1%} to {high:.1%}</div>"
        f"{interval_bar(success.success_rate, low, high, colour)}</div>"
    )


def _success_curves(data: RunData) -> str:
    lines = _with_axes(data.lines)
    rl = [line for line in lines if line["phase"] == "rl"]
    cards = []
    for title, shown, x, x_label in (
        ("Success against env steps", rl, "env_steps", "env steps"),
        ("Success against training time", lines, "minutes", "training time (minutes)"),
    ):
        # Rollouts sample their actions and evaluations do not, so the two differ for the same policy.
        rollouts = _series(shown, x, "rollout/success_rate", "rollouts (sampled, training episodes)", 3)
        cards.append(_card(title, [rollouts, _evaluated(shown, x)], x_label, "success rate", percent=True))
    return f'<section class="charts first">{"".join(cards)}</section>' if any(cards) else ""


RL_CURVES: tuple[tuple[str, dict[str, str], str, dict[str, bool]], ...] = (
    ("Return", {"rollout/return_mean": "return"}, "return", {}),
    ("Episode length", {"rollout/episode_len": "length"}, "env steps", {"zero": True}),
    ("Policy loss", {"train/policy_loss": "policy loss"}, "policy loss", {}),
    ("Value loss", {"train/value_loss": "value loss"}, "value loss", {"zero": True}),
    (
        "KL",
        {"train/approx_kl": "old to new policy", "train/kl_to_reference": "policy to reference"},
        "KL (nat)",
        {"zero": True},
    ),
    ("Entropy", {"train/entropy": "entropy"}, "entropy (nat)", {}),
    ("Clip fraction", {"train/clip_fraction": "clip fraction"}, "share of ratios", {"zero": True}),
    (
        "Parity gap: rollout and trainer log-probs",
        {"rollout/logprob_gap_max": "largest", "rollout/logprob_gap_mean": "mean"}, "|difference| (nat)", {"log": True},
    ),
    ("Explained variance of the critic", {"train/explained_variance": "explained variance"}, "explained variance", {}),
    ("Gradient norm", {"train/grad_norm": "gradient norm"}, "norm before clipping", {"zero": True}),
    ("Throughput", {"throughput/env_steps_per_s": "env steps"}, "env steps/s", {"zero": True}),
)  # fmt: skip
"""Title, metric to label, y axis and options of each curve over RL iterations."""


def _training_curves(data: RunData) -> str:
    sft = [line for line in data.lines if line["phase"] == "sft"]
    rl = [line for line in data.lines if line["phase"] == "rl"]
    cards = [
        _card(
            "Behaviour cloning loss",
            [_series(sft, "step", "sft/loss", "loss", 2)],
            "SFT step",
            "loss (nat)",
            size=SMALL,
        )
    ]
    for title, names, y_label, options in RL_CURVES:
        shown = [_series(rl, "step", name, label, 1 + number) for number, (name, label) in enumerate(names.items())]
        cards.append(_card(title, shown, "RL iteration", y_label, size=SMALL, **options))
    return f'<h2>Training curves</h2><section class="charts small">{"".join(cards)}</section>' if any(cards) else ""


def _with_axes(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every line ``env_steps`` of RL and training ``minutes``, carried forward from the line before."""
    found, env_steps, seconds = [], 0.0, 0.0
    for line in lines:
        env_steps = line.get("rollout/env_steps_total") or env_steps
        seconds = line.get("time/total_s") or seconds
        found.append({**line, "env_steps": env_steps, "minutes": seconds / 60})
    return found


def _series(lines: Sequence[dict[str, Any]], x: str, name: str, label: str, colour: int) -> Series:
    return Series(label, [(line[x], line[name]) for line in lines if name in line], colour)


def _evaluated(lines: Sequence[dict[str, Any]], x: str) -> Series:
    found = [line for line in lines if line.get("eval/success_rate") is not None]
    bands = [(line["eval/interval_low"], line["eval/interval_high"]) for line in found]
    return Series(
        "evaluation (held-out episodes)",
        [(line[x], line["eval/success_rate"]) for line in found],
        1,
        bands,
        markers=True,
    )


def _card(title: str, series: Sequence[Series], x_label: str, y_label: str, **options: Any) -> str:
    chart = line_chart(series, x_label=x_label, y_label=y_label, **options)
    return f'<div class="card"><h3>{escape(title)}</h3>{legend(series)}{chart}</div>' if chart else ""


def _tasks(data: RunData) -> str:
    shown = [
        one
        for one in (data.evaluation("before_rl", "after_sft", "before_training"), data.evaluation("after_rl"))
        if one
    ]
    shown = shown or data.evaluations[-1:]
    if not shown:
        return ""
    colours = [1] if len(shown) == 1 else [2, 1]
    tasks = list(dict.fromkeys(task for one in shown for task in one.result.per_task))
    rows = [(task, [one.result.per_task.get(task) for one in shown], "") for task in tasks]
    if len(tasks) > 1:
        rows.append(("all tasks", [one.result.total for one in shown], ' class="total"'))
    head = "".join(f"<th>{escape(one.name)}</th>" for one in shown) + ("<th>gain</th>" if len(shown) > 1 else "")
    body = []
    for task, successes, style in rows:
        cells = "".join(_success_cell(success, colour) for success, colour in zip(successes, colours, strict=True))
        if len(successes) > 1:
            gain = f"{100 * (successes[1].success_rate - successes[0].success_rate):+.1f}" if all(successes) else ""
            cells += f"<td>{gain}</td>"
        body.append(f'<tr{style}><td class="wrap">{escape(task)}</td>{cells}</tr>')
    return (
        f'<h2>Success per task</h2><div class="card scroll"><table><thead><tr><th>task</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
        '<p class="note">Held-out episodes, each run once; bars are 95 % Wilson intervals.</p>'
    )


def _success_cell(success: Success | None, colour: int) -> str:
    if success is None:
        return "<td>not run</td>"
    low, high = success.interval
    return (
        f"<td>{interval_bar(success.success_rate, low, high, colour)} <small>{success.success_rate:.1%} "
        f"({success.successes}/{success.episodes}, {low:.1%} to {high:.1%})</small></td>"
    )


def _all_evaluations(data: RunData) -> str:
    if len(data.evaluations) < 3:
        return ""
    rows = "".join(
        f'<tr><td class="wrap">{escape(one.name)}</td>{_success_cell(one.result.total, 1)}'
        f"<td>{'greedy' if one.result.greedy else 'sampled'}</td></tr>"
        for one in data.evaluations
    )
    return (
        f'<details class="card"><summary>All {len(data.evaluations)} evaluations</summary><div class="scroll"><table>'
        f"<thead><tr><th>evaluation</th><th>success</th><th>actions</th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _gallery(data: RunData) -> str:
    parts = []
    for one in reversed(data.evaluations):
        figures = []
        for video in one.result.videos:
            source = quote(video["path"] if one.folder == "." else f"{one.folder}/{video['path']}")
            badge = (
                '<span class="badge yes">success</span>'
                if video["success"]
                else '<span class="badge no">failure</span>'
            )
            figures.append(
                f'<figure class="card"><video controls muted loop playsinline preload="metadata" src="{source}">'
                f"</video><figcaption><span>{escape(video['instruction'])}<small>{escape(video['task'])}</small></span>{badge}</figcaption></figure>"
            )
        if figures:
            name = one.name[:1].upper() + one.name[1:]
            parts.append(f'<h4>{escape(name)}</h4><div class="gallery">{"".join(figures)}</div>')
    if not parts:
        return ""
    note = '<p class="note">The first success and the first failure of each task, where there is one.</p>'
    return f"<h2>Videos</h2>{note}{''.join(parts)}"


def _texts(data: RunData) -> str:
    blocks = [
        f'<details class="card"><summary>{name}</summary><pre>{escape(text)}</pre></details>'
        for name, text in (("Configuration", data.config), ("Manifest", data.manifest)) if text
    ]  # fmt: skip
    return f"<h2>Configuration and manifest</h2>{''.join(blocks)}" if blocks else ""


def _yaml(text: str) -> dict[str, Any]:
    if not text:
        return {}
    import yaml

    return yaml.safe_load(text) or {}


def _get(config: dict[str, Any], section: str, key: str) -> Any:
    return (config.get(section) or {}).get(key)
