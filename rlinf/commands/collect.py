"""Plays the scripted expert or a policy, and stores the episodes as a LeRobotDataset."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.commands.open_checkpoint import Opened, open_checkpoint, open_remote, policy_for
from rlinf.commands.signals import ctrl_c_waits, sigterm_is_ctrl_c
from rlinf.config.schema import RunConfig, expert_acts
from rlinf.data.lerobot_dataset import OWN_FILE
from rlinf.data.lerobot_format import EXECUTED
from rlinf.data.lerobot_writer import LeRobotWriter
from rlinf.distributed.process_group import resolve_device, set_num_threads
from rlinf.envs import make_env
from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError, SimulatorError
from rlinf.evaluation.evaluator import BatchedPolicy
from rlinf.evaluation.result import EvaluationResult
from rlinf.manifest import package_versions
from rlinf.models.precision import autocast, evaluation_mode
from rlinf.number_formats import format_interval
from rlinf.options import to_mapping
from rlinf.rollout.demonstrations import ActionSource, EpisodeBatch, ScriptedExpert, run_episodes
from rlinf.seeding import derive_seed, seed_everything
from rlinf.tracking.progress import Progress
from rlinf.types import EpisodeResult, EpisodeSpec, Observation

DEFAULT_FPS = 10


class PolicyDemonstrator:
    """A policy; a chunk of its actions is executed before it is asked again. The first envs play ``specs``."""

    def __init__(self, policy: BatchedPolicy, specs: Sequence[EpisodeSpec]) -> None:
        self.policy, self.specs = policy, list(specs)
        self._streams = [policy.start_episode(spec) for spec in self.specs]
        self._chunks: list[list[np.ndarray]] = [[] for _ in self.specs]

    def act(self, observation: Observation, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        asked = [row for row in np.flatnonzero(running).tolist() if not self._chunks[row]]
        if asked:
            chosen = self.policy.act(observation.select(asked), [self._streams[row] for row in asked])
            for row, chunk in zip(asked, chosen, strict=True):
                self._chunks[row] = list(chunk)
        width = next(len(chunk[0]) for chunk in self._chunks if chunk)
        actions = np.zeros((len(observation), width), dtype=np.float32)
        for row in np.flatnonzero(running).tolist():
            actions[row] = self._chunks[row].pop(0)
        return actions, actions

    def restart(self, row: int) -> None:
        self._chunks[row], self._streams[row] = [], self.policy.start_episode(self.specs[row])


def collect(config: RunConfig) -> Path:
    """Play ``collect.num_episodes`` episodes, store all or the successful ones, and print a summary.

    The dataset depends on the configuration and the seed only, not on the number of envs. ``meta/rlinf.json`` in it
    records the env's configuration, what acted, and how every episode ended.

    Return the folder. Where Ctrl-C, SIGTERM or a simulator cuts the collection short, the episodes that have ended are stored before
    KeyboardInterrupt or SimulatorError continues. Raise ConfigError if no episode is to be stored.
    """
    settings = config.collect
    set_num_threads(config.cluster.num_threads, 1)
    seed_everything(config.seed)
    env = make_env(config.env, min(settings.num_envs, settings.num_episodes), auto_reset=False)
    try:
        specs = collection_specs(env, settings.split, settings.num_episodes, config.seed)
        policy, about = _policy(config, env)
        writer = LeRobotWriter(
            config.dataset,
            fps=settings.fps or max(1, round(env.metadata.get("render_fps", DEFAULT_FPS))),
            image_shapes=dict.fromkeys(config.env.cameras, (config.env.image_size, config.env.image_size)),
            state_dim=env.state_dim,
            action_dim=env.action_dim,
            video=settings.video,
            robot_type=env.suite,
            more=[EXECUTED] if policy is None and config.sft.expert.jitter > 0 else (),
        )
        with sigterm_is_ctrl_c(), writer:
            results: list[EpisodeResult] = []
            cut_short: KeyboardInterrupt | SimulatorError | None = None
            try:
                _record(config, env, specs, policy, writer, results)
            except (KeyboardInterrupt, SimulatorError) as error:
                cut_short = error
            stored = [r for r in results if r.success or not settings.only_success]
            if cut_short is not None and not stored:
                raise cut_short
            if not stored:
                untold = "" if _played(env, results).total.is_reported else f"; env={config.env.name} tells no success"
                raise ConfigError(
                    f"None of {len(results)} episodes succeeded{untold} and collect.only_success=true, so there is nothing to store. "
                    "Set collect.only_success=false, or let another checkpoint act"
                )
            writer.about[OWN_FILE] = _conditions(config, env, about, results)
            played = _played(env, results)
    finally:
        env.close()
    print(_summary(writer.folder, played, len(stored), sum(r.num_env_steps for r in stored)), flush=True)
    if cut_short is not None:
        print(f"cut short after {len(results)} of {len(specs)} episodes; those that were stored are whole", flush=True)
        raise cut_short
    return writer.folder


def collection_specs(env: VectorEnv, split: str, num_episodes: int, seed: int) -> list[EpisodeSpec]:
    """Draw different episodes of a split, tasks in turn; raise ConfigError if the split has fewer."""
    available, num_tasks = env.episode_specs(split), len(env.task_names)
    rounds, needed = len(available) // num_tasks, -(-num_episodes // num_tasks)
    if needed > rounds:
        raise ConfigError(
            f"collect.num_episodes={num_episodes}, but the split '{split}' has {len(available)} episodes. "
            f"Set collect.num_episodes={len(available)}"
        )
    drawn = np.random.default_rng(derive_seed(seed, "collect")).choice(rounds, needed, replace=False)
    return [available[int(drawn[i // num_tasks]) * num_tasks + i % num_tasks] for i in range(num_episodes)]


def _policy(config: RunConfig, env: VectorEnv) -> tuple[BatchedPolicy | None, dict[str, Any]]:
    """Return the policy (None: the expert acts), and what the dataset records of who acted."""
    if expert_acts(config):
        return None, {"demonstrator": "expert", "expert": to_mapping(config.sft.expert)}
    if config.model.url is not None:
        opened = open_remote(config, env, config.evaluation.allow_mismatch)
        where: dict[str, Any] = {"url": config.model.url}
    elif config.checkpoint is None:
        opened = Opened(None, None, policy_for(config, env), None)
        where = {"model_path": config.model.model_path}
    else:
        opened = open_checkpoint(config.checkpoint, config, config.evaluation.allow_mismatch)
        where = {"checkpoint": str(opened.folder)}
    model = opened.policy.to(resolve_device(config.cluster.device, 1))
    policy = BatchedPolicy(model, env.task_names, config.collect.greedy, config.rollout.temperature, config.seed)
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
    writer: LeRobotWriter,
    results: list[EpisodeResult],
) -> None:
    """Play all episodes in batches of one per env, write those that are wanted in the order of ``specs``, and append to
    ``results`` the outcome of each episode that was written or discarded."""
    progress = Progress(updates=config.tracking.progress)
    for start in range(0, len(specs), env.num_envs):
        batch = list(specs[start : start + env.num_envs])
        numbers = range(start, start + env.num_envs)
        with _acting(config, policy):
            actor: ActionSource = (
                ScriptedExpert(env, config.sft.expert, config.seed, numbers)
                if policy is None
                else PolicyDemonstrator(policy, batch)
            )
            played = run_episodes(env, batch, actor)
        for row, result in enumerate(played.results):
            with ctrl_c_waits():
                if result.success or not config.collect.only_success:
                    _write_episode(writer, played, row)
                results.append(result)
        progress.update("collect", len(results), len(specs), success_rate=_played(env, results).success_rate)
    progress.close()


def _write_episode(writer: LeRobotWriter, played: EpisodeBatch, row: int) -> None:
    times = np.flatnonzero(played.alive[:, row])
    seen = [played.seen[t] for t in times]
    writer.add_episode(
        {camera: np.stack([view.images[camera][row] for view in seen]) for camera in seen[0].images},
        None if seen[0].state is None else np.stack([view.state[row] for view in seen]),
        played.labels[times, row],
        seen[0].instruction[row],
        rewards=played.rewards[times, row],
        success=played.success[times, row],
        truncated=bool(played.truncated[row]),
        more={EXECUTED: played.executed[times, row]},
    )


@contextlib.contextmanager
def _acting(config: RunConfig, policy: BatchedPolicy | None):
    """The mode and the number format in which a policy acts, as in an evaluation."""
    if policy is None:
        yield
        return
    with evaluation_mode(policy.model), autocast(policy.model, config.model.precision):
        yield


def _conditions(
    config: RunConfig, env: VectorEnv, about: dict[str, Any], results: list[EpisodeResult]
) -> dict[str, Any]:
    """What the dataset records besides the format's own files."""
    stored = [result.success or not config.collect.only_success for result in results]
    numbers = iter(range(len(results)))
    episodes = [
        {"episode_index": next(numbers) if kept else None, **row}
        for row, kept in zip(_played(env, results).as_dict()["results"], stored, strict=True)
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


def _played(env: VectorEnv, results: list[EpisodeResult]) -> EvaluationResult:
    """Return episodes as a result, which knows whether their success is told."""
    return EvaluationResult(results, reports_success=env.reports_success(env.config))


def _summary(folder: Path, played: EvaluationResult, num_stored: int, num_rows: int) -> str:
    """The closing lines: episodes, success or else return, rows, size, and the command to run next."""
    total, tasks = played.total, sorted(played.per_task.items())
    noun = "task" if len(tasks) == 1 else "tasks"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    interval = format_interval(*total.interval, " - ")
    rate = f"{total.successes} successes = {total.success_rate:.1%} (95 % {interval})"
    lines = [
        f"played    {played.episodes} episodes of {len(tasks)} {noun}, {rate if total.is_reported else total}",
        f"stored    {num_stored} episodes, {num_rows:,} rows, {size / 2**20:.1f} MiB",
        f"dataset   {folder}",
        f"clone it  sft.dataset={folder}",
    ]
    for task, found in tasks if len(tasks) > 1 else ():
        lines.insert(-3, f"          {task}: {found.count if found.is_reported else found}")
    return "\n".join(lines)
