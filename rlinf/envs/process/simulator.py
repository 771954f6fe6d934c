"""What a simulator that runs one environment at a time implements; ``ProcessVectorEnv`` makes a vector env of it."""

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
    """What one env step of one environment gives: see ``rlinf.envs.steps.SimulatorStep``."""

    dense_reward: float
    success: bool
    terminated: bool = False


class View(NamedTuple):
    """What one environment shows now: a row of ``rlinf.types.Observation``.

    Attributes:
        images: Each of ``config.cameras`` to uint8 ``[H, W, 3]``.
        state: float32 ``[S]``, or None.
        instruction: One sentence.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray | None
    instruction: str


class Simulator(ABC):
    """One environment. It lives in a worker process, and is made and used by one thread of it.

    An episode must be a function of its ``EpisodeSpec`` and of the actions alone: not of what ran before. The simulator's
    packages are imported in the constructor or later, never when the module is imported, and torch is not needed.

    Args:
        config: Settings of the environment.
        task_names: Tasks that ``config.tasks`` leaves; ``EpisodeSpec.task_id`` is an index into them.
    """

    def __init__(self, config: EnvConfig, task_names: Sequence[str]) -> None:
        self.config, self.task_names = config, list(task_names)

    @abstractmethod
    def reset(self, spec: EpisodeSpec) -> None:
        """Put the environment into the first state of ``spec``, whatever state it is in."""

    @abstractmethod
    def step(self, action: np.ndarray) -> SingleStep:
        """Advance by one env step with ``action`` (float32 ``[D]``, within bounds)."""

    @abstractmethod
    def observe(self) -> View:
        """Return what the environment shows now; called once per chunk."""

    def expert_action(self, aim_offset_m: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
        """Return what a scripted expert would do now, float32 ``[D]``, with its aim off by metres (x, y).

        Raises:
            ConfigError: There is no scripted expert.
        """
        raise ConfigError(f"Environment '{self.config.name}' has no scripted expert (asked with {aim_offset_m}).")

    def render(self, size: int) -> np.ndarray:
        """Return a picture for videos, uint8 ``[size, size, 3]``.

        Raises:
            ConfigError: The environment cannot draw.
        """
        raise ConfigError(f"Environment '{self.config.name}' cannot draw frames (asked for {size} pixels).")

    def poses(self) -> dict[str, list[float]]:
        """Return object name to its position (metres) and orientation now, for the simulator's fingerprint."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Free what the simulator holds; nothing by default."""
