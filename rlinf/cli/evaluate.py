"""``rlinf evaluate``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

from rlinf.errors import ConfigError


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a checkpoint under its own configuration, or (without ``checkpoint=``) the configured model as it is.

    Model and env come from the configuration that the checkpoint was trained with; overrides change single keys, whole
    groups (``env=tabletop``) replace a section.
    """
    from omegaconf import OmegaConf

    from rlinf.cli.hydra_app import given_value, hide_progress_bars, parse, read_saved_config
    from rlinf.config.compose import compose_config, compose_on_saved
    from rlinf.config.schema import build_config
    from rlinf.config.validation import validate
    from rlinf.training.checkpoint import resolve_checkpoint

    if not arguments:
        raise ConfigError(
            "`rlinf evaluate` needs a checkpoint or run folder. Type rlinf evaluate checkpoint=outputs/quickstart/<time>"
        )
    args = parse(arguments)
    if args.help:
        print("usage: rlinf evaluate checkpoint=<folder> [key=value ...]\n\n" + inspect.cleandoc(evaluate.__doc__))
        return 0
    if args.multirun:
        raise ConfigError("`rlinf evaluate` runs once; sweeps (-m) are for `rlinf train` and `rlinf sft`. Leave -m out")
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
    validate(config, "evaluate")
    hide_progress_bars()
    from rlinf.evaluation.run import evaluate as start

    start(config)
    return 0
