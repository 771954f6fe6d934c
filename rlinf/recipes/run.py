"""Run a recipe, from its configuration and data to the finished run folder."""

import glob
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from rlinf.checkpoints.checkpoint import load_checkpoint, on_rank_zero, set_aside_later
from rlinf.checkpoints.folders import is_checkpoint, resolve_checkpoint, saved_at
from rlinf.config.training import TrainerConfig
from rlinf.distributed.process_group import gather_objects, rank
from rlinf.errors import CheckpointError, ConfigError
from rlinf.files import locked_folder, write_text
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.manifest import Manifest, check
from rlinf.models.precision import torch_dtype_of
from rlinf.options import fixed_by_settings, to_mapping
from rlinf.recipes.build import (
    RecipeData,
    describe_data,
    describe_model,
    load_processor,
    make_trainer,
    make_uploads,
    policy_settings,
)
from rlinf.recipes.checkpoints import RecipeCheckpoints
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.datasets import StreamedRows
from rlinf.recipes.hf_folder import HFFolder
from rlinf.recipes.plan import steps_per_epoch
from rlinf.recipes.report_data import best_text
from rlinf.recipes.token_trainer import TokenTrainer, check_equal_rows, comparable, lora_of
from rlinf.report.run_page import write_report
from rlinf.report.why.rules import explain
from rlinf.run_folder import CHECKPOINTS_FOLDER, CONFIG_FILE, FINAL_FOLDER, SAFETENSORS_FOLDER, SUMMARY_FILE
from rlinf.seeding import seed_everything
from rlinf.tracking.progress import Progress
from rlinf.tracking.tracker import Tracker, TrackingConfig, read_metrics
from rlinf.training.loop import Loop
from rlinf.training.profile_window import ProfileWindow
from rlinf.training.state import LoopState
from rlinf.training.stop_signal import StopRequested, StopSignal

logger = logging.getLogger("rlinf")

SHOWN_AT_THE_END = ("eval/reward_mean", "eval/preference_accuracy", "eval/preference_margin", "eval/loss")
"""Validation metrics to show in the closing table, if present."""


def run(config: RecipeConfig, data: RecipeData) -> Path:
    """Train a model and return the run folder. Call it on every rank.

    Raise ConfigError before the first step if settings, data and model are incompatible, and SystemExit after a signal.
    """
    saves = config.train.ckpt.enable_checkpoint
    stop_signal = StopSignal(announce=rank() == 0, saves=saves)
    progress = Progress(updates=rank() == 0)
    with ExitStack() as stack:
        # Enter it first, so that the live line is closed after the last log line.
        stack.callback(progress.close)
        stack.enter_context(_shown_logs(progress))
        folder, checkpoint = _folder(config)
        if rank() == 0:
            stack.enter_context(locked_folder(folder))
        try:
            with stop_signal.handled():
                _run_in(folder, checkpoint, config, data, stop_signal, progress)
        except StopRequested as stop:
            if rank() == 0:
                logger.info("Report: %s", write_report(folder))
                state = "its checkpoint is saved" if saves else "nothing was saved (train.ckpt.enable_checkpoint=false)"
                print(f"\n{stop}; {state}", file=sys.stderr, flush=True)
            number = stop_signal.number
            sys.exit(1 if number is None else 128 + number)  # None: a different rank received the signal
    return folder


def _run_in(
    folder: Path,
    checkpoint: Path | None,
    config: RecipeConfig,
    data: RecipeData,
    stop_signal: StopSignal,
    progress: Progress,
) -> None:
    """Build the run's components, and train."""
    train = config.train
    fixed = partial(fixed_by_settings, "policy", path="model_name_or_path", trust_remote_code=None)
    with fixed():
        processor = load_processor(config.policy.model_name_or_path)
    mapping = to_mapping(config)
    uploads = make_uploads(config) if rank() == 0 else []
    with ExitStack() as stack:
        seed_everything(train.seed or 0)  # adapter dropout uses the global generators
        with fixed():
            policy = HuggingFacePolicy(config.policy.model_name_or_path, **policy_settings(config, processor))
        trainer = make_trainer(config, policy, processor, data, stack)
        stack.callback(trainer.close)
        save_every, profile_window = _save_every(config, trainer), _profile_window(config, trainer, folder)
        ckpt = train.ckpt
        exporter = HFFolder(
            policy.model_name,
            torch_dtype_of(train.param_dtype),
            lora=lora_of(policy),
            merge_lora=ckpt.merge_lora,
            chunk_bytes=ckpt.chunk_bytes,
        )
        checkpoints = RecipeCheckpoints(
            folder,
            save_mode=ckpt.save_mode,
            max_keep=ckpt.max_keep,
            keeps_any=ckpt.enable_checkpoint,
            export=exporter,
            exports_all=ckpt.enable_checkpoint and ckpt.export_safetensors,
            uploads=uploads,
            latest=folder,
        )
        loop = Loop(
            LoopState(phase=trainer.phase), folder,
            TrainerConfig(save_every=save_every, save_every_minutes=0.0), mapping,
            checkpoints=checkpoints, stop_signal=stop_signal, progress=progress, resumed_from=checkpoint,
        )  # fmt: skip
        loop.profile_window = profile_window
        stack.enter_context(loop)
        # Detect a script that divides its rows itself before the first step.
        check_equal_rows(trainer.rows)
        trainer.loop, trainer.data = loop, describe_data(config, trainer) | describe_model(policy)
        if checkpoint is not None:
            _restore(checkpoint, loop, trainer)
            if rank() == 0 and checkpoint.parent.name == CHECKPOINTS_FOLDER:
                set_aside_later(checkpoint)
        if rank() == 0:
            loop.tracker = _tracker(config, mapping, loop, trainer)
            write_text(folder / CONFIG_FILE, yaml.safe_dump(mapping, sort_keys=False))
        loop.fit(trainer)
        checkpoints.wait()
        if rank() == 0:
            run_summary = summary(loop, trainer, train.train_policy.type)
            write_text(folder / SUMMARY_FILE, json.dumps(run_summary, indent=1))
            report = write_report(folder)
            worse = explain(folder).outcome.made_worse(config.policy.model_name_or_path)
            print(closing_table(run_summary, read_metrics(folder)), f"report: {report}", *worse, sep="\n", flush=True)


def _save_every(config: RecipeConfig, trainer: TokenTrainer) -> int:
    """Return the number of steps between checkpoints, or 0 to save only the last one. Raise ConfigError for epochs of a stream."""
    ckpt = config.train.ckpt
    epochs = ckpt.save_freq_in_epoch
    if epochs and isinstance(trainer.rows, StreamedRows):
        raise ConfigError(
            "A stream has no epochs. Set train.ckpt.save_freq_in_epoch=0 and train.ckpt.save_freq=<steps>"
        )
    if not ckpt.enable_checkpoint or not epochs:
        return ckpt.save_freq if ckpt.enable_checkpoint else 0
    return epochs * steps_per_epoch(config, len(trainer.rows))


def _profile_window(config: RecipeConfig, trainer: TokenTrainer, folder: Path) -> ProfileWindow:
    """Return the profiler for the configured steps; raise ConfigError if they exceed the run."""
    steps = config.profiler.steps
    if steps is not None and steps[1] >= trainer.num_steps:
        raise ConfigError(
            f"profiler.sub_profiler_config records the steps {steps[0]} to {steps[1]}, counted from 0, but the run has "
            f"{trainer.num_steps} steps; expected steps within the run. Set profiler.enable_profiler=false, or lower wait_steps, "
            "warmup_steps and active_steps"
        )
    return ProfileWindow(steps, trainer.phase, folder, rank())


def summary(loop: Loop, trainer: TokenTrainer, kind: str) -> dict[str, Any]:
    """Return the content of summary.json: steps, tokens, time in seconds, last and best validation, and the model folder."""
    best = max(trainer.scores, key=lambda name: comparable(trainer.scores[name]), default=None)
    return {
        "type": kind,
        "steps": loop.state.done,
        "tokens": trainer.num_tokens,
        "train_wall_s": loop.state.train_wall_s,
        "validation": trainer.last_validation,
        "best_validation": None
        if best is None
        else {"checkpoint": best, "score": trainer.scores[best], "num_candidates": len(trainer.scores)},
        "model": str(loop.folder / SAFETENSORS_FOLDER / FINAL_FOLDER),
    }


def closing_table(run_summary: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """Return the run's closing lines: first, last and best validation, training time, and the model folder."""
    evaluated = [line for line in lines if "eval/loss" in line or "eval/reward_mean" in line]
    ends = {"first": evaluated[0], "last": evaluated[-1]} if evaluated else {}
    keys = [key for key in SHOWN_AT_THE_END if any(key in line for line in ends.values())]
    table = (
        [f"{'validation':10}" + "".join(f"  {key.removeprefix('eval/').replace('_', ' '):>19}" for key in keys)]
        if ends
        else []
    )
    table += [f"{name:10}" + "".join(f"  {line[key]:19.4g}" for key in keys) for name, line in ends.items()]
    if run_summary["best_validation"]:
        table.append(f"best checkpoint: {best_text(run_summary['best_validation'])}")
    table.append(
        f"training took {run_summary['train_wall_s']:.0f} s, {run_summary['steps']} steps, {run_summary['tokens']:,.0f} tokens"
    )
    return "\n".join([*table, f"model: {run_summary['model']}"])


def _folder(config: RecipeConfig) -> tuple[Path, Path | None]:
    """Return the run folder, and the checkpoint to resume from or None for a new run; both are equal on all ranks."""
    output, resume, name = Path(config.train.output_dir), config.train.resume, config.train.timestamp
    checkpoint = None
    if isinstance(resume, str) and resume not in ("", "auto", "true"):
        checkpoint = on_rank_zero(lambda: resolve_checkpoint(resume), f"read {resume}")
    elif resume:
        checkpoint = newest_checkpoint(output, name)
        if checkpoint is None:
            logger.info(
                "train.resume=%s, but %s has no checkpoint, so a new run starts",
                resume,
                output / name,
            )
    if checkpoint is not None:
        logger.info("The run continues from %s", checkpoint)
        return checkpoint.parent.parent, checkpoint
    # Use rank 0's time, because clocks differ between ranks.
    folder = output / (name or gather_objects(time.strftime("%Y%m%d%H%M%S"))[0])
    if on_rank_zero(lambda: any(folder.glob(f"{CHECKPOINTS_FOLDER}/[!.]*")), f"read {folder}"):
        raise ConfigError(f"{folder} already has checkpoints. Set train.resume=true, or a different train.timestamp")
    return folder, None


def _restore(checkpoint: Path, loop: Loop, trainer: TokenTrainer) -> None:
    """Load a checkpoint into policy, dataset and loop; raise ConfigError or ManifestMismatchError if data or initial model differ."""
    check(Manifest.load(checkpoint), trainer.manifest())
    loop.state = LoopState(**load_checkpoint(checkpoint, model=trainer.model, optimizer=trainer.optimizer))
    saved = loop.state.trainer["data"]
    changed = [
        f"{name} was {saved[name]} and is {value}" for name, value in trainer.data.items() if saved[name] != value
    ]
    if changed:
        raise ConfigError(
            f"{checkpoint} was saved with different data or a different model: {'; '.join(changed)}. Undo this, or set train.resume=false"
        )
    trainer.restore(loop.state.trainer)


def _tracker(config: RecipeConfig, mapping: dict[str, Any], loop: Loop, trainer: TokenTrainer) -> Tracker:
    names, state, folder = config.logging, loop.state, loop.folder
    tracking = TrackingConfig(
        wandb="wandb" in names.logger,
        wandb_project=names.project_name,
        wandb_name=f"{names.experiment_name}/{folder.name}" if names.experiment_name else str(folder),
    )
    step = None if state.tracker_run_id is None else state.done
    tracker = Tracker(
        folder, tracking, mapping, run_id=state.tracker_run_id, resume_step=step, resume_phase=trainer.phase
    )
    state.tracker_run_id = tracker.run_id
    return tracker


class _LogLines(logging.Handler):
    """Handler that prints records above the live line and prefixes each line with the rank."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[rlinf] %(asctime)s - rlinf - %(levelname)s - %(message)s"))
        self._prefix, self._progress = f"[rank{rank()}]:", progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.note("\n".join(self._prefix + line for line in self.format(record).split("\n")))


@contextmanager
def _shown_logs(progress: Progress) -> Iterator[None]:
    """Print log records of level INFO and above as ``[rank0]:[rlinf] <time> - rlinf - INFO - <text>`` inside the context."""
    handler, level = _LogLines(progress), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def newest_checkpoint(output_dir: Path, name: str = "") -> Path | None:
    """Return the newest complete checkpoint of the run ``<output_dir>/<name>`` (if ``name`` is empty, of any run), or None.

    This is a collective call. Runs are searched by time of their last save, newest first. Damaged checkpoints are skipped with a warning.
    """

    def find() -> Path | None:
        saved: dict[Path, float] = {}
        for path in Path(output_dir).glob(f"{glob.escape(name) or '[!.]*'}/{CHECKPOINTS_FOLDER}/step_*"):
            if is_checkpoint(path):
                run = path.parent.parent
                saved[run] = max(saved.get(run, 0.0), saved_at(path))
        for run in sorted(saved, key=saved.__getitem__, reverse=True):
            try:
                return resolve_checkpoint(run)
            except CheckpointError as error:
                logger.warning("%s is skipped: %s", run, error)
        return None

    return on_rank_zero(find, f"read {output_dir}")
