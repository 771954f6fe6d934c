"""Algorithms by name: ``ALGORITHMS.get("ppo")``; losses of token policies: ``NLLLossFn``, ``DPOLossFn``, ``GRPOLossFn``."""

from __future__ import annotations

from typing import Any

from rlinf.registry import Registry

ALGORITHMS: Registry = Registry(
    "algorithm",
    "rlinf.algorithms",
    {
        "ppo": "rlinf.algorithms.ppo:PPO",
        "grpo": "rlinf.algorithms.grpo:GRPO",
        "rloo": "rlinf.algorithms.rloo:RLOO",
        "reinforce_pp": "rlinf.algorithms.reinforce_pp:ReinforcePP",
    },
)


def register_algorithm(name: str, algorithm: type | str) -> None:
    """Register a subclass of ``rlinf.algorithms.base.Algorithm`` (or its ``"module:Class"``) under ``name``."""
    ALGORITHMS.register(name, algorithm)


def __getattr__(name: str) -> Any:
    if name not in ("NLLLossFn", "DPOLossFn", "GRPOLossFn"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from rlinf.algorithms import token_losses

    return getattr(token_losses, name)
