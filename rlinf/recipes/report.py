"""Write the report for a recipe's run or an evaluation on questions, as a single HTML file."""

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from rlinf.evaluation.compare import Comparison, Pairs
from rlinf.evaluation.result import Success
from rlinf.files import Json
from rlinf.number_formats import format_duration
from rlinf.recipes.questions_result import QuestionsResult, compare_questions
from rlinf.recipes.report_data import TokenRun, is_token_folder, read_token_run
from rlinf.recipes.why import read_record, record_of
from rlinf.report.page import Curves, card, curve_cards, series_of, write_page
from rlinf.report.run_data import RunFolders
from rlinf.report.why.rules import diagnose
from rlinf.run_folder import REPORT_FILE, SAFETENSORS_FOLDER

MAX_COMPLETIONS = 40
"""Maximum number of completions on the page; the run's files contain all of them."""

CURVES: Curves = (
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
        "Truncated completions", {"rollout/truncated_fraction": "training", "eval/truncated_fraction": "validation"},
        "fraction of completions", {"zero": True},
    ),
    ("Std of rewards", {"rollout/reward_std": "std"}, "reward", {"zero": True}),
    (
        "Groups with equal rewards", {"rollout/zero_variance_group_fraction": "equal rewards"}, "fraction of groups",
        {"zero": True},
    ),
    (
        "KL", {"train/approx_kl": "old to new policy", "train/kl_to_reference": "policy to reference"}, "KL (nat)",
        {"zero": True},
    ),
    ("Entropy", {"sft/entropy": "entropy", "train/entropy": "entropy"}, "entropy (nat)", {}),
    ("Clip fraction", {"train/clip_fraction": "clip fraction"}, "fraction of ratios", {"zero": True}),
    ("Gap between generator and trainer", {"rollout/logprob_gap_mean": "mean"}, "|difference| (nat)", {"log": True}),
    (
        "Preference accuracy", {"train/preference_accuracy": "training", "eval/preference_accuracy": "validation"},
        "fraction of pairs", {"percent": True},
    ),
    (
        "Truncated rows and equal pairs",
        {"sft/truncated_row_fraction": "truncated", "train/truncated_row_fraction": "truncated", "train/equal_pair_fraction": "equal pairs"},
        "fraction of rows", {"zero": True},
    ),
    ("Implicit rewards", {"train/preference_chosen": "chosen", "train/preference_rejected": "rejected"}, "nat", {}),
    ("Throughput", {"throughput/tokens_per_s": "tokens"}, "tokens/s", {"zero": True}),
    ("Model FLOPs utilisation", {"throughput/mfu": "MFU"}, "fraction of peak", {"percent": True}),
    ("Time per step", {"time/update_s": "step"}, "s", {"zero": True}),
)  # fmt: skip
"""Curves over optimiser steps."""


def write_token_report(folder: str | os.PathLike) -> Path:
    """Write ``report.html`` into the folder of a recipe's run or an evaluation on questions, and return its path."""
    run = read_token_run(folder)
    title, tiles = _title(run), {}
    if run.before_and_after is None and run.samples:  # without an earlier validation for comparison
        last = run.samples[-1]
        tiles = {f"{part}, {last.name}": success for part, success in last.successes().items()}
    newest = next(reversed(run.results.values()), None)
    return write_page(
        run.folder / REPORT_FILE, "recipe.html", f"{title}: {newest.total}" if newest else title, title=title, run=run,
        facts=_facts(run), gains=_gains(run), tiles=tiles, findings=diagnose(record_of(run)) if run.lines else None, rewards=_rewards(run),
        curves=curve_cards(run.lines, "steps", "step", CURVES), stored=_stored, max_completions=MAX_COMPLETIONS, **_completions(run),
        versions=json.loads(run.manifest).get("versions", {}) if run.manifest else {},
    )  # fmt: skip


def _title(run: TokenRun) -> str:
    name = run.setting("logging.experiment_name")
    if run.lines:
        place = run.folder.resolve()
        return f"{place.parent.name if name in (None, '', 'None') else name}/{place.name}"
    result = next(iter(run.results.values()))
    source = Path(run.setting("checkpoint") or run.folder)
    model = source.parents[1].name if source.parent.name == SAFETENSORS_FOLDER else source.name
    return f"{model} on {Path(result.file).name}"


def _facts(run: TokenRun) -> Json:
    steps = max((line["steps"] for line in run.lines), default=None)
    seconds = next((line["time/total_s"] for line in reversed(run.lines) if "time/total_s" in line), None)
    results = list(run.results.values())
    sampling = {"greedy" if result.temperature == 0 else f"temperature {result.temperature:g}" for result in results}
    return {
        "method": run.setting("train.train_policy.type"), "model": run.setting("policy.model_name_or_path"),
        "dataset": run.setting("train.train_policy.dataset.name"), "steps": steps,
        "training time": None if seconds is None else format_duration(seconds),
        "seed": run.setting("train.seed"), "checkpoint": run.setting("checkpoint"), "best checkpoint": run.best,
        "questions": results[0].file if len(results) == 1 else None,
        "answers": sampling.pop() if len(sampling) == 1 else None,
    }  # fmt: skip


def _gains(run: TokenRun) -> list[tuple[str, tuple[str, Success], tuple[str, Success], Pairs]]:
    """Return each binary reward before and after training, with the paired comparison."""
    if run.before_and_after is None:
        return []
    first, last = run.before_and_after
    before, after = first.successes(), last.successes()
    return [
        (part, (first.name, before[part]), (last.name, after[part]), pairs)
        for part in after
        if (pairs := run.paired(part)) is not None
    ]


def _rewards(run: TokenRun) -> list[Markup]:
    """Return charts of the total reward and each of its parts, in training and validation."""
    names = dict.fromkeys(
        name.split("/", 1)[1] for line in run.lines for name in line
        if name.startswith(("rollout/reward_mean", "eval/reward_mean"))
    )  # fmt: skip
    if len(names) == 2:  # a single part equals the sum up to its weight
        del names["reward_mean"]
    return [_reward_card(run, name) for name in names]


def _reward_card(run: TokenRun, name: str) -> Markup:
    part = name.partition("/")[2]
    training = series_of(run.lines, "steps", [f"rollout/{name}"], "training (sampled)", 3)
    validation = series_of(run.lines, "steps", [f"eval/{name}"], "validation (most likely tokens)", 1)
    counted = {samples.step: samples.successes().get(part) for samples in run.samples}
    known = [counted.get(round(x)) for x, _ in validation.points]
    validation.bands = [None if success is None else success.interval for success in known]
    validation.markers = True
    values = [y for series in (training, validation) for _, y in series.points if y is not None]
    percent = all(0 <= value <= 1 for value in values) and bool(part)
    return card(f"Reward {part}" if part else "Reward", [training, validation], "step", "mean reward", percent=percent)


def _completions(run: TokenRun) -> Json:
    """Return the validations to show side by side (first and last, or only the last), and the order of their prompts."""
    shown = list(run.before_and_after or run.samples[-1:])
    rewards = [[row["reward"] for row in samples.rows] for samples in shown]
    changed = [len(set(values)) > 1 for values in zip(*rewards, strict=True)]
    order = sorted(range(len(changed)), key=lambda number: not changed[number])
    return {"shown": shown, "order": order, "num_changed": sum(changed)}


def _stored(folder: Path, names: Sequence[str]) -> list[str]:
    """Return a prompt's images encoded in base64, for embedding in the page."""
    files = (folder / name for name in names)
    return [base64.b64encode(file.read_bytes()).decode() for file in files if file.is_file()]


def _compare(first: Path, second: Path, allow_mismatch: Sequence[str]) -> Comparison:
    return compare_questions(QuestionsResult.from_json(first), QuestionsResult.from_json(second), allow_mismatch)


RUN_FOLDERS = RunFolders("a run of a recipe", is_token_folder, write_token_report, read_record, _compare)
