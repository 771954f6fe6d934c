"""Estimates an experiment's memory by role, before anything is loaded."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlinf.algorithms import ALGORITHMS
from rlinf.config.schema import RunConfig
from rlinf.distributed.parallel import StateBytes, rank_memory_bytes
from rlinf.distributed.process_group import resolve_device
from rlinf.engines.weight_handle import BUCKET_BYTES
from rlinf.engines.weight_transfer import manifest_of
from rlinf.envs import ENVS
from rlinf.files import Json
from rlinf.models import entry_for, get_model
from rlinf.models.config import ModelConfig
from rlinf.models.embodiment.base import ActionModel
from rlinf.number_formats import format_bytes
from rlinf.preflight.derived import sharding_choice, trains_actor
from rlinf.preflight.placement import Placement


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank in bytes, without its passes (``rlinf.preflight.gpu_memory``).

    Attributes:
        weights: The trainer's part of the weights; trained shards are float32.
        masters, gradients, optimizer: Float32 master copies (none for shards), gradients and AdamW moments of trainable weights.
        rollout_weights: The full rollout copy of a rollout worker, or of a rank with sharded weights, and merged weights.
        reference_weights: Copy of the trained weights from the start of RL, for the KL penalty.
        engine: With vLLM, an engine's weights, the shared memory for transferring them, and the key-value cache.
        rollout_buffer: Observations and samples of this rank's envs, or the replay buffer and demonstrations of an actor.
        num_rollout_workers: Rollout workers of this rank, each with its own copy and engine; 0 if the rank itself rolls out.
    """

    num_parameters: int
    num_trainable: int
    weights: int
    masters: int
    gradients: int
    optimizer: int
    rollout_weights: int
    reference_weights: int
    engine: int
    rollout_buffer: int
    num_rollout_workers: int = 0
    is_sharded: bool = False

    @property
    def trainer(self) -> int:
        """Bytes used by the trainer."""
        return self.weights + self.masters + self.gradients + self.optimizer + self.reference_weights

    @property
    def total(self) -> int:
        """Total bytes of one rank and its rollout workers."""
        per_worker = self.rollout_weights + self.engine
        return self.trainer + max(1, self.num_rollout_workers) * per_worker + self.rollout_buffer

    def rows(self) -> list[tuple[str, str, str]]:
        """Return table rows ``(role, part, size)`` of all parts with non-zero size."""
        worker = "worker" if self.num_rollout_workers else "rollout"
        owner = (
            f"one rank and its {self.num_rollout_workers} rollout workers" if self.num_rollout_workers else "one rank"
        )
        count = f"{self.num_parameters:,} parameters, {self.num_trainable:,} trained"
        parts = [
            ("trainer", f"weights ({count})", self.weights),
            ("trainer", "float32 masters", self.masters),
            ("trainer", "gradients", self.gradients),
            ("trainer", "AdamW moments", self.optimizer),
            ("trainer", "reference policy", self.reference_weights),
            (worker, "copy of the weights", self.rollout_weights),
            (worker, "vLLM engine", self.engine),
            ("rollout", "rollout buffer", self.rollout_buffer),
            ("sum", owner, self.total),
        ]
        return [(role, part, format_bytes(size)) for role, part, size in parts if size]


def estimate_memory(
    config: RunConfig, gpu_bytes: int | None = None, model: ActionModel | None = None
) -> MemoryEstimate:
    """Estimate the bytes of each role for ranks with ``gpu_bytes`` (None: this machine's); ``model``: on the meta device."""
    model = policy_on_meta_device(config) if model is None else model
    parameters = [(p.numel(), p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
    trainer, ranks = config.trainer, config.cluster.num_processes
    memory = gpu_bytes or rank_memory_bytes(resolve_device(config.cluster.device, 1), ranks)
    choice = sharding_choice(config, model, ranks, memory)
    state = StateBytes.of(model, (trainer.shard_size or ranks) if choice.sharded else None)
    all_bytes = sum(size for _, size, _ in parameters)
    reference = state.gradients if choice.sharded else sum(size for _, size, trained in parameters if trained)
    num_parameters, buffer = sum(count for count, _, _ in parameters), 0
    if trainer.max_steps > 0:
        # If an actor follows cloning, the sum is an upper bound: the optimiser is freed before the buffer is allocated.
        algorithm = ALGORITHMS.get(config.algorithm.name)
        buffer = algorithm.buffer_bytes(config, model, sample_bytes(config, model))
    if trains_actor(config) and config.sft.max_steps == 0:
        # The policy is frozen, and the actor's memory is negligible.
        zeros = ("num_trainable", "masters", "gradients", "optimizer", "rollout_weights", "reference_weights", "engine")
        return MemoryEstimate(
            num_parameters=num_parameters, weights=all_bytes, rollout_buffer=buffer, **dict.fromkeys(zeros, 0)
        )
    workers = Placement.of(config).num_rollout_workers
    return MemoryEstimate(
        num_parameters=num_parameters,
        num_trainable=sum(count for count, _, trained in parameters if trained),
        weights=state.weights,
        masters=state.masters,
        gradients=state.gradients,
        optimizer=state.moments,
        rollout_weights=(all_bytes if choice.sharded or workers else 0) + merged_bytes(config, model),
        reference_weights=reference
        if getattr(config.algorithm, "kl_coef", 0) > 0 or getattr(config.algorithm, "restart", False)
        else 0,
        engine=engine_bytes(config, model, all_bytes, gpu_bytes) if config.trainer.max_steps > 0 else 0,
        rollout_buffer=buffer,
        num_rollout_workers=workers // ranks,
        is_sharded=choice.sharded,
    )


def merged_bytes(config: RunConfig, model: ActionModel) -> int:
    """Return the bytes of the copies of adapted weights with ``rollout.merge_adapters``."""
    if not config.rollout.merge_adapters or not config.model.is_lora or config.trainer.max_steps == 0:
        return 0
    from rlinf.models.lora import adapted_weights  # imports peft

    return sum(weight.numel() * weight.element_size() for weight in adapted_weights(model))


def engine_bytes(config: RunConfig, model: ActionModel, weights: int, gpu_bytes: int | None = None) -> int:
    """Return the bytes of a vLLM engine with ``weights`` bytes and its two transfer buckets; 0 without vLLM."""
    if config.rollout.backend != "vllm":
        return 0
    from rlinf.rollout.vllm_policy import engine_arguments

    options, ranks = config.rollout.vllm, config.cluster.num_processes
    num_envs = config.rollout.num_envs // (Placement.of(config).num_rollout_workers or ranks)
    arguments = engine_arguments(model, options, num_envs)
    cache = arguments["kv_cache_memory_bytes"]
    if cache is not None:
        return weights + min(weights, 2 * BUCKET_BYTES["cpu"]) + cache
    gpu_bytes = gpu_bytes or torch.cuda.mem_get_info()[1]
    return 2 * BUCKET_BYTES["cuda"] + int(arguments["gpu_memory_utilization"] * gpu_bytes)


def store_bytes(config: RunConfig) -> int | None:
    """Return the bytes of weights and rollouts that Ray's object store may contain; None if the weights are not on this machine yet."""
    if config.model.model_path is not None and not Path(config.model.model_path).is_dir():
        return None
    model, ahead, rollout = policy_on_meta_device(config), config.cluster.max_staleness, config.rollout
    # Frozen weights are stored once; of trained ones, there are the last version, the one being stored, and one per pending rollout.
    trained = {name for name, spec in manifest_of(model).items() if spec.trained}
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in model.state_dict().items()}
    copies = sum(size * (2 + ahead if name in trained else 1) for name, size in sizes.items())
    return copies + (1 + ahead) * rollout.num_envs * rollout.num_chunks * sample_bytes(config, model)


def sample_bytes(config: RunConfig, model: ActionModel) -> int:
    """Return the bytes per policy call of a ``RolloutBatch`` with the trainer's fields; float32 samples are treated as int64."""
    env, chunk_len = config.env, model.action_chunks_len
    observation = ENVS.get(env.name).observation_bytes(env)
    logprobs = (3 if getattr(config.algorithm, "kl_coef", 0) > 0 else 2) * 4 * model.num_logprobs
    per_action = chunk_len * (4 + 4 + 1)  # reward, advantage, mask
    per_call = 3 * 1 + 4 * 4 + 3 * 8  # masks; values of trainer and rollout, bootstrap values, returns; ids and version
    return observation + 8 * model.num_sampled + logprobs + per_action + per_call


def policy_on_meta_device(config: RunConfig) -> ActionModel:
    """Build the policy on torch's meta device, which has shapes and dtypes but no memory."""
    model_config, overrides = replace(config.model, lora_path=None), {}
    if model_config.model_path is not None:
        name, sizes = _architecture(model_config)
        overrides, known = model_config.override_config, sizes.get("norm_stats") or {}
        key = model_config.unnorm_key if model_config.unnorm_key in known else next(iter(known), None)
        model_config = replace(
            model_config, model_type=name, model_path=None, init_config=sizes, override_config={}, unnorm_key=key
        )
    with torch.device("meta"):
        return get_model(model_config, overrides)


def available_memory(num_ranks: int) -> int | None:
    """Return the free bytes on the GPUs of all ranks, or in main memory without a GPU; None if unknown."""
    if torch.cuda.is_available():
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(min(num_ranks, torch.cuda.device_count())))
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _architecture(model_config: ModelConfig) -> tuple[str, Json]:
    """Return the model type and configuration fields of a folder or hub model, in the form used for random weights."""
    from transformers import AutoConfig

    entry = entry_for(model_config).resolve()
    loaded = (entry.config or AutoConfig).from_pretrained(
        model_config.model_path, trust_remote_code=model_config.trust_remote_code
    )
    unwanted = ("transformers_version", "model_type", "architectures", "dtype", "torch_dtype", "auto_map")
    return entry.name, {
        name: value for name, value in loaded.to_dict().items() if name in vars(loaded) and name not in unwanted
    }
