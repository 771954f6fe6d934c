"""``rlinf train`` and ``rlinf sft``."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.commands.hydra_app import run_training
from rlinf.errors import ConfigError


def train(arguments: Sequence[str]) -> int:
    """Run behaviour cloning, if configured, then RL."""
    return _run(arguments, "train")


def sft(arguments: Sequence[str]) -> int:
    """Run only the behaviour cloning of a configuration."""
    return _run(arguments, "sft")


def _run(arguments: Sequence[str], command: str) -> int:
    if not arguments:
        needed = "an experiment (`rlinf models` lists them) or a choice of model, env and algorithm"
        raise ConfigError(f"`rlinf {command}` needs {needed}. Run rlinf {command} experiment=quickstart")
    run_training(arguments, command)
    return 0
