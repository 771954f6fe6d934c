"""The evaluation of one policy from its configuration to a table, a JSON file, videos and a report."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
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
from rlinf.evaluation.compare import (
    COMPARISON_FILE,
    CONDITIONS,
    EPISODES,
    RESULT_FILE,
    check_conditions,
    compare,
    compare_folders,
    evaluation_folder,
)
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.partial import PartialResults
from rlinf.evaluation.probe import drift, take_probe
from rlinf.evaluation.report import write_report
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import write_text
from rlinf.manifest import Manifest, build_manifest, check, verify_files
from rlinf.models import build_policy
from rlinf.seeding import seed_everything
from rlinf.tracking.progress import Progress
from rlinf.training.checkpoint import CONFIG_FILE, resolve_checkpoint
from rlinf.training.policy_loading import load_policy, statistics_of_env
from rlinf.types import EpisodeResult, EpisodeSpec

logger = logging.getLogger("rlinf")


def evaluate(config: RunConfig) -> EvaluationResult:
    """Evaluate ``config.checkpoint`` (a checkpoint, a run folder or an export), or the configured model without one.

    Prints a table, and writes ``result.json``, ``videos/``, ``config.yaml``, ``manifest.json`` and ``report.html`` into
    ``config.output_dir``; with ``evaluation.compare`` also ``compare.json``. Results are kept on disk as they come:
    the same call with the same ``output_dir`` continues an evaluation that was interrupted.

    Raises:
        CheckpointError: The folder is no checkpoint or is damaged.
        ManifestMismatchError: It was made under other conditions that ``evaluation.allow_mismatch`` does not name.
        ConfigError: The split has fewer episodes than asked for, or others than the evaluation to compare with.
    """
    settings, output = config.evaluation, Path(config.output_dir)
    baseline = evaluation_folder(settings.compare) if settings.compare else None
    set_num_threads(config.cluster.num_threads, 1)
    seed_everything(config.seed)
    env = make_env(config.env, settings.num_envs, auto_reset=False)
    try:
        specs = episode_list(env, settings.split, settings.num_episodes)
        model, manifest, saved = _load(config, env)
        if baseline is not None:
            _check_comparable(baseline, manifest, env, specs, settings.allow_mismatch)
        warnings = _compare_with_checkpoint(config, env, manifest, saved)
        device = _device(config.cluster.device)
        model = model.to(device)
        mixed = config.model.precision == "bf16-mixed"
        with (
            PartialResults(output, _conditions(config, manifest, saved, specs)) as partial,
            torch.autocast(device, torch.bfloat16) if mixed else contextlib.nullcontext(),
        ):
            progress = _Progress(partial, len(specs), config.tracking.progress)
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
                known=partial.known,
                on_result=progress.add,
            )
            result.warnings = warnings
            (output / COMPARISON_FILE).unlink(missing_ok=True)  # it was made of an earlier result
            result.to_json(output / RESULT_FILE)
    finally:
        env.close()
    manifest.save(output)
    write_text(output / CONFIG_FILE, yaml.safe_dump(to_mapping(config), sort_keys=False))
    print(f"{result.table()}\nresults: {output / RESULT_FILE}", flush=True)
    if baseline is not None:
        print(compare_folders(baseline, output, settings.allow_mismatch).table(), flush=True)
    print(f"report: {write_report(output)}", flush=True)
    return result


class _Progress:
    """Keeps each result, and shows how far the evaluation is."""

    def __init__(self, partial: PartialResults, num_episodes: int, enabled: bool) -> None:
        self._partial, self._num_episodes = partial, num_episodes
        self._successes = sum(result.success for result in partial.known)
        self._line = Progress(enabled=enabled)
        if partial.known:
            self._line.note(f"{partial.num_results} of {num_episodes} episodes are known from {partial.path}")
            self._show()

    def add(self, result: EpisodeResult) -> None:
        """Count one episode."""
        self._partial.add(result)
        self._successes += result.success
        self._show()

    def _show(self) -> None:
        done = self._partial.num_results
        rate = self._successes / done
        self._line.update("evaluation", done, self._num_episodes, success_rate=rate, successes=self._successes)


def episode_list(env: VectorEnv, split: str, num_episodes: int | None) -> list[EpisodeSpec]:
    """Return the first episodes of a split, which are spread evenly over the tasks; None: all of them.

    Raises:
        ConfigError: The split has fewer.
    """
    available = env.episode_specs(split)
    if num_episodes is None:
        return list(available)
    if len(available) < num_episodes:
        raise ConfigError(
            f"evaluation.num_episodes={num_episodes}, but the split '{split}' has {len(available)} episodes. "
            f"Type evaluation.num_episodes={len(available)}, or raise env.num_{split}_init_states"
        )
    return [available[number] for number in range(num_episodes)]


def _load(config: RunConfig, env: VectorEnv) -> tuple[Any, Manifest, Manifest | None]:
    """Return the policy, the present manifest and the checkpoint's."""
    if config.checkpoint is None:
        model = build_policy(config, statistics_of_env(config, env))
        return model, build_manifest(config, model, policy_version=0), None
    source = resolve_checkpoint(config.checkpoint)
    saved = Manifest.load(source)
    verify_files(source, saved)
    model = load_policy(source, config)
    return model, build_manifest(config, model, policy_version=saved.policy_version), saved


def _compare_with_checkpoint(
    config: RunConfig, env: VectorEnv, manifest: Manifest, saved: Manifest | None
) -> list[str]:
    """Refuse other conditions than the checkpoint's, take the probe, and return and log what a reader should know."""
    warnings = []
    if saved is not None:
        allowed = [name for name in config.evaluation.allow_mismatch if name not in (EPISODES, CONDITIONS)]
        mismatches = [mismatch for mismatch in check(saved, manifest, allowed) if mismatch.must_match]
        warnings += [f"allowed by evaluation.allow_mismatch: {mismatch}" for mismatch in mismatches]
    if config.evaluation.probe:
        manifest.probe = take_probe(env)
        moved = drift(saved.probe, manifest.probe) if saved is not None else []
        warnings += [f"the simulator has changed since the checkpoint was made: {line}" for line in moved]
    for warning in warnings:
        logger.warning(warning)
    return warnings


def _check_comparable(
    baseline: Path, manifest: Manifest, env: VectorEnv, specs: Sequence[EpisodeSpec], allow_mismatch: Sequence[str]
) -> None:
    """Raise now what a comparison would raise after hours of episodes."""
    check_conditions(baseline, manifest, allow_mismatch)
    planned = [EpisodeResult(spec, env.task_names[spec.task_id], False, 0.0, 0) for spec in specs]
    compare(EvaluationResult.from_json(baseline / RESULT_FILE), EvaluationResult(planned), allow_mismatch)


def _conditions(
    config: RunConfig, manifest: Manifest, saved: Manifest | None, specs: Sequence[EpisodeSpec]
) -> dict[str, Any]:
    """Return all that a result depends on."""
    return {
        "episodes": [len(specs), str(specs[0]), str(specs[-1])],
        "weights": None if saved is None else saved.files,
        **{name: value for name, value in manifest.facts().items() if name not in ("git_revision", "policy_version")},
        "greedy": config.evaluation.greedy,
        "temperature": config.rollout.temperature,
        "model.settings": to_mapping(config.model),
    }


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name
