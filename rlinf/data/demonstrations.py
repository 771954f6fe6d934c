"""Demonstrations of scripted experts, in memory, for behaviour cloning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError
from rlinf.seeding import derive_seed
from rlinf.training.config import ExpertConfig
from rlinf.types import EpisodeResult, Observation


@dataclass
class Demonstrations:
    """Rows of (observation, next ``C`` expert actions).

    Attributes:
        observation: ``N`` rows.
        actions: float32 ``[N, C, D]`` in env units: what the expert wanted at this row and the ``C - 1`` following ones
            (the last one repeated past the episode's end).
        episodes: How each demonstration ended.
    """

    observation: Observation
    actions: Tensor
    episodes: list[EpisodeResult]

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def success_rate(self) -> float:
        """Of the demonstrator itself."""
        return float(np.mean([episode.success for episode in self.episodes]))

    def batch(self, step: int, batch_size: int, seed: int) -> tuple[Observation, Tensor]:
        """Return the rows of optimiser step ``step``: epochs of shuffled rows, a pure function of the arguments."""
        num_rows = len(self)
        positions = np.arange(step * batch_size, (step + 1) * batch_size)
        index = np.empty(batch_size, dtype=np.int64)
        for epoch in np.unique(positions // num_rows):
            order = np.random.default_rng(derive_seed(seed, "sft epoch", int(epoch))).permutation(num_rows)
            rows = positions // num_rows == epoch
            index[rows] = order[positions[rows] % num_rows]
        return self.observation.select(index), self.actions[torch.from_numpy(index)]


def collect_demonstrations(
    env: VectorEnv, num_episodes: int, expert: ExpertConfig, chunk_len: int, seed: int
) -> Demonstrations:
    """Let the env's scripted expert play training episodes.

    Executed actions carry Gaussian noise of ``expert.jitter``, so that the states around the expert's path are seen;
    the labels are the expert's clean actions. An ``aim_offset_m`` makes a demonstrator with a constant error, as a badly
    calibrated camera does; ``keep_failures`` keeps the episodes that it failed.

    Args:
        env: Without auto-reset.
        num_episodes: Demonstrations, drawn from the training split, tasks in equal shares.
        expert: The demonstrator.
        chunk_len: ``C``.
        seed: Fixes episodes and noise; each demonstration has its own noise, so ``env.num_envs`` changes nothing.

    Raises:
        ConfigError: No demonstration is kept.
    """
    all_specs = env.episode_specs("train")
    num_tasks = len(env.task_names)
    rounds = len(all_specs) // num_tasks
    rng = np.random.default_rng(derive_seed(seed, "demonstrations"))
    specs = [all_specs[int(rng.integers(rounds)) * num_tasks + i % num_tasks] for i in range(num_episodes)]
    scale = (env.action_high - env.action_low) / 2
    observations: list[Observation] = []
    actions: list[np.ndarray] = []
    episodes: list[EpisodeResult] = []
    for start in range(0, num_episodes, env.num_envs):
        wave = specs[start : start + env.num_envs]
        padded = wave + [wave[-1]] * (env.num_envs - len(wave))
        numbers = range(start, start + env.num_envs)
        streams = [np.random.default_rng(derive_seed(seed, "demonstration noise", number)) for number in numbers]
        seen, labels, alive, results = _play_wave(env, padded, expert, scale, streams)
        kept = np.array([row < len(wave) and (r.success or expert.keep_failures) for row, r in enumerate(results)])
        episodes += [result for result, keep in zip(results, kept, strict=True) if keep]
        last = alive.sum(0) - 1
        for t in range(len(alive)):
            rows = np.flatnonzero(alive[t] & kept)
            if len(rows):
                following = np.minimum(t + np.arange(chunk_len), last[rows, None])
                observations.append(seen[t].select(rows))
                actions.append(labels[following, rows[:, None]])
    if not episodes:
        raise ConfigError(
            f"None of {num_episodes} demonstrations succeeded and sft.expert.keep_failures=false. "
            "Type sft.expert.keep_failures=true, or a smaller sft.expert.aim_offset_m"
        )
    return Demonstrations(Observation.concatenate(observations), torch.from_numpy(np.concatenate(actions)), episodes)


def _play_wave(
    env: VectorEnv, specs: list, expert: ExpertConfig, scale: np.ndarray, streams: list
) -> tuple[list[Observation], np.ndarray, np.ndarray, list[EpisodeResult]]:
    """Play one episode in every env; returns observations, labels ``[T, B, D]``, running mask ``[T, B]``, results."""
    observation, _ = env.reset(options={"episodes": specs})
    running = np.ones(env.num_envs, dtype=bool)
    seen, labels, alive = [], [], []
    results: list[EpisodeResult | None] = [None] * env.num_envs
    while running.any():
        wanted = env.expert_actions(aim_offset_m=tuple(expert.aim_offset_m))
        noise = np.stack([stream.normal(size=env.action_dim) for stream in streams]).astype(np.float32)
        seen.append(observation)
        labels.append(wanted)
        alive.append(running.copy())
        step = env.chunk_step(np.clip(wanted + noise * expert.jitter * scale, env.action_low, env.action_high)[:, None])
        for row, result in zip(step.final_env_ids, step.episodes, strict=True):
            results[row] = result
        running &= ~(step.terminated | step.truncated)
        observation = step.observation
    return seen, np.stack(labels).astype(np.float32), np.stack(alive), results
