"""Reinforcement learning. Every rank runs it."""

from __future__ import annotations

import os
import time

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf.algorithms.base import Algorithm
from rlinf.distributed.process_group import any_rank, gather_rollout, rank
from rlinf.errors import CheckpointError
from rlinf.memory import memory_metrics
from rlinf.models.embodiment.base import ActionModel
from rlinf.preflight.derived import parity_gate
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.weight_push import frozen_copy
from rlinf.seeding import derive_seed
from rlinf.training.session import Session
from rlinf.training.train_worker import minibatch_indices
from rlinf.types import RolloutBatch

REFERENCE_FILE = "reference.safetensors"
"""The policy with which RL began, in the run folder of a run with a KL penalty."""


class RLTrainer:
    """Improve a policy by its own rollouts.

    Args:
        session: The run.
        collector: Plays the policy.
        algorithm: Turns rollouts into losses.
    """

    def __init__(self, session: Session, collector: RolloutCollector, algorithm: Algorithm) -> None:
        self.session, self.collector, self.algorithm = session, collector, algorithm
        self.worker, self.sync = session.worker, session.sync
        self.gate = parity_gate(session.config)
        self.reference: ActionModel | None = None

    def fit(self) -> None:
        """Iterate from ``state.step`` to ``trainer.max_steps``, between two evaluations."""
        session, state, config = self.session, self.session.state, self.session.config.trainer
        if state.phase != "rl":  # cloning has ended: RL has an optimiser of its own
            state.phase = "rl"
            self.worker.start_phase(config)
        session.evaluate_once("before_rl")
        self.sync.push(state.policy_version)
        self.reference = self._make_reference()
        reached = self._evaluate_if_due(last=state.step == config.max_steps)
        session.stop_if_asked()
        while state.step < config.max_steps and not reached:
            start = time.monotonic()
            step = state.step
            with session.profile_window.step("rl", step):
                metrics = self.iteration(step)
            elapsed = time.monotonic() - start
            state.train_wall_s += elapsed
            state.step += 1
            metrics |= {"time/total_s": state.train_wall_s, **memory_metrics()}
            last = state.step == config.max_steps
            session.progress.update(
                "rl", state.step, config.max_steps, success_rate=metrics.get("rollout/success_rate"),
                env_steps_per_s=metrics["throughput/env_steps_per_s"],
            )  # fmt: skip
            session.log(step, metrics)
            reached = self._evaluate_if_due(last)
            session.checkpoint_if_due(last or reached)
        session.evaluate_once("after_rl")

    def _evaluate_if_due(self, last: bool) -> bool:
        """Return whether the evaluation after the present step, made now or before a resume, reaches the target."""
        config, evaluations = self.session.config.trainer, self.session.state.evaluations
        tag, target = self.session.evaluate_if_due("step", config.eval_every, last), config.target_success_rate
        if tag is None or target is None:
            return False
        return any_rank(tag in evaluations and evaluations[tag]["success_rate"] >= target)

    def _make_reference(self) -> ActionModel | None:
        """Return a frozen copy of the policy with which RL began, for the KL penalty; kept on disk for a resumed run.

        Raises:
            CheckpointError: The run that is resumed did not keep it.
        """
        session = self.session
        if session.config.algorithm.kl_coef == 0:
            return None
        reference = frozen_copy(self.sync.rollout_model)
        run_folder = session.folder if session.resumed_from is None else session.resumed_from.parent.parent
        if session.state.step > 0:
            path = run_folder / REFERENCE_FILE
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing, which a run writes that begins RL with a KL penalty. Copy it from that run's folder, or "
                    "set algorithm.kl_coef=0"
                )
            reference.load_state_dict(load_file(path))
        if rank() == 0 and (session.state.step == 0 or run_folder.resolve() != session.folder.resolve()):
            tensors = {name: tensor.detach().cpu().clone() for name, tensor in reference.state_dict().items()}
            partial = session.folder / f".{REFERENCE_FILE}.tmp"
            save_file(tensors, partial)
            os.replace(partial, session.folder / REFERENCE_FILE)
        return reference

    def iteration(self, step: int) -> dict[str, float]:
        """One iteration of reinforcement learning; returns its metrics."""
        config, state, algorithm = self.session.config, self.session.state, self.algorithm
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
        needs_values, state = self.algorithm.needs_values, self.session.state
        ids = None if env_ids is None else env_ids.numpy()
        batch = self.collector.collect(self.sync.rollout_policy, step, state.policy_version, needs_values, attempt, ids)
        clock.lap("rollout")
        batch.old_logprobs, batch.values = self.worker.evaluate(batch)
        if self.algorithm.needs_reference:
            batch.ref_logprobs, _ = self.worker.evaluate(batch, self.reference)
        batch = gather_rollout(batch)
        if ids is not None:
            # More were played where they do not divide over the ranks.
            batch = batch.select_envs(torch.arange(len(ids)))
        clock.lap("logprob")
        state.env_steps += int(batch.action_mask.sum())
        return batch


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
