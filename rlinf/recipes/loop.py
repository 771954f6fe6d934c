"""What the trainers of recipes share: steps, metrics, validation, checkpoints and an orderly end. Every rank runs a loop."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from rlinf.checkpoints.checkpoint_manager import CheckpointManager, save_is_due
from rlinf.distributed.deadlines import go_on, waiting
from rlinf.distributed.process_group import any_rank, rank, world_size
from rlinf.files import write_bytes, write_text
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.manifest import Manifest
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.equal_rows import check_equal_stream
from rlinf.recipes.schedule import learning_rate
from rlinf.run_folder import SAMPLES_FOLDER
from rlinf.tracking.progress import Progress
from rlinf.tracking.tracker import Tracker
from rlinf.training.profile_window import ProfileWindow
from rlinf.training.stop_signal import StopRequested, StopSignal

logger = logging.getLogger("rlinf")


@dataclass
class LoopState:
    """Where a run is; a checkpoint holds it.

    Attributes:
        step: Optimiser steps done.
        data: What determines the rows of a step, which a resumed run must have too.
        rows: State of the dataset.
        num_tokens: Tokens trained on or scored so far, without padding, over all ranks.
        train_wall_s: Seconds of training, without validation.
        scores: Score of each validation by the name of the checkpoint that follows it; higher is better.
        last_validation: Metrics of the last validation.
        tracker_run_id: Identity of the run of the tracker.
    """

    step: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    num_tokens: float = 0.0
    train_wall_s: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    last_validation: dict[str, float] = field(default_factory=dict)
    tracker_run_id: str | None = None


@dataclass
class Update:
    """What a step returns.

    Attributes:
        loss: Of the step.
        metrics: Named as in ``rlinf.tracking.METRICS``.
        num_tokens: Tokens of the batch on all ranks, without padding.
        num_rows: Rows of the batch on all ranks.
        shown: Further numbers of the console's line, by their names there.
    """

    loss: float
    metrics: dict[str, float]
    num_tokens: float
    num_rows: float
    shown: dict[str, float] = field(default_factory=dict)


@dataclass
class Validation:
    """What an evaluation returns on every rank.

    Attributes:
        score: By which checkpoints are compared; higher is better.
        metrics: Named as in ``rlinf.tracking.METRICS``.
        samples: Completions with their rewards, on rank 0.
        text: One line about it.
    """

    score: float
    metrics: dict[str, float]
    text: str
    samples: list[dict[str, Any]] = field(default_factory=list)


class Trainer(Protocol):
    """A method of training.

    Attributes:
        phase: ``sft`` or ``rl``, as the tracker names it.
        num_steps: Steps of the run.
        rows: Its dataset.
    """

    phase: str
    num_steps: int
    rows: Any

    def update(self, step: int) -> Update:
        """Take one step (a collective call)."""

    def validate(self, step: int) -> Validation | None:
        """Evaluate the present weights (a collective call); None: there is nothing to evaluate on."""

    def close(self) -> None:
        """Free what it holds."""


class Loop:
    """Runs a trainer from the step of its state to the end.

    Args:
        config: Of the run.
        policy: Trained.
        trainer: Takes the steps.
        state: Where to begin.
        folder: Of the run.
        checkpoints: Writes checkpoints and exports the policy.
        manifest: Returns the conditions after so many steps.
        config_mapping: The configuration as a mapping, for checkpoints.
        stop_signal: Whether the run is asked to stop.
        progress: Live line.
        tracker: Writes metrics; None: on another rank.
        profile_window: Records steps of the phase of the trainer; None: none.
        resumed_from: Checkpoint that ``state`` was read from; None: the run begins.
        steps_per_epoch: For ``train.ckpt.save_freq_in_epoch``.
    """

    def __init__(
        self,
        config: RecipeConfig,
        policy: HuggingFacePolicy,
        trainer: Trainer,
        state: LoopState,
        folder: Path,
        *,
        checkpoints: CheckpointManager,
        manifest: Callable[[int], Manifest],
        config_mapping: dict[str, Any],
        stop_signal: StopSignal,
        progress: Progress,
        tracker: Tracker | None = None,
        profile_window: ProfileWindow | None = None,
        resumed_from: Path | None = None,
        steps_per_epoch: int = 0,
    ) -> None:
        self.config, self.policy, self.trainer, self.state, self.folder = config, policy, trainer, state, folder
        self.checkpoints, self.manifest, self.config_mapping = checkpoints, manifest, config_mapping
        self.stop_signal, self.progress, self.tracker = stop_signal, progress, tracker
        self.resumed_from, self.steps_per_epoch = resumed_from, steps_per_epoch
        self.profile_window = profile_window or ProfileWindow(None, trainer.phase, folder, rank())
        self._saved_step: int | None = None

    @waiting("update")
    def fit(self) -> None:
        """Take the remaining steps, save, and export the policy.

        A run that was interrupted after its last checkpoint, which is whole before it is exported, is exported and uploaded now. Raise
        StopRequested after a signal; what was trained is saved, if the run writes checkpoints.
        """
        trainer, state, train = self.trainer, self.state, self.config.train
        validation = self.config.validation
        if state.step >= trainer.num_steps and self.resumed_from is not None:
            with waiting("save"):
                self.checkpoints.finish(self.resumed_from)
        if state.step == 0 and validation.val_before_train:
            self.validate()
        while state.step < trainer.num_steps:
            start = time.monotonic()
            rate = learning_rate(
                state.step, trainer.num_steps, train.optm_lr, train.optm_warmup_steps, train.optm_decay_type,
                train.optm_decay_ratio, train.optm_min_lr_factor,
            )  # fmt: skip
            self.policy.set_learning_rate(rate)
            with self.profile_window.step(trainer.phase, state.step):
                update = trainer.update(state.step)
            check_equal_stream(trainer.rows)
            go_on()
            state.step += 1
            self._log(update, rate, time.monotonic() - start)
            last = state.step == trainer.num_steps
            if validation.enable and (last or state.step % validation.freq == 0):
                self.validate()
            if last:
                logger.info(
                    "[Policy] Training finished at step %d/%d, saving final checkpoint in huggingface safetensors...",
                    state.step, trainer.num_steps,
                )  # fmt: skip
            ckpt = train.ckpt
            if last or (
                ckpt.enable_checkpoint
                and save_is_due(state.step, ckpt.save_freq, ckpt.save_freq_in_epoch, self.steps_per_epoch)
            ):
                self.save(is_last=last)
            if state.step < trainer.num_steps and any_rank(self.stop_signal.number is not None):
                if self._saved_step != state.step and ckpt.enable_checkpoint:
                    self.save()
                raise StopRequested(f"stopped by a signal after step {state.step}")

    @waiting("evaluate")
    def validate(self) -> None:
        """Evaluate the present weights (a collective call)."""
        start, state = time.monotonic(), self.state
        result = self.trainer.validate(state.step)
        if result is None:
            return
        state.scores[self.name] = result.score
        state.last_validation = result.metrics
        logger.info("[Policy] Validation: %s for train step %d/%d", result.text, state.step, self.trainer.num_steps)
        self._write(max(0, state.step - 1), result.metrics | {"time/eval_s": time.monotonic() - start})
        if rank() == 0 and result.samples:
            write_samples(self.folder / SAMPLES_FOLDER, self.name, result.samples)

    @waiting("save")
    def save(self, is_last: bool = False) -> None:
        """Write a checkpoint of the present state; the last one is exported too (a collective call)."""
        self.state.rows = self.trainer.rows.state_dict()
        best = self.checkpoints.best_of(self.state.scores, also=self.name)
        self.checkpoints.save(
            self.name,
            model=self.policy.model,
            optimizer=self.policy.optimizer,
            loop_state=asdict(self.state),
            run_config=self.config_mapping,
            manifest=self.manifest(self.state.step),
            best=best,
            is_last=is_last,
        )
        self._saved_step = self.state.step

    @property
    def name(self) -> str:
        """Name of a checkpoint of the present state."""
        return f"step_{self.state.step}"

    def _log(self, update: Update, rate: float, seconds: float) -> None:
        state, trainer = self.state, self.trainer
        state.num_tokens += update.num_tokens
        state.train_wall_s += seconds
        speed = update.num_tokens / seconds
        if state.step % self.config.logging.log_interval == 0 or state.step == trainer.num_steps:
            logger.info(
                "[Policy] Step: %d/%d, [Policy] Loss: %.6g%s, Learning rate: %.4g, Iteration time: %.2fs",
                state.step, trainer.num_steps, update.loss,
                "".join(f", {name}: {value:.4g}" for name, value in update.shown.items()), rate, seconds,
            )  # fmt: skip
        metrics = update.metrics | {
            f"{'sft' if trainer.phase == 'sft' else 'train'}/learning_rate": rate,
            "time/update_s": seconds,
            "time/total_s": state.train_wall_s,
            "throughput/tokens_per_s": speed,
        }
        peak = peak_flops()
        if peak is not None:
            flops = flops_per_token(self.policy.model, update.num_tokens / update.num_rows)
            metrics["throughput/mfu"] = speed * flops / (peak * world_size())
        self._write(state.step - 1, metrics)
        shown = {name.lower(): value for name, value in update.shown.items()} or {"loss": update.loss}
        self.progress.update(trainer.phase, state.step, trainer.num_steps, **shown, **{"tokens/s": speed})

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        if self.tracker is not None:
            self.tracker.log(step, metrics, self.trainer.phase)


def write_samples(folder: Path, name: str, samples: Sequence[Mapping[str, Any]]) -> None:
    """Write completions into ``<name>.jsonl``, and their images by ``write_images``."""
    lines = []
    for sample in samples:
        images = sample.get("images", ())
        shown = {**sample, "images": write_images(folder, images)} if images else sample
        lines.append(json.dumps(shown, ensure_ascii=False) + "\n")
    write_text(folder / f"{name}.jsonl", "".join(lines))


def write_images(folder: Path, images: Sequence[bytes]) -> list[str]:
    """Write JPEG images once into ``images/<digest>.jpg``, and return these names."""
    files = [f"images/{hashlib.sha256(image).hexdigest()[:16]}.jpg" for image in images]
    for file, image in zip(files, images, strict=True):
        if not (folder / file).exists():
            write_bytes(folder / file, image)
    return files


def own_share(num_rows: int) -> slice:
    """Return the neighbouring rows of a batch that this rank takes; the first ranks take one more if they do not divide."""
    share, extra = divmod(num_rows, world_size())
    start = rank() * share + min(rank(), extra)
    return slice(start, start + share + (rank() < extra))


PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""Peak of a GPU in bfloat16 without sparsity, by a part of its name, from the data sheets of its maker."""


def flops_per_token(model: Any, length: float) -> float:
    """Estimate the floating-point operations that training takes for a token (Kaplan et al. 2020, section 2.1).

    A weight in a matrix product takes 2 operations forward, 2 for the gradient of its input, and, if it is trained, 2 for its
    own gradient. Of the experts of a mixture, only those of one token count. Attention takes 4 times hidden size and length per layer forward, and twice that backward. Embeddings are looked
    up and cost nothing, unless they are also the head. What gradient checkpointing repeats is not counted.

    Args:
        model: A causal language model of transformers, sharded or not.
        length: Mean number of tokens of a row.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)
    looked_up = 0 if tied else sum(p.numel() for p in embedding.parameters())
    text = model.config.get_text_config()
    num_experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    used = getattr(text, "num_experts_per_tok", None)
    share = used / num_experts if used and num_experts else 1.0
    sizes = [(p.numel() * (share if ".experts." in name else 1.0), p) for name, p in model.named_parameters()]
    total = sum(size for size, _ in sizes) - looked_up
    trained = min(total, sum(size for size, p in sizes if p.requires_grad))
    # Causal attention looks at half of the row on average.
    attention = 4 * text.num_hidden_layers * text.hidden_size * length / 2
    return 4 * total + 2 * trained + 3 * attention


def peak_flops() -> float | None:
    """Return the peak of this process's device in bfloat16; None: it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((PEAK_FLOPS[key] for key in sorted(PEAK_FLOPS, key=len, reverse=True) if key in name), None)
