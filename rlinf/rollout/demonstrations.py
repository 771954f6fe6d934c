"""Collect demonstrations for behaviour cloning in memory: episodes of a scripted expert or a policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf.data.config import ExpertConfig
from rlinf.data.rows import following_rows
from rlinf.envs.base import VectorEnv, options_of_expert
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeResult, EpisodeSpec, Observation


class ActionSource(Protocol):
    """Source of actions for demonstrations, with one episode in each env."""

    def act(self, observation: Observation, running: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return labels and actions to execute, float32 ``[B, D]`` each, or None to end all episodes after at least one step.

        Only entries where ``running`` (bool ``[B]``) are used.
        """

    def restart(self, row: int) -> None:
        """Handle the restart of the episode in env ``row``."""


@dataclass
class Demonstrations:
    """``N`` observations, the expert's actions for them, and each episode's result.

    ``actions`` are float32 ``[N, C, D]`` in env units: the expert's actions for this and the ``C - 1`` following observations.
    The last one is repeated past the end of the episode.
    """

    observation: Observation
    actions: Tensor
    episodes: list[EpisodeResult]

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def state(self) -> np.ndarray | None:
        return self.observation.state

    @property
    def success_rate(self) -> float:
        """Fraction of successful episodes."""
        return float(np.mean([episode.success for episode in self.episodes]))

    def rows(self, index: np.ndarray) -> tuple[Observation, Tensor]:
        return self.observation.select(index), self.actions[torch.from_numpy(index)]


class ScriptedExpert:
    """An env's scripted expert. Noise on executed actions leads to states around its path; labels are noise-free.

    ``numbers``, one per env, and ``seed`` determine the noise.
    """

    def __init__(self, env: VectorEnv, expert: ExpertConfig, seed: int, numbers: Sequence[int]) -> None:
        self.env, self.expert, self.seed, self.numbers = env, expert, seed, list(numbers)
        self._scale = (env.action_high - env.action_low) / 2
        self._streams = [self._stream(number) for number in self.numbers]

    def _stream(self, number: int) -> np.random.Generator:
        return np.random.default_rng(derive_seed(self.seed, "demonstration noise", number))

    def act(self, observation: Observation, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        env = self.env
        wanted = env.expert_actions(**options_of_expert(self.expert))
        noise = np.stack([stream.normal(size=env.action_dim) for stream in self._streams]).astype(np.float32)
        return wanted, np.clip(wanted + noise * self.expert.jitter * self._scale, env.action_low, env.action_high)

    def restart(self, row: int) -> None:
        self._streams[row] = self._stream(self.numbers[row])


@dataclass
class EpisodeBatch:
    """Episodes that ran in parallel, the ``k``-th in env ``k`` of ``B``. The remaining envs were idle.

    ``seen`` contains ``T`` observations of all envs, each before an action. ``labels`` and ``executed`` are float32 ``[T, B, D]``;
    ``rewards`` (float32) and ``success`` (bool), ``[T, B]``, result from the executed action. ``truncated``, bool ``[B]``, marks
    episodes ended by the time limit, and ``alive``, bool ``[T, B]``, running ones. ``results`` has one entry per episode, which is None if the source ended it.
    """

    seen: list[Observation]
    labels: np.ndarray
    rewards: np.ndarray
    success: np.ndarray
    executed: np.ndarray
    truncated: np.ndarray
    alive: np.ndarray
    results: list[EpisodeResult]

    @property
    def last(self) -> np.ndarray:
        """The last ``t`` of each env's episode, int64 ``[B]``; meaningless for idle envs."""
        return len(self.alive) - 1 - self.alive[::-1].argmax(0)


def run_episodes(env: VectorEnv, specs: Sequence[EpisodeSpec], source: ActionSource) -> EpisodeBatch:
    """Run episodes in parallel, one action at a time, in an env without auto-reset; remaining envs stay idle."""
    observation, _ = env.reset(options={"episodes": [*specs, *[None] * (env.num_envs - len(specs))]})
    running = np.arange(env.num_envs) < len(specs)
    seen, labels, rewards, success, done, alive = [], [], [], [], [], []
    truncated = np.zeros(env.num_envs, dtype=bool)
    results: list[EpisodeResult | None] = [None] * len(specs)
    while running.any() and (actions := source.act(observation, running)) is not None:
        labelled, executed = actions
        seen.append(observation)
        labels.append(labelled)
        done.append(executed)
        alive.append(running.copy())
        step = env.chunk_step(np.where(running[:, None], executed, np.float32(0))[:, None])
        rewards.append(step.rewards[:, 0])
        success.append(step.success)
        for row in step.lost_env_ids.tolist():  # the episode restarts, so keep only the new run
            source.restart(row)
            for earlier in alive:
                earlier[row] = False
        for row, result in zip(step.final_env_ids, step.episodes, strict=True):
            results[row] = result
        truncated |= step.truncated & running
        running &= ~(step.terminated | step.truncated)
        observation = step.observation
    labelled, did = np.stack(labels).astype(np.float32), np.stack(done).astype(np.float32)
    return EpisodeBatch(seen, labelled, np.stack(rewards), np.stack(success), did, truncated, np.stack(alive), results)


def demonstration_specs(env: VectorEnv, num_episodes: int, seed: int) -> list[EpisodeSpec]:
    """Draw training episodes for demonstrations, in equal numbers per task."""
    all_specs = env.episode_specs("train")
    num_tasks = len(env.task_names)
    rounds = len(all_specs) // num_tasks
    rng = np.random.default_rng(derive_seed(seed, "demonstrations"))
    return [all_specs[int(rng.integers(rounds)) * num_tasks + i % num_tasks] for i in range(num_episodes)]


def collect_demonstrations(
    env: VectorEnv, num_episodes: int, expert: ExpertConfig, chunk_len: int, seed: int
) -> Demonstrations:
    """Collect scripted-expert episodes, in equal numbers per task and independent of ``env.num_envs``."""
    specs = demonstration_specs(env, num_episodes, seed)
    observation: Observation | None = None
    actions: list[np.ndarray] = []
    episodes: list[EpisodeResult] = []
    for start in range(0, num_episodes, env.num_envs):
        # Number all episodes consecutively, so that the noise does not depend on the number of envs.
        batch_specs, numbers = specs[start : start + env.num_envs], range(start, start + env.num_envs)
        batch = run_episodes(env, batch_specs, ScriptedExpert(env, expert, seed, numbers))
        episodes += batch.results
        last = batch.last
        for t in range(len(batch.alive)):
            rows = np.flatnonzero(batch.alive[t])
            if len(rows):
                selected = batch.seen[t].select(rows)
                if observation is None:
                    observation = selected
                else:
                    observation.append(selected)
                following = following_rows(np.full(len(rows), t), last[rows], chunk_len)
                actions.append(batch.labels[following, rows[:, None]])
    return Demonstrations(observation, torch.from_numpy(np.concatenate(actions)), episodes)
