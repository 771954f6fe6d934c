"""``rlinf train`` and ``rlinf sft``."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.commands.hydra_app import run_training
from rlinf.errors import ConfigError


def train(arguments: Sequence[str]) -> int:
    """Run behaviour cloning, if configured, then RL."""
    _require_choice(arguments, "train")
    run_training(arguments, "train")
    return 0


def sft(arguments: Sequence[str]) -> int:
    """Run only the behaviour cloning of a configuration."""
    _require_choice(arguments, "sft")
    run_training(arguments, "sft")
    return 0


def _require_choice(arguments: Sequence[str], command: str) -> None:
    if not arguments:
        raise ConfigError(
            f"`rlinf {command}` needs an experiment (`rlinf models` lists them) or a choice of model, env and algorithm. "
            f"Run rlinf {command} experiment=quickstart, or rlinf {command} model=openvla_tiny env=tabletop algorithm=ppo"
        )
