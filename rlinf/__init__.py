"""Reinforcement learning of vision-language-action models in robot simulators.

The functions below are what the commands run; docs/python.md shows them at work. Importing this package imports neither
torch nor a simulator: each name is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from rlinf.imports import lazy_attributes

if TYPE_CHECKING:
    from rlinf.api import audit, compare, evaluate, load_policy, make_env, train
    from rlinf.data.lerobot_writer import LeRobotWriter
    from rlinf.policy import Policy
    from rlinf.types import EpisodeSpec, Observation

__version__ = "0.1.0"

_LAZY = dict.fromkeys(("load_policy", "make_env", "train", "evaluate", "audit", "compare"), "rlinf.api")
_LAZY |= {"Policy": "rlinf.policy", "Observation": "rlinf.types", "EpisodeSpec": "rlinf.types"}
_LAZY |= {"LeRobotWriter": "rlinf.data.lerobot_writer"}
"""Public name to the module that defines it."""

__all__ = [
    "EpisodeSpec",
    "LeRobotWriter",
    "Observation",
    "Policy",
    "audit",
    "compare",
    "evaluate",
    "load_policy",
    "make_env",
    "train",
]

if not TYPE_CHECKING:  # a type checker would take every name for one of them
    __getattr__ = lazy_attributes(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "lazy_attributes"})
