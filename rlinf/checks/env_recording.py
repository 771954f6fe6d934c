"""Recorded trajectories for the contract checker: the same episodes and actions, played in different ways."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinf.envs.base import VectorEnv
from rlinf.seeding import derive_seed
from rlinf.types import ChunkStep, EpisodeSpec, Observation

CHUNK_LEN = 3


@dataclass
class Recording:
    """What ``play`` saw: the observation after the reset, and every chunk until all rows had ended."""

    first: Observation
    steps: list[ChunkStep]


def spread_specs(env: VectorEnv, count: int) -> list[EpisodeSpec]:
    """Return the first ``count`` training episodes, from the start again where there are fewer."""
    specs = env.episode_specs("train")
    return [specs[index % len(specs)] for index in range(count)]


def seeded_actions(env: VectorEnv, specs: list[EpisodeSpec | None], chunk_len: int, first: int = 0) -> np.ndarray:
    """Return uniform actions ``[B, C, D]`` that depend on the episode and the step only; 0 in idle rows."""
    actions = np.zeros((len(specs), chunk_len, env.action_dim), dtype=np.float32)
    for row, spec in enumerate(specs):
        for position in range(0 if spec is None else chunk_len):
            seed = derive_seed(spec.seed, "checker", spec.task_id, spec.init_state_id, first + position)
            actions[row, position] = np.random.default_rng(seed).uniform(env.action_low, env.action_high)
    return actions


def play(env: VectorEnv, specs: list[EpisodeSpec | None], max_steps: int) -> Recording:
    """Run ``specs`` to their ends in an env without auto-reset, with seeded actions."""
    recording = Recording(env.reset(options={"episodes": specs})[0], [])
    for position in range(0, max_steps + CHUNK_LEN, CHUNK_LEN):
        recording.steps.append(env.chunk_step(seeded_actions(env, specs, CHUNK_LEN, position)))
        if not recording.steps[-1].executed.any():
            break
    return recording


def first_difference(one: Recording, row: int, two: Recording, other: int) -> str | None:
    """Return the first field in which row ``row`` of one recording and row ``other`` of another differ, or None."""
    if not equal_rows(one.first.select([row]), two.first.select([other])):
        return "the first observation"
    for number, (mine, theirs) in enumerate(zip(one.steps, two.steps, strict=False)):
        for name in ("rewards", "executed", "terminated", "truncated", "success"):
            if not np.array_equal(getattr(mine, name)[row], getattr(theirs, name)[other]):
                return f"`{name}` of chunk {number}"
        if not equal_rows(mine.observation.select([row]), theirs.observation.select([other])):
            return f"the observation after chunk {number}"
    return None


def equal_rows(one: Observation, other: Observation) -> bool:
    """Whether two observations are equal bit for bit."""
    if one.instruction != other.instruction or list(one.images) != list(other.images):
        return False
    if (one.state is None) != (other.state is None):
        return False
    same = one.state is None or np.array_equal(one.state, other.state)
    return same and all(np.array_equal(one.images[name], other.images[name]) for name in one.images)
