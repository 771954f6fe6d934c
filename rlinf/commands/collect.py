"""Collects episodes of the scripted expert or a policy into a LeRobotDataset."""

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlinf.commands.open_checkpoint import Opened, open_checkpoint, open_remote, policy_for
from rlinf.config.schema import RunConfig, expert_acts
from rlinf.data.config import SFTConfig
from rlinf.data.formats import open_dataset
from rlinf.data.lerobot_dataset import OWN_FILE
from rlinf.data.lerobot_format import EXECUTED
from rlinf.data.lerobot_writer import LeRobotWriter
from rlinf.data.stored import StoredDemonstrations
from rlinf.distributed.process_group import resolve_device, set_num_threads
from rlinf.envs import make_env
from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError, SimulatorError
from rlinf.evaluation.evaluator import BatchedPolicy
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import Json
from rlinf.manifest import package_versions
from rlinf.models.precision import autocast, evaluation_mode
from rlinf.number_formats import format_interval
from rlinf.options import to_mapping
from rlinf.rollout.demonstrations import ActionSource, EpisodeBatch, ScriptedExpert, run_episodes
from rlinf.seeding import derive_seed, seed_everything
from rlinf.tracking.progress import Progress
from rlinf.training.recording import PolicyDemonstrator, dataset_writer, write_episode
from rlinf.training.stop_signal import ctrl_c_waits, sigterm_is_ctrl_c
from rlinf.types import EpisodeResult, EpisodeSpec

Demonstrate = Callable[[VectorEnv, EpisodeSpec], EpisodeBatch]
"""Runs an episode in which a human acts."""


def collect(config: RunConfig, human: Callable[[VectorEnv], Demonstrate] | None = None) -> Path:
    """Run ``collect.num_episodes`` episodes, store all or only the successful ones, print a summary and return the folder.

    The dataset does not depend on the number of envs. After Ctrl-C, SIGTERM or a SimulatorError, finished episodes are stored
    before the exception is raised. Raise ConfigError if no episode would be stored. ``human``: lets a human act, in one env.
    """
    settings = config.collect
    set_num_threads(config.cluster.num_threads, 1)
    seed_everything(config.seed)
    env = make_env(config.env, min(settings.num_envs, settings.num_episodes), auto_reset=False)
    try:
        specs = collection_specs(env, settings.split, settings.num_episodes, config.seed)
        earlier = settings.extends and open_dataset(SFTConfig(), env, settings.extends, outcomes=True)
        policy, about = _policy(config, env) if human is None else (None, {"demonstrator": "human"})
        demonstrate = None if human is None else human(env)
        is_noisy = policy is None and human is None and config.sft.expert.jitter > 0
        writer = dataset_writer(config, env, config.dataset, has_executed=bool(earlier) or is_noisy)
        with sigterm_is_ctrl_c(), writer:
            if earlier:
                _copy_episodes(earlier, writer)
            num_copied = writer.info["total_episodes"]
            results: list[EpisodeResult] = []
            interruption: KeyboardInterrupt | SimulatorError | None = None
            try:
                _record(config, env, specs, policy, demonstrate, writer, results)
            except (KeyboardInterrupt, SimulatorError) as error:
                # Re-raised after the writer has closed, so that hours of episodes are not lost.
                interruption = error
            stored = [r for r in results if r.success or not settings.only_success]
            if interruption is not None and not stored:
                raise interruption
            if not stored:
                reported = _as_result(env, results).total.is_reported
                reason = "" if reported else f"; env={config.env.name} does not report success"
                raise ConfigError(
                    f"None of {len(results)} episodes succeeded{reason} and collect.only_success=true, so there is nothing to store. "
                    "Set collect.only_success=false, or checkpoint=<a better policy>"
                )
            writer.about[OWN_FILE] = _conditions(config, env, about, results, num_copied)
            result = _as_result(env, results)
    finally:
        env.close()
    print(_summary(writer.folder, result, len(stored), sum(r.num_env_steps for r in stored)), flush=True)
    if interruption is not None:
        print(f"interrupted after {len(results)} of {len(specs)} episodes; the stored ones are complete", flush=True)
        raise interruption
    return writer.folder


def collection_specs(env: VectorEnv, split: str, num_episodes: int, seed: int) -> list[EpisodeSpec]:
    """Draw distinct episodes of a split, alternating tasks; raise ConfigError if the split has fewer."""
    available, num_tasks = env.episode_specs(split), len(env.task_names)
    rounds, needed = len(available) // num_tasks, -(-num_episodes // num_tasks)
    if needed > rounds:
        raise ConfigError(
            f"collect.num_episodes={num_episodes}, but the split '{split}' has {len(available)} episodes. "
            f"Set collect.num_episodes={len(available)}"
        )
    drawn = np.random.default_rng(derive_seed(seed, "collect")).choice(rounds, needed, replace=False)
    return [available[int(drawn[i // num_tasks]) * num_tasks + i % num_tasks] for i in range(num_episodes)]


def _policy(config: RunConfig, env: VectorEnv) -> tuple[BatchedPolicy | None, Json]:
    """Return the policy, or None if the expert acts, and its description for the dataset."""
    if expert_acts(config):
        return None, {"demonstrator": "expert", "expert": to_mapping(config.sft.expert)}
    if config.model.url is not None:
        opened = open_remote(config, env, config.evaluation.allow_mismatch)
        where: Json = {"url": config.model.url}
    elif config.checkpoint is None:
        opened = Opened(None, None, policy_for(config, env), None)
        where = {"model_path": config.model.model_path}
    else:
        opened = open_checkpoint(config.checkpoint, config, config.evaluation.allow_mismatch)
        where = {"checkpoint": str(opened.folder)}
    model = opened.policy.to(resolve_device(config.cluster.device, 1))
    policy = BatchedPolicy(model, env.stream_names, config.collect.greedy, config.rollout.temperature, config.seed)
    return policy, {
        "demonstrator": "policy",
        **where,
        "policy_version": None if opened.manifest is None else opened.manifest.policy_version,
        "differences": [str(difference) for difference in opened.differences],
    }


def _record(
    config: RunConfig,
    env: VectorEnv,
    specs: Sequence[EpisodeSpec],
    policy: BatchedPolicy | None,
    demonstrate: Demonstrate | None,
    writer: LeRobotWriter,
    results: list[EpisodeResult],
) -> None:
    """Run the episodes in batches of one per env, write the selected ones in order, and append each result to ``results``."""
    progress = Progress(updates=config.tracking.progress)
    for start in range(0, len(specs), env.num_envs):
        batch_specs = list(specs[start : start + env.num_envs])
        source: ActionSource
        if demonstrate is not None:
            batch = demonstrate(env, batch_specs[0])
        else:
            if policy is None:
                numbers = range(start, start + env.num_envs)
                source = ScriptedExpert(env, config.sft.expert, config.seed, numbers)
            else:
                source = PolicyDemonstrator(policy, batch_specs)
            with _inference(config, policy):
                batch = run_episodes(env, batch_specs, source)
        for slot, result in enumerate(batch.results):
            # Store an episode together with its result: a Ctrl-C in between would leave them inconsistent.
            with ctrl_c_waits():
                if result.success or not config.collect.only_success:
                    write_episode(writer, batch, slot)
                results.append(result)
        progress.update("collect", len(results), len(specs), success_rate=_as_result(env, results).success_rate)
    progress.close()


def _copy_episodes(earlier: StoredDemonstrations, writer: LeRobotWriter) -> None:
    """Copy all episodes of a dataset."""
    outcomes = earlier.outcomes
    for last in np.unique(earlier.last_rows):
        index = np.flatnonzero(earlier.last_rows == last)
        observation, _ = earlier.rows(index)
        writer.add_episode(
            observation.images,
            observation.state,
            earlier.actions[index],
            observation.instruction[0],
            rewards=outcomes.rewards[index],
            success=outcomes.success[index],
            truncated=not outcomes.terminated[last],
            more={EXECUTED: outcomes.executed[index]},
        )


@contextlib.contextmanager
def _inference(config: RunConfig, policy: BatchedPolicy | None):
    """Run a policy in evaluation mode and in its configured precision."""
    if policy is None:
        yield
        return
    with evaluation_mode(policy.model), autocast(policy.model, config.model.precision):
        yield


def _conditions(config: RunConfig, env: VectorEnv, about: Json, results: list[EpisodeResult], num_copied: int) -> Json:
    """Return the contents of ``meta/rlinf.json``, which complements the format's own files; ``episodes`` omits copied ones."""
    stored = [result.success or not config.collect.only_success for result in results]
    numbers = itertools.count(num_copied)
    episodes = [
        {"episode_index": next(numbers) if is_stored else None, **row}
        for row, is_stored in zip(_as_result(env, results).as_dict()["results"], stored, strict=True)
    ]
    return {
        **about,
        "seed": config.seed,
        "collect": to_mapping(config.collect),
        "env": to_mapping(config.env),
        "whole": len(results) == config.collect.num_episodes,
        "versions": package_versions(env.packages_of(config.env)),
        "renderer": os.environ.get("MUJOCO_GL"),
        "episodes": episodes,
    }


def _as_result(env: VectorEnv, results: list[EpisodeResult]) -> EvaluationResult:
    """Wrap finished episodes in an EvaluationResult that records whether the env reports success."""
    return EvaluationResult(results, reports_success=env.reports_success(env.config))


def _summary(folder: Path, result: EvaluationResult, num_stored: int, num_frames: int) -> str:
    """Return the closing summary: episodes, success or return, frames, size, and the override for training on them."""
    total, tasks = result.total, sorted(result.per_task.items())
    noun = "task" if len(tasks) == 1 else "tasks"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    interval = format_interval(*total.interval, " - ")
    rate = f"{total.successes} successes = {total.success_rate:.1%} (95 % {interval})"
    lines = [
        f"ran       {result.episodes} episodes of {len(tasks)} {noun}, {rate if total.is_reported else total}",
        f"stored    {num_stored} episodes, {num_frames:,} frames, {size / 2**20:.1f} MiB",
        f"dataset   {folder}",
        f"train     sft.dataset={folder}",
    ]
    for task, success in tasks if len(tasks) > 1 else ():
        lines.insert(-3, f"          {task}: {success.count if success.is_reported else success}")
    return "\n".join(lines)
