"""``rlinf train`` and ``rlinf sft``."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.commands.hydra_app import run_training
from rlinf.errors import ConfigError


def train(arguments: Sequence[str]) -> int:
    """Run behaviour cloning, if configured, then reinforcement learning.

    examples:
      rlinf train experiment=quickstart                             a small VLA on a laptop, in minutes
      rlinf train experiment=quickstart seed=3 trainer.max_steps=20
      rlinf train -m experiment=quickstart seed=0,1,2               one run per value
      rlinf train experiment=quickstart resume=auto                 go on where it stopped
      rlinf train experiment=quickstart --cfg job                   print every key and its value, and stop

    Keys are explained in docs/configuration.md. --config-dir <folder> adds your own YAML files; --hydra-help shows Hydra's flags.
    """
    return _run(arguments, "train")


def sft(arguments: Sequence[str]) -> int:
    """Run only the behaviour cloning of a configuration. Keys and flags are those of `rlinf train`."""
    return _run(arguments, "sft")


def _run(arguments: Sequence[str], command: str) -> int:
    if not arguments:
        needed = "an experiment (`rlinf models` lists them) or a choice of model, env and algorithm"
        raise ConfigError(f"`rlinf {command}` needs {needed}. Run rlinf {command} experiment=quickstart")
    run_training(arguments, command)
    return 0
