"""Reading the configuration stored in a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlinf.errors import CheckpointError
from rlinf.run_folder import CONFIG_FILE


class PlainLoader(yaml.SafeLoader):
    """A YAML loader that rejects aliases."""

    # Nested aliases let a small file expand to any size in memory ("billion laughs").
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "it has an alias (*name)")
        return super().compose_node(parent, index)


def read_saved_config(folder: Path) -> dict[str, Any]:
    """Return the resolved configuration stored in a checkpoint; raise CheckpointError if it is missing or damaged."""
    path = folder / CONFIG_FILE
    try:
        saved = yaml.load(path.read_text(encoding="utf-8"), PlainLoader)
    except (OSError, yaml.YAMLError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} cannot be read ({reason}). Use a different checkpoint.") from error
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path} contains no configuration. Use a different checkpoint.")
    return saved


def flat(mapping: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten a nested mapping to dotted keys."""
    result: dict[str, Any] = {}
    for key, value in mapping.items():
        result |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return result
