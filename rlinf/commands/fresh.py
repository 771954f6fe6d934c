"""Evaluates the checkpoint that a run has chosen on episodes that did not choose it."""

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from rlinf.commands.evaluate import evaluate_rank
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import broadcast_object, rank
from rlinf.evaluation.compare import compare
from rlinf.evaluation.partial import partial_files
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import Json, write_text
from rlinf.manifest import Manifest
from rlinf.options import override_text, to_mapping
from rlinf.run_folder import (
    CHECKPOINTS_FOLDER,
    CONDITIONS_FILE,
    FRESH_EVALUATION,
    MANIFEST_FILE,
    RESULT_FILE,
    SAMPLED_FOLDER,
)
from rlinf.training.outcome import evaluation_folder
from rlinf.training.state import LoopState

EVALUATED_SECTIONS = ("seed", "checkpoint", "model", "tokenizer", "env", "evaluation")
"""Parts of the configuration on which a result depends, besides the temperature."""

FREE_AT_THE_START = ("env", "precision", "lora", "renderer")
"""Conditions in which a run may differ from the checkpoint that it started from (``init_from``)."""


def evaluate_chosen(
    config: RunConfig,
    state: LoopState,
    names: Collection[str],
    fresh: range,
    can_sample: bool,
    on_workers: bool = False,
) -> Json:
    """Evaluate the best of a run's checkpoints ``names`` on the episodes ``fresh`` of the split (a collective call).

    Only if it was chosen among at least two; otherwise, the number to report is the one from the run. The result is in
    ``eval/fresh``, and equals the one of ``rlinf evaluate`` with this checkpoint and these episodes. Nothing is run again if an
    earlier process has finished the same evaluation.

    Args:
        can_sample: Whether the policy can sample actions; then the first of the episodes are also run with sampled ones.
        on_workers: Whether rollout workers ran the run's evaluations; then the policy may not fit on the ranks, and is not evaluated.

    Returns:
        On rank 0, entries of ``summary.json``: ``reported`` and ``sampled``, or ``not_fresh``, the reason why a checkpoint was chosen
        but not evaluated again.
    """
    settings, folder = config.evaluation, evaluation_folder(config, FRESH_EVALUATION)
    tag = broadcast_object(state.best_evaluation(names), 0)
    if tag is None or len(state.candidates) < 2:
        if rank() == 0 and folder.is_dir():  # of a checkpoint that the run chose before it was resumed
            shutil.rmtree(folder)
        return {}
    if settings.split == "train":
        return {"not_fresh": "evaluation.split=train"}
    if settings.num_fresh_episodes == 0:
        return {"not_fresh": "evaluation.num_fresh_episodes=0"}
    if not fresh:
        return {"not_fresh": f"the split '{settings.split}' has no episodes after the first {fresh.start}"}
    chosen = state.evaluations[tag]
    evaluated = _configuration(config, state, chosen["checkpoint"], fresh)
    if on_workers:
        keys = f"evaluation.first_episode={fresh.start} evaluation.num_episodes={len(fresh)}"
        command = f"rlinf evaluate checkpoint={override_text(evaluated.checkpoint)} {keys}"
        return {"not_fresh": f"the run has rollout workers; on a machine for one policy, run {command}"}
    if rank() == 0:
        place = f"episodes {fresh.start} to {fresh.stop - 1} of the split '{settings.split}'"
        resume = f"if interrupted, continue with rlinf train resume={config.output_dir}"
        print(f"fresh evaluation of {chosen['checkpoint']} on {place}; {resume}", flush=True)
    result, sampled = _evaluate_once(evaluated), None
    if settings.greedy and can_sample:
        count = min(len(fresh), settings.num_episodes or len(fresh))
        if rank() == 0:
            print(f"the first {count} of them with sampled actions:", flush=True)
        silent = {"num_videos_per_task": 0, "record_episodes": 0, "probe": False, "baselines": False}
        shorter = replace(evaluated.evaluation, greedy=False, num_episodes=count, **silent)
        sampled = _evaluate_once(replace(evaluated, output_dir=str(folder / SAMPLED_FOLDER), evaluation=shorter))
    if result is None:
        return {}
    values = {
        "reported": {
            "checkpoint": chosen["checkpoint"],
            **result.summary(),
            "first_episode": fresh.start,
            "num_candidates": len(state.candidates),
            "chosen_success_rate": chosen["success_rate"],
        }
    }
    if sampled is not None:
        greedy = replace(result, results=result.results[: sampled.episodes])
        paired = compare(greedy, sampled, ["greedy"]).as_dict()["total"]
        values["sampled"] = {**sampled.summary(), "temperature": sampled.temperature, "paired_with_greedy": paired}
    return values


def _configuration(config: RunConfig, state: LoopState, checkpoint: str, fresh: range) -> RunConfig:
    """Return the configuration of ``rlinf evaluate`` for a checkpoint of the run, or for the policy that it started from."""
    folder = str(evaluation_folder(config, FRESH_EVALUATION))
    evaluation = replace(
        config.evaluation, first_episode=fresh.start, num_episodes=len(fresh), compare=None, stop_when=None
    )
    source: str | None = str(Path(config.output_dir) / CHECKPOINTS_FOLDER / checkpoint)
    if checkpoint == state.start:
        source = None if checkpoint == config.model.model_path else checkpoint
        evaluation.allow_mismatch = [*evaluation.allow_mismatch, *FREE_AT_THE_START]
    return replace(config, checkpoint=source, resume=None, init_from=None, output_dir=folder, evaluation=evaluation)


def _evaluate_once(config: RunConfig) -> EvaluationResult | None:
    """Evaluate ``config.checkpoint``, unless an earlier process has done it; return the result on rank 0 (a collective call)."""
    output = Path(config.output_dir)
    if not broadcast_object(rank() == 0 and _is_done(config, output), 0):
        evaluate_rank((config, None))
    return EvaluationResult.from_json(output / RESULT_FILE) if rank() == 0 else None


def _is_done(config: RunConfig, output: Path) -> bool:
    """Return whether ``output`` has the result of this evaluation; delete the results of a different one."""
    source = None if config.checkpoint is None else Path(config.checkpoint)
    files = Manifest.load(source).files if source is not None and (source / MANIFEST_FILE).is_file() else None
    settings = {name: value for name, value in to_mapping(config).items() if name in EVALUATED_SECTIONS}
    conditions = json.dumps([settings, config.evaluation_temperature, files], indent=1, default=str)
    path = output / CONDITIONS_FILE
    if not path.is_file() or path.read_text(encoding="utf-8") != conditions:
        if output.is_dir():
            shutil.rmtree(output)
        write_text(path, conditions)
    return (output / RESULT_FILE).is_file() and not partial_files(output)
