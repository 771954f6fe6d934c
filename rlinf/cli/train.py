"""``rlinf train`` and ``rlinf sft``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.config.schema import RunConfig


def train(arguments: Sequence[str]) -> int:
    """Train as configured; without arguments say what can be trained."""
    _require_choice(arguments, "train")
    run(arguments, "train")
    return 0


def sft(arguments: Sequence[str]) -> int:
    """Run the behaviour cloning of a configuration."""
    _require_choice(arguments, "sft")
    run(arguments, "sft")
    return 0


def run(arguments: Sequence[str], command: str) -> list[Path]:
    """Run ``train`` or ``sft``, for a command and for ``rlinf.train``.

    Returns:
        The folder of each run; none where the arguments only ask to be told something.
    """
    from rlinf.cli.hydra_app import run as run_app

    def task(config: RunConfig) -> None:
        from rlinf.training import run as training

        getattr(training, command)(config)

    return run_app(arguments, command, task)


def _require_choice(arguments: Sequence[str], command: str) -> None:
    if not arguments:
        raise ConfigError(
            f"`rlinf {command}` needs an experiment (`rlinf models` lists them) or a choice of model, env and algorithm. "
            f"Type rlinf {command} experiment=quickstart, or rlinf {command} model=openvla_tiny env=tabletop algorithm=ppo"
        )
