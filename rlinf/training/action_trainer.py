"""Base class for trainers of action policies: evaluations, metrics and warnings."""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlinf.cluster.rollouts import rollout_workers
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import barrier, rank
from rlinf.evaluation.result import actions_clipped, clipping_warning, far_warning
from rlinf.manifest import Manifest
from rlinf.memory import memory_metrics
from rlinf.models.embodiment.base import ActionModel
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.schedule import learning_rate
from rlinf.preflight.conditions import build_manifest
from rlinf.rollout.collector import Collector
from rlinf.rollout.weight_push import WeightPush
from rlinf.run_folder import RESULT_FILE
from rlinf.training.evaluator import Evaluator
from rlinf.training.loop import Loop, Update
from rlinf.training.outcome import evaluation_folder
from rlinf.training.train_worker import TrainWorker

logger = logging.getLogger("rlinf")


@dataclass
class TrainerContext:
    """Components shared by a run's trainers on one rank.

    Attributes:
        sync: Pushes new weights to the rollout policy.
        fps: Frame rate of the behaviour-cloning dataset, stored in manifests; None if unknown.
        warned_of_clipping: Whether the run has already warned about clipped actions.
    """

    config: RunConfig
    loop: Loop
    worker: TrainWorker
    sync: WeightPush
    evaluator: Evaluator
    fingerprint: dict[str, Any] | None = None
    fps: float | None = None
    warned_of_clipping: bool = False


class ActionTrainer:
    """A ``rlinf.training.loop.Trainer`` of ``trainer.max_steps`` iterations; subclasses implement ``iteration``.

    Args:
        collector: Collects rollouts; None if the trainer steps the envs itself.
    """

    phase, tag = "rl", "step"
    last_tag: str | None = "after_rl"
    ends_run = False

    def __init__(self, parts: TrainerContext, collector: Collector | None = None) -> None:
        self.parts, self.loop, self.worker, self.sync = parts, parts.loop, parts.worker, parts.sync
        self.collector = collector

    def iteration(self, step: int) -> dict[str, float]:
        """Run an iteration and return its metrics, including ``throughput/env_steps_per_s`` (a collective call)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement iteration")

    def wait_until_ready(self) -> None:
        """Wait until the collector is ready."""
        if self.collector is not None:
            self.collector.wait_until_ready()

    def rollout_workers(self) -> str | None:
        """Return a description of each rank's rollout workers, or None without rollouts."""
        return None if self.collector is None else rollout_workers(self.collector)

    def close(self) -> None:
        """Close the collector."""
        if self.collector is not None:
            self.collector.close()

    @property
    def model(self) -> ActionModel:
        """The policy to evaluate and save."""
        return self.worker.model

    @property
    def optimizer(self) -> MasterAdamW | None:
        """The policy's optimiser; None if ``state_dict`` contains its state."""
        return self.worker.optimizer

    @property
    def num_steps(self) -> int:
        """Total number of iterations."""
        return self.parts.config.trainer.max_steps

    def is_done(self) -> bool:
        """Return whether no iteration is left."""
        return self.loop.state.step >= self.num_steps

    def begin(self) -> None:
        """Evaluate the initial policy, then start or resume RL."""
        self.loop.state.phase = "rl"
        self.loop.evaluate_once("before_rl")

    def update(self, step: int) -> Update:
        """Run an iteration, and warn once if many actions are clipped."""
        cpu_start = time.process_time()
        metrics = self.iteration(step)
        metrics |= {"time/cpu_s": time.process_time() - cpu_start, **memory_metrics()}
        self._warn_of_clipping(*(metrics.get(f"rollout/actions_{name}") for name in ("clipped_fraction", "max_abs")))
        if not self._reports_success:
            metrics.pop("rollout/success_rate", None)
        shown = {"success_rate": metrics.get("rollout/success_rate")}
        shown["env_steps_per_s"] = metrics["throughput/env_steps_per_s"]
        if "rollout/return_mean" in metrics:
            shown["return"] = metrics["rollout/return_mean"]
        return Update(metrics, shown)

    def decayed(self, step: int) -> float:
        """Return the factor by which ``trainer.lr_decay`` scales the learning rates in an iteration."""
        trainer = self.parts.config.trainer
        return learning_rate(step, self.num_steps, decay=trainer.lr_decay)

    def evaluation_due(self, last: bool) -> str | None:
        """Return the tag of the evaluation due after this iteration according to ``trainer.eval_every``; None after the last iteration."""
        return self._due(self.parts.config.trainer.eval_every, last)

    def _due(self, every: int, last: bool) -> str | None:
        done = self.loop.state.done
        return None if last or not every or not done or done % every else f"{self.tag}_{done:06d}"

    def evaluate(self, tag: str, step: int) -> None:
        """Evaluate the current weights (a collective call); rank 0 writes the files and logs the result."""
        start, state, config, evaluator = time.monotonic(), self.loop.state, self.parts.config, self.parts.evaluator
        self.sync.push(state.policy_version)
        result = evaluator.run(self.sync.rollout_model, tag)
        if result is None:  # interrupted by a signal
            return
        state.evaluations[tag] = result.summary() | {
            "env_steps": state.env_steps,
            "train_wall_s": state.train_wall_s,
            "phase": state.phase,
            "step": step,
            "checkpoint": state.policy_checkpoint,
            "end_episode": config.evaluation.first_episode + result.episodes,
        }
        if rank() == 0:
            folder = evaluation_folder(config, tag)
            result.to_json(folder / RESULT_FILE)
            self.manifest().save(folder)
            self.loop.progress.note(f"eval {tag}: {result.headline()}")
            self._warn_of_clipping(*actions_clipped(result.results))
            for text in far_warning(result.states_far_fraction):
                logger.warning(text)
            metrics = result.metrics() | {"time/eval_s": time.monotonic() - start, "time/total_s": state.train_wall_s}
            self.loop.log(step, metrics | {"rollout/env_steps_total": state.env_steps})
        # Wait until the result is on disk, because a failed recording may end the run.
        barrier()
        evaluator.record(self.sync.rollout_model, tag, result)

    @property
    def checkpoint_name(self) -> str:
        """Name for a checkpoint of the current state."""
        return self.loop.state.checkpoint_name

    def best_checkpoint(self, names: Collection[str]) -> str | None:
        """Return the checkpoint of the best evaluation, see ``LoopState.best_evaluation``."""
        return self.loop.state.best_checkpoint(names)

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty dict, because checkpoints already contain the policy and optimiser."""
        return {}

    def loop_state(self) -> dict[str, Any]:
        """Return an empty dict, because ``LoopState`` contains the progress."""
        return {}

    def manifest(self) -> Manifest:
        """Return the current policy's manifest."""
        version, policy, parts = self.loop.state.policy_version, self.sync.rollout_model, self.parts
        manifest = build_manifest(parts.config, policy, policy_version=version, fingerprint=parts.fingerprint)
        return replace(manifest, fps=parts.fps)

    @cached_property
    def _reports_success(self) -> bool:
        summaries = self.loop.state.evaluations.values()
        reports = any(summary.get("reports_success", True) for summary in summaries)
        return reports or self.parts.evaluator.env.reports_success(self.parts.config.env)

    def _warn_of_clipping(self, fraction: float | None, largest: float | None) -> None:
        """Warn once, on rank 0, if many actions are clipped."""
        if rank() == 0 and not self.parts.warned_of_clipping:
            for text in clipping_warning(fraction, largest):
                self.parts.warned_of_clipping = True
                logger.warning(text)


class Clock:
    """Measures the time spent in each stage of an iteration, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Add the time since the last lap, including pending GPU work, to this stage."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        """Return the total time of all stages, in seconds."""
        return sum(self.seconds.values())

    def metrics(self) -> dict[str, float]:
        """Return the time spent in each stage, in seconds, as metrics."""
        return {f"time/{name}_s": value for name, value in self.seconds.items()}
