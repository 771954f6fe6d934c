"""Reinforcement learning of vision-language-action models in robot simulators.

The commands call the functions below; see docs/python.md for examples. Importing this package does not import torch or a
simulator, because each name is loaded at first use.
"""

from typing import TYPE_CHECKING

from rlinf.imports import lazy_attributes

if TYPE_CHECKING:
    from rlinf.api import compare, evaluate, load_policy, make_env, train
    from rlinf.audits.command import audit
    from rlinf.data.lerobot_writer import LeRobotWriter
    from rlinf.policy import Policy
    from rlinf.types import EpisodeSpec, Observation

__version__ = "0.1.0"

_LAZY = dict.fromkeys(("load_policy", "make_env", "train", "evaluate", "compare"), "rlinf.api")
_LAZY |= {"Policy": "rlinf.policy", "Observation": "rlinf.types", "EpisodeSpec": "rlinf.types"}
_LAZY |= {"LeRobotWriter": "rlinf.data.lerobot_writer", "audit": "rlinf.audits.command"}
"""Maps public names to the modules that define them."""

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

# Hidden from type checkers: with a module ``__getattr__``, they would accept any name.
if not TYPE_CHECKING:
    _load = lazy_attributes(__name__, _LAZY)

    def __getattr__(name: str) -> object:
        if name == "audit":
            from rlinf.errors import ConfigError
            from rlinf.wings import missing

            if (reason := missing("commands", name)) is not None:
                raise ConfigError(reason)
        return _load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "lazy_attributes"})
