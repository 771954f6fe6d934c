"""Audits one policy: `rlinf.audit`, and the command, which writes a table and an HTML report."""

import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rlinf.api import check_overrides, code_overrides, command_arguments, opened_object
from rlinf.audits.auditor import Audit, Auditor, check_episodes, check_held_out, row_text
from rlinf.audits.checkpoint import AuditCheckpoint, num_saved
from rlinf.audits.verdicts import LEAST_FRACTION
from rlinf.checkpoints.folders import flat, is_checkpoint, read_loop_state, read_saved_config
from rlinf.cluster.factory import env_maker
from rlinf.commands.evaluation_output import report_saved
from rlinf.commands.hydra_app import configure, given_value
from rlinf.commands.open_evaluation import (
    conditions,
    open_policy,
    sampling_settings,
    server_digest,
    unknown_policy_warning,
)
from rlinf.config.overrides import parse_overrides
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import resolve_device, set_num_threads
from rlinf.envs import ENVS, make_env
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.envs.episodes import EpisodeSampler
from rlinf.errors import ConfigError, reject
from rlinf.evaluation.evaluator import episode_list
from rlinf.files import locked_folder, write_text
from rlinf.models.precision import autocast
from rlinf.number_formats import format_duration
from rlinf.options import to_mapping
from rlinf.policy import Policy
from rlinf.report.page import clipped_text, write_page
from rlinf.rollout.demonstrations import demonstration_specs
from rlinf.run_folder import AUDIT_FILE, PARTIAL_AUDIT, REPORT_FILE
from rlinf.seeding import seed_everything
from rlinf.types import EpisodeSpec, Observation, SupportsAct

NUM_EPISODES = 100
"""Default number of episodes per condition."""
TITLE_WIDTH = 44
NOT_KNOWN = "of the training split; it is not known which of them the policy has seen"
EVAL_STATES = "env.num_eval_init_states"
SEEN_KEYS = (
    "seed", "rollout.num_envs", "rollout.group_size", "rollout.init_states", "sft.dataset", "sft.num_demonstrations",
)  # fmt: skip
"""Settings that determine the first training episodes of a run."""


def configured(args: Namespace) -> RunConfig | None:
    """Return an audit's configuration with its defaults, or None if ``--cfg`` only printed it."""
    key = "evaluation.num_episodes"
    if not any(item.key_or_group == key for item in parse_overrides(args.overrides)):  # an explicit null counts as set
        args.overrides = [*args.overrides, f"{key}={NUM_EPISODES}"]
    config = configure(args, "evaluate")
    if config is not None and given_value(args.overrides, "output_dir") is None:
        config.output_dir = f"outputs/{config.experiment_name}/audit_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    return config


def run_audit(config: RunConfig) -> Audit:
    """Audit ``config.checkpoint``, or the configured model if it is null, in one process.

    Writes ``audit.json`` and ``report.html`` into ``config.output_dir``. Repeat the call to resume an interrupted audit.
    Raise ConfigError if settings are unsupported or a different audit is in ``output_dir``; otherwise raise as ``open_policy`` does.
    """
    output = Path(config.output_dir)
    check(config)
    with report_saved(output, num_saved, "conditions"), locked_folder(output / PARTIAL_AUDIT):
        return _audit(config, output)


def _audit(config: RunConfig, output: Path) -> Audit:
    start, settings = time.monotonic(), config.evaluation
    set_num_threads(config.cluster.num_threads, 1)
    seed_everything(config.seed)
    num_envs = min(settings.num_envs, settings.num_episodes or settings.num_envs)
    env = env_maker(config, 1)(num_envs, auto_reset=False)
    try:
        specs = episode_list(env, settings.split, settings.num_episodes, settings.first_episode)
        check_episodes(specs)
        model, manifest, saved, warnings = open_policy(config, env)
        model = model.to(resolve_device(config.cluster.device, 1))
        seen, note = seen_episodes(config, env, len(specs))
        server = server_digest(config, model)
        present = conditions(config, manifest, saved, specs, server)
        name = config.checkpoint or config.model.url or config.model.model_path
        name = name or f"model.model_type={config.model.model_type} without a checkpoint"
        progress = AuditCheckpoint(output, name, present)
        if progress.num_known:
            print(f"{progress.num_known} conditions were already done ({progress.folder})", flush=True)
            if server is not None and saved is None:
                warnings.append(unknown_policy_warning(config.model.url, f"{progress.num_known} conditions"))

        def moved(what: str) -> VectorEnv | None:
            changed = ENVS.get(config.env.name).moved(config.env, what)
            if changed is None:
                return None
            env.offload()  # two simulators may not fit in memory
            return env_maker(replace(config, env=changed), 1)(num_envs, auto_reset=False)

        auditor = Auditor(
            model,
            env,
            specs,
            **sampling_settings(config),
            on_row=lambda row: print(row_text(row, TITLE_WIDTH), flush=True),
            checkpoint=progress,
        )
        print(f"{'condition'.ljust(TITLE_WIDTH)}  success      k/n  change  95 % interval", flush=True)
        with autocast(model, config.model.precision):
            result = auditor.run(seen, note, moved)
    finally:
        env.close()
    result.warnings = warnings + result.warnings
    print("\n" + result.conclusions(), flush=True)
    facts = {"checkpoint": config.checkpoint, "env": config.env.name, "seed": config.seed, "split": settings.split}
    title = f"Audit of {config.experiment_name}"
    print(f"audit: {output / AUDIT_FILE}\nreport: {write_audit(result, output, title, facts)}")
    # Saved conditions are deleted only after the result is on disk.
    progress.remove()
    print(f"took {format_duration(time.monotonic() - start)}", flush=True)
    return result


def write_audit(audit: Audit, folder: str | os.PathLike, title: str, facts: Mapping[str, Any]) -> Path:
    """Write ``audit.json`` and ``report.html`` to a folder, and return the path of the report."""
    folder = Path(folder)
    write_text(folder / AUDIT_FILE, json.dumps({**audit.as_dict(), **facts}, indent=1, default=str))
    clipped = clipped_text(audit.actions_clipped_fraction, audit.actions_max_abs)
    facts = {**facts, "episodes": audit.num_episodes, "actions clipped": clipped}
    page = folder / REPORT_FILE
    return write_page(page, "audit.html", title, audit=audit, facts=facts, least_fraction=LEAST_FRACTION)


def check(config: RunConfig) -> None:
    """Raise ConfigError for settings that an audit does not support, before anything starts."""
    settings, cluster = config.evaluation, config.cluster
    if cluster.num_processes > 1 or cluster.num_rollout_workers is not None:
        name = "num_rollout_workers" if cluster.num_rollout_workers is not None else "num_processes"
        reject(f"cluster.{name}={getattr(cluster, name)} with `rlinf audit`", "one process", f"cluster.{name}=null")
    for key in ("compare", "stop_when"):
        if getattr(settings, key) is not None:
            actual = f"evaluation.{key}={getattr(settings, key)} with `rlinf audit`, which compares its own conditions with each other"
            reject(actual, "`rlinf evaluate`", f"evaluation.{key}=null")
    check_held_out(settings.split)
    folder = Path(config.output_dir)
    if folder.exists() and any(folder.iterdir()) and not (folder / PARTIAL_AUDIT).exists():
        raise ConfigError(f"output_dir is '{folder}', which is not empty. Delete it, or set output_dir=<new folder>")


def seen_episodes(config: RunConfig, env: VectorEnv, count: int) -> tuple[Sequence[EpisodeSpec], str]:
    """Return up to ``count`` episodes that start from initial states seen in training, and a description of their origin."""
    folder = Path(config.checkpoint) if config.checkpoint is not None else None
    if folder is not None and is_checkpoint(folder):
        # Training episodes follow from the checkpoint's own configuration and progress, not from the audit's settings.
        state, saved = read_loop_state(folder), flat(read_saved_config(folder))
        present = flat({"env": to_mapping(config)["env"]})
        same_env = all(present.get(key) == saved[key] for key in saved if key.startswith("env.") and key != EVAL_STATES)
        if same_env and saved.keys() >= set(SEEN_KEYS):
            seen, note = _training_episodes(env, state, saved)
            if distinct := _first(seen, count):
                return distinct, note
    return env.episode_specs("train")[:count], NOT_KNOWN


def _training_episodes(
    env: VectorEnv, state: Mapping[str, Any], saved: Mapping[str, Any]
) -> tuple[Iterable[EpisodeSpec], str]:
    """Return a run's training episodes and their origin, given its ``loop_state`` and its configuration with dotted keys."""
    if state.get("env_steps", 0) > 0:
        sampler = EpisodeSampler(
            env.episode_specs("train"),
            len(env.task_names),
            num_groups=saved["rollout.num_envs"] // saved["rollout.group_size"],
            seed=saved["seed"],
            init_states=saved["rollout.init_states"],
        )
        groups = range(sampler.num_groups)
        specs = (sampler.spec(step, group, 0) for step in range(state["step"]) for group in groups)
        return specs, "of its first rollouts"
    if state.get("sft_step", 0) > 0 and saved["sft.dataset"] is None:
        return demonstration_specs(env, saved["sft.num_demonstrations"], saved["seed"]), "of its demonstrations"
    return (), NOT_KNOWN


def _first(specs: Iterable[EpisodeSpec], count: int) -> list[EpisodeSpec]:
    """Return the first ``count`` distinct episodes."""
    distinct: dict[EpisodeSpec, None] = {}
    # Not `dict.fromkeys`: for a long run, the generator yields millions of episodes.
    for spec in specs:
        distinct[spec] = None
        if len(distinct) == count:
            break
    return list(distinct)


def audit(
    policy: str | os.PathLike | Policy | SupportsAct | Callable[[Observation], Any],
    env: str | EnvConfig | None = None,
    *,
    episodes: int = NUM_EPISODES,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Audit:
    """Test whether a policy uses its instruction, its images and its latest observations, like ``rlinf audit``.

    A folder is audited like ``rlinf audit checkpoint=<folder>``, and a report is written. An object is audited in memory, without
    writing files; the first initial states of the training split are assumed to be its training states.

    Args:
        policy, env, overrides: See ``evaluate``.
        episodes: Number of episodes per condition.

    Returns:
        An audit with ``rows``, ``verdicts`` and ``faults``. ``print(audit.table())`` prints a summary.
    """
    check_overrides(overrides, "audit")
    overrides = [*overrides, *code_overrides(plugins, trust_remote_code), f"evaluation.num_episodes={episodes}"]
    if isinstance(policy, (str, os.PathLike)):
        return run_audit(configured(command_arguments(policy, env, overrides, "audit")))
    with opened_object(policy, env, overrides, "audit") as (model, made, config):
        settings = config.evaluation
        check_held_out(settings.split)
        specs = episode_list(made, settings.split, settings.num_episodes, settings.first_episode)
        check_episodes(specs)

        def moved(what: str) -> VectorEnv | None:
            env_config = made.moved(config.env, what)
            return None if env_config is None else make_env(env_config, made.num_envs, auto_reset=False)

        seen = made.episode_specs("train")[: len(specs)]
        return Auditor(model, made, specs, **sampling_settings(config)).run(seen, NOT_KNOWN, moved)
