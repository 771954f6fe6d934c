"""Policies and environments of rlinf in lerobot's own commands, which import this package because of its name."""

from lerobot_policy_rlinf.configuration_rlinf import RLinfConfig
from lerobot_policy_rlinf.env_rlinf import RLinfEnv

__all__ = ["RLinfConfig", "RLinfEnv"]
