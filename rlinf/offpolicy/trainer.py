"""Off-policy reinforcement learning of an actor, standalone or on a frozen base policy: act, store, update."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.offpolicy_config import LARGEST_SCALE, OffPolicyConfig
from rlinf.checkpoints.base_store import store_base
from rlinf.checkpoints.folders import resolve_checkpoint
from rlinf.checkpoints.trainer_state import read_entries, read_tensors
from rlinf.cluster.factory import env_maker, episode_sampler
from rlinf.data.formats import open_dataset
from rlinf.data.stored import StoredDemonstrations
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.process_group import gather_objects, local_world_size, rank, rank_range, world_size
from rlinf.distributed.transfers import to_device
from rlinf.envs.base import VectorEnv
from rlinf.envs.episodes import EpisodeSampler
from rlinf.errors import CheckpointError, NonFiniteError, RLinfError
from rlinf.evaluation.result import actions_clipped
from rlinf.models.base_weights import tensors_digest
from rlinf.models.embodiment.actor_policy import ActorPolicy, check_bounds, make_actor
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.sampling import standard_normal
from rlinf.offpolicy.gather import BaseOutput, CallOutcome, all_gather_concat
from rlinf.offpolicy.learner import OffPolicyLearner
from rlinf.offpolicy.offline import Offline, take_over_replay
from rlinf.offpolicy.replay import ReplayBuffer
from rlinf.offpolicy.residual_norm import ResidualNorm
from rlinf.preflight.conditions import build_manifest
from rlinf.rollout.weight_push import WeightPush
from rlinf.run_folder import TRAINER_FOLDER
from rlinf.seeding import derive_seed
from rlinf.training.action_trainer import ActionTrainer, Clock, TrainerContext
from rlinf.types import BaseActions, EpisodeResult, EpisodeSpec, Observation

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
    return OffPolicyTrainer(parts, env, sampler, algorithm, parts.worker.autocast, demonstrations)


class OffPolicyTrainer(ActionTrainer):
    """Trains an actor that improves a frozen base policy, using a replay buffer.

    Each iteration starts new episodes, so that checkpoints need not contain simulator state. Episodes still running at the end of an
    iteration are truncated: the last observation is stored, and the critic estimates its value.

    Each rank steps its own envs. Transitions are all-gathered, so all ranks make identical updates.

    Args:
        autocast: Returns the context in which the base policy runs.
        demonstrations: Dataset from which a fraction of each batch is sampled, if any.
    """

    def __init__(
        self,
        parts: TrainerContext,
        env: VectorEnv,
        sampler: EpisodeSampler,
        make_learner: type[OffPolicyLearner],
        autocast: Callable[[], AbstractContextManager],
        demonstrations: StoredDemonstrations | None = None,
    ) -> None:
        super().__init__(parts)
        self.env, self.sampler, self.autocast = env, sampler, autocast
        self._bounds = torch.from_numpy(env.action_low), torch.from_numpy(env.action_high)
        check_bounds(*self._bounds)  # check now instead of after hours of behaviour cloning
        self.make_learner, self.demonstrations = make_learner, demonstrations
        self.offline: Offline | None = None
        self.config = cast(OffPolicyConfig, parts.config.algorithm)
        self.pending_updates = 0.0  # fractional updates still due (UTD ratio x env steps)
        self.num_base_queries = 0  # observations that the base policy has processed
        self.largest_return = 0.0  # discounted, in absolute value, from any step of an episode to its end
        self._warned: set[str] = set()
        num_envs = parts.config.rollout.num_envs
        self._rank_envs = rank_range(num_envs, rank(), world_size())
        self._residual_norm = ResidualNorm(env.task_names)
        self._observation: Observation  # current observation of this rank's envs
        self._base_actions: BaseActions | None = None  # base policy's output for the current observation
        self._updating = ThreadPoolExecutor(1, "update") if self.config.overlap else None
        self.policy: ActorPolicy
        self.learner: OffPolicyLearner
        self.replay: ReplayBuffer

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
        self.offline = Offline(self.parts, dataset, self.policy, self.autocast)
        self.demonstrations = None  # free the memory of its images, which are no longer needed
        self.loop.progress.note(str(self.offline.data))
        for episode in self.offline.data.episodes:
            largest = largest_value(episode.rewards.tolist(), self.config.gamma, is_truncated=not episode.terminated)
            self.largest_return = max(self.largest_return, largest)

    def state_dict(self) -> dict[str, Tensor]:
        """Return learner, replay buffer and counters."""
        loop = {
            "pending_updates": torch.tensor(self.pending_updates, dtype=torch.float64),
            "num_base_queries": torch.tensor(self.num_base_queries),
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
            self.pending_updates, self.num_base_queries = float(loop["pending_updates"]), int(loop["num_base_queries"])
            self.largest_return = float(loop["largest_return"])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder} does not fit algorithm.name={self.config.name} with these settings: {error}. Use the algorithm section of "
                f"its config.yaml, or start a new run with its policy: init_from={folder.parent} resume=null output_dir=<a new folder>"
            ) from error

    def iteration(self, step: int) -> dict[str, float]:
        """Run ``rollout.num_chunks`` policy calls in each env, with updates in between, and return metrics."""
        state, clock, num_calls = self.loop.state, Clock(), self.parts.config.rollout.num_chunks
        self.learner.decay(self.decayed(step))
        before, updates, staleness = state.env_steps, _Means(), 0
        episodes = _EpisodeStats(self.parts.config.rollout.num_envs, self.config.gamma)
        self._residual_norm = ResidualNorm(self.env.task_names)
        base_output = self._start_episodes(step)
        shape = (num_calls, self.parts.config.rollout.num_envs, self.policy.actor.noise_dim)
        for call, uniforms in enumerate(self._draw(*shape, purpose=("actions", step))):
            self._observe(base_output)
            clock.lap("rollout")
            if self._updating is None:
                self._update(updates)
                clock.lap("update")
            # With algorithm.overlap, a thread runs updates while the envs execute actions chosen before these updates. The actions, and
            # therefore the results, do not depend on whether the thread or the envs are faster.
            actions, greedy = self._choose_actions(base_output, uniforms, episodes)
            acted_at = self.learner.num_updates
            running = None if self._updating is None else self._updating.submit(self._update, updates)
            outcome = self._step_envs(step, call, actions, greedy, is_last=call + 1 == num_calls)
            clock.lap("rollout")
            # The buffer and the pending updates are not locked, so the thread must finish before they change.
            if running is not None:
                running.result()
                clock.lap("update")
                staleness = max(staleness, self.learner.num_updates - acted_at)
            self._store(actions, outcome, episodes)
            base_output = outcome.following
        self._observe(base_output)  # the critic estimates the value after the last actions
        clock.lap("rollout")
        self._update(updates)
        clock.lap("update")
        self.learner.check_finite()
        self._check_equal_on_ranks()
        self.largest_return = max(self.largest_return, episodes.largest_return)
        metrics = episodes.metrics() | {f"train/{name}": value for name, value in updates.means().items()}
        metrics |= self._residual_norm.metrics()
        metrics |= {
            "rollout/env_steps_total": state.env_steps,
            "rollout/base_policy_queries": self.num_base_queries,
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

    def _start_episodes(self, step: int) -> BaseOutput:
        """Start each env's first episode in this iteration."""
        first, positions = self._rank_envs.start, np.zeros(len(self._rank_envs), dtype=np.int64)

        def next_episode(row: int) -> EpisodeSpec:
            positions[row] += 1
            return episode(row)

        def episode(row: int) -> EpisodeSpec:
            spec = self.sampler.spec(step, first + row, int(positions[row]))
            self._residual_norm.start_episode(row, spec.task_id)
            return spec

        specs = [episode(row) for row in range(len(self._rank_envs))]
        self._observation = self.env.reset(options={"episodes": specs, "next_episode": next_episode})[0]
        rows = np.arange(len(specs))
        self._base_actions = self._propose(self._observation, rows, "candidates", step, 0)
        return all_gather_concat(self._base_output(rows, self._base_actions))

    def _draw(self, *shape: int, purpose: tuple[str | int, ...]) -> Tensor:
        """Draw uniform float32 random numbers in (0, 1), identical on all ranks."""
        generator = torch.Generator().manual_seed(derive_seed(self.parts.config.seed, *purpose))
        return torch.rand(shape, generator=generator).clamp_min_(torch.finfo(torch.float32).tiny)

    def _propose(self, observation: Observation, rows: np.ndarray, *purpose: str | int) -> BaseActions | None:
        """Query the base policy for the observations of this rank's envs ``rows`` (None if empty); ``purpose`` seeds the candidates."""
        if not len(rows):
            return None
        # Draw for the envs of all ranks, so that each env has the same random numbers for any number of ranks.
        shape = (self.parts.config.rollout.num_envs, self.policy.num_base_uniforms)
        uniforms = self._draw(*shape, purpose=purpose)[self._rank_envs.start + rows].to(self.policy.device)
        with self.autocast():
            return self.policy.query_base(self.policy.preprocess(observation), uniforms)

    def _base_output(self, rows: np.ndarray, actions: BaseActions | None) -> BaseOutput:
        """Move the base policy's output for this rank's envs ``rows`` to the CPU for the all-gather."""
        policy, envs = self.policy, torch.from_numpy(self._rank_envs.start + rows)
        # Even without rows, each rank needs tensors of the right width, because the all-gather is a collective call.
        if actions is None:
            chunks = torch.empty(0, policy.actor.num_candidates, policy.action_chunks_len, policy.action_dim)
            return BaseOutput(envs, torch.empty(0, policy.actor.feature_dim, dtype=policy.base.feature_dtype), chunks)
        features = actions.features.cpu()
        if not bool(features.isfinite().all()):
            num_bad = (~features.isfinite().all(1)).sum()
            raise NonFiniteError(
                f"The features of the frozen policy are not finite for {num_bad} of {len(rows)} observations "
                f"(model.features={self.parts.config.model.features}, model.precision={self.parts.config.model.precision}). "
                "Set model.precision=fp32, or check its weights with `rlinf diagnose`"
            )
        return BaseOutput(envs, features, actions.chunks.cpu())

    def _observe(self, base: BaseOutput) -> None:
        """Store observations; the last observation of a truncated episode has no action."""
        if len(base.envs):
            self.num_base_queries += len(base.envs)
            self.replay.observe(base.envs, base.features, self.policy.base_inputs(base.chunks.to(self.policy.device)))

    def _is_warm_up(self) -> bool:
        return self.loop.state.env_steps < self.config.learning_starts

    @torch.no_grad()
    def _choose_actions(self, output: BaseOutput, uniforms: Tensor, episodes: _EpisodeStats) -> tuple[Tensor, Tensor]:
        """Return the normalised actions ``[B, A]`` of all envs, with and without exploration noise."""
        device, actor = self.policy.device, self.policy.actor
        features, uniforms = to_device(output.features, device), to_device(uniforms, device)
        base = self.policy.base_inputs(to_device(output.chunks, device))
        greedy, _ = self.policy.select_action(features, base, None)
        if self._is_warm_up():
            actions = actor.compose(base, 2 * uniforms[:, : actor.output_dim] - 1)
        else:
            actions, chosen = self.policy.select_action(features, base, standard_normal(uniforms))
            episodes.add_choices(chosen, base.shape[1] if actor.critics_choose else 0)
        if episodes.values is None:
            episodes.values = self.learner.values(actor.encoder(features), base, actions).cpu().numpy()
        return actions, greedy

    @deadline("rollout")
    def _step_envs(self, step: int, call: int, actions: Tensor, greedy: Tensor, is_last: bool) -> CallOutcome:
        """Step this rank's envs, query the base policy for the next observations, and gather the outcomes from all ranks.

        After an iteration's last policy call, only query observations of unfinished episodes.
        """
        rank_rows = slice(self._rank_envs.start, self._rank_envs.stop)
        with self.autocast():  # with DSRL, the base policy computes its actions from the actor's noise
            executed = self.policy.env_actions(self._base_actions, actions[rank_rows])
        self._measure_residuals(executed, greedy[rank_rows])
        self._base_actions = None  # free its activations before the next query
        chunk = self.env.chunk_step(executed.cpu().numpy())
        self._observation, rows = chunk.observation, np.arange(len(self._rank_envs))
        if is_last:
            rows = np.setdiff1d(rows, [*chunk.final_env_ids, *chunk.lost_env_ids])
            self._observation = self._observation.select(rows)
        self._base_actions = self._propose(self._observation, rows, "candidates", step, call + 1)
        # A time limit does not end the task: the critic evaluates the true last observation, not the next episode's first one.
        truncated, envs, last = chunk.truncated[chunk.final_env_ids], self._rank_envs.start, None
        if truncated.any():
            observation = chunk.final_observation.select(np.flatnonzero(truncated))
            last = self._propose(observation, chunk.final_env_ids[truncated], "last candidates", step, call)
        outcome = CallOutcome(
            chunk.rewards, chunk.executed, chunk.terminated, chunk.final_env_ids + envs, truncated, chunk.episodes, chunk.lost_env_ids + envs,
            self._base_output(chunk.final_env_ids[truncated], last), self._base_output(rows, self._base_actions),
        )  # fmt: skip
        return all_gather_concat(outcome)

    def _measure_residuals(self, executed: Tensor, greedy: Tensor) -> None:
        """Record how much the actor changes the base actions, without exploration noise except for DSRL."""
        # Computing DSRL's greedy action would require an additional query of the base policy.
        if self._is_warm_up() or not self.policy.actor.base_dim:
            return
        base = self.policy.normalize(self._base_actions.chunks)[:, 0]
        changed = self.policy.normalize(executed.unsqueeze(1))[:, 0] if self.policy.actor.sets_noise else greedy
        self._residual_norm.add(base, changed)

    def _store(self, actions: Tensor, outcome: CallOutcome, episodes: _EpisodeStats) -> None:
        """Store the actions and their outcomes."""
        state, is_warm_up = self.loop.state, self._is_warm_up()
        rows = np.setdiff1d(np.arange(len(actions)), outcome.lost)
        self.replay.act(
            torch.from_numpy(rows), actions[rows], torch.from_numpy(outcome.rewards[rows]),
            torch.from_numpy(outcome.executed[rows]), torch.from_numpy(outcome.terminated[rows]),
        )  # fmt: skip
        self._observe(outcome.last)
        num_steps = int(outcome.executed.sum())
        if not is_warm_up:
            self.pending_updates += self.config.utd_ratio * num_steps
        state.env_steps += num_steps
        episodes.add(outcome)

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


def largest_return(replay: ReplayBuffer, gamma: float) -> float:
    """Return the return of an infinite episode in which every step has the buffer's maximum absolute reward."""
    largest = float(replay.rewards.abs().max())
    return largest / (1 - gamma) if gamma < 1 else math.inf


def largest_value(rewards: Sequence[float], gamma: float, is_truncated: bool) -> float:
    """Return the maximum ``|sum g^k r_k|`` from any step of an episode to its end."""
    # Treat a truncated episode as if it were repeated forever, because the critics also predict the rewards after the truncation.
    total = sum(gamma**step * reward for step, reward in enumerate(rewards))
    weight = 1 - gamma ** len(rewards)
    value = 0.0 if not is_truncated or total == 0 else total / weight if weight > 0 else math.inf
    largest = abs(value)
    for reward in reversed(rewards):
        value = reward + gamma * value
        largest = max(largest, abs(value))
    return largest


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


class _EpisodeStats:
    """Metrics of each env's first episode in an iteration."""

    # Later episodes that end within the iteration are mostly quick successes; including them would overestimate the success rate.

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma, self.results = gamma, list[EpisodeResult]()
        self.calibration = list[tuple[float, float]]()  # value of the first action, discounted return
        self._first = np.ones(num_envs, dtype=bool)  # whether the first episode is still running
        self.values: np.ndarray | None = None  # of the first actions
        self._returns, self._powers = np.zeros(num_envs), np.ones(num_envs)
        self.num_lost = 0
        self.largest_return = 0.0  # ``largest_value`` over all ended episodes
        self._rewards: list[list[float]] = [[] for _ in range(num_envs)]  # of the running episodes
        self._choices: list[Tensor] = []  # bool: whether an unmodified base-policy chunk was chosen

    def add_choices(self, chosen: Tensor, num_candidates: int) -> None:
        """Add the indices of the chosen options; the first ``num_candidates`` options are the base policy's chunks."""
        if num_candidates:
            self._choices.append(chosen < num_candidates)

    def add(self, outcome: CallOutcome) -> None:
        """Add the outcome of a policy call."""
        rewards, executed, ended, lost = outcome.rewards, outcome.executed, outcome.ended, outcome.lost
        for column in range(rewards.shape[1]):
            self._returns += self._powers * rewards[:, column]
            self._powers *= np.where(executed[:, column], self.gamma, 1.0)
        for row, done in enumerate(executed):
            self._rewards[row] += rewards[row, done].tolist()
        for row, is_truncated in zip(ended, outcome.truncated, strict=True):
            self.largest_return = max(self.largest_return, largest_value(self._rewards[row], self.gamma, is_truncated))
        for row in (*ended, *lost):
            self._rewards[row] = []
        self.num_lost += len(lost)
        self._first[lost] = False
        for row, episode in zip(ended, outcome.episodes, strict=True):
            if self._first[row]:
                self.results.append(episode)
                self.calibration.append((float(self.values[row]), float(self._returns[row])))
        self._first[ended] = False

    def metrics(self) -> dict[str, float]:
        """Return success, return and length, and the critic's values for the first actions."""
        metrics: dict[str, float] = {"rollout/num_episodes": len(self.results), "rollout/lost_episodes": self.num_lost}
        if self.results:
            rows = [(result.success, result.episode_return, result.num_env_steps) for result in self.results]
            names = ("rollout/success_rate", "rollout/return_mean", "rollout/episode_len")
            metrics |= dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))
            labels = [result.true_success for result in self.results if result.true_success is not None]
            metrics |= {"rollout/true_success_rate": float(np.mean(labels))} if labels else {}
            fraction, largest = actions_clipped(self.results)
            clipping = {"rollout/actions_clipped_fraction": fraction, "rollout/actions_max_abs": largest}
            metrics |= {name: value for name, value in clipping.items() if value is not None}
            predicted, observed = np.mean(self.calibration, axis=0).tolist()
            metrics |= {"train/q_initial": predicted, "train/return_initial": observed}
        if self._choices:
            metrics["rollout/base_action_fraction"] = torch.cat(self._choices).float().mean().item()
        return metrics
