"""Interface of a simulator that runs one environment, for ``ProcessVectorEnv``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError
from rlinf.imports import import_string

if TYPE_CHECKING:
    from rlinf.types import EpisodeSpec


class SingleStep(NamedTuple):
    """Result of one env step (see ``SimulatorStep``), with Python or NumPy scalars. ``success`` is None if not reported."""

    dense_reward: float
    success: bool | None
    terminated: bool = False
    truncated: bool = False


class View(NamedTuple):
    """One env's observation: uint8 images ``[H, W, 3]`` by camera, state float32 ``[S]`` or None, and instruction."""

    images: dict[str, np.ndarray]
    state: np.ndarray | None
    instruction: str


class Simulator(ABC):
    """One environment, built and used by one thread of a worker process.

    An episode must depend only on its ``EpisodeSpec`` and the actions, not on earlier episodes. Import the simulator's packages
    in the constructor or later, never at module level; torch is not needed. ``task_names`` are the tasks selected by
    ``config.tasks``, indexed by ``EpisodeSpec.task_id``.
    """

    def __init__(self, config: EnvConfig, task_names: Sequence[str]) -> None:
        self.config, self.task_names = config, list(task_names)

    @abstractmethod
    def reset(self, spec: EpisodeSpec) -> None:
        """Reset to the first state of ``spec``, whatever the current state."""

    @abstractmethod
    def step(self, action: np.ndarray) -> SingleStep:
        """Step once with ``action`` (float32 ``[D]``, within bounds)."""

    @abstractmethod
    def observe(self) -> View:
        """Return the current observation; called once per chunk and after a reset."""

    def expert_action(self) -> np.ndarray:
        """Return the scripted expert's action, float32 ``[D]``; keyword options as in ``VectorEnv.expert_actions``."""
        raise ConfigError(f"Environment '{self.config.name}' has no scripted expert.")

    def render(self, size: int) -> np.ndarray:
        """Return a video frame, uint8 ``[size, size, 3]``."""
        raise ConfigError(f"Environment '{self.config.name}' cannot render frames (requested {size} pixels).")

    def chunk_path(self, chunk: np.ndarray, size: int) -> np.ndarray | None:
        """Return the hand's path under ``chunk [C, D]``, ``[C + 1, 2]``, as in ``VectorEnv.chunk_paths``, or None if unknown."""
        return None

    def poses(self) -> dict[str, list[float]]:
        """Map object names to position (metres) and orientation (quaternion), for the simulator's fingerprint."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Free resources; does nothing by default."""


def load_simulator(simulator_class: str) -> type[Simulator]:
    """Import the class ``"module:Class"``, in the process that runs it or, for its expert, in the one that asks."""
    loaded: type[Simulator] = import_string(simulator_class)
    return loaded
