"""``rlinf export``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.options import from_mapping, option, public_fields
from rlinf.errors import ConfigError


@dataclass
class ExportConfig:
    """What to export, and where."""

    checkpoint: str | None = option(None, "Checkpoint or run folder.")
    output: str | None = option(None, "Folder to write; loads with `from_pretrained`.")
    merge_lora: bool = option(False, "Add the adapters into the weights.")


def export(arguments: Sequence[str]) -> int:
    """Write a checkpoint as a folder that ``from_pretrained`` loads."""
    config = from_mapping(ExportConfig, _pairs(arguments))
    usage = "Type rlinf export checkpoint=outputs/quickstart/<time> output=my_policy"
    for key in ("checkpoint", "output"):
        if getattr(config, key) is None:
            raise ConfigError(f"`rlinf export` needs {key}=<folder>. {usage}")
    output = Path(config.output).expanduser()
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ConfigError(f"output is '{config.output}', which exists and is not empty. Type output=<a new folder>")

    from rlinf.cli.hydra_app import hide_progress_bars
    from rlinf.config.folders import check_writable
    from rlinf.training.checkpoint import resolve_checkpoint
    from rlinf.training.export import export as write

    check_writable(config.output, "output")
    hide_progress_bars()
    checkpoint = resolve_checkpoint(Path(config.checkpoint).expanduser())
    print(f"exported {checkpoint} to {write(checkpoint, output, config.merge_lora)}")
    return 0


def _pairs(arguments: Sequence[str]) -> dict:
    """Read ``key=value`` words; ``merge_lora`` takes true and false."""
    pairs: dict = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"'{word}' is no key=value; keys are {', '.join(public_fields(ExportConfig))}.")
        pairs[key] = {"true": True, "false": False}.get(value.lower(), value) if key == "merge_lora" else value
    return pairs
