"""``rlinf export``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.checkpoints.folders import resolve_checkpoint
from rlinf.checkpoints.saved_config import TOKEN_KEYS
from rlinf.commands.hydra_app import hide_progress_bars
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError
from rlinf.options import from_mapping, option, public_fields, unknown_key_message
from rlinf.preflight.folders import check_writable


@dataclass
class ExportConfig:
    """What to export, and where."""

    checkpoint: str | None = option(None, "Checkpoint or run folder.")
    output: str | None = option(None, "Folder to write; loads with `from_pretrained`.")
    merge_lora: bool = option(False, "Add the adapters into the weights.")


def export(arguments: Sequence[str]) -> int:
    """Write a checkpoint as a folder that ``from_pretrained`` loads.

    Other keys override the checkpoint's configuration, e.g. ``plugins=[my_model.py]``, or ``policy.model_name_or_path=`` where the
    model of a recipe has moved.
    """
    own, overrides = _split(arguments)
    config = from_mapping(ExportConfig, own)
    for key in ("checkpoint", "output"):
        if getattr(config, key) is None:
            usage = "rlinf export checkpoint=outputs/quickstart/latest output=my_policy"
            raise ConfigError(f"`rlinf export` needs {key}=<folder>. Run {usage}")
    output = Path(config.output).expanduser()
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ConfigError(f"output is '{config.output}', which exists and is not empty. Set output=<a new folder>")
    check_writable(config.output, "output")
    checkpoint = resolve_checkpoint(Path(config.checkpoint).expanduser())
    hide_progress_bars()
    from rlinf.commands import export as command

    print(f"exported {checkpoint} to {command.export(checkpoint, output, config.merge_lora, overrides)}")
    return 0


def _split(arguments: Sequence[str]) -> tuple[dict, list[str]]:
    """Return the values of the command's own keys, and the overrides of the configuration."""
    own, others = {}, []
    sections_of_recipes = [key.partition(".")[0] for key in TOKEN_KEYS]
    own_keys, other_keys = public_fields(ExportConfig), [*public_fields(RunConfig), *sections_of_recipes]
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"'{word}' is not a key=value; keys are {', '.join(own_keys)}.")
        if key in own_keys:
            own[key] = {"true": True, "false": False}.get(value.lower(), value) if key == "merge_lora" else value
        elif key.partition(".")[0] in other_keys:
            others.append(word)
        else:
            raise ConfigError(unknown_key_message(key, value, [*own_keys, *other_keys]))
    return own, others
