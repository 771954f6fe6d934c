"""From a checkpoint or an export to a policy that acts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf.config.options import from_mapping
from rlinf.config.schema import RunConfig, build_config
from rlinf.data.stored import StoredDemonstrations
from rlinf.envs.base import VectorEnv
from rlinf.errors import CheckpointError
from rlinf.manifest import BASE_FIELD, Manifest, Mismatch, refuse
from rlinf.models import build_policy, get_model_config_and_processor
from rlinf.models.config import TokenizerConfig
from rlinf.training.checkpoint import CONFIG_FILE, is_checkpoint, load_weights, policy_folder
from rlinf.training.model_files import STATISTICS_FILE, weights_digest


def read_config(folder: str | os.PathLike) -> RunConfig:
    """Return the configuration that lies in a checkpoint or an export.

    Raises:
        CheckpointError: It is missing or unreadable.
        ConfigError: It is of another version of rlinf.
    """
    import yaml

    path = Path(folder) / CONFIG_FILE
    try:
        return build_config(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Use another checkpoint."
        ) from error


def load_policy(folder: str | os.PathLike, config: RunConfig) -> Any:
    """Build the policy of a checkpoint or an export, on the CPU, with its processor.

    Weights, sizes, processor and action statistics come from the folder; how the policy is run (precision, attention,
    ``unnorm_key``, ...) comes from ``config``. Adapters are put on the base weights that ``config.model`` names.

    Args:
        folder: Checkpoint or exported folder, already verified.
        config: Configuration whose ``model`` section fits it.

    Raises:
        CheckpointError: The folder holds adapters and ``config`` does not expect any.
        ManifestMismatchError: The adapters of an export belong to other base weights than those at
            ``config.model.model_path``, and ``config.evaluation.allow_mismatch`` does not name them.
        ConfigError: A size in ``config`` is not that of the folder.
    """
    source = policy_folder(folder)
    if (source / "adapter_config.json").is_file():
        return _load_adapter(Path(folder), source, config)
    model = replace(config.model, model_path=str(source), init_config={})
    return build_policy(replace(config, model=model, tokenizer=from_mapping(TokenizerConfig, {})))


def statistics_of_env(
    config: RunConfig, env: VectorEnv, dataset: StoredDemonstrations | None = None
) -> dict[str, Any] | None:
    """Action statistics for the env, where the weights cannot bring them: those of the dataset that is cloned, else the
    bounds of the env.

    That is so for random weights, and for a ``model.model_path`` of other data that is adapted to this env
    (``model.unnorm_key`` is the env's name, and the folder has no statistics of that name).

    Returns:
        ``override_config_kwargs`` of ``build_policy``; None where the folder has its own statistics.
    """
    name = config.env.name
    if config.model.model_path is not None:
        if config.model.unnorm_key != name:
            return None
        settings, _ = get_model_config_and_processor(config)
        if name in (getattr(settings, "norm_stats", None) or {}):
            return None
    return {"norm_stats": {name: env.action_statistics() if dataset is None else dataset.statistics()}}


def _load_adapter(folder: Path, source: Path, config: RunConfig) -> Any:
    if not config.model.is_lora:
        raise CheckpointError(f"{source} holds LoRA adapters and no base weights. Type model.is_lora=true")
    if not is_checkpoint(folder):  # a checkpoint brings the base weights
        _check_base(folder, config)
    overrides = None
    statistics = source / STATISTICS_FILE
    if statistics.is_file():  # those of the env, where the base weights had none
        overrides = {"norm_stats": json.loads(statistics.read_text(encoding="utf-8"))}
    model = build_policy(replace(config, model=replace(config.model, lora_path=str(source))), overrides)
    if is_checkpoint(folder):
        load_weights(folder, model)  # the base weights too, which may have been random ones
    return model


def _check_base(folder: Path, config: RunConfig) -> None:
    saved, present = Manifest.load(folder).lora.get("base_sha256"), weights_digest(config.model.model_path)
    if saved is not None and saved != present:
        mismatch = Mismatch(BASE_FIELD, saved, present, must_match=True)
        sentence = (
            f"The adapters of {folder} belong to other base weights than model.model_path={config.model.model_path}"
        )
        refuse([mismatch], config.evaluation.allow_mismatch, sentence)
