"""Opens a checkpoint, an export or a remote policy: resolve, verify, compare conditions, load."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlinf.checkpoints.checkpoint import load_weights, on_rank_zero, verify_checkpoint
from rlinf.checkpoints.folders import (
    is_checkpoint,
    is_export,
    policy_folder,
    read_loop_state,
    read_saved_config,
    resolve_checkpoint,
)
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
from rlinf.types import Statistics


@dataclass
class Opened:
    """A policy on the CPU, read from verified files, provided by a server, or built from the configuration.

    Attributes:
        folder: Folder of the files, or None if the policy is not local.
        manifest: Conditions during training, or None if unknown.
        present: Current conditions, or None if they are not compared.
        differences: Accepted differences between ``present`` and ``manifest``.
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
    """Resolve, verify and load a checkpoint or an export (a collective call on all ranks).

    Raise CheckpointError if a complete checkpoint of this model type does not exist, ManifestMismatchError for a difference that
    is not in ``allow_mismatch``, and ConfigError if a size in ``config`` contradicts the folder's.

    Args:
        path: A checkpoint, an export, or a run folder (for its newest checkpoint).
        allow_mismatch: Conditions that may differ, as in ``evaluation.allow_mismatch``; None skips the comparison.
        resumes: Skip the base weights of adapters, because ``load_checkpoint`` will read them.
        deferred: If possible, leave the weights in their files until ``make_parallel`` reads them.
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
    """Open ``config.checkpoint``, or the public model at ``config.model.model_path`` if it is null."""
    if config.checkpoint is not None:
        return open_checkpoint(config.checkpoint, config, allow_mismatch)
    policy = build_policy(config)
    manifest = build_manifest(config, policy, policy_version=0)
    return Opened(Path(str(config.model.model_path)), manifest, policy, manifest)


def open_remote(config: RunConfig, env: VectorEnv, allow_mismatch: Sequence[str]) -> Opened:
    """Connect to the policy at ``config.model.url``; raise ManifestMismatchError for a difference that is not allowed."""
    policy = build_policy(config)
    if policy.action_dim != env.action_dim:
        actual = f"{config.model.url} has action_dim {policy.action_dim}"
        fix = f"model.action_token_len={env.action_dim} if its server returns such actions, or env=<the env of the policy>"
        raise ConfigError(f"{actual}; expected {env.action_dim}, the action_dim of env={config.env.name}. Set {fix}")
    saved = policy.manifest
    if saved is None:
        return Opened(None, None, policy, build_manifest(config, policy, policy_version=0))
    # The policy runs on the server and the env in this process: compare their combined conditions with the checkpoint's.
    remote = policy.present
    preprocessing = {**remote.preprocessing, "cameras": list(config.env.cameras)}
    local = {**conditions_of(config), "versions": remote.versions, "precision": remote.precision}
    renderer = os.environ.get("MUJOCO_GL")
    present = replace(remote, **local, preprocessing=preprocessing, renderer=renderer, probe=None, files={})
    return Opened(None, saved, policy, present, check(saved, present, allow_mismatch))


def policy_before_rl(config: RunConfig) -> Any | None:
    """Load the policy with which the RL of ``config.checkpoint`` started (a collective call).

    None if its checkpoint is not on disk, or is ``config.checkpoint`` itself.
    """

    def find() -> Path | None:
        folder = None if config.checkpoint is None else resolve_checkpoint(config.checkpoint)
        if folder is None or not is_checkpoint(folder):
            return None
        name = read_loop_state(folder).get("evaluations", {}).get("before_rl", {}).get("checkpoint")
        places = [] if name is None else [folder.parent / name, Path(name)]
        start = next((place for place in places if is_checkpoint(place) or is_export(place)), None)
        return None if start is None or start.samefile(folder) else start

    start = on_rank_zero(find, "find the policy before RL")
    return None if start is None else open_checkpoint(start, config).policy


def read_config(folder: str | os.PathLike, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a checkpoint or export with ``overrides``; raise CheckpointError for code that these do not repeat."""
    saved = read_saved_config(Path(folder))
    composed = compose_on_saved(saved, overrides, folder=folder)
    composed.output_dir = saved.get("output_dir")
    return build_config(composed)


def load_policy(
    folder: str | os.PathLike, config: RunConfig, *, reads_base: bool = True, deferred: bool = False
) -> Any:
    """Build the policy of a checkpoint or an export, on the CPU, with its processor.

    Weights, sizes, processor and action statistics come from the folder. Runtime settings (precision, attention, ``unnorm_key``,
    ...) and the base weights of adapters come from ``config``. Raise CheckpointError if ``config`` does not expect adapters, and
    ManifestMismatchError if the adapters belong to different base weights, unless ``config.evaluation.allow_mismatch`` allows this.

    Args:
        reads_base: Read the (random) base weights that a checkpoint stores with its adapters.
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
    """Build the configured policy with ``statistics_of_env``; raise ConfigError if its actions do not match the env's."""
    policy = build_policy(config, statistics_of_env(config, env, dataset), deferred=deferred)
    policy.check_actions(env.action_low, env.action_high)
    return policy


def statistics_of_env(
    config: RunConfig, env: VectorEnv, dataset: StoredDemonstrations | None = None
) -> Statistics | None:
    """Return action statistics of the dataset or, without one, of the env's bounds; None if the model's folder has its own."""
    name = config.env.name
    if config.model.model_path is not None:
        # Only a model that is being adapted to this env (unnorm_key is the env's name) may lack the statistics.
        if config.model.unnorm_key != name:
            return None
        settings, _ = get_model_config_and_processor(config)
        if name in (getattr(settings, "norm_stats", None) or {}):
            return None
    return {"norm_stats": {name: env.action_statistics() if dataset is None else dataset.statistics()}}


def _load_adapter(folder: Path, source: Path, config: RunConfig, reads_base: bool, deferred: bool) -> Any:
    if not config.model.is_lora:
        raise CheckpointError(f"{source} contains LoRA adapters and no base weights. Set model.is_lora=true")
    # Random base weights have no file and no hash: the checkpoint stores them, so there is nothing to compare.
    has_base = is_checkpoint(folder) and "base_sha256" not in Manifest.load(folder).lora
    if has_base:
        allowed = [*config.evaluation.allow_mismatch, BASE_FIELD]
        config = replace(config, evaluation=replace(config.evaluation, allow_mismatch=allowed))
    overrides = None
    statistics = source / STATISTICS_FILE
    if statistics.is_file():  # the env's statistics, if the base weights had none
        overrides = {"norm_stats": json.loads(statistics.read_text(encoding="utf-8"))}
    adapted = replace(config, model=replace(config.model, lora_path=str(source)))
    model = build_policy(adapted, overrides, deferred=deferred and not has_base)
    if has_base and reads_base:
        load_weights(folder, model)
    return model
