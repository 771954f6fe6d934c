"""Exports the checkpoint of a recipe to a folder that ``from_pretrained`` can load."""

from collections.abc import Sequence
from pathlib import Path

from rlinf.checkpoints.checkpoint import check_adapters, verify_checkpoint
from rlinf.checkpoints.folders import flat, read_saved_config
from rlinf.errors import CheckpointError, ConfigError
from rlinf.manifest import Manifest
from rlinf.models.config import LoraConfig
from rlinf.models.precision import torch_dtype_of
from rlinf.recipes.hf_folder import HFFolder

TOKEN_KEYS = ("policy.model_name_or_path", "train.param_dtype")
"""Keys of a recipe's configuration that are used for exports and may be overridden."""


def export(checkpoint: Path, output: Path, merge_lora: bool, overrides: Sequence[str]) -> Path:
    """Export the policy of a token run; tokenizer and config files come from the model that training started with."""
    values = flat(read_saved_config(checkpoint))
    for override in overrides:
        key, _, value = override.partition("=")
        if key not in TOKEN_KEYS:
            actual = f"'{override}' does not affect the export of {checkpoint}, a checkpoint of a recipe"
            raise ConfigError(f"{actual}; available keys: {', '.join(TOKEN_KEYS)}.")
        values[key] = value
    verify_checkpoint(checkpoint)
    manifest = Manifest.load(checkpoint)
    check_adapters(checkpoint, manifest, merge_lora)
    lora = {key: value for key, value in manifest.lora.items() if key not in ("state", "base_sha256")}
    source, dtype = (values.get(key) for key in TOKEN_KEYS)
    adapter = LoraConfig(**lora) if manifest.lora["state"] == "adapter" else None
    write = HFFolder(source, torch_dtype_of(dtype), lora=adapter, merge_lora=merge_lora)
    try:
        write(checkpoint, output)
    except OSError as error:
        raise CheckpointError(f"Cannot write {output}: {error}. Check space and permissions, or set output") from error
    return output
