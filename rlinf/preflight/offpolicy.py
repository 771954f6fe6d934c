"""Checks of a run that trains a head on a frozen policy from a replay buffer."""

from __future__ import annotations

from typing import Any

from rlinf.algorithms.offpolicy_config import OffPolicyConfig
from rlinf.checkpoints.checkpoint import has_policy, policy_folder, resolve_checkpoint
from rlinf.config.schema import RunConfig
from rlinf.envs import ENVS
from rlinf.memory import main_memory_bytes
from rlinf.models.embodiment.headed import has_head
from rlinf.models.heads import HEADS
from rlinf.options import closest
from rlinf.preflight.memory import policy_on_meta_device, replay_bytes
from rlinf.preflight.refuse import refuse

UPDATE_S = 0.01
"""Seconds of an update of the default size on one core, for the estimate of how long a step of all envs takes."""

LONGEST_STEP_S = 60.0


def check_off_policy(config: RunConfig, algorithm: OffPolicyConfig, policy: tuple[Any, Any] | None) -> None:
    """Check what an off-policy algorithm requires of the policy, the envs and this machine.

    Args:
        config: Of the run.
        algorithm: Its algorithm section.
        policy: Class and own configuration of the policy that is frozen; None: unknown.
    """
    name = f"algorithm.name={algorithm.name}"
    if policy is not None and not policy[0].implements("_propose"):
        found = f"{name} with model.model_type={config.model.model_type}, which does not implement propose"
        refuse(found, "a policy that proposes chunks and features", "algorithm=ppo")
    if algorithm.head.name not in HEADS:
        fix = f"algorithm.head.name={closest(algorithm.head.name, HEADS) or 'residual'}"
        refuse(f"algorithm.head.name={algorithm.head.name}", f"one of {', '.join(HEADS)}", fix)
    if algorithm.num_target_critics > algorithm.num_critics:
        found = f"algorithm.num_target_critics={algorithm.num_target_critics} of {algorithm.num_critics} critics"
        refuse(found, "no more than algorithm.num_critics", f"algorithm.num_target_critics={algorithm.num_critics}")
    _check_run(config, name)
    _check_times(config, algorithm)
    _check_replay(config, algorithm)


def check_no_head(config: RunConfig) -> None:
    """Check that a policy with a head is trained by what trains heads."""
    source = config.resume or config.init_from
    trains_heads = isinstance(config.algorithm, OffPolicyConfig) and config.sft.max_steps == 0
    if source is None or (config.resume is not None and isinstance(config.algorithm, OffPolicyConfig)) or trains_heads:
        return
    folder = resolve_checkpoint(source)
    if has_policy(folder) and has_head(policy_folder(folder)):
        refuse(
            f"{folder} holds a head on a frozen policy",
            "an off-policy algorithm, and no cloning",
            "algorithm=sac sft.max_steps=0",
        )


def _check_run(config: RunConfig, name: str) -> None:
    """Check that the run is one process that plays and trains, with a frozen policy of whole weights."""
    cluster, rollout = config.cluster, config.rollout
    for key, value, wanted, required in (
        ("cluster.num_processes", cluster.num_processes, 1, "one process, which holds the replay buffer"),
        ("cluster.placement", cluster.placement, "colocated", "rollouts in the process that trains"),
        ("cluster.max_staleness", cluster.max_staleness, 0, "actions with the present weights"),
        ("rollout.worker_processes", rollout.worker_processes, 0, "rollouts in the process that trains"),
        (
            "rollout.backend",
            rollout.backend,
            "torch",
            "the frozen policy in this process, because its features are read",
        ),
        ("rollout.group_size", rollout.group_size, 1, "episodes of their own, because none are compared"),
        ("trainer.sharding", config.trainer.sharding != "fsdp2", True, "a policy in one piece"),
        ("trainer.cpu_offload", config.trainer.cpu_offload, False, "a policy in one piece"),
    ):
        if value != wanted:
            now = config.trainer.sharding if key == "trainer.sharding" else value
            to = "replicate" if key == "trainer.sharding" else str(wanted).lower()
            refuse(f"{key}={str(now).lower()} with {name}", required, f"{key}={to}")
    if config.model.is_lora:
        found = f"model.is_lora=true with {name}, which freezes the policy"
        refuse(
            found,
            "weights without adapters",
            "merge_lora=true with `rlinf export`, and model.is_lora=false model.model_path=<export>",
        )


def _check_times(config: RunConfig, algorithm: OffPolicyConfig) -> None:
    """Check that an n-step return ends before the episode does, and that updates leave time to act."""
    longest, chunk_len = ENVS.get(config.env.name).longest_horizon(config.env), config.model.action_chunks_len
    calls = -(-longest // chunk_len)
    if algorithm.n_step > calls:
        found = f"algorithm.n_step={algorithm.n_step} policy calls of {chunk_len} env steps"
        refuse(found, f"at most the {calls} calls of the longest episode", f"algorithm.n_step={min(3, calls)}")
    per_call = algorithm.updates_per_env_step * config.rollout.num_envs * chunk_len
    seconds = per_call * UPDATE_S * algorithm.batch_size / 128
    if seconds > LONGEST_STEP_S:
        fitting = algorithm.updates_per_env_step * LONGEST_STEP_S / seconds
        refuse(
            f"algorithm.updates_per_env_step={algorithm.updates_per_env_step:g} makes {per_call:,.0f} updates after each policy call "
            f"of {config.rollout.num_envs} envs, about {seconds:,.0f} s",
            f"at most {LONGEST_STEP_S:.0f} s",
            f"algorithm.updates_per_env_step={fitting:.2g}",
        )


def _check_replay(config: RunConfig, algorithm: OffPolicyConfig) -> None:
    """Check that the replay buffer fits into memory and has room for every env."""
    capacity, num_envs = algorithm.replay_capacity, config.rollout.num_envs
    if capacity < 2 * num_envs:
        found = f"algorithm.replay_capacity={capacity} for rollout.num_envs={num_envs}"
        refuse(found, "2 observations or more for each env", f"algorithm.replay_capacity={1000 * num_envs}")
    size, available = replay_bytes(algorithm, policy_on_meta_device(config)), main_memory_bytes()
    if size > available:
        fitting = int(0.5 * available / size * capacity)
        refuse(
            f"algorithm.replay_capacity={capacity} observations take {size / 1e9:.1f} GB",
            f"at most the {available / 1e9:.1f} GB of this machine",
            f"algorithm.replay_capacity={fitting}",
        )
