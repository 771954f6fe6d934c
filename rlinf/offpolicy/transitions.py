"""Collect transitions: act in this rank's envs, gather the outcomes from all ranks, and store them in the replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.config.schema import RunConfig
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.process_group import gather_objects, rank, rank_range, world_size
from rlinf.distributed.transfers import to_device
from rlinf.envs.base import VectorEnv
from rlinf.envs.episodes import EpisodeSampler
from rlinf.errors import NonFiniteError
from rlinf.models.embodiment.actor_policy import ActorPolicy
from rlinf.models.sampling import standard_normal
from rlinf.offpolicy.episodes import EpisodeStats, ResidualNorm
from rlinf.offpolicy.learner import OffPolicyLearner
from rlinf.offpolicy.replay import ReplayBuffer
from rlinf.seeding import derive_seed
from rlinf.types import BaseActions, EpisodeResult, EpisodeSpec, Observation


@dataclass
class BaseOutput:
    """Base-policy output (features and action chunks) for a batch of observations, on the CPU.

    Attributes:
        envs: Env of each observation, numbered across all ranks, int64 ``[K]``.
        features: ``[K, F]``.
        chunks: ``[K, N, C, D]`` in env units.
    """

    envs: Tensor
    features: Tensor
    chunks: Tensor


@dataclass
class CallOutcome:
    """Outcome of a policy call in ``B`` envs.

    Attributes:
        rewards: float32 ``[B, C]``; 0 for actions that were not executed.
        terminated: bool ``[B]``; false at a time limit.
        ended: Envs whose episode ended, int64 ``[K]``.
        truncated: Whether each of these episodes ended because of the time limit, bool ``[K]``.
        lost: Envs whose simulator was lost, int64 ``[L]``.
        last: Base-policy output for the true last observations of truncated episodes.
        following: Base-policy output for the next observations.
    """

    rewards: np.ndarray
    executed: np.ndarray
    terminated: np.ndarray
    ended: np.ndarray
    truncated: np.ndarray
    episodes: list[EpisodeResult]
    lost: np.ndarray
    last: BaseOutput
    following: BaseOutput


def all_gather_concat(part: Any) -> Any:
    """Gather a list, array, tensor, or dataclass of these from all ranks, and concatenate them in rank order (a collective call)."""
    return _concat(gather_objects(part))


def _concat(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, list):
        return [item for part in parts for item in part]
    return type(first)(*(_concat([getattr(part, field.name) for part in parts]) for field in fields(first)))


@dataclass
class ChosenActions:
    """Normalised actions ``[B, A]`` for the envs of all ranks, with exploration noise and without it (None in the warm-up)."""

    sampled: Tensor
    greedy: Tensor | None


class TransitionCollector:
    """Steps this rank's envs with the policy, and stores the transitions of all ranks in the replay buffer.

    Each rank steps its own envs. Transitions are all-gathered, so the buffers of all ranks are identical. Random numbers are drawn for
    the envs of all ranks, so that an env has the same ones for any number of ranks.

    Args:
        autocast: Returns the context in which the base policy runs.

    Attributes:
        num_base_queries: Number of observations that the base policy has processed, across all ranks.
        episodes, residual_norm: Metrics of the current iteration.
    """

    def __init__(
        self,
        config: RunConfig,
        env: VectorEnv,
        sampler: EpisodeSampler,
        policy: ActorPolicy,
        learner: OffPolicyLearner,
        replay: ReplayBuffer,
        autocast: Callable[[], AbstractContextManager],
    ) -> None:
        self.config, self.env, self.sampler, self.autocast = config, env, sampler, autocast
        self.policy, self.learner, self.replay = policy, learner, replay
        self.num_base_queries = 0
        self._rank_envs = rank_range(config.rollout.num_envs, rank(), world_size())
        self._step = 0
        self._uniforms: Tensor  # of the iteration's actions, [T, B, U]
        self._base_output: BaseOutput  # for the current observations of all ranks
        self._base_actions: BaseActions | None = None  # the same for this rank, on the policy's device
        self.episodes: EpisodeStats
        self.residual_norm: ResidualNorm

    def start_episodes(self, step: int) -> None:
        """Start each env's first episode in iteration ``step``."""
        rollout, algorithm = self.config.rollout, self.learner.config
        self._step, self.episodes = step, EpisodeStats(rollout.num_envs, algorithm.gamma)
        self.residual_norm = ResidualNorm(self.env.task_names)
        self._uniforms = self._draw(
            "actions", step, shape=(rollout.num_chunks, rollout.num_envs, self.policy.actor.noise_dim)
        )
        first, positions = self._rank_envs.start, np.zeros(len(self._rank_envs), dtype=np.int64)

        def next_episode(row: int) -> EpisodeSpec:
            positions[row] += 1
            return episode(row)

        def episode(row: int) -> EpisodeSpec:
            spec = self.sampler.spec(step, first + row, int(positions[row]))
            self.residual_norm.start_episode(row, spec.task_id)
            return spec

        rows = np.arange(len(self._rank_envs))
        options = {"episodes": [episode(int(row)) for row in rows], "next_episode": next_episode}
        observation, _ = self.env.reset(options=options)
        self._base_actions = self._query_base(observation, rows, "candidates", step, 0)
        self._base_output = all_gather_concat(self._on_cpu(rows, self._base_actions))

    def store_observations(self) -> None:
        """Store the current observations, which the next actions follow; after the last call, for the critics to estimate their values."""
        self._store(self._base_output)

    @torch.no_grad()
    def choose_actions(self, call: int, is_warm_up: bool) -> ChosenActions:
        """Return actions for the current observations: the actor's, or uniformly random ones in the warm-up."""
        device, actor, output = self.policy.device, self.policy.actor, self._base_output
        features, uniforms = to_device(output.features, device), to_device(self._uniforms[call], device)
        base, greedy = self.policy.base_inputs(to_device(output.chunks, device)), None
        if is_warm_up:
            actions = actor.compose(base, 2 * uniforms[:, : actor.output_dim] - 1)
        else:
            greedy, _ = self.policy.select_action(features, base, None)
            actions, options = self.policy.select_action(features, base, standard_normal(uniforms))
            self.episodes.add_choices(options, base.shape[1] if actor.critics_choose else 0)
        if call == 0:
            self.episodes.values = self.learner.values(actor.encoder(features), base, actions).cpu().numpy()
        return ChosenActions(actions, greedy)

    @deadline("rollout")
    def step_envs(self, call: int, actions: ChosenActions) -> CallOutcome:
        """Step this rank's envs, query the base policy for the next observations, and gather the outcomes from all ranks.

        Does not change the replay buffer, so updates may run at the same time.
        """
        rank_rows = slice(self._rank_envs.start, self._rank_envs.stop)
        with self.autocast():  # with DSRL, the base policy computes its actions from the actor's noise
            executed = self.policy.env_actions(self._base_actions, actions.sampled[rank_rows])
        if actions.greedy is not None and self.policy.actor.base_dim:
            self._measure_residuals(executed, actions.greedy[rank_rows])
        self._base_actions = None  # free its activations before the next query
        chunk = self.env.chunk_step(executed.cpu().numpy())
        observation, rows = chunk.observation, np.arange(len(self._rank_envs))
        if call + 1 == self.config.rollout.num_chunks:
            # The next iteration starts new episodes, so only episodes that are still running need a value of their observation.
            rows = np.setdiff1d(rows, [*chunk.final_env_ids, *chunk.lost_env_ids])
            observation = observation.select(rows)
        self._base_actions = self._query_base(observation, rows, "candidates", self._step, call + 1)
        # A time limit does not end the task: the critic evaluates the true last observation, not the next episode's first one.
        truncated, first, last = chunk.truncated[chunk.final_env_ids], self._rank_envs.start, None
        if truncated.any():
            observation = chunk.final_observation.select(np.flatnonzero(truncated))
            last = self._query_base(observation, chunk.final_env_ids[truncated], "last candidates", self._step, call)
        outcome = CallOutcome(
            chunk.rewards, chunk.executed, chunk.terminated, chunk.final_env_ids + first, truncated, chunk.episodes, chunk.lost_env_ids + first,
            self._on_cpu(chunk.final_env_ids[truncated], last), self._on_cpu(rows, self._base_actions),
        )  # fmt: skip
        return all_gather_concat(outcome)

    def store(self, actions: Tensor, outcome: CallOutcome) -> None:
        """Store the actions and their outcomes, and the last observations of truncated episodes, which no action follows."""
        rows = np.setdiff1d(np.arange(len(actions)), outcome.lost)
        self.replay.act(
            torch.from_numpy(rows), actions[rows], torch.from_numpy(outcome.rewards[rows]),
            torch.from_numpy(outcome.executed[rows]), torch.from_numpy(outcome.terminated[rows]),
        )  # fmt: skip
        self._store(outcome.last)
        self.episodes.add(outcome)
        self._base_output = outcome.following

    def _store(self, base: BaseOutput) -> None:
        if len(base.envs):
            self.num_base_queries += len(base.envs)
            self.replay.observe(base.envs, base.features, self.policy.base_inputs(base.chunks.to(self.policy.device)))

    def _draw(self, *purpose: str | int, shape: tuple[int, ...]) -> Tensor:
        """Draw uniform float32 random numbers in (0, 1), identical on all ranks."""
        generator = torch.Generator().manual_seed(derive_seed(self.config.seed, *purpose))
        return torch.rand(shape, generator=generator).clamp_min_(torch.finfo(torch.float32).tiny)

    def _query_base(self, observation: Observation, rows: np.ndarray, *purpose: str | int) -> BaseActions | None:
        """Query the base policy for the observations of this rank's envs ``rows`` (None if empty); ``purpose`` seeds the candidates."""
        if not len(rows):
            return None
        shape = (self.config.rollout.num_envs, self.policy.num_base_uniforms)
        uniforms = self._draw(*purpose, shape=shape)[self._rank_envs.start + rows].to(self.policy.device)
        with self.autocast():
            return self.policy.query_base(self.policy.preprocess(observation), uniforms)

    def _on_cpu(self, rows: np.ndarray, actions: BaseActions | None) -> BaseOutput:
        """Move the base policy's output for this rank's envs ``rows`` to the CPU for the all-gather."""
        policy, envs, model = self.policy, torch.from_numpy(self._rank_envs.start + rows), self.config.model
        # Even without rows, each rank needs tensors of the right width, because the all-gather is a collective call.
        if actions is None:
            chunks = torch.empty(0, policy.actor.num_candidates, policy.action_chunks_len, policy.action_dim)
            return BaseOutput(envs, torch.empty(0, policy.actor.feature_dim, dtype=policy.base.feature_dtype), chunks)
        features = actions.features.cpu()
        if not bool(features.isfinite().all()):
            num_bad = (~features.isfinite().all(1)).sum()
            raise NonFiniteError(
                f"The features of the frozen policy are not finite for {num_bad} of {len(rows)} observations "
                f"(model.features={model.features}, model.precision={model.precision}). "
                "Set model.precision=fp32, or check its weights with `rlinf diagnose`"
            )
        return BaseOutput(envs, features, actions.chunks.cpu())

    def _measure_residuals(self, executed: Tensor, greedy: Tensor) -> None:
        """Record how much the actor changes the base actions, without exploration noise except for DSRL."""
        # Computing DSRL's greedy action would require an additional query of the base policy.
        base = self.policy.normalize(self._base_actions.chunks)[:, 0]
        changed = self.policy.normalize(executed.unsqueeze(1))[:, 0] if self.policy.actor.sets_noise else greedy
        self.residual_norm.add(base, changed)
