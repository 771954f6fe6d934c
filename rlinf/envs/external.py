"""The env of an exported policy whose code is not part of the export: what the policy sees, and no episodes."""

from __future__ import annotations

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
    """What an exported policy reads, and a note on the env that it was trained on."""

    name: str = option("external", "Registered environment.")
    state_dim: int = option(0, "Dimension of the state that the policy reads; 0: none.", minimum=0)
    trained_on: str = option("", "Overrides that choose the env of the training where its code is installed.")


class ExternalEnv(VectorEnv):
    """Describes observations for serving and for one policy call; it cannot be built, so nothing is rolled out in it."""

    config_class = ExternalConfig
    suite = "external"
    free_settings: ClassVar[tuple[str, ...]] = tuple(field.name for field in fields(ExternalConfig))

    def __init__(self, config: ExternalConfig, num_envs: int, auto_reset: bool) -> None:
        raise ConfigError(
            f"This policy was exported without the code of its env; required: an env for {num_envs} episodes at a time. "
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
