"""Open what an evaluation needs before its first episode: the list of episodes, the policy, the conditions, the comparison."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf import run_folder
from rlinf.checkpoints.folders import is_checkpoint, read_loop_state, read_saved_config, resolve_checkpoint
from rlinf.commands.open_checkpoint import Opened, open_checkpoint, open_remote, policy_for
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import rank, resolve_device
from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError
from rlinf.evaluation.compare import compare
from rlinf.evaluation.config import TRAINING_SPLIT
from rlinf.evaluation.evaluator import NUM_ROWS, episode_list
from rlinf.evaluation.fingerprint import compare_fingerprints, take_fingerprint
from rlinf.evaluation.result import EvaluationResult
from rlinf.manifest import Manifest
from rlinf.models.base_weights import weights_digest
from rlinf.options import to_mapping
from rlinf.preflight.conditions import build_manifest
from rlinf.report.compare_folders import COMPARISON_NAMES, check_conditions, evaluation_folder
from rlinf.training.state import LoopState
from rlinf.types import EpisodeResult, EpisodeSpec

logger = logging.getLogger("rlinf")

VERSION_FIELDS = ("versions.", "simulators.")
"""Manifest fields whose differences are accepted but reported."""

CONNECTION_FIELDS = ("timeout_s", "connect_timeout_s", "api_key_env")
"""``model`` settings that do not affect episodes."""


@dataclass
class OpenedPolicy:
    """Policy, episodes and conditions of an evaluation before its first episode.

    Attributes:
        baseline, before: Folder of ``evaluation.compare``, resolved once because ``latest`` may move, and its result; or None.
        is_unverified: True if earlier processes may have run a different policy.
    """

    specs: list[EpisodeSpec]
    model: Any
    manifest: Manifest
    conditions: dict[str, Any]
    baseline: Path | None
    before: EvaluationResult | None
    warnings: list[str]
    is_unverified: bool


def open_evaluation(config: RunConfig, env: VectorEnv) -> OpenedPolicy:
    """Open the policy, list the episodes, and reject now any comparison that would fail after hours of episodes."""
    settings, baseline, before = config.evaluation, None, None
    specs = episode_list(env, settings.split, settings.num_episodes, settings.first_episode)
    model, manifest, saved, warnings = open_policy(config, env)
    if settings.compare:
        baseline = evaluation_folder(settings.compare)
        before = EvaluationResult.from_json(baseline / run_folder.RESULT_FILE)
        _check_comparable(baseline, before, manifest, env, specs, config)
    more = _choice_warning(config.checkpoint, env, specs) if config.checkpoint is not None and rank() == 0 else []
    if settings.split == "train":
        more.append(TRAINING_SPLIT)
    warnings += more
    log_warnings(more)
    server = server_digest(config, model)
    present = conditions(config, manifest, saved, specs, server)
    is_unverified = server is not None and saved is None
    return OpenedPolicy(specs, model, manifest, present, baseline, before, warnings, is_unverified)


def _choice_warning(checkpoint: str, env: VectorEnv, specs: Sequence[EpisodeSpec]) -> list[str]:
    """Return a warning if these episodes chose the checkpoint as the best of its run."""
    folder = resolve_checkpoint(checkpoint).absolute()
    if not is_checkpoint(folder):
        return []
    summary = folder.parent.parent / run_folder.SUMMARY_FILE
    if folder.parent.name == run_folder.CHECKPOINTS_FOLDER and summary.is_file():
        choice = json.loads(summary.read_text(encoding="utf-8")).get("best_checkpoint", {})
        chosen, num_candidates = choice.get("name"), choice.get("num_candidates", 0)
    else:  # the run has not finished: was it the best until it was saved?
        state = LoopState(evaluations=read_loop_state(folder).get("evaluations", {}))
        chosen, num_candidates = state.best_checkpoint(state.candidates), len(state.candidates)
    saved = read_saved_config(folder)
    settings, tasks = saved["evaluation"], saved["env"].get("tasks")
    if chosen != folder.name or num_candidates < 2 or tasks != env.config.tasks:
        return []
    available, first = env.episode_specs(settings["split"]), settings.get("first_episode", 0)
    end = len(available) if settings["num_episodes"] is None else first + settings["num_episodes"]
    count = len({available[number] for number in range(first, min(end, len(available)))} & set(specs))
    if not count:
        return []
    more = f" after raising env.num_{settings['split']}_init_states" if end >= len(available) else ""
    return [
        f"{count} of these {len(specs)} episodes chose this checkpoint among {num_candidates}, so on average the result is too high. "
        f"Set evaluation.first_episode={end}{more}"
    ]


def open_policy(config: RunConfig, env: VectorEnv) -> tuple[Any, Manifest, Manifest | None, list[str]]:
    """Open the checkpoint or server, or build the configured policy, on the CPU.

    Return the policy, its current conditions (fingerprint on rank 0 only), the recorded conditions (None: unknown), and warnings.
    """
    warnings = []
    allowed = [name for name in config.evaluation.allow_mismatch if name not in COMPARISON_NAMES]
    if config.model.url is not None:
        opened = open_remote(config, env, allowed)
        if opened.manifest is None:
            warnings.append(
                f"{config.model.url} does not describe its policy, so neither weights nor conditions were compared"
            )
        elif opened.policy.rows_of_call != NUM_ROWS:
            sizes = (
                f"calls its policy with {opened.policy.rows_of_call} rows (max_batch), but evaluations use {NUM_ROWS}"
            )
            warnings.append(f"{config.model.url} {sizes}: actions may be rounded differently")
    elif config.checkpoint is not None:
        opened = open_checkpoint(config.checkpoint, config, allowed)
    else:
        model = policy_for(config, env)
        opened = Opened(None, None, model, build_manifest(config, model, policy_version=0))
    model, manifest, saved = opened.policy, opened.present, opened.manifest
    if saved is not None:
        manifest.fps = saved.fps
    for mismatch in opened.differences:
        if mismatch.must_match:
            warnings.append(f"allowed by evaluation.allow_mismatch: {mismatch}")
        elif mismatch.field.startswith(VERSION_FIELDS):
            warnings.append(f"the checkpoint was written with a different version: {mismatch}")
    if config.evaluation.probe and rank() == 0:
        manifest.probe = take_fingerprint(env)
        moved = compare_fingerprints(saved.probe, manifest.probe) if saved is not None else []
        warnings += [f"the simulator has changed since the checkpoint was written: {line}" for line in moved]
    log_warnings(warnings)
    return model, manifest, saved, warnings


def _check_comparable(
    baseline: Path,
    before: EvaluationResult,
    manifest: Manifest,
    env: VectorEnv,
    specs: Sequence[EpisodeSpec],
    config: RunConfig,
) -> None:
    """Raise now the errors that a comparison would raise after hours of episodes."""
    allowed = config.evaluation.allow_mismatch
    check_conditions(baseline, manifest, allowed)
    episodes = [EpisodeResult(spec, env.task_names[spec.task_id], False, 0.0, 0) for spec in specs]
    planned = EvaluationResult(episodes, config.evaluation.greedy, config.evaluation_temperature, config.seed)
    compare(before, planned, allowed)
    if before.stopping is not None and before.episodes < len(specs):
        raise ConfigError(
            f"evaluation.compare={baseline} ended after {before.episodes} of {before.stopping['num_planned']} episodes "
            f"(evaluation.stop_when); expected a baseline with all {len(specs)}. Set evaluation.num_episodes={before.episodes}"
        )


def conditions(
    config: RunConfig,
    manifest: Manifest,
    saved: Manifest | None,
    specs: Sequence[EpisodeSpec],
    server: str | None = None,
) -> dict[str, Any]:
    """Return everything that affects a result, as JSON values; ``saved`` is the checkpoint's manifest (None without a checkpoint)."""
    model, free = config.model, {*CONNECTION_FIELDS}
    weights: Any = (
        saved.files if saved is not None else [weights_digest(p) for p in (model.model_path, model.lora_path)]
    )
    if saved is not None:
        free.add("url")  # a server with a known manifest may move to a new address
    return {
        "device": resolve_device(config.cluster.device, 1),
        "episodes": [len(specs), str(specs[0]), str(specs[-1])],
        "weights": weights,
        "env.reward_mode": config.env.reward_mode,
        "env.success_bonus": config.env.success_bonus,
        **{name: value for name, value in manifest.flatten().items() if name not in ("git_revision", "policy_version")},
        "greedy": config.evaluation.greedy,
        "temperature": config.evaluation_temperature,
        "model.settings": {name: value for name, value in to_mapping(model).items() if name not in free},
        "server": server,
    }


def server_digest(config: RunConfig, model: Any) -> str | None:
    """Return the digest of a remote policy's metadata, or None for a local policy."""
    return None if config.model.url is None else model.client.digest


def sampling_settings(config: RunConfig) -> dict[str, Any]:
    """Return the sampling arguments of ``evaluate_policy``."""
    return {"greedy": config.evaluation.greedy, "temperature": config.evaluation_temperature, "seed": config.seed}


def unknown_policy_warning(url: str | None, earlier: str) -> str:
    """Return the warning that earlier results (e.g. ``12 episodes``) may be from a different policy."""
    doubt = f"whether {url} served the same policy during the {earlier} of earlier processes"
    return f"It is not known {doubt}, because it does not describe its policy"


def log_warnings(warnings: Sequence[str]) -> None:
    """Log warnings on rank 0."""
    for warning in warnings if rank() == 0 else ():
        logger.warning(warning)
