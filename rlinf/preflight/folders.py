"""Checks of the folders that a command reads or writes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError


def check_sources(config: RunConfig) -> None:
    """Folders that will be loaded must be there and be what they are taken for."""
    from rlinf.checkpoints.checkpoint import resolve_checkpoint

    if config.resume is not None and config.init_from is not None:
        raise ConfigError(
            f"resume={config.resume} and init_from={config.init_from} exclude each other: resume continues a run, init_from "
            "starts a new one from its weights. Set resume=null or init_from=null"
        )
    for key in ("resume", "init_from", "checkpoint"):
        folder = getattr(config, key)
        if folder is not None:
            resolve_checkpoint(folder)
    if config.checkpoint is not None:
        return  # Weights and processor come from there.
    model = config.model
    if (config.resume or config.init_from) is None and model.model_path is None and not model.init_config:
        raise ConfigError(
            "model.model_path is null and model.init_config is empty: there are no weights to load, and no sizes for random "
            "ones. Set model.model_path=<folder or hub id>, or model=openvla_tiny"
        )
    from rlinf.models import config_file_names, entry_for

    markers = config_file_names(entry_for(model))
    for key, names in (("model_path", markers), ("lora_path", ("adapter_config.json",))):
        path = getattr(model, key)
        if path is not None:
            check_hub_folder(f"model.{key}", path, names)
    if config.resume is None and config.init_from is None and Path(model.model_path or "").expanduser().is_dir():
        from rlinf.models.base_weights import check_base

        check_base(model, config.evaluation.allow_mismatch)
    if config.tokenizer.tokenizer_model is not None:
        check_hub_folder("tokenizer.tokenizer_model", config.tokenizer.tokenizer_model, ())


def check_hub_folder(key: str, path: str, markers: tuple[str, ...]) -> None:
    """A folder must exist and hold one of ``markers``; ``organisation/name`` is left to the hub.

    Raises:
        ConfigError: Neither a folder nor a hub id, or a folder without any of ``markers``.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():

        def fits(candidate: Path) -> bool:
            return not markers or any((candidate / name).is_file() for name in markers)

        if not fits(folder):
            wanted = " or ".join(markers)
            inside = [child for child in ("model", "adapter") if fits(folder / child)]
            hint = f" Set {key}={folder / inside[0]}" if inside else f" Set {key}=<folder with {wanted}>"
            raise ConfigError(f"{key} is '{path}', a folder without {wanted}.{hint}")
        return
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") != 1 or folder.exists()
    if looks_local:
        raise ConfigError(
            f"{key} is '{path}', which is not a folder (and no hub id such as organisation/name). Set {key}=<folder>"
        )


def check_new_folder(config: RunConfig) -> None:
    """A run starts in a folder without another run, unless it continues that one."""
    from rlinf.checkpoints.checkpoint import CHECKPOINTS_FOLDER, STATE_FILE, resolve_checkpoint

    folder = Path(config.output_dir).expanduser().resolve()
    found = [name for name in ("metrics.jsonl", CHECKPOINTS_FOLDER) if (folder / name).exists()]
    if not found:
        return
    if config.resume is not None and folder in resolve_checkpoint(config.resume).resolve().parents:
        return
    instead = f"resume={config.output_dir} to continue it, or output_dir=<another folder>"
    if not any(folder.glob(f"{CHECKPOINTS_FOLDER}/*/{STATE_FILE}")):
        instead = "output_dir=<another folder>, or delete this one: its run ended before the first checkpoint"
    raise ConfigError(
        f"output_dir is '{config.output_dir}', which already holds a run ({', '.join(found)}), and a new one would mix with it. "
        f"Set {instead}"
    )


def check_writable(output_dir: str, key: str = "output_dir") -> None:
    """The folder, or the nearest folder above it that exists, must be a folder that this user may write to."""
    folder = Path(output_dir).expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ConfigError(f"{key} is '{output_dir}', but '{existing}' is not a folder. Set {key}=<another folder>")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".rlinf-", dir=existing))
    except OSError as error:
        raise ConfigError(
            f"{key} is '{output_dir}', but nothing can be written in '{existing}' ({error.strerror}). Set {key}=<another folder>"
        ) from error
