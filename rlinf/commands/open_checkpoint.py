"""From the path of a checkpoint or an export to a policy that acts: found, verified, compared with the present, loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlinf.checkpoints.checkpoint import load_weights, on_rank_zero, verify_checkpoint
from rlinf.checkpoints.folders import is_checkpoint, policy_folder, resolve_checkpoint
from rlinf.checkpoints.saved_config import read_saved_config
from rlinf.config.compose import compose_on_saved
from rlinf.config.schema import RunConfig, build_config
from rlinf.data.stored import StoredDemonstrations
from rlinf.envs.base import VectorEnv
from rlinf.errors import CheckpointError, ConfigError
from rlinf.manifest import BASE_FIELD, Manifest, Mismatch, check
from rlinf.models import build_policy, get_model_config_and_processor
from rlinf.models.config import TokenizerConfig
from rlinf.models.embodiment.actor_policy import ActorPolicy, base_folder, has_actor
from rlinf.options import from_mapping
from rlinf.preflight.conditions import build_manifest, conditions_of
from rlinf.preflight.saved import check_model_type
from rlinf.run_folder import STATISTICS_FILE


@dataclass
class Opened:
    """A policy: of a checkpoint or an export whose files are verified, of a server, or of the configuration alone.

    Attributes:
        folder: Where it lies; None: not here.
        manifest: Its manifest; None: it has none.
        policy: On the CPU.
        present: The present conditions; None: they were not compared.
        differences: How ``present`` differs from ``manifest``, where that is allowed.
    """

    folder: Path | None
    manifest: Manifest | None
    policy: Any
    present: Manifest | None = None
    differences: list[Mismatch] = field(default_factory=list)


def open_checkpoint(
    path: str | os.PathLike,
    config: RunConfig,
    allow_mismatch: Sequence[str] | None = None,
    *,
    resumes: bool = False,
    deferred: bool = False,
) -> Opened:
    """Find, verify and load a checkpoint or an export; a collective call on all ranks.

    Raise CheckpointError without a whole checkpoint of this model type, ManifestMismatchError if another condition
    differs than ``allow_mismatch`` names, and ConfigError if a size in ``config`` differs from the folder's.

    Args:
        path: A checkpoint, an export, or a run folder, which means its newest checkpoint.
        config: Says how the policy is run, and what the present conditions are.
        allow_mismatch: Conditions that may differ, as in ``evaluation.allow_mismatch``; None: do not compare conditions.
        resumes: ``load_checkpoint`` follows and reads the base weights below adapters, so they are not read here.
        deferred: Leave the weights in their files, if they can be: ``make_parallel`` reads them.
    """
    folder = on_rank_zero(lambda: resolve_checkpoint(path), f"read {path}")
    saved = Manifest.load(folder)
    if not {"model", "model.model_type"} & set(allow_mismatch or ()):
        check_model_type(folder, saved, config)
    verify_checkpoint(folder)
    opened = Opened(folder, saved, load_policy(folder, config, reads_base=not resumes, deferred=deferred))
    if allow_mismatch is not None:
        opened.present = build_manifest(config, opened.policy, policy_version=saved.policy_version)
        opened.differences = check(saved, opened.present, allow_mismatch)
    return opened


def open_local(config: RunConfig, allow_mismatch: Sequence[str]) -> Opened:
    """Open ``config.checkpoint`` like ``open_checkpoint``; without one, the folder of a public model at ``config.model.model_path``."""
    if config.checkpoint is not None:
        return open_checkpoint(config.checkpoint, config, allow_mismatch)
    policy = build_policy(config)
    manifest = build_manifest(config, policy, policy_version=0)
    return Opened(Path(str(config.model.model_path)), manifest, policy, manifest)


def open_remote(config: RunConfig, env: VectorEnv, allow_mismatch: Sequence[str]) -> Opened:
    """Connect to the policy behind ``config.model.url``; compare the conditions that it tells with those here.

    The server tells the conditions of the policy, and this process has the conditions of the world. Both are compared with the
    checkpoint's. Raise ConfigError for actions that do not fit the env, and ManifestMismatchError for a condition that differs and that
    ``allow_mismatch`` does not name.
    """
    policy = build_policy(config)
    if policy.action_dim != env.action_dim:
        found = f"{config.model.url} acts with {policy.action_dim} numbers"
        fix = f"model.action_token_len={env.action_dim} if its server has such actions, or env=<the env of the policy>"
        raise ConfigError(f"{found}; required: {env.action_dim}, the action of env={config.env.name}. Set {fix}")
    saved = policy.manifest
    if saved is None:
        return Opened(None, None, policy, build_manifest(config, policy, policy_version=0))
    there = policy.present
    preprocessing = {**there.preprocessing, "cameras": list(config.env.cameras)}
    world = {**conditions_of(config), "versions": there.versions, "precision": there.precision}
    renderer = os.environ.get("MUJOCO_GL")
    present = replace(there, **world, preprocessing=preprocessing, renderer=renderer, probe=None, files={})
    return Opened(None, saved, policy, present, check(saved, present, allow_mismatch))


def read_config(folder: str | os.PathLike, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration stored in a checkpoint or an export, with ``overrides`` laid over it.

    Code runs only where an override names it, e.g. ``plugins=[my_model.py]``; raise CheckpointError for other code.
    """
    saved = read_saved_config(Path(folder))
    composed = compose_on_saved(saved, overrides, folder=folder)
    composed.output_dir = saved.get("output_dir")
    return build_config(composed)


def load_policy(
    folder: str | os.PathLike, config: RunConfig, *, reads_base: bool = True, deferred: bool = False
) -> Any:
    """Build the policy of a checkpoint or an export, on the CPU, with its processor.

    Weights, sizes, processor and action statistics come from the folder; how the policy is run (precision, attention,
    ``unnorm_key``, ...) comes from ``config``. Adapters are put on the base weights that ``config.model`` names. Raise
    CheckpointError if the folder holds adapters and ``config`` expects none, and ManifestMismatchError if they belong
    to other base weights than ``config.model.model_path`` and ``config.evaluation.allow_mismatch`` does not name that.

    Args:
        reads_base: Read the base weights below the adapters of a checkpoint that holds them, because they were random.
        deferred: Leave the weights in their files, if they can be.
    """
    source = policy_folder(folder)
    if (source / "adapter_config.json").is_file():
        return _load_adapter(Path(folder), source, config, reads_base, deferred)
    base = base_folder(source) if has_actor(source) else source
    model = replace(config.model, model_path=str(base), init_config={})
    policy = build_policy(replace(config, model=model, tokenizer=from_mapping(TokenizerConfig, {})), deferred=deferred)
    return ActorPolicy.load(policy, source) if has_actor(source) else policy


def policy_for(
    config: RunConfig, env: VectorEnv, dataset: StoredDemonstrations | None = None, deferred: bool = False
) -> Any:
    """Build the configured policy with ``statistics_of_env``; raise ConfigError if its actions are not the env's."""
    policy = build_policy(config, statistics_of_env(config, env, dataset), deferred=deferred)
    policy.check_actions(env.action_low, env.action_high)
    return policy


def statistics_of_env(
    config: RunConfig, env: VectorEnv, dataset: StoredDemonstrations | None = None
) -> dict[str, Any] | None:
    """Return the action statistics of the cloned dataset, else the bounds of the env, as ``override_config_kwargs`` of ``build_policy``.

    Return None where the folder at ``model.model_path`` has its own. Random weights have none, and neither has a model of other data
    that is adapted to this env (``model.unnorm_key`` is the env's name, and the folder has no statistics of that name).
    """
    name = config.env.name
    if config.model.model_path is not None:
        if config.model.unnorm_key != name:
            return None
        settings, _ = get_model_config_and_processor(config)
        if name in (getattr(settings, "norm_stats", None) or {}):
            return None
    return {"norm_stats": {name: env.action_statistics() if dataset is None else dataset.statistics()}}


def _load_adapter(folder: Path, source: Path, config: RunConfig, reads_base: bool, deferred: bool) -> Any:
    if not config.model.is_lora:
        raise CheckpointError(f"{source} holds LoRA adapters and no base weights. Set model.is_lora=true")
    brings_base = is_checkpoint(folder) and "base_sha256" not in Manifest.load(folder).lora  # it was random
    if brings_base:
        allowed = [*config.evaluation.allow_mismatch, BASE_FIELD]
        config = replace(config, evaluation=replace(config.evaluation, allow_mismatch=allowed))
    overrides = None
    statistics = source / STATISTICS_FILE
    if statistics.is_file():  # of the env, where the base weights had none
        overrides = {"norm_stats": json.loads(statistics.read_text(encoding="utf-8"))}
    adapted = replace(config, model=replace(config.model, lora_path=str(source)))
    model = build_policy(adapted, overrides, deferred=deferred and not brings_base)
    if brings_base and reads_base:
        load_weights(folder, model)
    return model
