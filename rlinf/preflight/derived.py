"""The plan of a run, and choices that follow from its configuration: sharding, and the parity gate."""

import math

from torch import nn

from rlinf.algorithms import ALGORITHMS
from rlinf.config.schema import RunConfig
from rlinf.distributed.parallel import Choice, choose_sharding
from rlinf.number_formats import format_count
from rlinf.options import fixed_by_settings
from rlinf.rollout.parity import MAX_GAP, ParityGate


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
    rollout, trainer, sft, model = config.rollout, config.trainer, config.sft, config.model
    rows = {
        "policy": f"{model.model_type}, chunks of {model.action_chunks_len} actions x {model.action_token_len} dimensions",
        "tasks": f"{config.env.name}: {', '.join(config.env.tasks or ['all tasks'])}",
    }
    if sft.max_steps > 0:
        rows_per_rank = sft.batch_size // config.cluster.num_processes
        passes = format_count(math.ceil(rows_per_rank / model.micro_batch_size), "micro-batch")
        rows["behaviour cloning"] = f"{sft.max_steps} steps of {sft.batch_size} in {passes} per rank"
    if trainer.max_steps > 0:
        size, samples = rollout.group_size, rollout.num_envs * rollout.num_chunks
        groups = f" = {rollout.num_envs // size} groups of {size}" if size > 1 else ""
        rows["rollout"] = f"{rollout.num_envs} envs{groups} x {rollout.num_chunks} chunks = {samples} samples"
        updates = ALGORITHMS.get(config.algorithm.name).updates(config)
        rows |= updates.table
        most = samples * model.action_chunks_len if updates.env_steps is None else updates.env_steps
        env_steps = most * trainer.max_steps
        steps = f"{updates.per_iteration * trainer.max_steps:,} optimiser steps, up to {env_steps:,} env steps"
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
