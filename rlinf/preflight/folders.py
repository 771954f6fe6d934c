"""Checks of input and output folders."""

import os
import tempfile
from pathlib import Path

from rlinf import models
from rlinf.checkpoints.folders import resolve_checkpoint
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError, reject
from rlinf.models.base_weights import check_base
from rlinf.run_folder import ADAPTER_FOLDER, CHECKPOINTS_FOLDER, METRICS_FILE, MODEL_FOLDER, STATE_FILE


def check_sources(config: RunConfig) -> None:
    """Check that the input folders exist and have the expected contents."""
    if config.resume is not None and config.init_from is not None:
        actual = f"resume={config.resume} continues a run, and init_from={config.init_from} starts a new one"
        reject(actual, "they exclude each other", "resume=null or init_from=null")
    for folder in (config.resume, config.init_from, config.checkpoint):
        if folder is not None:
            resolve_checkpoint(folder)
    if config.checkpoint is not None or config.model.url is not None:
        return  # weights and processor come from the checkpoint or the server
    model, is_new = config.model, config.resume is None and config.init_from is None
    if is_new and model.model_path is None and not model.init_config:
        reject(
            "model.model_path is null and model.init_config is empty",
            "weights to load, or sizes for random ones",
            f"model.model_path=<folder or hub id>, or {models.random_weights(model.model_type)}",
        )
    if model.model_path is not None:
        check_hub_folder("model.model_path", model.model_path, models.config_file_names(models.entry_for(model)))
    if model.lora_path is not None:
        check_hub_folder("model.lora_path", model.lora_path, ("adapter_config.json",))
    if is_new and model.lora_path is not None and Path(model.model_path or "").expanduser().is_dir():
        check_base(model, config.evaluation.allow_mismatch)
    if config.tokenizer.tokenizer_model is not None:
        check_hub_folder("tokenizer.tokenizer_model", config.tokenizer.tokenizer_model, ())


def check_hub_folder(key: str, path: str, markers: tuple[str, ...]) -> None:
    """Check that ``path`` is a folder that contains one of the files ``markers``, or looks like a hub id (``organisation/name``)."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        with_marker = [
            candidate
            for candidate in (folder, folder / MODEL_FOLDER, folder / ADAPTER_FOLDER)
            if not markers or any((candidate / name).is_file() for name in markers)
        ]
        if folder not in with_marker:
            required = " or ".join(markers)
            fix = with_marker[0] if with_marker else f"<folder with {required}>"
            raise ConfigError(f"{key}='{path}' is a folder without {required}. Set {key}={fix}")
    elif path.startswith(("/", ".", "~")) or path.count("/") != 1 or folder.exists():
        raise ConfigError(f"{key}='{path}' is neither a folder nor a hub id (organisation/name). Set {key}=<folder>")


def check_new_folder(config: RunConfig) -> None:
    """Check that the output folder contains no run other than the resumed one."""
    folder = Path(config.output_dir).expanduser().resolve()
    files = [name for name in (METRICS_FILE, CHECKPOINTS_FOLDER) if (folder / name).exists()]
    if not files or (config.resume is not None and folder in resolve_checkpoint(config.resume).resolve().parents):
        return
    fix = f"resume={config.output_dir} to continue it, or output_dir=<a new folder>"
    if not any(folder.glob(f"{CHECKPOINTS_FOLDER}/*/{STATE_FILE}")):
        fix = "output_dir=<a new folder>, or delete this one: its run ended before the first checkpoint"
    raise ConfigError(f"output_dir='{config.output_dir}' already contains a run ({', '.join(files)}). Set {fix}")


def check_writable(output_dir: str, key: str = "output_dir") -> None:
    """Check that the folder, or its nearest existing parent, is writable."""
    folder = Path(output_dir).expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ConfigError(f"{key}='{output_dir}', but '{existing}' is not a folder. Set {key}=<a different folder>")
    try:
        # Try to write a file, because permission bits do not reveal read-only mounts and quotas.
        os.rmdir(tempfile.mkdtemp(prefix=".rlinf-", dir=existing))
    except OSError as error:
        message = f"{key}='{output_dir}', but nothing can be written in '{existing}' ({error.strerror})"
        raise ConfigError(f"{message}. Set {key}=<a different folder>") from error
