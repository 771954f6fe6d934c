"""RL policy that generates, scores and learns with a causal language model from transformers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from rlinf.distributed.config import SHARDINGS
from rlinf.distributed.deadlines import heartbeat
from rlinf.distributed.deferred import deferred_parameters
from rlinf.distributed.devices import own_device
from rlinf.distributed.parallel import (
    Choice,
    Parallel,
    Replicated,
    Sharded,
    StateBytes,
    choose_sharding,
    rank_memory_bytes,
    take_weights_of_rank_0,
)
from rlinf.distributed.process_group import local_world_size, maximum, rank, resolve_device, world_size
from rlinf.errors import ConfigError
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.borrowed_rows import borrowed_rows, with_borrowed_row
from rlinf.llm.causal_lm import CausalLMConfig, load_causal_lm
from rlinf.llm.generation_interface import GenerationDatumSpec, GenerationOutputSpec
from rlinf.llm.hf_generation import generate_tokens, reject_other_names
from rlinf.llm.hf_model import HFModel, model_shapes
from rlinf.llm.logprobs import batch_scores, has_separable_head
from rlinf.llm.losses import TokenLoss, trained_tokens
from rlinf.llm.memory_plan import PassPlan, plan_passes
from rlinf.llm.packing import attend_each_sequence, keeps_sequences_apart
from rlinf.llm.policy_interface import LogprobsSpec, LossFunction
from rlinf.llm.token_policy import TokenPolicy, TokenPolicyConfig, check_trainable
from rlinf.models.config import LoraConfig
from rlinf.models.layers import check_compiler, set_training_options
from rlinf.models.lora import apply_lora, merged_state_dict
from rlinf.models.norms import fuse_norms
from rlinf.models.precision import torch_dtype_of
from rlinf.models.weights_in_files import check_read, how_read
from rlinf.optim.reference import Reference
from rlinf.options import from_mapping, option

logger = logging.getLogger("rlinf")

_NO_GPU = ("None", "cpu", "disk")
_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass
class HuggingFacePolicyConfig(CausalLMConfig, TokenPolicyConfig):
    """Keyword arguments for ``HuggingFacePolicy``."""

    sequence_packing: bool = option(False, "Concatenate rows in a micro-batch instead of padding them.")
    gradient_checkpointing: bool | str = option(
        "auto", "Recompute activations in updates; auto: of as many layers as necessary.", choices=("auto", True, False)
    )
    report_entropy: bool = option(False, "Return the mean token entropy in nats; needs memory for two logit chunks.")
    compile: bool = option(False, "Compile the model's repeated layers in train() with torch.compile.")
    sharding: str = option(
        "auto",
        "replicate: one full model per rank; fsdp2: shard the model; auto: shard it if a replica is too large.",
        choices=SHARDINGS,
    )
    shard_size: int | None = option(None, "Number of ranks to shard the weights over; null: all.", minimum=1)
    cpu_offload: bool = option(False, "Offload shards, gradients and optimiser states to main memory.")
    lora: dict[str, Any] | None = option(None, "Train only LoRA adapters; keys: rank, alpha, dropout, target_modules.")


class HuggingFacePolicy(TokenPolicy):
    """Policy for any causal language model from transformers.

    If ``torch.distributed`` is initialised, every rank must call each method, with its own rows. Gradients and counts are summed over
    ranks, so up to rounding, steps do not depend on the number of ranks or micro-batches. Each rank has the full model or a shard
    (``sharding``). Shards are gathered once per call when generating or scoring, and layer by layer in ``train``.

    16-bit weights are updated through float32 copies, which also accumulate gradients, because RL steps are smaller than 16-bit
    rounding. The model's dropout is always disabled, because probability ratios would otherwise not start at 1.

    Raises ConfigError for unknown or contradictory keywords; CheckpointError if ``model_name`` cannot be loaded.

    Args:
        model_name: Folder or hub id.
        **kwargs: Fields of ``HuggingFacePolicyConfig``.
    """

    config: HuggingFacePolicyConfig
    pass_plan: PassPlan | None = None
    _keeps_reference = False

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        reject_other_names(kwargs)
        self.config = config = from_mapping(HuggingFacePolicyConfig, kwargs)
        check_trainable(config)
        if config.sequence_packing and config.max_tokens_per_microbatch is None:
            raise ConfigError("sequence_packing=True needs a row size. Pass e.g. max_tokens_per_microbatch=4096")
        if (config.load_in_8bit or config.load_in_4bit) and config.lora is None:
            raise ConfigError("Quantised weights cannot be trained, only adapters on them. Pass lora={}")
        if config.compile:
            check_compiler(_device_of(config))
        self._lora = None if config.lora is None else from_mapping(LoraConfig, config.lora, "lora")
        self.model_name, self.temperature = model_name, config.temperature
        choice = _choose(model_name, config, self._lora)
        self._sharded = choice.sharded
        self.model = self._attending(self._load())
        if config.sequence_packing and not keeps_sequences_apart(self.model):
            raise ConfigError(
                f"{type(self.model).__name__} does not separate packed sequences. Pass sequence_packing=False"
            )
        self._adapt(self.model)
        set_training_options(self.model, recomputed=config.gradient_checkpointing is True, compiled=config.compile)
        take_weights_of_rank_0(self.model)
        self.parallel: Parallel = Replicated(self.model)
        if rank() == 0 and world_size() > 1:
            logger.info("%s", f"{choice}; {how_read(self.model)}" if self._sharded else choice)
        if self._sharded:
            sources = deferred_parameters(self.model)
            self.model.fsdp_wrap_modules = HFModel(self.model).fsdp_wrap_modules
            sizes = {"shard_size": config.shard_size, "cpu_offload": config.cpu_offload}
            self.parallel = Sharded(self.model, _device_of(config), **sizes)
            check_read(self.model, sources)
            # Run the test here, where all ranks are, because it runs the model, which is collective with shards.
            has_separable_head(self.model)
            # Otherwise, the root would stay gathered with its current weights.
            self.model.reshard()
        self._initial: Reference | None = None
        self._init_training(self.model.config.get_text_config(), rank(), parallel=self.parallel)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate one completion per row; ``logprobs`` equal ``get_logprobs`` of the output."""
        with self.parallel.gathered():
            return generate_tokens(self.model, data, self.config, greedy, self._random, self.config.tokenizer)

    def get_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """See ``TokenPolicy.get_logprobs``."""
        with self.parallel.gathered():
            return super().get_logprobs(data)

    def keep_reference(self) -> None:
        """Store the current weights as the reference policy; call this before loading a checkpoint."""
        if self.config.lora is None:
            self._initial = Reference(self.model)

    def get_reference_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """Return ``get_logprobs`` without adapters or, without LoRA, with the initial weights, which the first call stores.

        Raise CheckpointError if the first call follows a step and ``model_name`` no longer contains the initial weights.
        """
        if self.config.lora is not None:
            with self.parallel.gathered(), _without_adapters(self.model):
                return self._score(self.model, data)
        if self._initial is None:
            self._initial = self._initial_weights()
        with self._initial.in_place(), self.parallel.gathered():
            return self._score(self.model, data)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder that transformers, vLLM and policies can load, with adapters merged (a collective call).

        Raises ConfigError if the weights are quantised.
        """
        if self.config.load_in_8bit or self.config.load_in_4bit:
            raise ConfigError("Adapters cannot be merged into quantised weights. Load them in 16 or 32 bits")
        names = list(self.model.state_dict())
        with self.parallel.gathered():
            if rank() == 0:
                # Collect the gathered tensors, because state_dict() returns shards.
                tensors = dict(self.model.named_parameters(remove_duplicate=False))
                tensors |= dict(self.model.named_buffers(remove_duplicate=False))
                weights = {name: tensors[name].detach() for name in names}
                merged = weights if self.config.lora is None else merged_state_dict(self.model, weights)
                self.model.save_pretrained(folder, state_dict=merged)
        if world_size() > 1:
            dist.barrier()

    def _check_loss(self, loss_fn: LossFunction) -> None:
        super()._check_loss(loss_fn)
        self._keeps_reference |= isinstance(loss_fn, TokenLoss) and loss_fn.needs_reference
        dropout = (self.config.lora or {}).get("dropout", 0.0)
        if isinstance(loss_fn, TokenLoss) and loss_fn.compares and dropout > 0:
            raise ConfigError(
                f"lora.dropout={dropout} and {type(loss_fn).__name__}: with dropout, the log-probabilities of an unchanged "
                "policy change between passes. Pass lora={'dropout': 0.0}"
            )
        if world_size() > 1 and not isinstance(loss_fn, TokenLoss):
            raise ConfigError(f"{loss_fn} is not a TokenLoss, so it cannot be summed over {world_size()} ranks.")

    def _rows_per_pass(self, length: int) -> int:
        config, rows, tokens = self.config, self.config.micro_batch_size, self.config.max_tokens_per_microbatch
        is_set = (rows or tokens) and config.gradient_checkpointing != "auto"
        if is_set or not (gpu_bytes := _gpu_bytes(config)):
            return super()._rows_per_pass(length)
        if self.pass_plan is None or length > self.pass_plan.length:
            longest = max(length, config.max_model_len or 0)
            self.pass_plan = plan_passes(
                _shapes(self.model_name, config, self._lora), longest, -(-tokens // longest) if tokens else rows,
                config.gradient_checkpointing, gpu_bytes, offloads=config.cpu_offload,
                shards=(config.shard_size or world_size()) if self._sharded else None,
                has_reference=self._lora is None and (self._keeps_reference or self._initial is not None),
            )  # fmt: skip
            set_training_options(self.model, recomputed=self.pass_plan.recomputed, compiled=config.compile)
            if rank() == 0:
                logger.info("updates: %s", self.pass_plan)
        # Memory is proportional to the tokens of a pass.
        return rows or max(1, self.pass_plan.rows * self.pass_plan.length // length)

    def _accumulate(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        if not isinstance(loss_fn, TokenLoss):
            return self._train_step.accumulate([data], lambda batch: self._any_loss(batch, loss_fn))
        counts, parts = self._prepare(data, loss_fn)
        packed, with_entropy = self.config.sequence_packing, self.config.report_entropy

        def loss_of(number: int) -> tuple[Tensor, dict[str, Tensor]]:
            heartbeat()  # the previous micro-batch is done
            part, counted = parts[min(number, len(parts) - 1)], float(number < len(parts))
            trained, row = trained_tokens(part), borrowed[number]
            num_rows, num_columns = trained.shape
            scored, trained = (part, trained) if row is None else with_borrowed_row(part, trained, row)
            scores = batch_scores(self.model, scored, self.temperature, packed, with_entropy, trained)
            output = loss_fn.from_logprobs(scores.logprobs[:num_rows, :num_columns], part, counts)
            metrics = dict(output.metrics)
            if scores.entropy is not None:  # which is 0 in the borrowed row
                metrics["entropy"] = scores.entropy.sum() / counts.tokens
            metrics = {name: counted * value for name, value in metrics.items()}
            return counted * output.loss, {**metrics, "loss": counted * output.loss.detach()}

        # Every rank must gather shards in every pass, so a rank with fewer micro-batches repeats its last one with weight 0.
        num_passes = int(*maximum(len(parts))) if self._sharded else len(parts)
        borrowed = borrowed_rows(parts, num_passes) if self._sharded else [None] * num_passes
        totals = self._train_step.accumulate(range(num_passes), loss_of)
        return {**totals.over_ranks(), "num_tokens": counts.tokens}

    def _any_loss(self, data: BatchedDataDict, loss_fn: LossFunction) -> tuple[Tensor, dict[str, Tensor]]:
        loss = loss_fn(self.model, data)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError(f"loss_fn returned {loss!r}; expected a scalar tensor with a gradient.")
        return loss, {"loss": loss.detach()}

    def _logprobs(self, model: nn.Module, data: BatchedDataDict) -> Tensor:
        return batch_scores(model, data, self.temperature, self.config.sequence_packing).logprobs

    def _initial_weights(self) -> Reference:
        """Store the initial weights; after a step, reload them from ``model_name``."""
        initial = Reference(self.model)
        if self._train_step.num_steps:
            model = self._load()
            initial.load(dict(model.named_parameters()) | deferred_parameters(model))
            with initial.in_place():
                self._check_initial(self.model)
        return initial

    def unloaded_model(self) -> nn.Module:
        """Return an unsharded copy of the model on the CPU, leaving weights in their files where possible."""
        config = replace(self.config, device_map=None)
        model = self._attending(load_causal_lm(self.model_name, config, deferred=True))
        self._adapt(model)
        return model

    def _attending(self, model: nn.Module) -> nn.Module:
        """Set up attention for packed rows and, on a GPU, for padded rows; return the model."""
        if (self.config.sequence_packing or _device_of(self.config) != "cpu") and not self.config.compile:
            attend_each_sequence(model)
        return model

    def _adapt(self, model: nn.Module) -> None:
        """Set up kernels, and add the configured adapters to the model."""
        fuse_norms(model)
        if self._lora is not None:
            with torch.random.fork_rng():
                # Seed here, because the current random state depends on the number of ranks.
                torch.manual_seed(self.config.seed)
                model.peft_config = apply_lora(HFModel(model), self._lora).peft_config

    def _load(self) -> nn.Module:
        # With sharding, move weights to the device shard by shard.
        config = replace(self.config, device_map=None) if self._sharded else self.config
        return load_causal_lm(self.model_name, config, deferred=self._sharded)


def _device_of(config: HuggingFacePolicyConfig) -> str:
    places = config.device_map.values() if isinstance(config.device_map, dict) else [config.device_map]
    return "cpu" if any(str(place) in _NO_GPU for place in places) else resolve_device("auto", 1)


def _choose(model_name: str, config: HuggingFacePolicyConfig, lora: LoraConfig | None) -> Choice:
    """Choose the sharding from the model's shapes; raise ConfigError if the model does not fit or cannot be sharded as requested."""
    quantised = config.load_in_8bit or config.load_in_4bit
    is_requested = config.sharding == "fsdp2" or config.cpu_offload
    if is_requested and (quantised or isinstance(config.device_map, dict)):
        settings = f"sharding={config.sharding}, cpu_offload={config.cpu_offload}"
        raise ConfigError(f"{settings} with quantised weights or a device_map. Pass sharding='replicate'")
    if is_requested and not dist.is_initialized():
        raise ConfigError(f"sharding={config.sharding} without torch.distributed. Start the program with torchrun")
    if config.shard_size is not None and world_size() % config.shard_size:
        raise ConfigError(f"shard_size={config.shard_size} does not divide the {world_size()} ranks.", shard_size=None)
    on_gpu = _device_of(config) != "cpu"
    if quantised or not (is_requested or world_size() > 1 or (on_gpu and lora is None)):
        return Choice(False, "its weights are quantised" if quantised else "there is one rank")
    shapes = _shapes(model_name, config, lora)
    memory = rank_memory_bytes(_device_of(config), local_world_size()) if world_size() > 1 else 0
    sizes = {"cpu_offload": config.cpu_offload, "shard_size": config.shard_size}
    choice = choose_sharding(config.sharding, shapes, world_size(), memory, **sizes)
    shards = (config.shard_size or world_size()) if choice.sharded else None
    needed, available = StateBytes.of(shapes, shards).total, _gpu_bytes(config)
    if on_gpu and not config.cpu_offload and needed > available:
        num_parameters = sum(p.numel() for p in shapes.parameters() if p.requires_grad)
        raise ConfigError(
            f"Training the {num_parameters / 1e9:.3g} billion weights of '{model_name}' needs {needed / 1e9:.3g} GB for weights, gradients "
            f"and optimiser on every rank, but its GPUs have {available / 1e9:.3g} GB. "
            "Pass lora={}, shard over more ranks, or train a smaller model"
        )
    return choice


def _shapes(model_name: str, config: HuggingFacePolicyConfig, lora: LoraConfig | None) -> HFModel:
    shapes = model_shapes(model_name, config.trust_remote_code, torch_dtype_of(config.torch_dtype))
    fuse_norms(shapes)
    if lora is not None:
        # Preserve the random state, because a single process does not initialise adapters here.
        with torch.random.fork_rng(devices=[]):
            apply_lora(shapes, lora)
    return shapes


def _gpu_bytes(config: HuggingFacePolicyConfig) -> int:
    """Return the memory of the GPUs over which this rank's model is spread; 0 on a CPU."""
    if _device_of(config) == "cpu":
        return 0
    is_spread = isinstance(config.device_map, dict) or config.device_map in _SPREAD
    has_one_gpu = not is_spread or (config.device_map == "auto" and dist.is_initialized())
    gpus = [own_device().index] if has_one_gpu else range(torch.cuda.device_count())
    return sum(torch.cuda.get_device_properties(index).total_memory for index in gpus)


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the context."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
