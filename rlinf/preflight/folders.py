"""Checks of the folders that a command reads or writes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError
from rlinf.preflight.refuse import refuse


def check_sources(config: RunConfig) -> None:
    """Check that the folders to load exist and hold what they should."""
    from rlinf.checkpoints.checkpoint import resolve_checkpoint

    if config.resume is not None and config.init_from is not None:
        raise ConfigError(
            f"resume={config.resume} and init_from={config.init_from} exclude each other: resume continues a run, init_from "
            "starts a new run from its weights. Set resume=null or init_from=null"
        )
    for key in ("resume", "init_from", "checkpoint"):
        folder = getattr(config, key)
        if folder is not None:
            resolve_checkpoint(folder)
    if config.checkpoint is not None:
        return  # Weights and processor come from there.
    model = config.model
    if (config.resume or config.init_from) is None and model.model_path is None and not model.init_config:
        refuse(
            "model.model_path is null and model.init_config is empty",
            "weights to load, or sizes for random ones",
            "model.model_path=<folder or hub id>, or model=openvla_tiny",
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
    """Check that ``path`` is a folder with one of the files ``markers``, or looks like a hub id (``organisation/name``).

    Raises:
        ConfigError: It is neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():

        def fits(candidate: Path) -> bool:
            return not markers or any((candidate / name).is_file() for name in markers)

        if not fits(folder):
            wanted = " or ".join(markers)
            inside = [child for child in ("model", "adapter") if fits(folder / child)]
            fitting = folder / inside[0] if inside else f"<folder with {wanted}>"
            raise ConfigError(f"{key}='{path}' is a folder without {wanted}. Set {key}={fitting}")
    elif path.startswith(("/", ".", "~")) or path.count("/") != 1 or folder.exists():
        raise ConfigError(f"{key}='{path}' is neither a folder nor a hub id (organisation/name). Set {key}=<folder>")


def check_new_folder(config: RunConfig) -> None:
    """Check that the output folder holds no run, except the one that is resumed."""
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
    raise ConfigError(f"output_dir='{config.output_dir}' already holds a run ({', '.join(found)}). Set {instead}")


def check_writable(output_dir: str, key: str = "output_dir") -> None:
    """Check that the folder, or its nearest existing parent, is a folder that this user may write to."""
    folder = Path(output_dir).expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ConfigError(f"{key}='{output_dir}', but '{existing}' is not a folder. Set {key}=<another folder>")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".rlinf-", dir=existing))
    except OSError as error:
        raise ConfigError(
            f"{key}='{output_dir}', but nothing can be written in '{existing}' ({error.strerror}). Set {key}=<another folder>"
        ) from error
