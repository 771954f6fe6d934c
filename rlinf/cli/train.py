"""``rlinf train`` and ``rlinf sft``."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.errors import ConfigError


def train(arguments: Sequence[str]) -> int:
    """Train as configured; without arguments say what can be trained."""
    from rlinf.cli.hydra_app import run
    from rlinf.config.schema import RunConfig

    _require_choice(arguments, "train")

    def task(config: RunConfig) -> None:
        from rlinf.training.run import train as start

        start(config)

    return run(arguments, "train", task)


def sft(arguments: Sequence[str]) -> int:
    """Run the behaviour cloning of a configuration."""
    from rlinf.cli.hydra_app import run
    from rlinf.config.schema import RunConfig

    _require_choice(arguments, "sft")

    def task(config: RunConfig) -> None:
        from rlinf.training.run import sft as start

        start(config)

    return run(arguments, "sft", task)


def _require_choice(arguments: Sequence[str], command: str) -> None:
    if not arguments:
        raise ConfigError(
            f"`rlinf {command}` needs an experiment (`rlinf models` lists them) or a choice of model, env and algorithm. "
            f"Type rlinf {command} experiment=quickstart, or rlinf {command} model=openvla_tiny env=tabletop algorithm=ppo"
        )
