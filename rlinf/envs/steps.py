"""Results of single env steps and of chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlinf.flags import flags_of


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
