"""Env of a policy exported without its env code: it describes observations but cannot run episodes."""

from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from rlinf.envs.base import VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError
from rlinf.options import option
from rlinf.types import Observation


@dataclass
class ExternalConfig(EnvConfig):
    """An exported policy's inputs and training env."""

    name: str = option("external", "Name of the registered environment.")
    state_dim: int = option(0, "Dimension of the policy's state; 0: none.", minimum=0)
    trained_on: str = option("", "Overrides that select the training env where its code is installed.")


class ExternalEnv(VectorEnv):
    """Describes observations for serving and for single policy calls; it cannot be built or used for rollouts."""

    config_class = ExternalConfig
    suite = "external"
    free_settings: ClassVar[tuple[str, ...]] = tuple(field.name for field in fields(ExternalConfig))

    def __init__(self, config: ExternalConfig, num_envs: int, auto_reset: bool) -> None:
        raise ConfigError(
            f"This policy was exported without its env's code, but {num_envs} envs are needed to run episodes. "
            f"Set {config.trained_on or 'env=<name>'}"
        )

    @classmethod
    def all_task_names(cls, config: EnvConfig) -> list[str]:
        return ["external"]

    @classmethod
    def state_width(cls, config: ExternalConfig) -> int:
        return config.state_dim

    def _observe(self, ids: np.ndarray) -> Observation:
        raise NotImplementedError("an external env is never built")
