"""Run a recipe: from its configuration and data to a finished folder."""

from __future__ import annotations

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

from rlinf.checkpoints.checkpoint import on_rank_zero, set_aside_later
from rlinf.checkpoints.checkpoint_manager import CheckpointManager, comparable, newest_checkpoint
from rlinf.checkpoints.folders import resolve_checkpoint
from rlinf.checkpoints.hf_folder import HFFolder
from rlinf.config.training import TrainerConfig
from rlinf.distributed.process_group import gather_objects, rank
from rlinf.errors import ConfigError
from rlinf.files import locked_folder, write_text
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.models.precision import torch_dtype_of
from rlinf.options import fixed_by_settings, to_mapping
from rlinf.recipes.build import (
    RecipeData,
    batch_size,
    describe_data,
    describe_model,
    load_processor,
    make_trainer,
    make_uploads,
    policy_settings,
)
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.datasets import StreamedRows
from rlinf.recipes.equal_rows import check_equal_rows
from rlinf.recipes.packers import Packer
from rlinf.recipes.rollout_workers import RolloutWorkerPlaces
from rlinf.recipes.schedule import count_steps_per_epoch
from rlinf.recipes.token_trainer import TokenTrainer, lora_of
from rlinf.report.run_page import write_report
from rlinf.report.why.rules import explain
from rlinf.run_folder import CHECKPOINTS_FOLDER, CONFIG_FILE, FINAL_FOLDER, SAFETENSORS_FOLDER, SUMMARY_FILE
from rlinf.seeding import seed_everything
from rlinf.tracking.config import TrackingConfig
from rlinf.tracking.progress import Progress
from rlinf.tracking.tracker import Tracker, read_metrics
from rlinf.training.loop import Loop
from rlinf.training.profile_window import ProfileWindow
from rlinf.training.state import LoopState
from rlinf.training.stop_signal import StopRequested, StopSignal

logger = logging.getLogger("rlinf")

SHOWN_AT_THE_END = ("eval/reward_mean", "eval/preference_accuracy", "eval/preference_margin", "eval/loss")
"""Metrics of a validation in the closing table, if it has them."""


def run(
    config: RecipeConfig,
    *,
    dataset: Any,
    data_packer: Packer,
    reward_fns: Any = None,
    val_dataset: Any = None,
    val_data_packer: Packer | None = None,
    places: RolloutWorkerPlaces | None = None,
) -> Path:
    """Train a model, and return the folder of the run. Every rank calls it.

    Raise ConfigError before the first step if settings, data and model do not fit, SystemExit after a signal.

    Args:
        dataset, data_packer, reward_fns, val_dataset, val_data_packer: See ``RecipeData``.
        places: Where rollout workers may be; None: the ranks generate.
    """
    data = RecipeData(dataset, data_packer, reward_fns, val_dataset, val_data_packer, places)
    saves = config.train.ckpt.enable_checkpoint
    stop_signal = StopSignal(announce=rank() == 0, saves=saves)
    progress = Progress(updates=rank() == 0)
    with ExitStack() as stack:
        stack.callback(progress.close)  # after the last line of the log
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
                kept = "its checkpoint is saved" if saves else "nothing was saved (train.ckpt.enable_checkpoint=false)"
                print(f"\n{stop}; {kept}", file=sys.stderr, flush=True)
            number = stop_signal.number
            sys.exit(1 if number is None else 128 + number)  # None: another rank received the signal
    return folder


def _run_in(
    folder: Path,
    checkpoint: Path | None,
    config: RecipeConfig,
    data: RecipeData,
    stop_signal: StopSignal,
    progress: Progress,
) -> None:
    """Build the parts of a run, and run it."""
    train = config.train
    fixed = partial(fixed_by_settings, "policy", path="model_name_or_path", trust_remote_code=None)
    with fixed():
        processor = load_processor(config.policy.model_name_or_path)
    mapping = to_mapping(config)
    uploads = make_uploads(config) if rank() == 0 else []
    with ExitStack() as stack:
        seed_everything(train.seed or 0)  # dropout of adapters draws
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
        checkpoints = CheckpointManager(
            folder,
            save_mode=ckpt.save_mode,
            max_keep=ckpt.max_keep,
            keeps_any=ckpt.enable_checkpoint,
            with_policy=False,
            export=exporter,
            exports_all=ckpt.enable_checkpoint and ckpt.export_safetensors,
            uploads=uploads,
            latest=folder,
        )
        loop = Loop(
            LoopState(phase="step", data=describe_data(config, trainer) | describe_model(policy)), folder,
            TrainerConfig(save_every=save_every, save_every_minutes=0.0), mapping,
            checkpoints=checkpoints, stop_signal=stop_signal, progress=progress, resumed_from=checkpoint,
        )  # fmt: skip
        loop.profile_window = profile_window
        stack.enter_context(loop)
        check_equal_rows(trainer.rows)
        trainer.loop = loop
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
            reached = summary(loop, train.train_policy.type)
            write_text(folder / SUMMARY_FILE, json.dumps(reached, indent=1))
            report = write_report(folder)
            worse = explain(folder).outcome.made_worse(config.policy.model_name_or_path)
            print(closing_table(reached, read_metrics(folder)), f"report: {report}", *worse, sep="\n", flush=True)


def _save_every(config: RecipeConfig, trainer: TokenTrainer) -> int:
    """Return the steps between two checkpoints; 0: only the last one is written. A stream has no epochs to count."""
    ckpt = config.train.ckpt
    epochs = ckpt.save_freq_in_epoch
    if epochs and isinstance(trainer.rows, StreamedRows):
        raise ConfigError(
            f"train.ckpt.save_freq_in_epoch={epochs}, but a streamed dataset does not tell how long an epoch is. "
            "Set train.ckpt.save_freq_in_epoch=0 and train.ckpt.save_freq=<steps>"
        )
    if not ckpt.enable_checkpoint or not epochs:
        return ckpt.save_freq if ckpt.enable_checkpoint else 0
    rows_per_sample = config.rollout.n_generation if config.train.train_policy.type == "grpo" else 1
    return epochs * count_steps_per_epoch(len(trainer.rows), batch_size(config), rows_per_sample)


def _profile_window(config: RecipeConfig, trainer: TokenTrainer, folder: Path) -> ProfileWindow:
    """Return what records the steps of ``profiler``; raise ConfigError if they are not steps of the run."""
    steps = config.profiler.steps
    if steps is not None and steps[1] >= trainer.num_steps:
        raise ConfigError(
            f"profiler.sub_profiler_config records the steps {steps[0]} to {steps[1]}, counted from 0, of a run of "
            f"{trainer.num_steps}; required: steps of the run. Set profiler.enable_profiler=false, or lower wait_steps, "
            "warmup_steps and active_steps"
        )
    return ProfileWindow(steps, trainer.phase, folder, rank())


def summary(loop: Loop, kind: str) -> dict[str, Any]:
    """Return what a finished run has reached: steps, tokens, seconds, and the last and the best validation."""
    state = loop.state
    best = max(state.scores, key=lambda name: comparable(state.scores[name]), default=None)
    return {
        "type": kind,
        "steps": state.step,
        "tokens": state.num_tokens,
        "train_wall_s": state.train_wall_s,
        "validation": state.last_validation,
        "best_validation": None if best is None else {"checkpoint": best, "score": state.scores[best]},
        "model": str(loop.folder / SAFETENSORS_FOLDER / FINAL_FOLDER),
    }


def closing_table(reached: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """Return the lines that end a run: its first and last validation, the best one, what training took, and where the model is."""
    evaluated = [line for line in lines if "eval/loss" in line or "eval/reward_mean" in line]
    ends = {"first": evaluated[0], "last": evaluated[-1]} if evaluated else {}
    keys = [key for key in SHOWN_AT_THE_END if any(key in line for line in ends.values())]
    table = (
        [f"{'validation':10}" + "".join(f"  {key.removeprefix('eval/').replace('_', ' '):>19}" for key in keys)]
        if ends
        else []
    )
    table += [f"{name:10}" + "".join(f"  {line[key]:19.4g}" for key in keys) for name, line in ends.items()]
    if best := reached["best_validation"]:
        table.append(f"best checkpoint: {best['checkpoint']}")
    table.append(
        f"training took {reached['train_wall_s']:.0f} s, {reached['steps']} steps, {reached['tokens']:,.0f} tokens"
    )
    return "\n".join([*table, f"model: {reached['model']}"])


def _folder(config: RecipeConfig) -> tuple[Path, Path | None]:
    """Return the folder of the run, and the checkpoint from which it continues (None: from the start), equal on all ranks."""
    output, resume, name = Path(config.train.output_dir), config.train.resume, config.train.timestamp
    checkpoint = None
    if isinstance(resume, str) and resume not in ("", "auto", "true"):
        checkpoint = on_rank_zero(lambda: resolve_checkpoint(resume), f"read {resume}")
    elif resume:
        checkpoint = newest_checkpoint(output, name)
        if checkpoint is None:
            logger.info(
                "train.resume=%s, but %s holds no checkpoint, so the run starts from the start",
                resume,
                output / name,
            )
    if checkpoint is not None:
        logger.info("The run continues from %s", checkpoint)
        return checkpoint.parent.parent, checkpoint
    folder = output / (name or gather_objects(time.strftime("%Y%m%d%H%M%S"))[0])
    if on_rank_zero(lambda: any(folder.glob(f"{CHECKPOINTS_FOLDER}/[!.]*")), f"read {folder}"):
        raise ConfigError(
            f"A run with checkpoints is in {folder} already. Set train.resume=true to continue with it, or another train.timestamp"
        )
    return folder, None


def _restore(checkpoint: Path, loop: Loop, trainer: TokenTrainer) -> None:
    """Load a checkpoint into policy, dataset and loop; reject it if its next rows would be others."""
    present = trainer.manifest()
    loaded = loop.checkpoints.load(checkpoint, model=trainer.model, optimizer=trainer.optimizer, present=present)
    state = LoopState(**loaded | {"phase": "step"})
    changed = [f"{name} was {state.data[name]} and is {value}" for name, value in loop.state.data.items()
               if state.data.get(name, value) != value]  # older checkpoints lack some  # fmt: skip
    if changed:
        raise ConfigError(
            f"{checkpoint} was written with other data or another model: {'; '.join(changed)}. Set them as they were, or train.resume=false"
        )
    trainer.rows.load_state_dict(state.rows)
    loop.state = state


def _tracker(config: RecipeConfig, mapping: dict[str, Any], loop: Loop, trainer: TokenTrainer) -> Tracker:
    names, state, folder = config.logging, loop.state, loop.folder
    tracking = TrackingConfig(
        wandb="wandb" in names.logger,
        wandb_project=names.project_name,
        wandb_name=f"{names.experiment_name}/{folder.name}" if names.experiment_name else str(folder),
    )
    step = None if state.tracker_run_id is None else state.step
    tracker = Tracker(
        folder, tracking, mapping, run_id=state.tracker_run_id, resume_step=step, resume_phase=trainer.phase
    )
    state.tracker_run_id = tracker.run_id
    return tracker


class _LogLines(logging.Handler):
    """Writes records between the updates of a live line; each of their lines starts with the rank."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[rlinf] %(asctime)s - rlinf - %(levelname)s - %(message)s"))
        self._head, self._progress = f"[rank{rank()}]:", progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.note("\n".join(self._head + line for line in self.format(record).split("\n")))


@contextmanager
def _shown_logs(progress: Progress) -> Iterator[None]:
    """Show what the package logs inside, from the level INFO on: ``[rank0]:[rlinf] <time> - rlinf - INFO - <text>``."""
    handler, level = _LogLines(progress), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
