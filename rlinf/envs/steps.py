"""Results of single env steps and of chunks, and statistics of the current episodes: rewards, length, return and success."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rlinf.envs.config import EnvConfig
from rlinf.flags import flags_of
from rlinf.types import EpisodeResult, EpisodeSpec


class SimulatorStep(NamedTuple):
    """The result of one step in each of ``K`` envs.

    ``dense_reward`` is used in the reward modes "shaped" and "relative". ``success`` is True if the goal is reached,
    ``terminated`` if the episode has ended for a reason other than success, such as a failure, and ``truncated`` if the simulator
    truncates the episode before ``VectorEnv`` does. None means that this never happens. Flags are bool, or 0 and 1.
    """

    dense_reward: np.ndarray
    success: np.ndarray
    terminated: np.ndarray | None = None
    truncated: np.ndarray | None = None


class SimulatorChunk(NamedTuple):
    """The result of up to ``C`` steps in ``K`` envs, ``[K, C]`` each; 0 and false for steps that were not executed.

    ``executed`` includes the step at which the episode ended. ``success_known`` is True if the env reports success or failure.
    """

    dense_reward: np.ndarray
    success: np.ndarray
    terminated: np.ndarray
    executed: np.ndarray
    success_known: np.ndarray
    truncated: np.ndarray

    def ended(self, terminate_on_success: bool) -> np.ndarray:
        """Return whether the episode ends at each step, bool ``[K, C]``."""
        return self.terminated | self.truncated | (self.success & terminate_on_success)

    @staticmethod
    def empty(num_envs: int, chunk_len: int) -> SimulatorChunk:
        """Return a chunk without executed steps."""
        flags = [np.zeros((num_envs, chunk_len), dtype=bool) for _ in range(5)]
        return SimulatorChunk(np.zeros((num_envs, chunk_len), dtype=np.float32), *flags)


def chunk_of_steps(
    step_envs: Callable[[np.ndarray, np.ndarray], SimulatorStep],
    ids: np.ndarray,
    actions: np.ndarray,
    steps_left: np.ndarray,
    terminate_on_success: bool,
) -> SimulatorChunk:
    """Call ``step_envs(ids, actions)`` up to ``C`` times for envs with a running episode; see ``VectorEnv._step_chunk``."""
    num_envs, chunk_len, _ = actions.shape
    chunk = SimulatorChunk.empty(num_envs, chunk_len)
    active = np.ones(num_envs, dtype=bool)
    for position in range(chunk_len):
        rows = np.flatnonzero(active)
        if not len(rows):
            break
        step = step_envs(ids[rows], actions[rows, position])
        chunk.dense_reward[rows, position] = step.dense_reward
        for name in ("success", "terminated", "truncated"):
            if (flags := getattr(step, name)) is not None:
                getattr(chunk, name)[rows, position] = flags_of(flags, f"`{name}` of a SimulatorStep")
        chunk.executed[rows, position] = chunk.success_known[rows, position] = True
        active = ~chunk.ended(terminate_on_success)[:, position] & active & (position + 1 < steps_left)
    return chunk


class EpisodeStats:
    """Statistics of the current episode in each of ``B`` envs.

    ``success`` is True once the goal has been reached, and ``success_known`` once the env has reported success or failure.
    ``true_success`` is the simulator's own success (1 or 0) if it is overridden, or -1 if not reported. ``sim_truncated`` is True
    if the simulator itself truncated the episode.
    """

    def __init__(self, num_envs: int, config: EnvConfig) -> None:
        self._config = config
        self.horizons = np.ones(num_envs, dtype=np.int64)
        self.num_steps = np.zeros(num_envs, dtype=np.int64)
        self.success, self.success_known = np.zeros(num_envs, dtype=bool), np.zeros(num_envs, dtype=bool)
        self.sim_truncated = np.zeros(num_envs, dtype=bool)
        self.true_success = np.full(num_envs, -1, dtype=np.int8)
        self._returns = np.zeros(num_envs, dtype=np.float64)
        self._previous_dense = np.zeros(num_envs, dtype=np.float32)
        self._clipped = np.zeros(num_envs, dtype=np.float64)  # in actions: three of four clipped dimensions add 0.75
        self._max_abs = np.zeros(num_envs, dtype=np.float32)

    def start(self, ids: np.ndarray, horizons: Sequence[int]) -> None:
        """Start episodes with ``horizons`` in the envs ``ids`` (int64 ``[K]``)."""
        self.num_steps[ids], self._returns[ids], self._previous_dense[ids] = 0, 0.0, 0.0
        self.success[ids], self.success_known[ids], self.sim_truncated[ids] = False, False, False
        self.horizons[ids] = horizons
        self._clipped[ids], self._max_abs[ids], self.true_success[ids] = 0.0, 0.0, -1

    def add(self, ids: np.ndarray, chunk: SimulatorChunk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Add a chunk; return rewards float32 ``[K, C]``, and terminated and truncated bool ``[K]``, which are mutually exclusive."""
        rewards = np.zeros(chunk.executed.shape, dtype=np.float32)
        for position in range(rewards.shape[1]):
            rows = np.flatnonzero(chunk.executed[:, position])
            dense_reward, success = chunk.dense_reward[rows, position], chunk.success[rows, position]
            rewards[rows, position] = self._rewards_of(ids[rows], dense_reward, success)
        self.num_steps[ids] += chunk.executed.sum(1)
        self.success_known[ids] |= chunk.success_known.any(1)
        self._returns[ids] += rewards.sum(1, dtype=np.float64)
        terminated = (chunk.terminated | (chunk.success & self._config.terminate_on_success)).any(1)
        self.sim_truncated[ids] = chunk.truncated.any(1)
        is_over = self.sim_truncated[ids] | (self.num_steps[ids] >= self.horizons[ids])
        return rewards, terminated, ~terminated & is_over

    def add_actions(
        self, ids: np.ndarray, unclipped: np.ndarray, was_clipped: np.ndarray, executed: np.ndarray
    ) -> None:
        """Count clipped values, and note the largest, among the ``unclipped`` actions ``[K, C, D]`` ``executed`` (``[K, C]``)."""
        if was_clipped.any():
            self._clipped[ids] += (was_clipped & executed[..., None]).mean(2).sum(1)
        largest = np.where(executed[..., None], np.abs(unclipped), 0).max((1, 2))
        self._max_abs[ids] = np.maximum(self._max_abs[ids], largest)

    def result_of(self, index: int, spec: EpisodeSpec, task: str) -> EpisodeResult:
        """Return the result of the episode of env ``index``."""
        length = int(self.num_steps[index])
        clipped, largest = self._clipped[index] / max(1, length), self._max_abs[index]
        numbers = float(self._returns[index]), length, float(clipped), float(largest)
        true_success = None if self.true_success[index] < 0 else bool(self.true_success[index])
        flags = {"success_reported": bool(self.success_known[index]), "true_success": true_success}
        return EpisodeResult(spec, task, bool(self.success[index]), *numbers, **flags)

    def _rewards_of(self, ids: np.ndarray, dense_reward: np.ndarray, success: np.ndarray) -> np.ndarray:
        """Return the rewards of one env step. The bonus is paid once, at the first step of success."""
        rewards = np.zeros(len(ids), dtype=np.float32)
        if self._config.reward_mode == "shaped":
            rewards += dense_reward
        elif self._config.reward_mode == "relative":
            rewards += dense_reward - self._previous_dense[ids]
        self._previous_dense[ids] = dense_reward
        rewards[success & ~self.success[ids]] += self._config.success_bonus
        self.success[ids] |= success
        return rewards
