"""Trainer of an off-policy actor, standalone or on a frozen base policy: collect transitions, update, report."""

from __future__ import annotations

import logging
import math
import os
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rlinf.algorithms.offpolicy_config import LARGEST_SCALE, OffPolicyConfig
from rlinf.checkpoints.checkpoint import on_rank_zero, write_policy
from rlinf.checkpoints.folders import policy_folder, resolve_checkpoint
from rlinf.checkpoints.trainer_state import read_entries, read_tensors
from rlinf.cluster.factory import env_maker, episode_sampler
from rlinf.data.formats import open_dataset
from rlinf.data.stored import StoredDemonstrations
from rlinf.distributed.process_group import gather_objects, local_world_size, rank, world_size
from rlinf.envs.base import VectorEnv
from rlinf.envs.episodes import EpisodeSampler
from rlinf.errors import CheckpointError, RLinfError
from rlinf.files import naming
from rlinf.models.base_weights import tensors_digest, weights_digest
from rlinf.models.embodiment.actor_policy import (
    ActorPolicy,
    actor_settings,
    base_store_folder,
    check_bounds,
    make_actor,
)
from rlinf.models.embodiment.base import ActionModel
from rlinf.offpolicy.episodes import largest_value
from rlinf.offpolicy.learner import OffPolicyLearner
from rlinf.offpolicy.offline import Offline, take_over_replay
from rlinf.offpolicy.replay import ReplayBuffer
from rlinf.offpolicy.transitions import TransitionCollector
from rlinf.preflight.conditions import build_manifest
from rlinf.rollout.weight_push import WeightPush
from rlinf.run_folder import TRAINER_FOLDER
from rlinf.seeding import derive_seed
from rlinf.training.action_trainer import ActionTrainer, Clock, TrainerContext

logger = logging.getLogger("rlinf")

LEARNER, REPLAY, LOOP, OFFLINE = "learner.", "replay.", "loop.", "offline."
"""Prefixes of tensor names in a checkpoint."""


def make_offpolicy_trainer(algorithm: type[OffPolicyLearner], parts: TrainerContext) -> OffPolicyTrainer:
    """Build the trainer for an off-policy algorithm, and this rank's envs."""
    config = parts.config
    env = env_maker(config, local_world_size())(config.rollout.num_envs // world_size(), auto_reset=True)
    folder = cast(OffPolicyConfig, config.algorithm).offline_dataset
    demonstrations = None if folder is None else open_dataset(config.sft, env, folder, outcomes=True)
    sampler = episode_sampler(config, env)
    return OffPolicyTrainer(parts, env, sampler, algorithm, demonstrations)


class OffPolicyTrainer(ActionTrainer):
    """Trains an actor that improves a frozen base policy, using a replay buffer.

    Each iteration starts new episodes, so that checkpoints need not contain simulator state. Episodes still running at the end of an
    iteration are truncated: the last observation is stored, and the critic estimates its value.

    Each rank steps its own envs. Transitions are all-gathered, so all ranks make identical updates.

    Args:
        demonstrations: Dataset from which a fraction of each batch is sampled, if any.
    """

    def __init__(
        self,
        parts: TrainerContext,
        env: VectorEnv,
        sampler: EpisodeSampler,
        make_learner: type[OffPolicyLearner],
        demonstrations: StoredDemonstrations | None = None,
    ) -> None:
        super().__init__(parts)
        self.env, self.sampler = env, sampler
        self._bounds = torch.from_numpy(env.action_low), torch.from_numpy(env.action_high)
        check_bounds(*self._bounds)  # check now instead of after hours of behaviour cloning
        self.make_learner, self.demonstrations = make_learner, demonstrations
        self.offline: Offline | None = None
        self.config = cast(OffPolicyConfig, parts.config.algorithm)
        self.pending_updates = 0.0  # fractional updates still due (UTD ratio x env steps)
        self.largest_return = 0.0  # discounted, in absolute value, from any step of an episode to its end
        self._warned: set[str] = set()
        self._updating = ThreadPoolExecutor(1, "update") if self.config.overlap else None
        self.policy: ActorPolicy
        self.learner: OffPolicyLearner
        self.replay: ReplayBuffer
        self.transitions: TransitionCollector

    def begin(self) -> None:
        """Start with a new actor or the checkpoint's, and evaluate it."""
        loop = self.loop
        self.worker.end_phase()
        self.make_parts(self.worker.model)
        self.sync = WeightPush(self.policy, self.policy)
        super().begin()
        self.sync.push(loop.state.policy_version)

    @property
    def model(self) -> ActorPolicy:
        """The policy with its actor, to be evaluated and saved."""
        return self.policy

    @property
    def optimizer(self) -> None:
        """None, because ``state_dict`` contains the optimiser states."""
        return None

    def rollout_workers(self) -> str:
        """Return a description of the thread that steps a rank's envs."""
        return "the thread that updates" if self._updating is None else "a thread next to the one that updates"

    def close(self) -> None:
        """Wait for running updates to finish, and close the env."""
        if self._updating is not None:
            self._updating.shutdown(cancel_futures=True)
        self.env.close()

    def make_parts(self, model: ActionModel) -> None:
        """Build actor, learner and replay buffer, or restore them from the checkpoint."""
        loop, run = self.loop, self.parts.config
        config, seed, rollout = self.config, run.seed, run.rollout
        if isinstance(model, ActorPolicy):
            self.policy = model
        else:
            with torch.random.fork_rng(devices=[]):
                # The actor was formerly called "head". The tag must not change, because it affects all published results.
                torch.manual_seed(derive_seed(seed, "head"))
                actor = make_actor(config.actor, model.feature_dim, model, self.make_learner.noise_std(config))
            self.policy = ActorPolicy(model, actor, *self._bounds)
        self.policy.eval()
        store_base(self.policy, loop.folder, loop.resumed_from if loop.state.step > 0 else None)
        actor = self.policy.actor
        self.learner = self.make_learner(config, actor, seed)
        if self.policy.critics is not None:  # the actor uses its critics to choose actions, so they are saved with it
            self.learner.load_critics(self.policy.critics)
        self.policy.critics = self.learner.critics if actor.critics_choose else None
        self.replay = ReplayBuffer(
            config.replay_capacity,
            rollout.num_envs,
            feature_dim=actor.feature_dim,
            num_candidates=actor.num_candidates,
            base_dim=actor.base_dim,
            output_dim=actor.output_dim,
            chunk_len=self.policy.action_chunks_len,
            seed=derive_seed(seed, "replay"),
            feature_dtype=self.policy.base.feature_dtype,
        )
        self.transitions = TransitionCollector(
            run, self.env, self.sampler, self.policy, self.learner, self.replay, self.worker.autocast
        )
        if self.policy.base_sha256 is None:
            self.policy.base_sha256 = tensors_digest(self.policy.base.state_dict())
        if self.demonstrations is not None:
            self._take(self.demonstrations)
        if loop.state.step > 0:
            self._load()
        elif config.replay_from is not None:
            folder = resolve_checkpoint(config.replay_from)
            manifest = build_manifest(run, self.policy, policy_version=0)
            more = take_over_replay(folder, self.replay, self.policy, manifest, REPLAY, [f"{LOOP}largest_return"])
            self.largest_return = max(self.largest_return, float(more[f"{LOOP}largest_return"]))
            loop.progress.note(f"the buffer starts with {self.replay.num_transitions} transitions of {folder}")

    def _take(self, dataset: StoredDemonstrations) -> None:
        """Prepare the demonstrations: query the base policy, unless its outputs are cached on disk."""
        self.offline = Offline(self.parts, dataset, self.policy, self.worker.autocast)
        self.demonstrations = None  # free the memory of its images, which are no longer needed
        self.loop.progress.note(str(self.offline.data))
        for episode in self.offline.data.episodes:
            largest = largest_value(episode.rewards.tolist(), self.config.gamma, is_truncated=not episode.terminated)
            self.largest_return = max(self.largest_return, largest)

    def state_dict(self) -> dict[str, Tensor]:
        """Return learner, replay buffer and counters."""
        loop = {
            "pending_updates": torch.tensor(self.pending_updates, dtype=torch.float64),
            "num_base_queries": torch.tensor(self.transitions.num_base_queries),
            "largest_return": torch.tensor(self.largest_return, dtype=torch.float64),
        }
        parts = {LEARNER: self.learner.state_dict(), REPLAY: self.replay.state_dict(), LOOP: loop}
        parts |= {} if self.offline is None else {OFFLINE: self.offline.state_dict()}
        return {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.items()}

    def _load(self) -> None:
        """Read the resumed checkpoint's ``state_dict``."""
        folder = self.loop.resumed_from / TRAINER_FOLDER
        tensors = {}
        for name, entry in read_entries(folder).items():
            if name.startswith(REPLAY):  # read directly into the buffer, because two copies might not fit into memory
                tensors[name] = self.replay.tensor_for(name.removeprefix(REPLAY), entry.size, entry.properties.dtype)
            elif name.startswith((LEARNER, LOOP, OFFLINE)):
                tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        read_tensors(folder, tensors)

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        if self.offline is not None:
            self.offline.load_state_dict(part(OFFLINE), folder.parent)
        try:
            self.replay.load_state_dict(part(REPLAY))
            self.learner.load_state_dict(part(LEARNER))
            loop = part(LOOP)
            self.pending_updates, self.largest_return = float(loop["pending_updates"]), float(loop["largest_return"])
            self.transitions.num_base_queries = int(loop["num_base_queries"])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder} does not fit algorithm.name={self.config.name} with these settings: {error}. Use the algorithm section of "
                f"its config.yaml, or start a new run with its policy: init_from={folder.parent} resume=null output_dir=<a new folder>"
            ) from error

    def iteration(self, step: int) -> dict[str, float]:
        """Run ``rollout.num_chunks`` policy calls in each env, with updates in between, and return metrics."""
        state, clock, transitions = self.loop.state, Clock(), self.transitions
        self.learner.decay(self.decayed(step))
        before, updates, staleness = state.env_steps, _Means(), 0
        transitions.start_episodes(step)
        for call in range(self.parts.config.rollout.num_chunks):
            transitions.store_observations()
            clock.lap("rollout")
            if self._updating is None:
                self._update(updates)
                clock.lap("update")
            # With algorithm.overlap, a thread runs updates while the envs execute actions chosen before these updates. The actions, and
            # therefore the results, do not depend on whether the thread or the envs are faster.
            is_warm_up = state.env_steps < self.config.learning_starts
            actions = transitions.choose_actions(call, is_warm_up)
            acted_at = self.learner.num_updates
            running = None if self._updating is None else self._updating.submit(self._update, updates)
            outcome = transitions.step_envs(call, actions)
            clock.lap("rollout")
            # The buffer and the pending updates are not locked, so the thread must finish before they change.
            if running is not None:
                running.result()
                clock.lap("update")
                staleness = max(staleness, self.learner.num_updates - acted_at)
            transitions.store(actions.sampled, outcome)
            self._count_env_steps(int(outcome.executed.sum()), is_warm_up)
        transitions.store_observations()
        clock.lap("rollout")
        self._update(updates)
        clock.lap("update")
        self.learner.check_finite()
        self._check_equal_on_ranks()
        self.largest_return = max(self.largest_return, transitions.episodes.largest_return)
        metrics = transitions.episodes.metrics() | {f"train/{name}": value for name, value in updates.means().items()}
        metrics |= transitions.residual_norm.metrics()
        metrics |= {
            "rollout/env_steps_total": state.env_steps,
            "rollout/base_policy_queries": transitions.num_base_queries,
            "rollout/transitions": self.replay.num_transitions,
            "rollout/staleness_updates": staleness,
            "train/updates_total": self.learner.num_updates,
            "throughput/env_steps_per_s": (state.env_steps - before) / clock.total(),
        }
        metrics |= {} if self.offline is None else self.offline.metrics()
        if self.policy.actor.is_standalone:
            # The outputs of a standalone actor are actions, limited by the env's bounds instead of a scale that could be increased.
            metrics.pop("train/action_saturation", None)
        if rank() == 0:
            self._warn(metrics)
        return metrics | clock.metrics()

    def _count_env_steps(self, num_steps: int, is_warm_up: bool) -> None:
        if not is_warm_up:
            self.pending_updates += self.config.utd_ratio * num_steps
        self.loop.state.env_steps += num_steps

    def _update(self, updates: _Means) -> None:
        """Run the pending updates."""
        num_offline = self.config.num_offline_rows
        while self.pending_updates >= 1.0:
            batch = self.replay.sample(self.config.batch_size - num_offline, self.config.gamma, self.config.n_step)
            if self.offline is not None:
                batch = self.offline.join(batch)
            updates.add(self.learner.update(batch, num_offline))
            self.pending_updates -= 1.0
            self.loop.state.policy_version += 1

    def _check_equal_on_ranks(self) -> None:
        """Raise RLinfError on all ranks if the ranks' actors differ."""
        weights = torch.cat([parameter.detach().flatten().cpu() for parameter in self.policy.actor.parameters()])
        if len(set(gather_objects(zlib.crc32(weights.numpy().tobytes())))) > 1:
            raise RLinfError(
                "The actors of the ranks have diverged, because updates round differently on different processors. Use machines or "
                "GPUs of the same type, or set cluster.num_processes=1"
            )

    def _warn(self, metrics: Mapping[str, float]) -> None:
        """Warn once if the critics diverge or the actor saturates."""
        buffers = [self.replay] if self.offline is None else [self.replay, self.offline.data.replay]
        predicted = metrics.get("train/q_mean", 0.0)
        possible = max(largest_return(buffer, self.config.gamma) for buffer in buffers)
        possible = min(possible, self.largest_return or math.inf)  # much less, if a reward is paid only once
        if abs(predicted) > 2 * possible > 0:
            self._warn_once(
                "train/q_mean",
                f"the critics predict {predicted:.3g} on average (train/q_mean), but episodes so far allow at most {possible:.3g}: they "
                "diverge. Set a lower algorithm.learning_rate or algorithm.utd_ratio",
            )
        saturation, actor = metrics.get("train/action_saturation", 0.0), self.config.actor
        if saturation > 0.5 and actor.scale < LARGEST_SCALE:
            self._warn_once(
                "train/action_saturation",
                f"{saturation:.0%} of the actor's outputs are at their bound (train/action_saturation): residuals cannot become larger. "
                f"Set algorithm.actor.scale={min(LARGEST_SCALE, 2 * actor.scale):g}",
            )

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned:
            logger.warning("%s", text)
            self._warned.add(name)


def store_base(policy: ActorPolicy, run: Path, resumed: Path | None) -> None:
    """Write the base policy of ``policy`` to the run folder, where the run's checkpoints refer to it (a collective call).

    Skip the write if the folder already contains the base policy used by ``resumed``, the checkpoint from which ``policy`` was
    loaded. Raise CheckpointError if the write fails.
    """

    def store() -> str:
        known = None if resumed is None else actor_settings(policy_folder(resumed)).get("base_store")
        if known is not None and base_store_folder(run, known).is_dir():
            return known
        partial = base_store_folder(run, ".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            with naming(partial):
                write_policy(
                    partial, policy.base, {name: tensor.cpu() for name, tensor in policy.base.state_dict().items()}
                )
            digest = weights_digest(str(partial))
            if not base_store_folder(run, digest).is_dir():
                os.rename(partial, base_store_folder(run, digest))
            return digest
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    policy.base_store = on_rank_zero(store, f"write the frozen policy into {run}")


def largest_return(replay: ReplayBuffer, gamma: float) -> float:
    """Return the return of an infinite episode in which every step has the buffer's maximum absolute reward."""
    largest = float(replay.rewards.abs().max())
    return largest / (1 - gamma) if gamma < 1 else math.inf


class _Means:
    """Averages each metric over the updates that report it."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            total, count = self._sums.get(name, (torch.zeros(()), 0))
            self._sums[name] = (total + value.cpu(), count + 1)

    def means(self) -> dict[str, float]:
        return {name: float(total) / count for name, (total, count) in self._sums.items()}
