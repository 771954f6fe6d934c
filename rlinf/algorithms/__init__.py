"""Algorithms by name (``ALGORITHMS.get("ppo")``), and the token losses ``NLLLossFn``, ``DPOLossFn`` and ``GRPOLossFn``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf.imports import lazy_attributes
from rlinf.registry import Registry

if TYPE_CHECKING:
    from rlinf.algorithms.base import AnyAlgorithm  # imports torch

ALGORITHMS: Registry[type[AnyAlgorithm]] = Registry(
    "algorithm",
    "rlinf.algorithms",
    {
        "ppo": "rlinf.algorithms.ppo:PPO",
        "grpo": "rlinf.algorithms.groups:GRPO",
        "rloo": "rlinf.algorithms.groups:RLOO",
        "reinforce_pp": "rlinf.algorithms.reinforce_pp:ReinforcePP",
        "filtered_bc": "rlinf.offpolicy.filtered_bc:FilteredBC",
        "sac": "rlinf.offpolicy.algorithms:SAC",
        "td3": "rlinf.offpolicy.algorithms:TD3",
    },
    configs={
        "ppo": "rlinf.algorithms.config:PPOConfig",
        "grpo": "rlinf.algorithms.config:GRPOConfig",
        "rloo": "rlinf.algorithms.config:RLOOConfig",
        "reinforce_pp": "rlinf.algorithms.config:ReinforcePPConfig",
        "filtered_bc": "rlinf.algorithms.config:FilteredBCConfig",
        "sac": "rlinf.algorithms.offpolicy_config:SACConfig",
        "td3": "rlinf.algorithms.offpolicy_config:TD3Config",
    },
)


def register_algorithm(name: str, algorithm: type | str) -> None:
    """Register a subclass of ``rlinf.algorithms.base.AnyAlgorithm``, or its ``"module:Class"`` path, under ``name``."""
    ALGORITHMS.register(name, algorithm)


__getattr__ = lazy_attributes(__name__, dict.fromkeys(("NLLLossFn", "DPOLossFn", "GRPOLossFn"), "rlinf.llm.losses"))
