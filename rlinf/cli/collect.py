"""``rlinf collect``."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.commands.hydra_app import configure, parse


def collect(arguments: Sequence[str]) -> int:
    """Store episodes of the env's scripted expert, or of the policy of ``checkpoint``, as a LeRobotDataset.

    With a checkpoint, model and env come from its configuration. Overrides change single keys; a whole group
    (``env=tabletop``) replaces a section.
    """
    config = configure(parse(arguments), "collect")
    if config is not None:
        from rlinf.commands import collect as command

        command.collect(config)
    return 0
