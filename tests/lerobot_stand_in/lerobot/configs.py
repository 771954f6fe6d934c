"""``PreTrainedConfig`` of lerobot: the fields of ``config.json``."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace


class PreTrainedConfig(SimpleNamespace):
    """Has each field as an attribute."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, cli_overrides: Sequence[str] = ()) -> "PreTrainedConfig":
        values = json.loads((Path(folder) / "config.json").read_text())
        return cls(
            pretrained_backbone_weights=None, **{**values, **dict(each[2:].split("=") for each in cli_overrides)}
        )
