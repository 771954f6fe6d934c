"""Counts derived from a configuration: envs x chunks -> samples -> minibatches -> micro-batches."""

import math
from dataclasses import dataclass

from torch import nn

from rlinf.algorithms import ALGORITHMS
from rlinf.config.schema import RunConfig
from rlinf.distributed.parallel import Choice, choose_sharding
from rlinf.number_formats import format_count
from rlinf.options import fixed_by_settings
from rlinf.rollout.parity import MAX_GAP, ParityGate


@dataclass(frozen=True)
class DerivedNumbers:
    """Counts of a run: ``max_env_steps`` per rollout, ``rows_per_rank`` per minibatch, ``optimizer_steps`` in all of RL."""

    num_samples: int
    num_groups: int
    max_env_steps: int
    envs_per_rank: int
    minibatches_per_epoch: int
    rows_per_rank: int
    micro_batches_per_rank: int
    optimizer_steps_per_iteration: int
    optimizer_steps: int
    env_steps: int
    sft_micro_batches_per_rank: int


def derive(config: RunConfig) -> DerivedNumbers:
    """Compute the counts; they are exact if ``validate`` accepts the configuration."""
    ranks, rollout, trainer = config.cluster.num_processes, config.rollout, config.trainer
    num_samples = rollout.num_envs * rollout.num_chunks
    max_env_steps = num_samples * config.model.action_chunks_len
    updates = ALGORITHMS.get(config.algorithm.name).updates(config)
    return DerivedNumbers(
        num_samples=num_samples,
        num_groups=rollout.num_envs // rollout.group_size,
        max_env_steps=max_env_steps,
        envs_per_rank=rollout.num_envs // ranks,
        minibatches_per_epoch=updates.minibatches_per_epoch,
        rows_per_rank=updates.rows_per_rank,
        micro_batches_per_rank=math.ceil(updates.rows_per_rank / config.model.micro_batch_size),
        optimizer_steps_per_iteration=updates.per_iteration,
        optimizer_steps=updates.per_iteration * trainer.max_steps,
        env_steps=max_env_steps * trainer.max_steps,
        sft_micro_batches_per_rank=math.ceil(config.sft.batch_size // ranks / config.model.micro_batch_size),
    )


def trains_actor(config: RunConfig) -> bool:
    """Return whether RL trains an actor on a frozen policy."""
    return config.trainer.max_steps > 0 and ALGORITHMS.get(config.algorithm.name).freezes_policy


def sharding_choice(config: RunConfig, model: nn.Module, num_ranks: int, memory_bytes: int) -> Choice:
    """Choose between shards and replicas with ``choose_sharding``; a frozen policy with an actor is always replicated."""
    trainer = config.trainer
    if trainer.sharding == "auto" and trains_actor(config):
        return Choice(False, "an actor is trained on the full policy")
    with fixed_by_settings("trainer"):
        return choose_sharding(
            trainer.sharding, model, num_ranks, memory_bytes, cpu_offload=trainer.cpu_offload, shard_size=trainer.shard_size
        )  # fmt: skip


def format_derived(config: RunConfig) -> str:
    """Return the plan of a run as a small table."""
    numbers, rollout, trainer, sft, model = derive(config), config.rollout, config.trainer, config.sft, config.model
    rows = {
        "policy": f"{model.model_type}, chunks of {model.action_chunks_len} actions x {model.action_token_len} dimensions",
        "tasks": f"{config.env.name}: {', '.join(config.env.tasks or ['all tasks'])}",
    }
    if sft.max_steps > 0:
        passes = format_count(numbers.sft_micro_batches_per_rank, "micro-batch")
        rows["behaviour cloning"] = f"{sft.max_steps} steps of {sft.batch_size} in {passes} per rank"
    if trainer.max_steps > 0:
        groups = f" = {numbers.num_groups} groups of {rollout.group_size}" if rollout.group_size > 1 else ""
        steps = f"{numbers.optimizer_steps:,} optimiser steps, up to {numbers.env_steps:,} env steps"
        calls = f"{rollout.num_chunks} chunks = {numbers.num_samples} samples"
        rows["rollout"] = f"{rollout.num_envs} envs{groups} x {calls}"
        rows |= ALGORITHMS.get(config.algorithm.name).updates(config).table
        rows["total"] = f"{trainer.max_steps} iterations, {steps}"
    num_episodes = "all" if config.evaluation.num_episodes is None else config.evaluation.num_episodes
    rows["evaluation"] = f"{num_episodes} episodes of the split '{config.evaluation.split}'"
    rows["seed"] = str(config.seed)
    if config.output_dir:
        rows["output"] = config.output_dir
    width = max(map(len, rows))
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows.items())


def parity_gate(config: RunConfig) -> ParityGate:
    """Return the parity gate of a run; in float32, it can stop the run at any step."""
    return ParityGate(accepted_gap(config), always_stops=not computes_in_16_bits(config))


def accepted_gap(config: RunConfig) -> float | None:
    """Return ``trainer.parity_max_gap`` or its default: ``MAX_GAP`` in float32, None with any 16-bit computation."""
    if config.trainer.parity_max_gap is not None:
        return config.trainer.parity_max_gap
    return None if computes_in_16_bits(config) else MAX_GAP


def computes_in_16_bits(config: RunConfig) -> bool:
    """Return whether the policy or its rollout engine computes in 16 bits."""
    in_vllm = config.rollout.vllm.dtype if config.rollout.backend == "vllm" else "auto"
    return "16" in f"{config.model.precision} {in_vllm}"
