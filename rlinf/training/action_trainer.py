"""What the trainers of action policies share: the parts of a run, evaluations, and the metrics of an iteration."""

from __future__ import annotations

import logging
import time
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
    """What the trainers of a run are made of, on one rank.

    Attributes:
        worker: Scores and updates the policy.
        sync: Brings new weights to the rollout policy.
        fingerprint: Fingerprint of the simulator, which every manifest records.
        fps: Rows a second of the dataset that was cloned, which every manifest records; None: unknown.
        warned_of_clipping: The run has warned that numbers of actions are cut.
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
    """Improves a policy by ``iteration``, which a subclass has, ``trainer.max_steps`` times (see ``rlinf.training.loop.Trainer``).

    Args:
        collector: Plays the policy; None: the trainer plays it itself.
    """

    phase, tag = "rl", "step"
    last_tag: str | None = "after_rl"
    ends_run = False

    def __init__(self, parts: TrainerContext, collector: Collector | None = None) -> None:
        self.parts, self.loop, self.worker, self.sync = parts, parts.loop, parts.worker, parts.sync
        self.collector = collector

    def iteration(self, step: int) -> dict[str, float]:
        """Take a step; return its metrics, of which ``throughput/env_steps_per_s`` must be one (a collective call)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement iteration")

    def wait_until_ready(self) -> None:
        """Wait for the collector."""
        if self.collector is not None:
            self.collector.wait_until_ready()

    def rollout_workers(self) -> str | None:
        """Return in words who plays the rollouts of a rank; None without rollouts."""
        return None if self.collector is None else rollout_workers(self.collector)

    def close(self) -> None:
        """End the collector."""
        if self.collector is not None:
            self.collector.close()

    @property
    def model(self) -> ActionModel:
        """The policy that is evaluated and saved."""
        return self.worker.model

    @property
    def optimizer(self) -> MasterAdamW | None:
        """Its optimiser; None: ``state_dict`` has all that learns."""
        return self.worker.optimizer

    @property
    def num_steps(self) -> int:
        """Iterations of the run."""
        return self.parts.config.trainer.max_steps

    def is_done(self) -> bool:
        """Return whether no iteration is left."""
        return self.loop.state.step >= self.num_steps

    def begin(self) -> None:
        """Start RL, or continue with it, after an evaluation of the policy before it."""
        self.loop.state.phase = "rl"
        self.loop.evaluate_once("before_rl")

    def update(self, step: int) -> Update:
        """Take a step; warn once if many numbers of actions are cut."""
        cpu_start = time.process_time()
        metrics = self.iteration(step)
        metrics |= {"time/cpu_s": time.process_time() - cpu_start, **memory_metrics()}
        self._warn_of_clipping(*(metrics.get(f"rollout/actions_{name}") for name in ("clipped_fraction", "max_abs")))
        if not self._tells_success:
            metrics.pop("rollout/success_rate", None)
        shown = {"success_rate": metrics.get("rollout/success_rate")}
        shown["env_steps_per_s"] = metrics["throughput/env_steps_per_s"]
        if "rollout/return_mean" in metrics:
            shown["return"] = metrics["rollout/return_mean"]
        return Update(metrics, shown)

    def decayed(self, step: int) -> float:
        """Return the fraction of the learning rates in an iteration, by ``trainer.lr_decay``."""
        trainer = self.parts.config.trainer
        return learning_rate(step, self.num_steps, decay=trainer.lr_decay, min_factor=trainer.lr_min_factor)

    def evaluation_due(self, last: bool) -> str | None:
        """Return the tag of the evaluation after every ``trainer.eval_every`` iterations but the last."""
        return self._due(self.parts.config.trainer.eval_every, last)

    def _due(self, every: int, last: bool) -> str | None:
        done = self.loop.state.done
        return None if last or not every or not done or done % every else f"{self.tag}_{done:06d}"

    def evaluate(self, tag: str, step: int) -> None:
        """Evaluate the present weights (a collective call); rank 0 writes files, a line of metrics and one of the console."""
        start, state, config, evaluator = time.monotonic(), self.loop.state, self.parts.config, self.parts.evaluator
        self.sync.push(state.policy_version)
        result = evaluator.run(self.sync.rollout_model, tag)
        if result is None:  # a signal has stopped it
            return
        state.evaluations[tag] = result.summary() | {
            "env_steps": state.env_steps,
            "train_wall_s": state.train_wall_s,
            "phase": state.phase,
            "step": step,
            "checkpoint": state.checkpoint_name,
        }
        if rank() == 0:
            folder = evaluation_folder(config, tag)
            result.to_json(folder / RESULT_FILE)
            self.manifest().save(folder)
            self.loop.progress.note(f"eval {tag}: {result.headline()}")
            self._warn_of_clipping(*actions_clipped(result.results))
            for sentence in far_warning(result.states_far_fraction):
                logger.warning(sentence)
            metrics = result.metrics() | {"time/eval_s": time.monotonic() - start, "time/total_s": state.train_wall_s}
            self.loop.log(step, metrics | {"rollout/env_steps_total": state.env_steps})
        barrier()  # the other ranks wait for rank 0
        evaluator.record(self.sync.rollout_model, tag, result)

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing: policy and optimiser are all that a checkpoint needs."""
        return {}

    def manifest(self) -> Manifest:
        """Return the conditions of the present policy."""
        version, policy, parts = self.loop.state.policy_version, self.sync.rollout_model, self.parts
        found = build_manifest(parts.config, policy, policy_version=version, fingerprint=parts.fingerprint)
        return replace(found, fps=parts.fps)

    @cached_property
    def _tells_success(self) -> bool:
        told = [one.get("reports_success", True) for one in self.loop.state.evaluations.values()]
        return any(told) or self.parts.evaluator.env.reports_success(self.parts.config.env)

    def _warn_of_clipping(self, fraction: float | None, largest: float | None) -> None:
        """Warn once, on rank 0, that many numbers of actions are cut."""
        if rank() == 0 and not self.parts.warned_of_clipping:
            for sentence in clipping_warning(fraction, largest):
                self.parts.warned_of_clipping = True
                logger.warning(sentence)


class Clock:
    """Seconds of the parts of an iteration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Count the time since the last lap, what a GPU computes included, as time of this part."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        """Return the seconds of all laps."""
        return sum(self.seconds.values())

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each part as metrics."""
        return {f"time/{name}_s": value for name, value in self.seconds.items()}
