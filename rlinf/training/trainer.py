"""The training loop: behaviour cloning, then reinforcement learning. Every rank runs it; rank 0 writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.algorithms.base import Algorithm
from rlinf.config.schema import RunConfig
from rlinf.data.prefetch import Prefetcher
from rlinf.data.rows import BatchSource, shuffled_rows
from rlinf.distributed.process_group import any_rank, gather_rollout, rank, sum_over_ranks
from rlinf.evaluation.result import EvaluationResult
from rlinf.memory import memory_metrics
from rlinf.preflight.derived import parity_gate
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.weight_sync import WeightSync
from rlinf.seeding import derive_seed
from rlinf.training.stop_signal import StopRequested
from rlinf.training.train_worker import TrainWorker, minibatch_indices, own_rows
from rlinf.types import Observation, RolloutBatch


@dataclass
class LoopState:
    """Where a run is; saved with every checkpoint.

    Attributes:
        phase: ``sft`` or ``rl``.
        sft_step, step: Next optimiser step of cloning, next iteration of RL.
        env_steps: Env steps of RL so far.
        policy_version: Weight updates so far.
        train_wall_s: Seconds of training so far (demonstrations, cloning, RL; not evaluation).
        tracker_run_id: Identity of the metric run.
        evaluations: Tag to summary of each evaluation so far, with the name of the ``checkpoint`` that holds the policy.
        dataset: Hash of the dataset that is cloned (``StoredDemonstrations.digest``), or None.
    """

    phase: str = "sft"
    sft_step: int = 0
    step: int = 0
    env_steps: int = 0
    policy_version: int = 0
    train_wall_s: float = 0.0
    tracker_run_id: str | None = None
    evaluations: dict[str, Any] = field(default_factory=dict)
    dataset: str | None = None

    @property
    def checkpoint_name(self) -> str | None:
        """Name of the checkpoint that holds the present policy, once it is saved; None: nothing was trained yet."""
        if self.phase == "rl" and self.step > 0:
            return f"rl_{self.step:06d}"
        return f"sft_{self.sft_step:06d}" if self.sft_step > 0 else None

    def best_evaluation(self, names: Collection[str]) -> str | None:
        """Return the tag of the evaluation with the highest success rate above 0, the newest of equals.

        Args:
            names: Checkpoints that there are; other evaluations are left out.
        """
        tags = [
            tag for tag, one in self.evaluations.items() if one.get("checkpoint") in names and one["success_rate"] > 0
        ]
        return max(reversed(tags), key=lambda tag: self.evaluations[tag]["success_rate"], default=None)


class Trainer:
    """Runs the phases of one experiment.

    Args:
        config: The whole configuration.
        worker: Scores and updates the policy.
        collector: Plays it.
        algorithm: Turns rollouts into losses.
        sync: Brings new weights to the rollout policy.
        make_reference: Returns the frozen policy of the KL penalty, or None; called when RL begins.
        evaluate: ``evaluate(tag) -> EvaluationResult`` on rank 0 (None elsewhere).
        save: ``save(state)`` writes a checkpoint; a collective call.
        log: ``log(step, metrics, phase)`` on rank 0.
        progress: Live line on rank 0.
        should_stop: True once a signal arrived.
        state: Where to begin.
        clock: Seconds, by which checkpoints are due.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        worker: TrainWorker,
        collector: RolloutCollector,
        algorithm: Algorithm,
        sync: WeightSync,
        make_reference: Callable[[], nn.Module | None],
        evaluate: Callable[[str], EvaluationResult | None],
        save: Callable[[LoopState], Path | None],
        log: Callable[[int, dict[str, float], str], None],
        progress: Callable[..., None],
        should_stop: Callable[[], bool],
        state: LoopState,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.worker = worker
        self.collector = collector
        self.algorithm = algorithm
        self.sync = sync
        self.make_reference = make_reference
        self.reference: nn.Module | None = None
        self._evaluate = evaluate
        self._save = save
        self._log = log
        self._progress = progress
        self._should_stop = should_stop
        self.state = state
        self._saved_steps: tuple[int, int] | None = None  # of cloning and RL, in the newest checkpoint
        self._clock, self._saved_at = clock, clock()
        self.gate = parity_gate(config)

    def run_sft(self, collect: Callable[[], BatchSource]) -> None:
        """Clone demonstrations from ``state.sft_step`` on, then switch the state to RL with a fresh optimiser."""
        state = self.state
        if self._sft_goes_on():
            start = time.monotonic()
            demonstrations = collect()
            if state.sft_step == 0:  # a resumed run has paid for them before
                state.train_wall_s += time.monotonic() - start
            self._clone(demonstrations)
        state.phase = "rl"
        self.worker.start_phase(self.config.trainer)

    def _clone(self, demonstrations: BatchSource) -> None:
        """Take the optimiser steps of behaviour cloning; of each minibatch, a rank reads the rows that it trains on."""
        config, state = self.config.sft, self.state
        seed = derive_seed(self.config.seed, "sft")
        mine = own_rows(config.batch_size)[0].numpy()
        num_workers = config.num_workers if config.dataset is not None else 0
        waits, times = [], []  # seconds of the steps since the last line

        def read(step: int) -> tuple[Observation, Tensor]:
            return demonstrations.rows(shuffled_rows(len(demonstrations), step, config.batch_size, seed)[mine])

        with Prefetcher(read, state.sft_step, num_workers) as batches:
            self._evaluate_if_due(last=False)
            self._stop_if_asked()
            while self._sft_goes_on():
                start = time.monotonic()
                step = state.sft_step
                observation, actions = batches.next()
                waits.append(time.monotonic() - start)
                noise = derive_seed(self.config.seed, "sft noise", step)
                metrics = self.worker.sft_update(observation, actions, config.batch_size, step, noise)
                state.sft_step += 1
                state.policy_version += 1
                times.append(time.monotonic() - start)
                state.train_wall_s += times[-1]
                last = not self._sft_goes_on()
                if step % 10 == 0 or last:
                    named = {f"sft/{name}": value for name, value in metrics.items()}
                    named |= {"time/update_s": times[-1], "time/total_s": state.train_wall_s}
                    named |= {"time/data_wait_s": sum(waits) / len(waits)}
                    named |= {"throughput/data_wait_fraction": sum(waits) / sum(times)}
                    self._log(step, named | {"throughput/samples_per_s": config.batch_size / times[-1]}, "sft")
                    waits, times = [], []
                self._progress("sft", state.sft_step, max(config.max_steps, state.sft_step), loss=metrics["loss"])
                self._evaluate_if_due(last)
                self._checkpoint_if_due(state.sft_step, last)

    def _sft_goes_on(self) -> bool:
        config, state = self.config.sft, self.state
        within_time = config.time_limit_s is not None and state.train_wall_s < config.time_limit_s
        return state.sft_step < config.max_steps or any_rank(within_time)

    def run_rl(self) -> None:
        """Iterate from ``state.step`` to ``trainer.max_steps``."""
        config, state = self.config.trainer, self.state
        self.sync.push(state.policy_version)
        self.reference = self.make_reference()
        reached = self._evaluate_if_due(last=state.step == config.max_steps)
        self._stop_if_asked()
        while state.step < config.max_steps and not reached:
            start = time.monotonic()
            step = state.step
            metrics = self.iteration(step)
            elapsed = time.monotonic() - start
            state.train_wall_s += elapsed
            state.step += 1
            metrics |= {"time/total_s": state.train_wall_s, **memory_metrics()}
            last = state.step == config.max_steps
            self._progress(
                "rl", state.step, config.max_steps, success_rate=metrics.get("rollout/success_rate"),
                env_steps_per_s=metrics["throughput/env_steps_per_s"],
            )  # fmt: skip
            self._log(step, metrics, "rl")
            reached = self._evaluate_if_due(last)
            self._checkpoint_if_due(state.step, last or reached)

    def iteration(self, step: int) -> dict[str, float]:
        """One iteration of reinforcement learning; returns its metrics."""
        config, state, algorithm = self.config, self.state, self.algorithm
        clock, env_steps_before = _Clock(), state.env_steps
        self.sync.push(state.policy_version)
        clock.lap("sync")
        batch = self._collect(step, 0, clock)
        for attempt in range(1, 1 + algorithm.max_resamples):
            uninformative = torch.nonzero(algorithm.uninformative_envs(batch)).flatten()
            if not len(uninformative):
                break
            more = self._collect(step, attempt, clock, uninformative)
            batch = replace_envs(batch, uninformative, more, ~algorithm.uninformative_envs(more))
        metrics = self.gate.check(batch, step)
        metrics |= rollout_metrics(batch)
        metrics |= algorithm.compute_advantages(batch)
        flat = batch.flatten()
        updates: list[dict[str, float]] = []
        for epoch in range(config.algorithm.update_epochs):
            seed = derive_seed(config.seed, "minibatches", step, epoch)
            for index in minibatch_indices(flat.loss_mask, config.trainer.minibatch_size, seed):
                updates.append(self.worker.update(flat, index, algorithm, step))
                if len(updates) == 1:
                    self.gate.check_first_update(updates[0], step)
        state.policy_version += len(updates)
        if updates and not algorithm.policy_is_frozen(step):
            self.gate.policy_was_updated()
        clock.lap("update")
        for name in updates[0] if updates else ():
            metrics[f"train/{name}"] = sum(update[name] for update in updates) / len(updates)
        metrics |= clock.metrics()
        metrics["rollout/env_steps_total"] = state.env_steps
        metrics["throughput/env_steps_per_s"] = (state.env_steps - env_steps_before) / clock.total()
        metrics["throughput/samples_per_s"] = (
            int(flat.loss_mask.sum()) * config.algorithm.update_epochs / clock.seconds["update"]
        )
        return metrics

    def _collect(self, step: int, attempt: int, clock: _Clock, env_ids: Tensor | None = None) -> RolloutBatch:
        """Play one rollout of the envs ``env_ids`` (None: all), score it with the trained weights, and join what all ranks played."""
        needs_values, version = self.algorithm.needs_values, self.state.policy_version
        ids = None if env_ids is None else env_ids.numpy()
        batch = self.collector.collect(self.sync.player, step, version, needs_values, attempt, ids)
        clock.lap("rollout")
        batch.old_logprobs, batch.values = self.worker.evaluate(batch)
        if self.algorithm.needs_reference:
            batch.ref_logprobs, _ = self.worker.evaluate(batch, self.reference)
        batch = gather_rollout(batch)
        if ids is not None:
            # More were played where they do not divide over the ranks.
            batch = batch.select_envs(torch.arange(len(ids)))
        clock.lap("logprob")
        self.state.env_steps += int(batch.action_mask.sum())
        return batch

    def evaluate_phase(self, tag: str) -> None:
        """Evaluate between phases and remember the result under ``tag``; a resumed run does not repeat it."""
        if tag in self.state.evaluations:
            return
        is_sft = tag == "after_sft"
        self._evaluate_now(tag, self.state.sft_step if is_sft else self.state.step, "sft" if is_sft else "rl")
        self._stop_if_asked()

    def _evaluate_if_due(self, last: bool) -> bool:
        """Evaluate every ``eval_every`` steps of a phase but the last; a resumed run begins with what a signal interrupted.

        Returns:
            Whether the evaluation after the present step, made now or before a resume, reaches the target of RL.
        """
        state, in_sft = self.state, self.state.phase == "sft"
        every = (self.config.sft if in_sft else self.config.trainer).eval_every
        done = state.sft_step if in_sft else state.step
        if last or not every or not done or done % every:
            return False
        tag = f"{'sft' if in_sft else 'step'}_{done:06d}"
        if not any_rank(tag in state.evaluations):
            self._evaluate_now(tag, done - 1, state.phase)
        target = self.config.trainer.target_success_rate
        if in_sft or target is None:
            return False
        return any_rank(tag in state.evaluations and state.evaluations[tag]["success_rate"] >= target)

    def _evaluate_now(self, tag: str, step: int, phase: str) -> None:
        """Evaluate on all ranks; on rank 0 the result gets a line of its own and a place in the state."""
        start, state = time.monotonic(), self.state
        self.sync.push(state.policy_version)
        result = self._evaluate(tag)
        if result is not None:
            where = {"env_steps": state.env_steps, "train_wall_s": state.train_wall_s, "phase": phase, "step": step}
            where["checkpoint"] = state.checkpoint_name
            state.evaluations[tag] = result.summary() | where
            metrics = result.metrics() | {"time/eval_s": time.monotonic() - start, "time/total_s": state.train_wall_s}
            self._log(step, metrics | {"rollout/env_steps_total": state.env_steps}, phase)
        sum_over_ranks([0.0])  # the other ranks wait here

    def _checkpoint_if_due(self, step: int, last: bool) -> None:
        """Save at the end of a phase, every ``save_every`` steps and minutes, the best policy so far, and before stopping."""
        config, state = self.config.trainer, self.state
        limit = 60 * config.save_every_minutes
        late = rank() == 0 and limit > 0 and self._clock() - self._saved_at >= limit
        best = state.best_evaluation({one.get("checkpoint") for one in state.evaluations.values()} - {None})
        is_best = best is not None and state.evaluations[best]["checkpoint"] == state.checkpoint_name
        due = any_rank(late or is_best)  # asked of all ranks in every step: only rank 0 has clock and evaluations
        if last or due or (config.save_every and step % config.save_every == 0):
            self._save_now()
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """End the run where a signal has asked for it; what is not in a checkpoint yet is saved first."""
        state = self.state
        if any_rank(self._should_stop()):
            step = state.sft_step if state.phase == "sft" else state.step
            # A resumed run drops the lines at or beyond its step, so it makes their evaluations again.
            state.evaluations = {
                tag: one for tag, one in state.evaluations.items() if one["phase"] != state.phase or one["step"] < step
            }
            if self._saved_steps != (state.sft_step, state.step):
                self._save_now()
            raise StopRequested(f"stopped by a signal after step {step} of phase {state.phase}")

    def _save_now(self) -> None:
        self._save(self.state)
        self._saved_steps = (self.state.sft_step, self.state.step)
        self._saved_at = self._clock()


class _Clock:
    """Seconds of the parts of an iteration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        return sum(self.seconds.values())

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": value for name, value in self.seconds.items()}


def replace_envs(batch: RolloutBatch, envs: Tensor, more: RolloutBatch, wanted: Tensor) -> RolloutBatch:
    """Put the columns of ``more`` that are ``wanted`` in the place of the columns ``envs`` of ``batch`` (time-major).

    Args:
        batch: ``B`` columns.
        envs: int64 ``[K]``, columns of ``batch``.
        more: ``K`` columns, each the env of ``envs`` again.
        wanted: bool ``[K]``, in whole groups.
    """
    width = batch.loss_mask.shape[1]
    order = torch.arange(width)
    order[envs[wanted]] = width + torch.nonzero(wanted).flatten()
    return RolloutBatch.concatenate([batch, more]).select_envs(order)


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Success, return and length of the first episode of each env, and how many were lost (``rollout/*``)."""
    episodes = batch.episodes
    count = len(episodes)
    num_lost = len(batch.episode_ids.unique()) - len(batch.episode_ids[batch.loss_mask].unique())
    if not count:
        return {"rollout/num_episodes": 0, "rollout/lost_episodes": num_lost}
    return {
        "rollout/success_rate": sum(e.success for e in episodes) / count,
        "rollout/return_mean": sum(e.episode_return for e in episodes) / count,
        "rollout/episode_len": sum(e.num_env_steps for e in episodes) / count,
        "rollout/num_episodes": len(episodes),
        "rollout/lost_episodes": num_lost,
    }
