"""``rlinf convert``."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.commands import convert as command
from rlinf.config.compose import parse_overrides
from rlinf.data.hdf5 import ConvertConfig
from rlinf.errors import ConfigError
from rlinf.options import from_mapping, public_fields


def convert(arguments: Sequence[str]) -> int:
    """Write demonstrations in HDF5, of robomimic or of LIBERO, as a LeRobotDataset.

    Keys: source, dataset, task, cameras, state_keys, mask, rotate_images, seen_after_action, fps, video (docs/datasets.md).
    """
    for word in arguments:
        if "=" not in word:
            raise ConfigError(f"'{word}' is not a key=value; keys are {', '.join(public_fields(ConvertConfig))}.")
    given = parse_overrides(arguments)
    for item in given:
        if item.is_sweep_override():
            key, _, value = item.input_line.partition("=")
            if ConvertConfig.__annotations__.get(key, "").startswith("list"):
                raise ConfigError(f"'{item.input_line}' lacks the brackets of a list. Set '{key}=[{value}]'")
            raise ConfigError(
                f"'{item.input_line}' lists several values; required: one. Quote a comma. Set '{key}=\"{value}\"'"
            )
    command.convert(from_mapping(ConvertConfig, {item.key_or_group: item.value() for item in given}))
    return 0
