"""``rlinf collect``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

from rlinf.errors import ConfigError


def collect(arguments: Sequence[str]) -> int:
    """Store episodes of the env's scripted expert, or of the policy of ``checkpoint``, as a LeRobotDataset.

    With a checkpoint, model and env come from the configuration that it was trained with; overrides change single keys,
    whole groups (``env=tabletop``) replace a section.
    """
    from omegaconf import OmegaConf

    from rlinf.cli.hydra_app import given_value, hide_progress_bars, parse, read_saved_config
    from rlinf.config.compose import compose_config, compose_on_saved
    from rlinf.config.schema import build_config
    from rlinf.config.validation import validate
    from rlinf.training.checkpoint import resolve_checkpoint

    args = parse(arguments)
    if args.help:
        usage = "usage: rlinf collect dataset=<new folder> [checkpoint=<folder>] [key=value ...]"
        print(f"{usage}\n\n{inspect.cleandoc(collect.__doc__)}")
        return 0
    if args.multirun:
        raise ConfigError("`rlinf collect` runs once; sweeps (-m) are for `rlinf train` and `rlinf sft`. Leave -m out")
    checkpoint = given_value(args.overrides, "checkpoint")
    if checkpoint is None:
        composed = compose_config(args.overrides, args.config_dir, args.config_name)
    else:
        folder = resolve_checkpoint(Path(checkpoint).expanduser())
        composed = compose_on_saved(read_saved_config(folder), args.overrides, args.config_dir)
        composed.checkpoint = str(folder)
    if args.cfg:
        print(OmegaConf.to_yaml(composed, resolve=args.resolve))
        return 0
    config = build_config(composed)
    validate(config, "collect")
    hide_progress_bars()
    from rlinf.data.collect import collect as start

    start(config)
    return 0
