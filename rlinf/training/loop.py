"""Main loop of every run: steps, metrics, evaluations, checkpoints and shutdown. It runs on all ranks; rank 0 writes the files."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from rlinf.checkpoints.checkpoint_manager import CheckpointManager
from rlinf.checkpoints.trainer_state import read_entries, read_tensors
from rlinf.config.training import TrainerConfig
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.process_group import any_rank, rank
from rlinf.manifest import Manifest
from rlinf.run_folder import CHECKPOINTS_FOLDER, TRAINER_FOLDER
from rlinf.tracking.progress import Progress
from rlinf.tracking.tracker import Tracker
from rlinf.training.collapse import RolledBack, ends_by_collapse
from rlinf.training.profile_window import ProfileWindow
from rlinf.training.state import LoopState
from rlinf.training.stop_signal import StopRequested, StopSignal

logger = logging.getLogger("rlinf")


@dataclass
class Update:
    """Result of a step.

    Attributes:
        metrics: Metrics, named as in ``rlinf.tracking.METRICS``.
        shown: Values for the live line, by display name.
        is_logged: Whether to write the metrics; they are always written for the last step.
    """

    metrics: dict[str, float]
    shown: dict[str, float | None] = field(default_factory=dict)
    is_logged: bool = True


class Trainer(Protocol):
    """Trainer interface; ``ActionTrainer`` and ``TokenTrainer`` are base classes for action and token policies.

    Attributes:
        phase: ``sft`` or ``rl``, the phase in ``metrics.jsonl``.
        last_tag: Tag of the evaluation after the last step, if any.
        ends_run: Whether the run ends with this trainer; its last checkpoint is then exported.
        optimizer: The optimiser; None if ``state_dict`` contains its state.
    """

    phase: str
    num_steps: int
    last_tag: str | None
    ends_run: bool

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> Optimizer | None: ...

    @property
    def checkpoint_name(self) -> str:
        """Name for a checkpoint of the current state."""

    def begin(self) -> None:
        """Prepare the first step of this process, which may be a later step in a resumed run (a collective call)."""

    def is_done(self) -> bool:
        """Return whether no steps are left (a collective call)."""

    def update(self, step: int) -> Update:
        """Take a step (a collective call)."""

    def evaluation_due(self, last: bool) -> str | None:
        """Return the tag of the evaluation due after the current step, or None; ``last`` is true after the last step."""

    def evaluate(self, tag: str, step: int) -> None:
        """Evaluate the current weights and log the result at ``step`` (a collective call)."""

    def best_checkpoint(self, names: Collection[str]) -> str | None:
        """Return the one of the checkpoints ``names`` whose policy is the best so far, if any."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors to save in a checkpoint in addition to policy and optimiser; ``Loop.restore`` reads them."""

    def loop_state(self) -> dict[str, Any]:
        """Return JSON values to save in a checkpoint, which a resumed run finds in ``LoopState.trainer``."""

    def manifest(self) -> Manifest:
        """Return the current policy's manifest."""

    def close(self) -> None:
        """Free all resources."""


class Loop:
    """Executes a run's trainers one after the other.

    Args:
        run_config: Configuration as a mapping, saved in checkpoints.
        resumed_from: Checkpoint that ``state`` was read from; None for a new run.

    Attributes:
        tracker: Writes metrics; None except on rank 0.
    """

    trainer: Trainer
    tracker: Tracker | None = None

    def __init__(
        self,
        state: LoopState,
        folder: Path,
        settings: TrainerConfig,
        run_config: dict[str, Any],
        *,
        checkpoints: CheckpointManager,
        stop_signal: StopSignal,
        progress: Progress,
        resumed_from: Path | None = None,
    ) -> None:
        self.state, self.folder, self.settings, self.run_config = state, folder, settings, run_config
        self.checkpoints, self.stop_signal, self.progress = checkpoints, stop_signal, progress
        self.resumed_from = resumed_from
        self.profile_window = ProfileWindow(None, "", folder, rank())
        same_run = resumed_from is not None and resumed_from.parent.resolve() == (folder / CHECKPOINTS_FOLDER).resolve()
        # Numbers of behaviour-cloning and RL steps in this folder's newest checkpoint.
        self._saved_steps = (state.sft_step, state.step) if same_run else None
        self._saved_at = time.monotonic()

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Write the open profile and finish writing the current checkpoint; if the run has failed, only log errors from this."""
        with ExitStack() as stack:  # runs all callbacks in reverse order, even if some fail
            stack.callback(self._finish_checkpoints, error)
            stack.callback(self.progress.close)
            if self.tracker is not None:
                stack.callback(self.tracker.close)
            stack.callback(self.profile_window.close)

    @deadline("update")
    def fit(self, trainer: Trainer) -> None:
        """Run a trainer from the current step to its last, or until an evaluation reaches the target or shows a collapse.

        Raise StopRequested after a signal, once all training is saved, and RolledBack if the run must resume from an earlier checkpoint.
        """
        self.trainer, state = trainer, self.state
        trainer.begin()
        last = trainer.is_done()
        ends = self._ends_by_evaluation(last)
        self.stop_if_asked()
        while not (last or ends):
            start, step = time.monotonic(), state.done
            with self.profile_window.step(trainer.phase, step):
                update = trainer.update(step)
            state.train_wall_s += time.monotonic() - start
            state.advance()
            last = trainer.is_done()
            if update.is_logged or last:
                self.log(step, update.metrics | {"time/total_s": state.train_wall_s})
            self.progress.update(trainer.phase, state.done, trainer.num_steps, **update.shown)
            # Evaluate before saving: the checkpoint contains the result, and may be saved because the policy is the best so far.
            ends = self._ends_by_evaluation(last)
            self.checkpoint_if_due(last or ends)
        if trainer.last_tag is not None:
            self.evaluate_once(trainer.last_tag)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write a line of metrics."""
        if self.tracker is not None:
            self.tracker.log(step, metrics, self.trainer.phase)

    @deadline("evaluate")
    def evaluate(self, tag: str, step: int) -> None:
        """Evaluate the current weights (a collective call); the metrics are logged at ``step``."""
        self.trainer.evaluate(tag, step)

    def evaluate_once(self, tag: str) -> None:
        """Evaluate before or after a phase, unless a resumed run has already done so."""
        if tag not in self.state.evaluations:
            self.evaluate(tag, self.state.done)
            self.stop_if_asked()

    def _ends_by_evaluation(self, last: bool) -> bool:
        """Evaluate if due; return whether the result, new or from before a resume, ends the phase."""
        state, target = self.state, self.settings.target_success_rate
        tag = self.trainer.evaluation_due(last)
        if tag is None:
            return False
        if tag not in state.evaluations:
            self.evaluate(tag, max(0, state.done - 1))
        if state.phase != "rl":
            return False
        if target is not None and tag in state.evaluations and (state.evaluations[tag]["success_rate"] or 0) >= target:
            return True
        return ends_by_collapse(self)

    def checkpoint_if_due(self, last: bool) -> None:
        """Save at the end of a phase, at the ``save_every`` intervals, and if an action policy is the best so far; stop after a signal."""
        settings, state = self.settings, self.state
        limit = 60 * settings.save_every_minutes
        late = rank() == 0 and limit > 0 and time.monotonic() - self._saved_at >= limit
        best = state.best_checkpoint(state.candidates)
        # All ranks must decide together, because their clocks differ and saving is a collective call.
        due = any_rank(late or (best is not None and best == state.policy_checkpoint))
        if last or due or (settings.save_every and state.done % settings.save_every == 0):
            self.save(is_last=last and self.trainer.ends_run)
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """After a signal, save unsaved steps and raise StopRequested on all ranks, unless the run is already complete."""
        state, trainer = self.state, self.trainer
        is_over = trainer.last_tag in state.evaluations or (trainer.ends_run and trainer.is_done())
        if not any_rank(self.stop_signal.number is not None) or is_over:
            return
        self.save_unsaved()
        phase = "" if trainer.ends_run else f" of phase {state.phase}"
        raise StopRequested(f"stopped by a signal after step {state.done}{phase}")

    def save_unsaved(self) -> None:
        """Save unless a checkpoint of the current step exists (a collective call)."""
        state = self.state
        # A resumed run drops metrics at or after its step, so the corresponding evaluations must be repeated.
        state.evaluations = {
            tag: summary
            for tag, summary in state.evaluations.items()
            if summary["phase"] != state.phase or summary["step"] < state.done
        }
        if self._saved_steps != (state.sft_step, state.step):
            self.save()

    @deadline("save")
    def save(self, is_last: bool = False) -> None:
        """Save the current state (a collective call); ``is_last`` means that the run is complete, so its policy is exported."""
        state, trainer = self.state, self.trainer
        if is_last:
            logger.info(
                "[Policy] Training finished at step %d/%d, saving final checkpoint in huggingface safetensors...",
                state.done, trainer.num_steps,
            )  # fmt: skip
        more, name, state.trainer = trainer.state_dict(), trainer.checkpoint_name, trainer.loop_state()
        self.checkpoints.wait()  # the previous checkpoint may be the best, but is only considered once it is complete
        self.checkpoints.save(
            name,
            model=trainer.model,
            optimizer=trainer.optimizer,
            loop_state=asdict(state),
            run_config=self.run_config,
            manifest=trainer.manifest(),
            best=trainer.best_checkpoint({name, *self.checkpoints.names()}),
            more=more,
            is_last=is_last,
        )
        self._saved_steps = (state.sft_step, state.step)
        self._saved_at = time.monotonic()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the resumed checkpoint, if any, into tensors with the names used in ``Trainer.state_dict``."""
        if self.resumed_from is not None:
            folder = self.resumed_from / TRAINER_FOLDER
            if self.state.step > 0 or tensors.keys() & read_entries(folder).keys():  # missing in checkpoints before RL
                read_tensors(folder, dict(tensors))

    def _finish_checkpoints(self, error: BaseException | None) -> None:
        ends_well = error is None or isinstance(error, (StopRequested, RolledBack))
        # Do not set a deadline for an export, because it may include an upload.
        limited = self.checkpoints.closes_in_time or not ends_well
        try:
            with deadline("save") if limited else nullcontext():
                self.checkpoints.close()
        except Exception as other:  # the writer may raise any exception
            if ends_well:
                raise
            logger.error("The checkpoint that was being written is also lost: %s", other)
