"""``rlinf collect``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence


def collect(arguments: Sequence[str]) -> int:
    """Store episodes of the env's scripted expert, or of the policy of ``checkpoint``, as a LeRobotDataset.

    With a checkpoint, model and env come from the configuration that it was trained with; overrides change single keys,
    whole groups (``env=tabletop``) replace a section.
    """
    from rlinf.commands.hydra_app import configure, parse

    args = parse(arguments)
    if args.help:
        usage = "usage: rlinf collect dataset=<new folder> [checkpoint=<folder>] [key=value ...]"
        print(f"{usage}\n\n{inspect.cleandoc(collect.__doc__)}")
        return 0
    config = configure(args, "collect")
    if config is None:
        return 0
    from rlinf.commands.collect import collect as start

    start(config)
    return 0
