"""Current conditions for a manifest: configuration, model, versions and simulators."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.config.schema import RunConfig
from rlinf.envs import ENVS
from rlinf.files import Json, sha256_of
from rlinf.manifest import ACTION_FIELDS, Manifest, git_revision, library_versions, package_versions
from rlinf.models.base_weights import weights_digest
from rlinf.run_folder import CLASSIFIER_FILE, CLASSIFIER_WEIGHTS

if TYPE_CHECKING:
    from torch import nn


def conditions_of(config: RunConfig) -> Json:
    """Return the manifest fields of a configuration and this machine, without the model."""
    env_class = ENVS.get(config.env.name)
    horizons = {task: env_class.horizon_of(config.env, task) for task in env_class.selected_tasks(config.env)}
    env = {name: value for name, value in asdict(config.env).items() if name not in env_class.free_settings}
    if config.env.success_classifier is not None:
        folder = Path(config.env.success_classifier).expanduser()
        env["success_classifier.sha256"] = "-".join(
            sha256_of(folder / name) for name in (CLASSIFIER_FILE, CLASSIFIER_WEIGHTS)
        )
    return {
        "versions": library_versions(),
        "precision": config.model.precision,
        "env": {**env, "max_episode_steps": horizons},
        "simulators": package_versions(env_class.packages_of(config.env)),
        "seed": config.seed,
    }


def build_manifest(
    config: RunConfig, model: nn.Module, *, policy_version: int, fingerprint: Json | None = None
) -> Manifest:
    """Return the manifest of a policy's current conditions, including the result of ``take_fingerprint`` if there is one."""
    settings = model.config.to_dict()
    lora: Json = {"state": "merged" if settings.get("merged_adapters") else "none"}
    if config.model.is_lora:
        base = weights_digest(config.model.model_path)
        lora = {"state": "adapter", **asdict(config.model.lora), **({} if base is None else {"base_sha256": base})}
    statistics, unnorm_key = settings.get("norm_stats") or {}, config.model.unnorm_key
    if unnorm_key is None and len(statistics) == 1:
        (unnorm_key,) = statistics
    names = (*ACTION_FIELDS, *getattr(type(model.config), "manifest_fields", ()))
    actions = {name: settings[name] for name in names if name in settings}
    return Manifest(
        **conditions_of(config),
        model={"model_type": config.model.model_type, "class": type(model).__name__.removeprefix("FSDP")},
        normalization={
            "unnorm_key": unnorm_key,
            "statistics": statistics.get(unnorm_key),
            **_normalized_state(config, settings),
        },
        preprocessing={
            "image_size": config.model.image_size or settings.get("image_sizes"),
            "cameras": list(config.env.cameras),
            **{name: settings[name] for name in ("image_resize_strategy", "prompt_template") if name in settings},
            **({"prompt_suffix": config.model.prompt_suffix} if config.model.prompt_suffix else {}),
            "processor": _processor_settings(getattr(model, "processor", None)),
        },
        actions={
            "action_token_len": config.model.action_token_len,
            "action_chunks_len": config.model.action_chunks_len,
            **actions,
        },
        lora=lora,
        renderer=os.environ.get("MUJOCO_GL"),
        policy_version=policy_version,
        probe=fingerprint,
        git_revision=git_revision(),
    )


def _normalized_state(config: RunConfig, settings: Json) -> Json:
    """Return the env in which a policy's running state statistics were measured; a new run must use the same one."""
    if not settings.get("normalize_state"):
        return {}
    names = ("name", "id", "state")
    return {"state": {name: getattr(config.env, name) for name in names if hasattr(config.env, name)}}


def _processor_settings(processor: Any) -> Json | None:
    """Return the image settings of a Hugging Face processor and a hash of its vocabulary."""
    if processor is None:
        return None
    image_processor = getattr(processor, "image_processor", None)
    settings: Json = {}
    if hasattr(image_processor, "to_dict"):
        hidden = ("_processor_class", "processor_class", "transformers_version", "name_or_path")
        settings = {name: value for name, value in image_processor.to_dict().items() if name not in hidden}
        settings = json.loads(json.dumps(settings, default=str))
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is not None:
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
        settings["vocabulary_sha256"] = hashlib.sha256(vocabulary.encode()).hexdigest()
    return settings
