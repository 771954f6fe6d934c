"""Check the configuration of an off-policy run."""

from collections.abc import Mapping
from dataclasses import asdict
from decimal import ROUND_DOWN, Context
from pathlib import Path
from typing import Any, cast

from rlinf.algorithms import ALGORITHMS
from rlinf.algorithms.offpolicy_config import SCRATCH, OffPolicyConfig
from rlinf.checkpoints.folders import (
    has_policy,
    policy_folder,
    read_loop_state,
    read_saved_config,
    resolve_checkpoint,
)
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import resolve_device
from rlinf.envs import ENVS
from rlinf.errors import reject
from rlinf.models.actors.kinds import ACTORS
from rlinf.models.embodiment.actor_policy import actor_settings, base_folder, check_samples_noise, has_actor
from rlinf.models.embodiment.modules.readout_token import holds_readout_token
from rlinf.offpolicy.learner import OffPolicyLearner
from rlinf.offpolicy.offline import REWARD_SETTINGS, check_demonstrations, check_replay_from
from rlinf.offpolicy.replay import check_replay_size
from rlinf.options import closest, override_of, override_text, require_values
from rlinf.preflight.compatibility import check_moments
from rlinf.preflight.memory import policy_on_meta_device
from rlinf.types import ClassAndConfig

UPDATE_S, ROW_WEIGHT_S = 4e-3, 1.5e-10
"""Time of an update on one core, in seconds: a constant, and the time per row and weight (`benchmarks/offpolicy_update.py`)."""

LONGEST_STEP_S = 60.0

NO_STALENESS = "no asynchronous rollouts; algorithm.overlap=true updates while the envs step"
IN_ONE_PROCESS = (
    ("cluster.placement", "colocated", "rollouts in the process that trains"),
    ("cluster.max_staleness", 0, NO_STALENESS),
    ("rollout.worker_processes", 0, "rollouts in the process that trains"),
    ("rollout.backend", "torch", "the frozen policy in this process, because its features are used"),
    ("rollout.group_size", 1, "ungrouped episodes"),
    ("rollout.auto_reset", True, "envs that reset automatically"),
    ("rollout.continue_episodes", False, "iterations that start new episodes"),
    ("trainer.cpu_offload", False, "an unsharded policy"),
)
"""What an off-policy run requires; see ``require_values``."""


def check_off_policy(config: RunConfig, policy: ClassAndConfig | None) -> None:
    """Check that the policy, the envs and this machine meet an off-policy algorithm's requirements.

    ``policy`` is the class and configuration of the base policy, or None if unknown.
    """
    algorithm = cast(OffPolicyConfig, config.algorithm)
    name = f"algorithm.name={algorithm.name}"
    if policy is not None and not policy[0].implements("_propose"):
        problem = f"{name} with model.model_type={config.model.model_type}, which does not implement propose"
        reject(problem, "a policy that returns chunks and features", "algorithm=ppo")
    check_moments(config, policy, name, "algorithm=ppo")
    if algorithm.actor.name not in ACTORS:
        fix = f"algorithm.actor.name={closest(algorithm.actor.name, ACTORS) or 'residual'}"
        reject(f"algorithm.actor.name={algorithm.actor.name}", f"one of {', '.join(ACTORS)}", fix)
    if algorithm.num_target_critics > algorithm.num_critics:
        problem = f"algorithm.num_target_critics={algorithm.num_target_critics} of {algorithm.num_critics} critics"
        reject(problem, "no more than algorithm.num_critics", f"algorithm.num_target_critics={algorithm.num_critics}")
    _check_run(config, name)
    _check_alone(config, algorithm)
    _check_saved(config, algorithm)
    _check_token(config)
    _check_learns(config, algorithm)
    check_demonstrations(config, algorithm, policy)
    check_replay_from(config, algorithm)
    if policy is not None:  # the sizes of a hub model are only known after the download
        model = policy_on_meta_device(config)
        _check_candidates(config, algorithm, model)
        _check_times(config, algorithm, model)
        check_replay_size(config, algorithm, model)


def _check_run(config: RunConfig, name: str) -> None:
    """Check that each rank collects rollouts and trains in one process, and that the base policy is unsharded and has no adapters."""
    require_values(config, name, *IN_ONE_PROCESS)
    if config.trainer.sharding == "fsdp2":
        reject(f"{name} with trainer.sharding=fsdp2", "an unsharded policy", "trainer.sharding=replicate")
    if config.model.is_lora:
        reject(
            f"model.is_lora=true with {name}, which freezes the policy",
            "weights without adapters",
            "merge_lora=true with `rlinf export`, and model.is_lora=false model.model_path=<export>",
        )


def _check_alone(config: RunConfig, algorithm: OffPolicyConfig) -> None:
    """Check that actions are continuous, and that behaviour cloning is disabled for a standalone actor, which has no base policy."""
    env, actor = config.env, ACTORS.get(algorithm.actor.name)
    if ENVS.get(env.name).acts_in_choices(env):
        problem = f"algorithm.name={algorithm.name} with env.name={env.name}, some of whose actions are discrete"
        reject(problem, "continuous actions, so that critics have a gradient", "algorithm=ppo")
    if getattr(algorithm, "entropy_in_target", False) and actor.critics_choose:
        problem = f"algorithm.entropy_in_target=true with algorithm.actor.name={algorithm.actor.name}, some of whose actions have no density"
        reject(problem, "an actor of one action", "algorithm.entropy_in_target=false")
    if algorithm.actor.name != SCRATCH:
        return
    if config.sft.max_steps:
        problem = f"sft.max_steps={config.sft.max_steps} with algorithm.actor.name={SCRATCH}, which has no base policy"
        reject(problem, "sft.max_steps=0", "sft.max_steps=0, or algorithm.actor.name=residual")


def _check_saved(config: RunConfig, algorithm: OffPolicyConfig) -> None:
    """Check that a saved actor and, if the run is resumed in RL, its critics and rewards match this configuration."""
    source = config.resume or config.init_from
    if source is None:
        return
    folder = resolve_checkpoint(source)
    config_there = read_saved_config(folder)
    saved = config_there.get("algorithm") or {}
    in_rl = config.resume is not None and read_loop_state(folder)["phase"] == "rl"
    holds_actor = has_policy(folder) and has_actor(policy_folder(folder))
    new_run = (
        "" if holds_actor else f", or for a new run init_from={config.resume} resume=null output_dir=<a new folder>"
    )
    if in_rl and saved.get("name") != algorithm.name:
        reject(
            f"algorithm.name={algorithm.name}, but {folder} was trained with algorithm.name={saved.get('name')}",
            "the same algorithm in a run",
            f"algorithm={saved.get('name')}{new_run}",
        )
    if in_rl:
        _check_rewards(config, folder, config_there.get("env") or {})
        if saved.get("offline_dataset") is not None and algorithm.offline_dataset is None:
            overrides = " ".join(
                override_of(f"algorithm.{name}", saved[name])
                for name in ("offline_dataset", "offline_ratio", "offline_episodes")
            )
            reject(
                f"algorithm.offline_dataset=null, but {folder} was trained with demonstrations",
                "the demonstrations of the run",
                f"{overrides}, or for a new run init_from={config.resume} resume=null output_dir=<a new folder>",
            )
    if not holds_actor:
        return
    settings, wanted = actor_settings(policy_folder(folder)), asdict(algorithm.actor)
    pairs = {f"algorithm.actor.{key}": (settings["actor"].get(key, value), value) for key, value in wanted.items()}
    # Critics are saved with an actor that uses them to choose actions; otherwise, they are only in the trainer state of a resumed run.
    num_critics = saved.get("num_critics", algorithm.num_critics) if in_rl else settings["num_critics"]
    pairs["algorithm.num_critics"] = (num_critics or algorithm.num_critics, algorithm.num_critics)
    pairs["model.features"] = (settings["feature_kind"], config.model.features)
    differences = {key: there for key, (there, here) in pairs.items() if there != here}
    noise_there, noise_here = (
        settings["noise_std"],
        cast(type[OffPolicyLearner], ALGORITHMS.get(algorithm.name)).noise_std(algorithm),
    )
    fixes = [override_of(key, value) for key, value in differences.items()]
    problems = [f"{fix}, here {override_text(pairs[key][1])}" for key, fix in zip(differences, fixes, strict=True)]
    if noise_there != noise_here:
        name = saved.get("name", "sac" if noise_there is None else "td3")
        problems.append(f"exploration by {_noise(noise_there)}, here {_noise(noise_here)}")
        std = [] if noise_there is None else [f"algorithm.noise_std={noise_there:g}"]
        fixes = [*([] if name == algorithm.name else [f"algorithm={name}"]), *std, *fixes]
    if problems:
        reject(f"The actor in {folder} was trained with {'; '.join(problems)}", "the saved actor", " ".join(fixes))


def _check_rewards(config: RunConfig, folder: Path, saved: Mapping[str, Any]) -> None:
    """Check that a resumed run uses the same rewards as its replay buffer; ``saved`` is the buffer's env section."""
    there = {
        name: saved[name]
        for name in REWARD_SETTINGS
        if saved.get(name, getattr(config.env, name)) != getattr(config.env, name)
    }
    if there:
        was = " ".join(override_of(f"env.{name}", value) for name, value in there.items())
        here = " ".join(override_of(f"env.{name}", getattr(config.env, name)) for name in there)
        reject(
            f"The replay buffer of {folder} has rewards of {was}, but this run has {here}",
            "the same rewards",
            f"{was}, or for a new run init_from={config.resume} resume=null output_dir=<a new folder>",
        )


def _check_token(config: RunConfig) -> None:
    """Check that the readout for ``model.features=token`` or ``keyframe`` has been trained, or will be in this run."""
    kind = config.model.features
    if kind not in ("token", "keyframe") or config.sft.max_steps > 0:
        return
    source = config.resume or config.init_from
    folder = config.model.model_path if source is None else policy_folder(resolve_checkpoint(source))
    if folder is not None and has_actor(folder):
        folder = base_folder(folder)
    if folder is None or (Path(folder).is_dir() and not holds_readout_token(folder)):
        reject(
            f"model.features={kind}, but {folder or 'random weights'} has not been trained for it",
            "a policy whose behaviour cloning trained it",
            f"sft.max_steps=1000 to train it in this run, or init_from=<run of `rlinf sft model.features={kind}`>, or model.features=pooled",
        )


def _noise(std: float | None) -> str:
    return "learned noise" if std is None else f"noise of {std:g}"


def _check_learns(config: RunConfig, algorithm: OffPolicyConfig) -> None:
    """Check that the run will make updates that change the weights."""
    for key in ("learning_rate", "tau", "utd_ratio"):
        if getattr(algorithm, key) == 0:
            default = type(algorithm).__dataclass_fields__[key].default
            reject(f"algorithm.{key}=0", "more than 0 for the actor to learn", f"algorithm.{key}={default:g}")
    rollout = config.rollout
    num_steps = config.trainer.max_steps * rollout.num_envs * rollout.num_chunks * config.model.action_chunks_len
    if algorithm.learning_starts >= num_steps:
        reject(
            f"algorithm.learning_starts={algorithm.learning_starts} in a run of at most {num_steps:,} env steps",
            "fewer, because updates only start then",
            f"algorithm.learning_starts={num_steps // 4}",
        )


def _check_candidates(config: RunConfig, algorithm: OffPolicyConfig, model: Any) -> None:
    """Check that multiple candidates differ, and that the base policy has noise that DSRL can set."""
    check_samples_noise(algorithm.actor, model)
    count = ACTORS.get(algorithm.actor.name).num_candidates_for(algorithm.actor)
    if count > 1 and model.num_candidate_uniforms == 0:
        reject(
            f"algorithm.actor.name={algorithm.actor.name} with {count} candidates of model.model_type={config.model.model_type}, whose "
            "actions are deterministic, so that all candidates are equal",
            "one candidate",
            "algorithm.actor.num_candidates=1, or algorithm.actor.name=residual",
        )


def _check_times(config: RunConfig, algorithm: OffPolicyConfig, model: Any) -> None:
    """Check that n-step returns are not longer than episodes, and that the updates after a policy call do not take too long."""
    longest, chunk_len = ENVS.get(config.env.name).longest_horizon(config.env), config.model.action_chunks_len
    calls = -(-longest // chunk_len)
    if algorithm.n_step > calls:
        problem = f"algorithm.n_step={algorithm.n_step} policy calls of {chunk_len} env steps"
        reject(problem, f"at most the {calls} calls of the longest episode", f"algorithm.n_step={min(3, calls)}")
    per_call = algorithm.utd_ratio * config.rollout.num_envs * chunk_len
    on_cpu = resolve_device(config.cluster.device, 1) == "cpu"
    # On a GPU, the time of such small updates is dominated by kernel launches, so network sizes do not matter.
    seconds = per_call * (update_seconds(algorithm, model) if on_cpu else UPDATE_S)
    if seconds > LONGEST_STEP_S:
        reject(
            f"algorithm.utd_ratio={algorithm.utd_ratio:g} makes {per_call:,.0f} updates after each policy call "
            f"of {config.rollout.num_envs} envs, about {seconds:,.0f} s",
            f"at most {LONGEST_STEP_S:.0f} s",
            f"algorithm.utd_ratio={rounded_down(algorithm.utd_ratio * LONGEST_STEP_S / seconds)}",
        )


def update_seconds(algorithm: OffPolicyConfig, model: Any) -> float:
    """Return the approximate duration of an update on one core."""
    actor, kind = algorithm.actor, ACTORS.get(algorithm.actor.name)
    num_inputs = model.feature_dim + kind.base_dim_for(model) + kind.output_dim_for(model)
    num_weights = actor.hidden_size * (num_inputs + (actor.num_layers - 1) * actor.hidden_size)
    # If critics choose actions, the target requires a forward pass on two options per candidate, about as expensive as N critic updates.
    num_networks = 1 + algorithm.num_critics * (1 + (kind.num_candidates_for(actor) if kind.critics_choose else 0))
    return UPDATE_S + ROW_WEIGHT_S * algorithm.batch_size * num_networks * num_weights


def rounded_down(number: float) -> str:
    """Format a positive number with two significant digits, rounded down."""
    return f"{float(Context(prec=2, rounding=ROUND_DOWN).create_decimal_from_float(number)):g}"
