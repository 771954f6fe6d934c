"""Exports a checkpoint to a folder that ``from_pretrained`` can load."""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import yaml

from rlinf import wings
from rlinf.algorithms import ALGORITHMS
from rlinf.checkpoints.checkpoint import check_adapters, is_adapter, write_policy
from rlinf.checkpoints.folders import read_saved_config, resolve_checkpoint
from rlinf.commands.open_checkpoint import load_policy, open_checkpoint, read_config
from rlinf.config.saved_code import code_overrides, code_values, env_overrides
from rlinf.config.schema import RunConfig
from rlinf.envs import ENVS
from rlinf.envs.external import ExternalConfig
from rlinf.errors import CheckpointError
from rlinf.files import write_text
from rlinf.manifest import Manifest, hash_files
from rlinf.models import MODELS
from rlinf.models.embodiment.base import ActionModel
from rlinf.options import to_mapping
from rlinf.registry import BUILTIN
from rlinf.run_folder import CONFIG_FILE
from rlinf.types import Observation

MAX_GAP = 1e-5


def export(
    checkpoint: str | os.PathLike, output: str | os.PathLike, merge_lora: bool = False, overrides: Sequence[str] = ()
) -> Path:
    """Write the model (or adapter), processor, ``dataset_statistics.json``, ``config.yaml`` and ``manifest.json``; return ``output``.

    Checkpoints of a wing are exported by its function (``Wing.exports``). Raise CheckpointError if ``output`` is not
    empty, the checkpoint is damaged or has no adapters to merge, its configuration contains code that no override allows, or the
    exported policy predicts different actions.

    Args:
        merge_lora: Merge the adapters into the base weights, so that the folder is complete.
        overrides: Overrides of the checkpoint's configuration, e.g. ``["plugins=[my_model.py]"]``.
    """
    checkpoint, output = resolve_checkpoint(checkpoint), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} exists and is not empty; nothing is overwritten. Set output=<a new folder>")
    for section in read_saved_config(checkpoint):
        if wings.is_entry("exports", section):
            return wings.load("exports", section)(checkpoint, output, merge_lora, overrides)
    config = read_config(checkpoint, overrides)
    check_adapters(checkpoint, Manifest.load(checkpoint), merge_lora)
    opened = open_checkpoint(checkpoint, config)
    model, manifest = opened.policy.eval(), opened.manifest
    if merge_lora:
        from rlinf.models.lora import merge_lora as merge

        model = merge(model, model.preprocess(random_observation(config, model))).eval()
        config = replace(config, model=replace(config.model, is_lora=False, lora_path=None))
        manifest = replace(manifest, lora={"state": "merged"})
    elif is_adapter(model) and config.model.model_path is None:
        raise CheckpointError(
            f"The adapters of {checkpoint} belong to random base weights, which are stored nowhere else. Set merge_lora=true"
        )
    write_export(config, model, manifest, output)
    return output


def write_export(config: RunConfig, model: ActionModel, manifest: Manifest, output: Path) -> None:
    """Write the files of an export and check that the folder loads; raise CheckpointError if this fails."""
    observation = random_observation(config, model)
    partial = output.with_name(f".{output.name}.tmp")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_policy(partial, model, model.state_dict())
        exported = _with_code_of_model(config, partial, model)
        write_text(partial / CONFIG_FILE, yaml.safe_dump(to_mapping(exported), sort_keys=False))
        replace(manifest, files=hash_files(partial)).save(partial)
        # Load the folder before renaming it, so that a folder with the final name is known to load.
        code = shlex.split(code_overrides(to_mapping(replace(exported, plugins=config.plugins))))
        _compare(model, load_policy(partial, read_config(partial, code)).eval(), observation, output)
        if output.exists():
            output.rmdir()
        os.rename(partial, output)
    except OSError as error:
        raise CheckpointError(f"Cannot write {output}: {error}. Check space and permissions, or set output") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _with_code_of_model(config: RunConfig, folder: Path, model: ActionModel) -> RunConfig:
    """Return a configuration that needs no third-party env or algorithm; copy the model's plug-in to ``folder``."""
    model_origin = MODELS.entries()[config.model.model_type].origin if config.model.model_type in MODELS else BUILTIN
    available = (BUILTIN, model_origin)
    env, algorithm = config.env, config.algorithm
    env_class, drops_plugins = ENVS.get(env.name), any(plugin != model_origin for plugin in config.plugins)
    is_from_plugin = ENVS.entries()[env.name].origin not in available or (
        drops_plugins and env_class.is_registered(env)
    )
    if is_from_plugin or any(code_values({"env": to_mapping(env)})):
        state_dim = env_class.state_width(env)
        if state_dim is None:
            state_dim = getattr(model.config, "state_dim", None)
        env = ExternalConfig(
            cameras=env.cameras, image_size=env.image_size, max_episode_steps=env_class.longest_horizon(env),
            state_dim=state_dim or 0, trained_on=env_overrides(config),
        )  # fmt: skip
    if ALGORITHMS.entries()[algorithm.name].origin not in available:
        algorithm = RunConfig().algorithm
    plugins = [plugin for plugin in config.plugins if plugin == model_origin]
    for plugin in plugins:
        if plugin.endswith(".py"):
            shutil.copy(plugin, folder)
            plugins = [Path(plugin).name]
    return replace(config, env=env, algorithm=algorithm, plugins=plugins)


def random_observation(config: RunConfig, model: ActionModel, num_rows: int = 2, seed: int = 0) -> Observation:
    """Return a random observation with the env's shapes."""
    generator = np.random.default_rng(seed)
    size = config.env.image_size
    images = {name: generator.integers(0, 256, (num_rows, size, size, 3), np.uint8) for name in config.env.cameras}
    state_dim = ENVS.get(config.env.name).state_width(config.env)
    if state_dim is None:  # not known without building the env
        state_dim = getattr(model.config, "state_dim", None)
    state = generator.standard_normal((num_rows, state_dim), np.float32) if state_dim else None
    return Observation(images, state, ["pick up the red block"] * num_rows)


def _compare(written: ActionModel, read: ActionModel, observation: Observation, output: Path) -> None:
    with torch.no_grad():
        before = written.predict_action_batch(**written.preprocess(observation), do_sample=False)
        after = read.predict_action_batch(**read.preprocess(observation), do_sample=False)
    for name in ("logits", "actions", "values"):
        gaps = (getattr(before, name).float() - getattr(after, name).float()).abs()
        gap = float(gaps.max()) if gaps.numel() else 0.0  # lerobot policies have no logits
        if not gap <= MAX_GAP:
            raise CheckpointError(
                f"{output} was not written: after saving and reloading, its {name} differ by {gap:.2e} (tolerance: {MAX_GAP:.0e}). "
                f"{type(written).__name__}.save_pretrained and from_pretrained are inconsistent."
            )
