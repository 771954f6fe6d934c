"""The evaluation of one policy from its configuration to a table, a JSON file, videos and a report."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import torch
import yaml

from rlinf.config.options import to_mapping
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import set_num_threads
from rlinf.envs import make_env
from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.report import write_report
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import write_text
from rlinf.manifest import Manifest, build_manifest, check, verify_files
from rlinf.models import build_policy
from rlinf.seeding import seed_everything
from rlinf.training.checkpoint import CONFIG_FILE, resolve_checkpoint
from rlinf.training.policy_loading import load_policy, statistics_of_env
from rlinf.types import EpisodeSpec

logger = logging.getLogger("rlinf")


def evaluate(config: RunConfig) -> EvaluationResult:
    """Evaluate ``config.checkpoint`` (a checkpoint, a run folder or an export), or the configured model without one.

    Prints a table, and writes ``result.json``, ``videos/``, ``config.yaml``, ``manifest.json`` and ``report.html`` into
    ``config.output_dir``.

    Raises:
        CheckpointError: The folder is no checkpoint or is damaged.
        ManifestMismatchError: It was made under other conditions that ``evaluation.allow_mismatch`` does not name.
        ConfigError: The split has fewer episodes than asked for.
    """
    settings = config.evaluation
    set_num_threads(config.cluster.num_threads, 1)
    seed_everything(config.seed)
    env = make_env(config.env, settings.num_envs, auto_reset=False)
    try:
        specs = episode_list(env, settings.split, settings.num_episodes)
        model, manifest = _load(config, env)
        device = _device(config.cluster.device)
        model = model.to(device)
        output = Path(config.output_dir)
        with (
            torch.autocast(device, torch.bfloat16)
            if config.model.precision == "bf16-mixed"
            else contextlib.nullcontext()
        ):
            result = evaluate_policy(
                model,
                env,
                specs,
                greedy=settings.greedy,
                temperature=config.rollout.temperature,
                seed=config.seed,
                val_micro_batch_size=config.model.val_micro_batch_size,
                video_folder=output / "videos" if settings.num_videos_per_task else None,
                num_videos_per_task=settings.num_videos_per_task,
                video_size=settings.video_size,
            )
    finally:
        env.close()
    result.to_json(output / "result.json")
    manifest.save(output)
    write_text(output / CONFIG_FILE, yaml.safe_dump(to_mapping(config), sort_keys=False))
    report = write_report(output)
    print(f"{result.table()}\nresults: {output / 'result.json'}\nreport: {report}", flush=True)
    return result


def episode_list(env: VectorEnv, split: str, num_episodes: int) -> list[EpisodeSpec]:
    """Return the first episodes of a split, which are spread evenly over the tasks.

    Raises:
        ConfigError: The split has fewer.
    """
    available = env.episode_specs(split)
    if len(available) < num_episodes:
        raise ConfigError(
            f"evaluation.num_episodes={num_episodes}, but the split '{split}' has {len(available)} episodes. "
            f"Type evaluation.num_episodes={len(available)}, or raise env.num_{split}_init_states"
        )
    return [available[number] for number in range(num_episodes)]


def _load(config: RunConfig, env: VectorEnv) -> tuple[Any, Manifest]:
    """Return the policy and the present manifest, which was compared with the checkpoint's."""
    if config.checkpoint is None:
        model = build_policy(config, statistics_of_env(config, env))
        return model, build_manifest(config, model, policy_version=0)
    source = resolve_checkpoint(config.checkpoint)
    saved = Manifest.load(source)
    verify_files(source, saved)
    model = load_policy(source, config)
    present = build_manifest(config, model, policy_version=saved.policy_version)
    for mismatch in check(saved, present, config.evaluation.allow_mismatch):
        if mismatch.must_match:
            logger.warning("allowed by evaluation.allow_mismatch: %s", mismatch)
    return model, present


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name
