"""Plan a recipe's GPUs, steps, tokens and memory before data and model are loaded."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache

from rlinf.distributed.parallel import StateBytes, rank_memory_bytes
from rlinf.engines.gpu_fraction import SEPARATE_GPU_FRACTION, engine_fraction
from rlinf.engines.weight_transfer import manifest_of
from rlinf.errors import ConfigError, RLinfError
from rlinf.llm.hf_model import HFModel, check_tensor_parallel, load_config, model_shapes
from rlinf.llm.memory_plan import plan_passes
from rlinf.llm.vllm_generation import IMAGE_FAMILIES
from rlinf.models.config import LoraConfig
from rlinf.models.loading import num_positions
from rlinf.models.lora import apply_lora
from rlinf.models.precision import torch_dtype_of
from rlinf.number_formats import format_bytes
from rlinf.preflight.placement import FreeCapacity
from rlinf.recipes.config import NO_ROLLOUT_WORKERS, RecipeConfig

ASSUMED_GPU = 80 * 10**9
"""GPU memory in bytes for a plan on a machine without a GPU."""
NOT_COUNTED = "without activations, one gathered layer of a sharded model, and libraries"


@dataclass(frozen=True)
class Plan:
    """A recipe's ranks and rollout workers.

    Attributes:
        policy_gpus: Number of GPUs (ranks) for the trained model.
        shards: Number of ranks per replica, which divide its weights and its batch.
        workers: Number of rollout workers, in addition to the ranks; 0 if the ranks generate.
        tp_size: Number of tensor-parallel GPUs per vLLM engine; 0 if torch generates, on one GPU.
    """

    policy_gpus: int
    shards: int
    workers: int
    tp_size: int

    @property
    def gpus_per_rollout_worker(self) -> int:
        """Number of GPUs per rollout worker."""
        return max(1, self.tp_size)

    @property
    def rollout_gpus(self) -> int:
        """Number of GPUs for all rollout workers."""
        return self.workers * self.gpus_per_rollout_worker

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.policy_gpus + self.rollout_gpus


def make_plan(config: RecipeConfig, num_ranks: int | None = None) -> Plan:
    """Plan a checked recipe.

    Raise ConfigError if the recipe does not match the number of ranks, or its batch does not divide evenly over them.
    ``num_ranks`` is set by a launcher; None derives it from the recipe, where ``dp_shard_size=-1`` then means 1.
    """
    train, sizes, rollout = config.train, config.policy.parallelism, config.rollout
    replicas, group_size = sizes.replicas, config.group_size
    shards = sizes.dp_shard_size if sizes.dp_shard_size > 0 else max(1, (num_ranks or 1) // replicas)
    if num_ranks is not None and replicas * shards != num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks were started, but the recipe needs {replicas * shards} (policy.parallelism: {replicas} replicas of "
            f"dp_shard_size={sizes.dp_shard_size}). Start {replicas * shards}, or set policy.parallelism.dp_shard_size=-1"
        )
    unit = group_size * shards
    if train.train_batch_per_replica % unit:
        fits = max(1, train.train_batch_per_replica // unit) * unit
        key = "train.train_batch_per_replica"
        groups = f" with complete groups of rollout.n_generation={group_size}" if config.is_grpo else ""
        raise ConfigError(
            f"{key}={train.train_batch_per_replica} does not divide over {shards} ranks{groups}; expected a multiple of {unit}. Set {key}={fits}"
        )
    wants_engine = config.is_grpo and rollout.backend == "vllm"
    has_engine = wants_engine and why_no_engine(_config_of(config)) is None
    workers = 0
    has_gpus = num_ranks is None and asks_for_gpus(config) and config.policy.device != "cpu"
    if config.cluster.workers_override or has_gpus:
        in_torch = wants_engine and not has_engine
        workers = count_rollout_workers(config, replicas * shards, rollout.parallelism.tp_size if in_torch else 1)
    return Plan(replicas * shards, shards, workers, rollout.parallelism.tp_size if has_engine else 0)


def asks_for_gpus(config: RecipeConfig) -> bool:
    """Return whether rollouts use separate GPUs if GPUs are available."""
    is_colocated = "colocated" in (config.mode, config.cluster.placement)
    return config.is_grpo and config.rollout.backend == "vllm" and not is_colocated


def without_rollout_workers(config: RecipeConfig) -> str:
    """Return the overrides that make the policy's ranks generate."""
    overrides = ["mode=colocated"]
    if config.rollout.parallelism.tp_size > 1:
        overrides.append("rollout.parallelism.tp_size=1")
    if config.cluster.workers_override:
        overrides.append(NO_ROLLOUT_WORKERS)
    return " ".join(overrides)


def count_rollout_workers(config: RecipeConfig, num_ranks: int, per_engine: int) -> int:
    """Return the number of rollout workers; raise ConfigError unless it is a multiple or a divisor of ``num_ranks``.

    ``per_engine`` is the number of rollout workers that replace one engine. Without vLLM, it is one per GPU if that divides evenly.
    """
    requested = config.cluster.num_rollout_workers
    engines = config.rollout.parallelism.n_init_replicas
    workers = requested or engines * per_engine
    # Use one worker per GPU if that divides evenly, otherwise one per engine.
    if requested is None and workers % num_ranks and num_ranks % workers:
        workers = engines
    if workers % num_ranks and num_ranks % workers:
        key = "rollout.parallelism.n_init_replicas" if requested is None else "cluster.num_rollout_workers"
        raise ConfigError(
            f"{key}={workers} with {num_ranks} ranks; expected a multiple or divisor. Set cluster.num_rollout_workers={num_ranks}"
        )
    return workers


def num_steps(config: RecipeConfig, num_rows: int) -> int:
    """Return the number of optimiser steps: ``epochs * num_rows * group_size / batch_size``, rounded down, up to the maximum.

    Raise ConfigError if the data does not fill a batch.
    """
    train, batch_size = config.train, config.batch_size
    samples = train.epoch * num_rows * config.group_size
    if samples < batch_size:
        raise ConfigError(
            f"The dataset has {num_rows} rows, too few for one batch of train.train_batch_per_replica={batch_size} in "
            f"train.epoch={train.epoch} epochs. Set train.train_batch_per_replica={max(1, samples)}, or more epochs"
        )
    steps = samples // batch_size
    return steps if train.max_num_steps is None else min(steps, train.max_num_steps)


def steps_per_epoch(config: RecipeConfig, num_rows: int) -> int:
    """Return the number of optimiser steps per epoch, rounded down but at least 1."""
    return max(1, num_rows * config.group_size // config.batch_size)


def longest_row(config: RecipeConfig) -> int:
    """Return the maximum row length in tokens: ``policy.model_max_length``, capped at the number of positions the model supports."""
    policy = config.policy
    declared = num_positions(load_config(policy.model_name_or_path).get_text_config())
    return min(policy.model_max_length, declared or policy.model_max_length)


def rows_per_pass(config: RecipeConfig, has_gpu: bool = True) -> int | None:
    """Return the rows per forward-backward pass; None if GPU memory determines them."""
    rows, on_gpu = config.train.train_policy.mini_batch, has_gpu and config.policy.device != "cpu"
    return rows if rows is not None or (on_gpu and not config.train.sequence_packing) else 2


def describe(config: RecipeConfig, plan: Plan, num_rows: int | None, reason: str = "") -> str:
    """Return the plan as text, which ``rlinf launch`` prints; ``reason`` explains why ``num_rows`` is None."""
    method, train = config.train.train_policy, config.train
    batch_size, group_size, longest = config.batch_size, config.group_size, config.policy.model_max_length
    batch = f"{batch_size} {'completions' if config.is_grpo else 'rows'}"
    if group_size > 1:
        batch += f" ({batch_size // group_size} prompts x {group_size})"
    rows_per_rank = batch_size // plan.policy_gpus
    max_tokens = batch_size * (min(config.rollout.max_response_length, longest) if config.is_grpo else longest)
    at_a_time = f", {min(rows, rows_per_rank)} at a time" if (rows := rows_per_pass(config)) else ""
    ranks, replicas = f"{plan.policy_gpus}", config.policy.parallelism.replicas
    if plan.policy_gpus > 1:
        ranks += f" ({replicas} x {plan.shards} shards)" if replicas > 1 else f" ({plan.shards} shards)"
    rollout = "none"
    if config.is_grpo:
        engine = f"tensor parallel {plan.tp_size}" if plan.tp_size else "1, in torch"
        rollout = f"{plan.rollout_gpus} ({plan.workers} x {engine})" if plan.workers else "same as the policy"
    if plan.workers:
        per_worker, per_rank = plan.policy_gpus // plan.workers, plan.workers // plan.policy_gpus
        ratio = f"1 per {per_worker} ranks" if per_worker > 1 else f"{per_rank} per rank"
    factor = "" if group_size == 1 else f" * {group_size} completions"
    formula = f"{train.epoch} epochs * N rows{factor} / {batch_size}"
    limit = "" if train.max_num_steps is None else f", at most {train.max_num_steps}"
    if num_rows is None:
        steps = f"{formula}{limit}; N is unknown: {reason}"
    else:
        steps = f"{num_steps(config, num_rows)} = {formula}{limit}; N = {num_rows:,}"
    kind = method.variant if config.is_grpo else method.type
    lines = [
        ("recipe", f"{kind} of {config.policy.model_name_or_path}"),
        ("policy GPUs", ranks),
        ("rollout GPUs", rollout),
        ("total GPUs", str(plan.num_gpus)),
        *engine_lines(config),
        *([("workers", f"{plan.workers}, in processes started by Ray; {ratio}")] if plan.workers else []),
        ("batch", f"{batch}; {rows_per_rank} on each rank{at_a_time}"),
        ("steps", steps),
        ("tokens", f"at most {max_tokens:,} {'generated ' if config.is_grpo else ''}in a step"),
        *memory_lines(config, plan),
        ("output", f"{train.output_dir}/<timestamp>"),
    ]  # fmt: skip
    return "\n".join(f"{name + ':':<14}{text}" for name, text in lines)


def engine_lines(config: RecipeConfig) -> list[tuple[str, str]]:
    """Return lines explaining why generation runs in torch although the recipe selects vLLM."""
    if not config.is_grpo or config.rollout.backend != "vllm":
        return []
    reason = why_no_engine(_config_of(config))
    if reason is not None:
        return [("  in torch", f"vLLM is not used: {reason}")]
    if is_local(config.policy.model_name_or_path):
        return []
    condition = f"reads images and its type is not {' or '.join(IMAGE_FAMILIES)}"
    return [("  or in torch", f"on each of these GPUs, if the model (not on this machine) {condition}")]


class Sizes(NamedTuple):
    """Number of parameters, weights in bytes, and a rank's training state in bytes."""

    parameters: int
    weights: int
    state: StateBytes


def _shapes(config: RecipeConfig) -> HFModel:
    model = model_shapes(config.policy.model_name_or_path, dtype=torch_dtype_of(config.train.param_dtype))
    if config.policy.lora is not None:
        apply_lora(model, LoraConfig(**config.policy.lora.settings()))
    return model


def sizes_of(config: RecipeConfig, plan: Plan) -> Sizes:
    """Compute a model's sizes from its shapes, without loading it; its configuration must be on this machine."""
    model = _shapes(config)
    base = [p for name, p in model.named_parameters() if "lora_" not in name]
    state = StateBytes.of(model, plan.shards if plan.shards > 1 else None)
    return Sizes(sum(p.numel() for p in base), sum(p.nbytes for p in base), state)


def fraction_of_engine(config: RecipeConfig, plan: Plan | None) -> float:
    """Return the fraction of GPU memory to reserve for an engine. Raise ConfigError if it does not fit next to the policy.

    ``plan`` is None in a run with rollout workers, where engines have separate GPUs.
    """
    requested = config.rollout.gpu_memory_utilization
    if plan is None or plan.workers or config.policy.device == "cpu" or not torch.cuda.is_available():
        return SEPARATE_GPU_FRACTION if requested is None else requested
    sizes, offloads = sizes_of(config, plan), config.train.fsdp_offload
    # Shards are gathered while the engine generates, so include memory for the full model.
    gathered = sizes.weights if plan.shards > 1 or offloads else 0
    return engine_fraction(
        requested,
        rank_memory_bytes("cuda", 1),
        (0 if offloads else sizes.state.total) + gathered,
        sizes.weights,
        key="rollout.gpu_memory_utilization",
        apart="mode=disaggregated" if config.policy.lora is not None else "mode=disaggregated, or policy.lora.r=8",
    )


def memory_lines(config: RecipeConfig, plan: Plan) -> list[tuple[str, str]]:
    """Return lines with the memory per GPU for policy and rollout; raise ConfigError if a GPU is too small for both."""
    name = config.policy.model_name_or_path
    if not is_local(name):
        return [("memory", f"unknown: the config.json of {name} is not on this machine")]
    try:
        sizes = sizes_of(config, plan)
    except RLinfError as error:
        return [("memory", f"unknown: {error}")]
    state = sizes.state
    parts = f"weights {format_bytes(state.weights + state.masters)}, gradients {format_bytes(state.gradients)}"
    where = "in main memory for each GPU" if config.train.fsdp_offload else "on each GPU"
    lines = [
        ("memory", f"{sizes.parameters:,} weights; {NOT_COUNTED}"),
        ("  policy", f"{format_bytes(state.total)} {where}: {parts}, optimiser {format_bytes(state.moments)}"),
    ]
    if config.policy.device != "cpu":
        lines.append(("  update", update_text(config, plan)))
    if config.is_grpo:
        takes = ""
        if plan.tp_size:
            unseen = not torch.cuda.is_available() and config.rollout.gpu_memory_utilization is None
            # Call it even if the text is not used, because it checks that the engine fits.
            fraction = f"{fraction_of_engine(config, plan):.0%} of the GPU"
            takes = f"; the engine takes {'what the policy leaves' if unseen and not plan.workers else fraction}"
        splits = plan.workers and plan.tp_size
        lines.append(("  rollout", f"weights {format_bytes(sizes.weights // (plan.tp_size if splits else 1))}{takes}"))
    return lines


def update_text(config: RecipeConfig, plan: Plan) -> str:
    """Return the rows per pass and the recomputed layers of an update on this machine's GPU, or on an assumed one."""
    has_gpu, method, model = torch.cuda.is_available(), config.train.train_policy, _shapes(config)
    rows, is_dpo = rows_per_pass(config), method.type == "dpo"
    passes = plan_passes(
        model, longest_row(config), 2 * rows if rows and is_dpo else rows, config.policy.model_gradient_checkpointing,
        rank_memory_bytes("cuda", 1) if has_gpu else ASSUMED_GPU,
        shards=plan.shards if plan.shards > 1 else None, offloads=config.train.fsdp_offload,
        has_reference=config.policy.lora is None and (is_dpo or method.kl_beta > 0),
    )  # fmt: skip
    return f"{passes}" if has_gpu else f"{passes} (on a GPU with {ASSUMED_GPU // 10**9} GB)"


def store_capacity(config: RecipeConfig) -> FreeCapacity | None:
    """Return the space that rollout workers need in Ray's object store, or None if the model is not on this machine."""
    name, lora = config.policy.model_name_or_path, config.policy.lora
    if not is_local(name):
        return None
    try:
        model = _shapes(config)
    except RLinfError:
        return None  # the later loading of the model reports the error
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in model.state_dict().items()}
    # Frozen weights are stored once. Trained ones need space twice, because the old version stays until the new one is complete.
    num_bytes = sum(sizes[key] * (2 if spec.trained else 1) for key, spec in manifest_of(model).items())
    fix = without_rollout_workers(config)
    return FreeCapacity(num_bytes, fix if lora is not None else f"policy.lora.r=8, or {fix}")


def why_no_engine(model_config: Any) -> str | None:
    """Return why vLLM cannot generate, or None if it can. ``model_config`` is the transformers configuration, or None if unknown."""
    reads_images = getattr(model_config, "vision_config", None) is not None
    if reads_images and model_config.model_type not in IMAGE_FAMILIES:
        return f"it supports images for {', '.join(IMAGE_FAMILIES)}, but the model type is {model_config.model_type}"
    missing = [name for name in ("vllm", *(["torchvision"] if reads_images else [])) if find_spec(name) is None]
    return f"the {missing[0]} package is not installed" if missing else None


def _config_of(config: RecipeConfig) -> Any:
    """Return the model's transformers configuration, or None if it is unreadable or not on this machine."""
    name = config.policy.model_name_or_path
    try:
        return load_config(name) if is_local(name) else None
    except RLinfError:
        return None  # the later loading of the model reports the error


def is_local(name: str) -> bool:
    """Return whether the model's configuration is on this machine."""
    if Path(name).expanduser().is_dir():
        return True
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # not a valid hub id
        return False


def choose_device(config: RecipeConfig, plan: Plan, is_plan: bool = False) -> str:
    """Return ``cuda`` or ``cpu`` for the policy's ranks. Raise ConfigError if torch sees fewer GPUs than the recipe needs.

    With ``is_plan``, nothing will run, so on a machine without GPUs, assume one with enough of them.
    """
    wanted = config.policy.device
    # Rollout workers may use GPUs on different machines, so leave that check to Ray.
    needed = plan.policy_gpus if plan.workers and os.environ.get("RAY_ADDRESS") else plan.num_gpus
    num_gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0 and needed == 1):
        return "cpu"
    if num_gpus >= needed or (is_plan and num_gpus == 0):
        return "cuda"
    roles = f"{plan.policy_gpus} for the policy, {plan.rollout_gpus} for the rollout"
    fixes = [f"policy.device=cpu to run {plan.policy_gpus} ranks as processes on this machine"]
    if plan.rollout_gpus and num_gpus >= plan.policy_gpus:
        fixes.insert(0, f"{without_rollout_workers(config)} to generate on the policy's {plan.policy_gpus}")
    elif (replicas := config.policy.parallelism.replicas) <= num_gpus:
        # Use the maximum number of shards that divides the batch evenly.
        rows = config.train.train_batch_per_replica // config.group_size
        shards = max(size for size in range(1, num_gpus // replicas + 1) if rows % size == 0)
        colocated = f"{without_rollout_workers(config)} " if plan.rollout_gpus else ""
        fixes.insert(0, f"{colocated}policy.parallelism.dp_shard_size={shards}")
    raise ConfigError(f"The recipe needs {needed} GPUs ({roles}), but torch sees {num_gpus}. Set {', or '.join(fixes)}")


def check_engines(config: RecipeConfig, plan: Plan, device: str) -> None:
    """Raise ConfigError if the model or the placement does not support the recipe's tensor parallelism."""
    tp_size, model_config = plan.tp_size, _config_of(config)
    if tp_size > 1 and model_config is not None:
        check_tensor_parallel(model_config, tp_size, "rollout.parallelism.tp_size")
    if tp_size > 1 and device == "cuda" and not plan.workers:
        apart = "mode=disaggregated cluster.placement=null and start the command once, for engines with separate GPUs"
        raise ConfigError(
            f"rollout.parallelism.tp_size is {tp_size}, but each policy rank generates on its own GPU, between updates; "
            f"expected 1. Set rollout.parallelism.tp_size=1, or {apart}"
        )
