"""Write the files at the end of a run: its summary, or the batch that caused it to fail."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from rlinf.config.schema import RunConfig
from rlinf.evaluation.result import Success, success_table
from rlinf.files import Json, write_text
from rlinf.report.run_data import reported_lines
from rlinf.report.run_page import write_report
from rlinf.report.why.rules import explain
from rlinf.rollout.parity import EXCEEDED
from rlinf.run_folder import EVALUATIONS_FOLDER, SUMMARY_FILE
from rlinf.tracking.tracker import read_metrics
from rlinf.training.state import LoopState
from rlinf.training.train_worker import FailedBatch

SUMMARY_TAGS = {"success_after_sft": "after_sft", "success_before_rl": "before_rl", "success_after_rl": "after_rl"}
"""Maps keys of ``summary.json`` to the tags of their evaluations."""

SUMMARY_VALUES = (
    "success_rate",
    "successes",
    "episodes",
    "interval",
    "return_mean",
    "return_interval",
    "reports_success",
)


def evaluation_folder(config: RunConfig, tag: str) -> Path:
    """Return an evaluation's folder."""
    return Path(config.output_dir) / EVALUATIONS_FOLDER / tag


def write_summary(
    config: RunConfig,
    state: LoopState,
    saved_names: Collection[str],
    chosen: Json,
    rollout_workers: str | None = None,
) -> None:
    """Write ``summary.json`` and the report for a finished run, and print the closing table.

    Args:
        chosen: Entries of ``rlinf.commands.fresh.evaluate_chosen``.
        rollout_workers: Describes each rank's rollout workers; None without rollouts.
    """
    folder = Path(config.output_dir)
    summary = summary_of(config.experiment_name, config.seed, state, state.best_evaluation(saved_names)) | chosen
    summary["parity_exceeded"] = sum(line.get(EXCEEDED, 0) > 0 for line in read_metrics(folder))
    summary["rollout_workers"] = rollout_workers
    outcome = explain(folder).outcome
    summary["outcome"] = {"verdict": outcome.verdict, "measure": outcome.measure, "text": outcome.text}
    write_text(folder / SUMMARY_FILE, json.dumps(summary, indent=1))
    report, before = write_report(folder), state.evaluations.get("before_rl", {}).get("checkpoint")
    print(closing_table(summary), f"report: {report}", *outcome.made_worse(before), sep="\n", flush=True)


def summary_of(experiment_name: str, seed: int, state: LoopState, best: str | None = None) -> dict[str, Any]:
    """Return the content of ``summary.json``; ``best`` is the tag of the evaluation of the best checkpoint."""
    summary: dict[str, Any] = {
        "experiment": experiment_name,
        "seed": seed,
        "train_wall_s": round(state.train_wall_s, 1),
        "env_steps": state.env_steps,
    }
    for key, tag in SUMMARY_TAGS.items():
        if tag in state.evaluations:
            summary[key] = {name: value for name, value in state.evaluations[tag].items() if name in SUMMARY_VALUES}
    if state.rollbacks:
        summary["rollbacks"] = state.rollbacks
    if best is not None:
        evaluation = state.evaluations[best]
        names = ("success_rate", "return_mean", "reports_success")
        values = {name: evaluation[name] for name in names if name in evaluation}
        summary["best_checkpoint"] = {"name": evaluation["checkpoint"], "evaluation": best, **values}
        summary["best_checkpoint"]["num_candidates"] = len(state.candidates)
    return summary


def closing_table(summary: dict[str, Any]) -> str:
    """Return a run's closing lines: success and return, to report, before and after RL, with intervals, and the training time."""
    rows, reported = [], summary.get("reported", {})
    if reported:
        rows.append((f"{'to report':12}", Success.from_dict(reported)))
    for key in SUMMARY_TAGS:
        if key in summary:
            label = key.removeprefix("success_").replace("_", " ").replace("rl", "RL").replace("sft", "SFT")
            rows.append((f"{label:12}", Success.from_dict(summary[key])))
    lines = [success_table(rows, "", "success")] if rows else []
    lines += reported_lines(summary)
    if "best_checkpoint" in summary:
        best = summary["best_checkpoint"]
        is_reported = best.get("reports_success", True)
        reached = f"{best['success_rate']:.1%}" if is_reported else f"return {best['return_mean']:.4g}"
        lines.append(f"best checkpoint: {best['name']} ({reached} in the evaluation {best['evaluation']})")
    if "rollbacks" in summary:
        lines.append(f"rollbacks to the best checkpoint: {summary['rollbacks']}")
    lines.append(
        f"training took {summary['train_wall_s']:.0f} s, {summary['env_steps']:,} env steps, seed {summary['seed']}"
    )
    return "\n".join(lines)


def write_failed_batch(failed: FailedBatch, folder: Path) -> None:
    """Write a failed batch's tensors (``tensors.pt``) and a report (``report.json``)."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(failed.tensors, folder / "tensors.pt.tmp")
    os.replace(folder / "tensors.pt.tmp", folder / "tensors.pt")
    report = {
        "rank": failed.rank,
        "phase": failed.phase,
        "step": failed.step,
        "loss": str(failed.loss),
        "grad_norm": str(failed.grad_norm),
        "parameters_with_bad_gradients": failed.bad_parameters,
        "instructions": failed.instructions,
        "tensors": {
            name: {
                "shape": list(tensor.shape),
                "num_not_finite": int((~torch.isfinite(tensor.float())).sum()),
                "min": str(float(tensor.float().min())) if tensor.numel() else None,
                "max": str(float(tensor.float().max())) if tensor.numel() else None,
            }
            for name, tensor in failed.tensors.items()
        },
    }
    write_text(folder / "report.json", json.dumps(report, indent=1))
