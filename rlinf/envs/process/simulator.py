"""The contract of a simulator that runs one environment; ``ProcessVectorEnv`` makes a vector env of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.types import EpisodeSpec


class SingleStep(NamedTuple):
    """The result of one env step of one environment, see ``rlinf.envs.steps.SimulatorStep``. ``success`` None: not told.

    Numbers and flags may be NumPy scalars; the worker checks them.
    """

    dense_reward: float
    success: bool | None
    terminated: bool = False
    truncated: bool = False


class View(NamedTuple):
    """The observation of one environment: a row of ``rlinf.types.Observation``.

    ``images`` map each of ``config.cameras`` to uint8 ``[H, W, 3]``; ``state`` is float32 ``[S]``, or None.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray | None
    instruction: str


class Simulator(ABC):
    """One environment, made and used by one thread of a worker process.

    An episode must be a function of its ``EpisodeSpec`` and the actions alone, not of earlier episodes. Import the
    simulator's packages in the constructor or later, never at module level; torch is not needed. ``task_names`` are the
    tasks that ``config.tasks`` selects; ``EpisodeSpec.task_id`` is an index into them.
    """

    def __init__(self, config: EnvConfig, task_names: Sequence[str]) -> None:
        self.config, self.task_names = config, list(task_names)

    @abstractmethod
    def reset(self, spec: EpisodeSpec) -> None:
        """Put the environment into the first state of ``spec``, whatever its state."""

    @abstractmethod
    def step(self, action: np.ndarray) -> SingleStep:
        """Advance by one env step with ``action`` (float32 ``[D]``, within bounds)."""

    @abstractmethod
    def observe(self) -> View:
        """Return the current observation; called once per chunk and after a reset."""

    def expert_action(self) -> np.ndarray:
        """Return the scripted expert's action in the current state, float32 ``[D]``.

        An override may take keyword options, see ``VectorEnv.expert_actions``.
        """
        raise ConfigError(f"Environment '{self.config.name}' has no scripted expert.")

    def render(self, size: int) -> np.ndarray:
        """Return an image for videos, uint8 ``[size, size, 3]``."""
        raise ConfigError(f"Environment '{self.config.name}' cannot draw frames (asked for {size} pixels).")

    def chunk_path(self, chunk: np.ndarray, size: int) -> np.ndarray | None:
        """Return a row of ``VectorEnv.chunk_paths`` for ``chunk [C, D]``, ``[C + 1, 2]``; None: unknown."""
        return None

    def poses(self) -> dict[str, list[float]]:
        """Return object name to current position (metres) and orientation (quaternion), for the simulator's fingerprint."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Free what the simulator holds; nothing by default."""
