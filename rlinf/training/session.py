"""What the trainers of a run share: where it is, what it writes, and when it stops. Every rank has a session; rank 0 writes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf.checkpoints.checkpoint_manager import CheckpointManager
from rlinf.config.schema import RunConfig
from rlinf.distributed.deadlines import waiting
from rlinf.distributed.process_group import any_rank, barrier, rank
from rlinf.evaluation.result import actions_clipped, clipping_warning
from rlinf.manifest import Manifest
from rlinf.models.embodiment.base import ActionModel
from rlinf.options import to_mapping
from rlinf.preflight.conditions import build_manifest
from rlinf.rollout.weight_push import WeightPush
from rlinf.run_folder import RESULT_FILE
from rlinf.tracking.progress import Progress
from rlinf.tracking.tracker import Tracker
from rlinf.training.evaluator import Evaluator
from rlinf.training.outcome import evaluation_folder
from rlinf.training.profile_window import ProfileWindow
from rlinf.training.state import LoopState
from rlinf.training.stop_signal import StopRequested, StopSignal
from rlinf.training.train_worker import TrainWorker

logger = logging.getLogger("rlinf")


class Session:
    """The common part of cloning and RL.

    Args:
        config: Configuration of the run.
        state: Where to begin.
        worker: Scores and updates the policy.
        sync: Brings new weights to the rollout policy.
        evaluator: Evaluates it.
        stop_signal: Whether the run is asked to stop.
        progress: Live line.
        tracker: Writes metrics; None: on another rank.
        fingerprint: Fingerprint of the simulator, which every manifest records.
        resumed_from: Checkpoint that the run goes on from.
        clock: Seconds, by which checkpoints are due.
    """

    def __init__(
        self,
        config: RunConfig,
        state: LoopState,
        *,
        worker: TrainWorker,
        sync: WeightPush,
        evaluator: Evaluator,
        stop_signal: StopSignal,
        progress: Progress,
        tracker: Tracker | None = None,
        fingerprint: dict[str, Any] | None = None,
        resumed_from: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.state = config, state
        self.worker, self.sync, self.evaluator = worker, sync, evaluator
        self.stop_signal, self.progress, self.tracker = stop_signal, progress, tracker
        self.fingerprint, self.resumed_from = fingerprint, resumed_from
        self.folder = Path(config.output_dir)
        phase = "rl" if config.trainer.max_steps > 0 else "sft"
        self.checkpoints = CheckpointManager(
            self.folder, save_mode=config.trainer.save_mode, max_keep=config.trainer.max_keep
        )
        self.profile_window = ProfileWindow(config.trainer.profile_steps, phase, self.folder, rank())
        self.before_save: Callable[[], dict[str, Tensor]] = dict  # for what a trainer adds to a checkpoint
        self._other_policy: ActionModel | None = None
        self._warned = False
        self._saved_steps: tuple[int, int] | None = None  # of cloning and RL, in the newest checkpoint
        self._clock, self._saved_at = clock, clock()

    def close(self) -> None:
        """Write the open profile, then close the env of the evaluations, an engine, and what is written to.

        Raise CheckpointError if the last checkpoint could not be written.
        """
        with ExitStack() as stack:  # calls the last one first, and all even if some fail
            stack.callback(waiting("save")(self.checkpoints.close))
            stack.callback(self.progress.close)
            if self.tracker is not None:
                stack.callback(self.tracker.close)
            stack.callback(self.evaluator.env.close)
            if self.sync.generator is not None:
                stack.callback(self.sync.generator.close)
            stack.callback(self.profile_window.close)

    def take_over(self, policy: ActionModel) -> None:
        """Evaluate and save ``policy`` from now on. The worker does not train it: what does adds its state in ``before_save``."""
        self._other_policy, self.sync = policy, WeightPush(policy, policy)

    def warn_of_clipping(self, fraction: float | None, largest: float | None) -> None:
        """Warn once, on rank 0, that many numbers of actions are cut."""
        for sentence in clipping_warning(fraction, largest) if rank() == 0 and not self._warned else ():
            self._warned = True
            logger.warning(sentence)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write a line of metrics."""
        if self.tracker is not None:
            self.tracker.log(step, metrics, self.state.phase)

    @waiting("evaluate")
    def evaluate(self, tag: str, step: int) -> None:
        """Evaluate the present weights (a collective call); on rank 0 the result gets files, a line, and a place in the state.

        Args:
            tag: Name of the evaluation.
            step: Of its line of metrics.
        """
        start, state = time.monotonic(), self.state
        self.sync.push(state.policy_version)
        result = self.evaluator.run(self.sync.rollout_model, tag)
        if result is not None and rank() == 0:
            folder = evaluation_folder(self.config, tag)
            result.to_json(folder / RESULT_FILE)
            self._manifest().save(folder)
            self.progress.note(f"eval {tag}: {result.headline()}")
            self.warn_of_clipping(*actions_clipped(result.results))
            state.evaluations[tag] = result.summary() | {
                "env_steps": state.env_steps,
                "train_wall_s": state.train_wall_s,
                "phase": state.phase,
                "step": step,
                "checkpoint": state.checkpoint_name,
            }
            metrics = result.metrics() | {"time/eval_s": time.monotonic() - start, "time/total_s": state.train_wall_s}
            self.log(step, metrics | {"rollout/env_steps_total": state.env_steps})
        barrier()  # the other ranks wait for rank 0
        if result is not None:
            self.evaluator.record(self.sync.rollout_model, tag, result)

    def evaluate_once(self, tag: str) -> None:
        """Evaluate before or after a phase; a resumed run does not repeat it."""
        if tag not in self.state.evaluations:
            self.evaluate(tag, self.state.done)
            self.stop_if_asked()

    def evaluate_if_due(self, prefix: str, every: int, last: bool) -> str | None:
        """Evaluate every ``every`` steps of a phase but the last; a resumed run begins with what a signal interrupted.

        Returns:
            Tag of the evaluation that follows the present step, made now or before a resume; None: none is due.
        """
        done = self.state.done
        if last or not every or not done or done % every:
            return None
        tag = f"{prefix}_{done:06d}"
        if not any_rank(tag in self.state.evaluations):
            self.evaluate(tag, done - 1)
        return tag

    def checkpoint_if_due(self, last: bool) -> None:
        """Save at the end of a phase, every ``save_every`` steps and minutes, the best policy so far, and before stopping."""
        config, state = self.config.trainer, self.state
        limit = 60 * config.save_every_minutes
        late = rank() == 0 and limit > 0 and self._clock() - self._saved_at >= limit
        best = state.best_evaluation({one.get("checkpoint") for one in state.evaluations.values()} - {None})
        is_best = best is not None and state.evaluations[best]["checkpoint"] == state.checkpoint_name
        due = any_rank(late or is_best)  # asked of all ranks in every step: only rank 0 has clock and evaluations
        if last or due or (config.save_every and state.done % config.save_every == 0):
            self.save()
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """End the run if a signal has asked for it. What is not in a checkpoint yet is saved first. Raise StopRequested on all ranks."""
        state = self.state
        if not any_rank(self.stop_signal.number is not None):
            return
        # A resumed run drops the lines at or beyond its step, so it makes their evaluations again.
        state.evaluations = {
            tag: one
            for tag, one in state.evaluations.items()
            if one["phase"] != state.phase or one["step"] < state.done
        }
        if self._saved_steps != (state.sft_step, state.step):
            self.save()
        raise StopRequested(f"stopped by a signal after step {state.done} of phase {state.phase}")

    @waiting("save")
    def save(self) -> None:
        """Save the present state (a collective call)."""
        state, more = self.state, self.before_save()
        name = f"{state.phase}_{state.done:06d}"
        self.checkpoints.wait()  # the one before may be the best
        best = state.best_evaluation({name, *self.saved_names()})
        self.checkpoints.save(
            name,
            model=self.worker.model if self._other_policy is None else self._other_policy,
            optimizer=self.worker.optimizer if self._other_policy is None else None,
            loop_state=asdict(state),
            run_config=to_mapping(self.config),
            manifest=self._manifest(),
            best=None if best is None else state.evaluations[best]["checkpoint"],
            more=more,
        )
        self._saved_steps = (state.sft_step, state.step)
        self._saved_at = self._clock()

    def saved_names(self) -> list[str]:
        """Return the names of the checkpoints in the run folder."""
        return self.checkpoints.names()

    def _manifest(self) -> Manifest:
        version = self.state.policy_version
        return build_manifest(
            self.config, self.sync.rollout_model, policy_version=version, fingerprint=self.fingerprint
        )
