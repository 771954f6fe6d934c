"""Algorithms by name: ``ALGORITHMS.get("ppo")``."""

from __future__ import annotations

from rlinf.registry import Registry

ALGORITHMS: Registry = Registry(
    "algorithm",
    "rlinf.algorithms",
    {"ppo": "rlinf.algorithms.ppo:PPO", "grpo": "rlinf.algorithms.grpo:GRPO"},
)


def register_algorithm(name: str, algorithm: type | str) -> None:
    """Register a subclass of ``rlinf.algorithms.base.Algorithm`` (or its ``"module:Class"``) under ``name``."""
    ALGORITHMS.register(name, algorithm)
