"""Plays a policy in vectorised environments and returns a ``RolloutBatch``.

The envs are split into halves, each in its own thread: while one half steps and renders (MuJoCo releases the GIL), the
policy acts for the other. An iteration starts from fresh episodes and draws its random numbers from the seed, the
iteration and the global env index, so a rollout depends on the weights and the step alone, not on how the envs were
split over halves or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.base import VectorEnv
from rlinf.models.embodiment.base import ActionModel
from rlinf.rollout.sampler import EpisodeSampler
from rlinf.seeding import derive_seed
from rlinf.types import ChunkStep, EpisodeSpec, Observation, RolloutBatch


@dataclass
class _Half:
    """One half of the envs, its thread, and what it has recorded in this rollout."""

    env: VectorEnv
    env_ids: np.ndarray
    executor: ThreadPoolExecutor
    pending: Future | None = None
    observations: list[Observation] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    chunks: list[ChunkStep] = field(default_factory=list)
    alive: list[np.ndarray] = field(default_factory=list)
    episode_ids: list[np.ndarray] = field(default_factory=list)


class RolloutCollector:
    """Collects rollouts of ``num_chunks`` policy calls from every env of this rank.

    Args:
        make_env: ``make_env(num_envs) -> VectorEnv`` with the wanted auto-reset mode.
        sampler: Chooses episodes.
        num_envs: Environments of all ranks.
        num_chunks: Policy calls per env.
        temperature: Of the action distribution.
        num_halves: 1 or 2.
        rank, num_ranks: This process plays the ``rank``-th block of envs.
    """

    def __init__(
        self,
        make_env: Callable[[int], VectorEnv],
        sampler: EpisodeSampler,
        *,
        num_envs: int,
        num_chunks: int,
        temperature: float,
        num_halves: int = 2,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.sampler = sampler
        self.num_envs = num_envs
        self.num_chunks = num_chunks
        self.temperature = temperature
        block = np.arange(num_envs).reshape(num_ranks, -1)[rank]
        self.halves = [
            _Half(make_env(len(ids)), ids, ThreadPoolExecutor(1, thread_name_prefix="envs"))
            for ids in np.array_split(block, num_halves)
        ]
        self._positions: dict[int, int] = {}
        self._specs: dict[int, EpisodeSpec] = {}

    def close(self) -> None:
        """Close the envs in the threads that own their graphics contexts."""
        for half in self.halves:
            half.executor.submit(half.env.close).result()
            half.executor.shutdown()

    @torch.no_grad()
    def collect(self, model: ActionModel, step: int, policy_version: int, needs_values: bool) -> RolloutBatch:
        """Play one rollout.

        Args:
            model: An ``ActionModel`` in evaluation mode.
            step: Iteration; fixes episodes and random numbers.
            policy_version: Recorded with every sample.
            needs_values: Compute ``bootstrap_values``.

        Returns:
            Time-major batch of this rank's envs, without the trainer's fields.
        """
        self._specs = {}
        generator = torch.Generator().manual_seed(derive_seed(self.sampler.seed, "actions", step))
        uniforms = torch.rand(self.num_chunks, self.num_envs, model.num_logprobs, generator=generator)
        for half in self.halves:
            self._start(half, step)
        for t in range(self.num_chunks):
            for half in self.halves:
                self._act(half, model, uniforms[t, half.env_ids])
        for half in self.halves:
            self._receive(half)
        parts = [self._assemble(half, model, policy_version, needs_values) for half in self.halves]
        return concatenate_envs(parts)

    def _start(self, half: _Half, step: int) -> None:
        """Reset every env of the half to the first episode of this iteration."""
        for records in (half.observations, half.tokens, half.logprobs, half.chunks, half.alive, half.episode_ids):
            records.clear()
        self._positions.update({int(i): 0 for i in half.env_ids})
        first = [self.sampler.spec(step, int(i), 0) for i in half.env_ids]

        def reset() -> Observation:
            return half.env.reset(options={"episodes": first, "next_episode": next_episode})[0]

        def next_episode(row: int) -> EpisodeSpec:
            env_id = int(half.env_ids[row])
            self._positions[env_id] += 1
            return self.sampler.spec(step, env_id, self._positions[env_id])

        half.pending = half.executor.submit(reset)

    def _receive(self, half: _Half) -> Observation:
        """Wait for the half's envs and record what they returned."""
        result = half.pending.result()
        if isinstance(result, ChunkStep):
            half.chunks.append(result)
            result = result.observation
        return result

    def _act(self, half: _Half, model: ActionModel, uniforms: Tensor) -> None:
        observation = self._receive(half)
        inputs = model.preprocess(observation)
        prediction = model.predict_action_batch(
            do_sample=True, temperature=self.temperature, uniforms=uniforms, **inputs
        )
        tokens = prediction.sequences[:, -model.num_logprobs :]
        half.observations.append(observation)
        half.tokens.append(tokens.cpu())
        half.logprobs.append(model.rollout_logprobs(prediction, self.temperature).cpu())
        self._record_episodes(half)
        actions = prediction.actions.cpu().numpy()
        half.pending = half.executor.submit(half.env.chunk_step, actions)

    def _record_episodes(self, half: _Half) -> None:
        """Note which episode each env plays now, and whether it still runs."""
        if not half.chunks or not half.alive:
            alive = np.ones(len(half.env_ids), dtype=bool)
        else:
            ended = half.chunks[-1].terminated | half.chunks[-1].truncated
            alive = half.alive[-1] & (~ended | half.env.auto_reset)
        half.alive.append(alive)
        positions = np.array([self._positions[int(i)] for i in half.env_ids])
        episode_ids = positions * self.num_envs + half.env_ids
        half.episode_ids.append(episode_ids)
        for row, spec in enumerate(half.env.current_specs()):
            self._specs.setdefault(int(episode_ids[row]), spec)

    def _assemble(self, half: _Half, model: ActionModel, policy_version: int, needs_values: bool) -> RolloutBatch:
        chunks = half.chunks
        alive = torch.from_numpy(np.stack(half.alive))
        terminated = torch.from_numpy(np.stack([chunk.terminated for chunk in chunks]))
        truncated = torch.from_numpy(np.stack([chunk.truncated for chunk in chunks]))
        bootstrap = torch.zeros(alive.shape)
        if needs_values:
            self._fill_bootstrap(half, model, alive, terminated, truncated, bootstrap)
        episode_ids = torch.from_numpy(np.stack(half.episode_ids))
        groups = torch.tensor([self.sampler.group_of(int(i)) for i in half.env_ids])
        return RolloutBatch(
            observation=Observation.concatenate(half.observations),
            action_tokens=torch.stack(half.tokens),
            rollout_logprobs=torch.stack(half.logprobs),
            action_rewards=torch.from_numpy(np.stack([chunk.rewards for chunk in chunks])),
            action_mask=torch.from_numpy(np.stack([chunk.executed for chunk in chunks])),
            loss_mask=alive,
            terminated=terminated,
            truncated=truncated,
            bootstrap_values=bootstrap,
            group_ids=groups.expand(alive.shape).contiguous(),
            episode_ids=episode_ids,
            policy_version=torch.full(alive.shape, policy_version, dtype=torch.int64),
            episodes=[episode for chunk in chunks for episode in chunk.episodes],
            specs={int(i): self._specs[int(i)] for i in episode_ids.flatten().unique()},
        )

    def _fill_bootstrap(
        self, half: _Half, model: ActionModel, alive: Tensor, terminated: Tensor, truncated: Tensor, bootstrap: Tensor
    ) -> None:
        """Value the true final observation of every truncated episode, and what follows the last chunk."""
        where: list[tuple[int, int]] = []
        observations: list[Observation] = []
        for t, chunk in enumerate(half.chunks):
            rows = [k for k, env in enumerate(chunk.final_env_ids) if chunk.truncated[env]]
            if rows:
                observations.append(chunk.final_observation.select(rows))
                where += [(t, int(chunk.final_env_ids[k])) for k in rows]
        last = len(half.chunks) - 1
        running = torch.nonzero(alive[last] & ~terminated[last] & ~truncated[last]).flatten().tolist()
        if running:
            observations.append(half.chunks[last].observation.select(running))
            where += [(last, row) for row in running]
        if not where:
            return
        final = Observation.concatenate(observations)
        block = len(half.env_ids)
        for start in range(0, len(where), block):
            rows = where[start : start + block]
            inputs = model.preprocess(final.select(np.arange(start, start + len(rows))))
            values = model.predict_action_batch(do_sample=False, **inputs).values.cpu()
            bootstrap[[t for t, _ in rows], [row for _, row in rows]] = values


def concatenate_envs(parts: list[RolloutBatch]) -> RolloutBatch:
    """Join rollouts of different envs along ``B``, in the order given."""
    num_chunks = len(parts[0].loss_mask)
    widths = [part.loss_mask.shape[1] for part in parts]
    # Rows of the joined observation are (part, t, b); reorder them to (t, part, b).
    offsets = np.cumsum([0] + [num_chunks * width for width in widths])
    order = np.concatenate(
        [offsets[p] + t * width + np.arange(width) for t in range(num_chunks) for p, width in enumerate(widths)]
    )
    tensors = [part.tensors() for part in parts]
    return replace(
        parts[0],
        observation=Observation.concatenate([part.observation for part in parts]).select(order),
        episodes=[episode for part in parts for episode in part.episodes],
        specs={key: spec for part in parts for key, spec in part.specs.items()},
        **{name: torch.cat([each[name] for each in tensors], dim=1) for name in tensors[0]},
    )
