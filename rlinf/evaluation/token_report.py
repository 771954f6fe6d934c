"""Write the report of a recipe's run, or of an evaluation on questions: one HTML file, as ``rlinf.evaluation.report``."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlinf.evaluation.answers import Answer
from rlinf.evaluation.charts import NUM_COLOURS, SMALL, Series
from rlinf.evaluation.finding_rules import findings_section
from rlinf.evaluation.findings import record_of
from rlinf.evaluation.report_data import REPORT_FILE
from rlinf.evaluation.report_page import (
    card,
    charts,
    comparisons,
    gain_tile,
    header,
    page,
    profile,
    row,
    success_cell,
    table,
    texts,
    tile,
    training_curves,
    warning_card,
)
from rlinf.evaluation.token_data import SAMPLES_FOLDER, TokenRun, read_token_run
from rlinf.files import write_text
from rlinf.number_formats import format_bytes, format_duration, format_number, format_p_value, format_points

MAX_COMPLETIONS = 40
"""Completions on the page; the files of the run hold all."""

CURVES: tuple[tuple[str, dict[str, str], str, dict[str, bool]], ...] = (
    (
        "Loss", {"sft/loss": "training", "train/loss": "training", "eval/loss": "validation"}, "loss (nat)", {},
    ),
    ("Learning rate", {"sft/learning_rate": "learning rate", "train/learning_rate": "learning rate"}, "learning rate", {}),
    (
        "Gradient norm", {"sft/grad_norm": "gradient norm", "train/grad_norm": "gradient norm"}, "norm before clipping",
        {"zero": True},
    ),
    ("Completion length", {"rollout/completion_length_max": "longest", "rollout/completion_length_mean": "mean",
                           "eval/completion_length_mean": "mean, validation"}, "tokens", {"zero": True}),
    (
        "Cut completions", {"rollout/truncated_fraction": "training", "eval/truncated_fraction": "validation"},
        "share without an end", {"zero": True},
    ),
    ("Spread of rewards", {"rollout/reward_std": "standard deviation"}, "reward", {"zero": True}),
    (
        "Groups with equal rewards", {"rollout/zero_variance_group_fraction": "equal rewards"}, "share of groups",
        {"zero": True},
    ),
    (
        "KL", {"train/approx_kl": "old to new policy", "train/kl_to_reference": "policy to reference"}, "KL (nat)",
        {"zero": True},
    ),
    ("Entropy", {"sft/entropy": "entropy", "train/entropy": "entropy"}, "entropy (nat)", {}),
    ("Clip fraction", {"train/clip_fraction": "clip fraction"}, "share of ratios", {"zero": True}),
    ("Gap of generator and trainer", {"rollout/logprob_gap_mean": "mean"}, "|difference| (nat)", {"log": True}),
    (
        "Preference accuracy", {"train/preference_accuracy": "training", "eval/preference_accuracy": "validation"},
        "share of pairs", {"percent": True},
    ),
    ("Implicit rewards", {"train/preference_chosen": "chosen", "train/preference_rejected": "rejected"}, "nat", {}),
    ("Throughput", {"throughput/tokens_per_s": "tokens"}, "tokens/s", {"zero": True}),
    ("Model FLOPs utilisation", {"throughput/mfu": "MFU"}, "share of the peak", {"percent": True}),
    ("Time of a step", {"time/update_s": "step"}, "s", {"zero": True}),
)  # fmt: skip
"""Title, metric to label, y axis and options of each curve over steps. Metrics of equal label are one curve."""


def write_token_report(folder: str | os.PathLike) -> Path:
    """Write ``report.html`` into the folder of a recipe's run or an evaluation on questions, and return its path.

    Raise CheckpointError if the folder has neither metrics nor a result.
    """
    run = read_token_run(folder)
    title = _title(run)
    sections = [
        _header(title, run), _headline(run), _warnings(run), findings_section(record_of(run)), _rewards(run), _categories(run),
        comparisons(run.comparison), _before_and_after(run), _answers(run), _training_curves(run), profile(run.traces, None),
        _checkpoints(run), _versions(run), texts(run.config, run.manifest),
    ]  # fmt: skip
    newest = next(reversed(run.results.values()), None)
    return write_text(run.folder / REPORT_FILE, page(f"{title}: {newest.total}" if newest else title, sections))


def _title(run: TokenRun) -> str:
    name = run.setting("logging.experiment_name")
    if run.lines:
        place = run.folder.resolve()
        return f"{place.parent.name if name in (None, '', 'None') else name}/{place.name}"
    result = next(iter(run.results.values()))
    source = Path(run.setting("checkpoint") or run.folder)
    model = source.parents[1].name if source.parent.name == "safetensors" else source.name
    return f"{model} on {Path(result.file).name}"


def _header(title: str, run: TokenRun) -> str:
    steps = max((line["steps"] for line in run.lines), default=None)
    seconds = next((line["time/total_s"] for line in reversed(run.lines) if "time/total_s" in line), None)
    results = list(run.results.values())
    sampling = {"greedy" if one.temperature == 0 else f"temperature {one.temperature:g}" for one in results}
    return header(title, {
        "method": run.setting("train.train_policy.type"), "model": run.setting("policy.model_name_or_path"),
        "dataset": run.setting("train.train_policy.dataset.name"), "steps": steps,
        "training time": None if seconds is None else format_duration(seconds),
        "seed": run.setting("train.seed"), "checkpoint": run.setting("checkpoint"),
        "questions": results[0].file if len(results) == 1 else None,
        "answers": sampling.pop() if len(sampling) == 1 else None,
    })  # fmt: skip


def _headline(run: TokenRun) -> str:
    tiles = []
    if run.before_and_after is not None:
        first, last = run.before_and_after
        for part, success in last.successes().items():
            paired = run.paired(part)
            if paired is None:
                continue
            tiles += [
                tile(f"{part}, {first.name}", first.successes()[part], 2, "answers"),
                tile(f"{part}, {last.name}", success, 1, "answers"),
                gain_tile(
                    f"Gain in {part}", paired.difference,
                    f"percentage points, 95 % interval {format_points(*paired.interval)}; {paired.only_b} of the same "
                    f"{paired.episodes} prompts were right only {last.name} and {paired.only_a} only {first.name}: "
                    f"{format_p_value(paired.p_value)} (McNemar)",
                ),
            ]  # fmt: skip
    elif run.samples:
        last = run.samples[-1]
        tiles = [tile(f"{part}, {last.name}", one, 1, "answers") for part, one in last.successes().items()]
    for name, result in run.results.items():
        tiles.append(tile(f"Correct answers, {name}" if name else "Correct answers", result.total, 3, "questions"))
    return f'<section class="headline">{"".join(tiles)}</section>' if tiles else ""


def _warnings(run: TokenRun) -> str:
    return warning_card([warning for result in run.results.values() for warning in result.warnings])


def _rewards(run: TokenRun) -> str:
    """Return a chart for the sum of rewards, and one for each part: of training, and of validations with intervals."""
    names = dict.fromkeys(
        name.split("/", 1)[1] for line in run.lines for name in line
        if name.startswith(("rollout/reward_mean", "eval/reward_mean"))
    )  # fmt: skip
    if len(names) == 2:  # the only part is the sum, but for its weight
        del names["reward_mean"]
    return charts([_reward_card(run, name) for name in names])


def _reward_card(run: TokenRun, name: str) -> str:
    part = name.partition("/")[2]
    training = _series(run, [f"rollout/{name}"], "training (sampled)", 3)
    validation = _series(run, [f"eval/{name}"], "validation (most likely tokens)", 1)
    counted = {samples.step: samples.successes().get(part) for samples in run.samples}
    known = [counted.get(round(x)) for x, _ in validation.points]
    validation.bands = [None if one is None else one.interval for one in known]
    validation.markers = True
    values = [y for one in (training, validation) for _, y in one.points if y is not None]
    percent = all(0 <= value <= 1 for value in values) and bool(part)
    return card(f"Reward {part}" if part else "Reward", [training, validation], "step", "mean reward", percent=percent)


def _categories(run: TokenRun) -> str:
    parts = []
    for name, result in run.results.items():
        rows = [row(category, [success_cell(one, 1)]) for category, one in result.per_category.items()]
        if len(rows) > 1:
            rows.append(row("all questions", [success_cell(result.total, 1)], "total"))
        found = sum(answer.found is None for answer in result.answers)
        cut = sum(answer.is_cut for answer in result.answers)
        note = (
            f"{result.file}: {found} completions hold no answer of the asked form, {cut} were cut at the largest length. The "
            "intervals are 95 % Wilson intervals."
        )
        heading = f"Correct answers{f', {name}' if name else ''}"
        parts.append(
            f"<h2>{escape(heading)}</h2>{table(('category', 'correct'), rows, 'card scroll')}"
            f'<p class="note">{escape(note)}</p>'
        )
    return "".join(parts)


def _before_and_after(run: TokenRun) -> str:
    """Return the completions of the first and the last validation side by side, or the last ones alone."""
    if run.before_and_after is None:
        if not run.samples:
            return ""
        shown = run.samples[-1:]
        order = list(range(len(shown[0].rows)))
    else:
        shown = list(run.before_and_after)
        rewards = [[row["reward"] for row in samples.rows] for samples in shown]
        changed = [after != before for before, after in zip(*rewards, strict=True)]
        order = sorted(range(len(changed)), key=lambda number: not changed[number])
    has_images = any("images" in sample for sample in shown[0].rows)
    columns = ("prompt", *(["images"] if has_images else []), "expected", *(samples.name for samples in shown))
    rows = [
        row(str(shown[0].rows[number]["prompt"]), [
            *_image_cells(run.folder / SAMPLES_FOLDER, shown[0].rows[number].get("images", ()), has_images),
            f'<td class="text">{escape(str(shown[0].rows[number].get("reference") or ""))}</td>',
            *(_completion_cell(samples.rows[number]) for samples in shown),
        ])
        for number in order[:MAX_COMPLETIONS]
    ]  # fmt: skip
    files = " and ".join(f"samples/step_{samples.step}.jsonl" for samples in shown)
    note = f"{len(rows)} of {len(shown[-1].rows)} prompts of the validation"
    if len(shown) > 1:
        note += f", first those whose reward has changed ({sum(changed)})"
    return (
        f"<h2>Completions with their rewards</h2>{table(columns, rows, 'card scroll')}"
        f'<p class="note">{escape(f"{note}. All of them: {files}.")}</p>'
    )


def _image_cells(folder: Path, names: Sequence[str], has_images: bool) -> list[str]:
    """Return the cell with the images of a prompt, in the page itself; none if no prompt has images."""
    if not has_images:
        return []
    files = [folder / name for name in names]
    stored = [base64.b64encode(file.read_bytes()).decode() for file in files if file.is_file()]
    shown = "".join(f'<img src="data:image/jpeg;base64,{each}" alt="image of the prompt">' for each in stored)
    return [f"<td>{shown}</td>"]


def _completion_cell(sample: dict[str, Any]) -> str:
    badges = " ".join(
        f'<span class="badge {"yes" if value > 0 else "no"}">{escape(name)} {format_number(value)}</span>'
        for name, value in sample["rewards"].items()
    )
    return (
        f'<td class="text">{escape(sample["completion"])}<br>{badges} <small>{sample["num_tokens"]} tokens</small></td>'
    )


def _answers(run: TokenRun) -> str:
    """Return questions and answers of an evaluation, the wrong ones first; a run shows its own completions instead."""
    if run.lines:
        return ""
    parts = []
    for result in run.results.values():
        shown = sorted(result.answers, key=lambda answer: answer.is_correct)[:MAX_COMPLETIONS]
        has_images = any(answer.images for answer in shown)
        columns = ("prompt", *(["images"] if has_images else []), "expected", "found", "completion")
        rows = [
            row(answer.prompt, [*_image_cells(run.folder, answer.images, has_images), *_answer_cells(answer)])
            for answer in shown
        ]
        note = f"{len(rows)} of {len(result.answers)} questions, the wrong answers first; result.json holds all."
        parts.append(f'<h2>Answers</h2>{table(columns, rows, "card scroll")}<p class="note">{note}</p>')
    return "".join(parts)


def _answer_cells(answer: Answer) -> list[str]:
    style, word = ("yes", "correct") if answer.is_correct else ("no", "wrong")
    cells = [escape(answer.expected), escape("none" if answer.found is None else answer.found)]
    cells.append(f'{escape(answer.completion)}<br><span class="badge {style}">{word}</span>')
    return [f'<td class="text">{cell}</td>' for cell in cells]


def _training_curves(run: TokenRun) -> str:
    cards = []
    for title, names, y_label, options in CURVES:
        labels = dict.fromkeys(names.values())
        series = [
            _series(run, [name for name, its in names.items() if its == label], label, 1 + number % NUM_COLOURS)
            for number, label in enumerate(labels)
        ]
        cards.append(card(title, series, "step", y_label, size=SMALL, **options))
    return training_curves(cards)


def _series(run: TokenRun, names: Sequence[str], label: str, colour: int) -> Series:
    points = [(float(line["steps"]), line[name]) for line in run.lines for name in names if name in line]
    return Series(label, points, colour)


def _checkpoints(run: TokenRun) -> str:
    rows = [row(name, [f"<td>{format_bytes(size)}</td>"]) for name, size in run.checkpoints.items()]
    return f"<h2>Checkpoints and exports</h2>{table(('folder', 'size'), rows, 'card scroll')}" if rows else ""


def _versions(run: TokenRun) -> str:
    versions = json.loads(run.manifest).get("versions", {}) if run.manifest else {}
    chips = "".join(f"<span>{escape(name)} <b>{escape(str(value))}</b></span>" for name, value in versions.items())
    return f'<h2>Versions</h2><div class="facts">{chips}</div>' if chips else ""
