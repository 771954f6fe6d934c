"""Registry of environments. Importing ``rlinf.envs`` is cheap, because simulators are imported only when an env is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError
from rlinf.registry import Registry
from rlinf.wings import added

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv

ENVS: Registry[type[VectorEnv]] = Registry(
    "env",
    "rlinf.envs",
    {
        "tabletop": "rlinf.envs.tabletop.env:TabletopVectorEnv",
        "metaworld": "rlinf.envs.metaworld.env:MetaWorldVectorEnv",
        "libero": "rlinf.envs.libero.env:LiberoVectorEnv",
        "maniskill": "rlinf.envs.maniskill.env:ManiSkillVectorEnv",
        "maniskill_gpu": "rlinf.envs.maniskill.gpu_env:ManiSkillGpuVectorEnv",
        "gymnasium": "rlinf.envs.gymnasium.env:GymnasiumVectorEnv",
        "external": "rlinf.envs.external:ExternalEnv",
        **added("envs"),
    },
    configs={"tabletop": "rlinf.envs.tabletop.config:TabletopConfig"},
)


def register_env(name: str, cls: type[VectorEnv] | str) -> None:
    """Register a ``rlinf.envs.base.VectorEnv`` for ``env.name``; a ``"module:Class"`` string is imported at first use."""
    ENVS.register(name, cls)


def make_env(config: EnvConfig, num_envs: int, *, auto_reset: bool) -> VectorEnv:
    """Build ``num_envs`` parallel copies of the env registered as ``config.name``; see ``VectorEnv``."""
    if not isinstance(config, EnvConfig):
        raise ConfigError(
            f"make_env was called with a {type(config).__name__}; expected an EnvConfig. Pass build_config(<composed "
            "configuration>).env, or the dataclass of the env, such as TabletopConfig(tasks=['reach'])"
        )
    return ENVS.get(config.name)(config, num_envs, auto_reset)
