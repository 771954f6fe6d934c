"""A causal language model of transformers as an RL policy that generates, scores and learns."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from rlinf.distributed.devices import own_device
from rlinf.distributed.process_group import rank, world_size
from rlinf.errors import ConfigError
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.causal_lm import CausalLMConfig, load_causal_lm
from rlinf.llm.generation_interface import GenerationDatumSpec, GenerationOutputSpec
from rlinf.llm.hf_generation import generate_tokens, refuse_other_names
from rlinf.llm.logprobs import batch_logprobs
from rlinf.llm.losses import TokenLoss
from rlinf.llm.packing import keeps_sequences_apart
from rlinf.llm.policy_interface import LogprobsSpec, LossFunction
from rlinf.llm.token_policy import TokenPolicy, TokenPolicyConfig, check_trainable
from rlinf.models.blocks import check_compiler, set_training_options
from rlinf.models.config import LoraConfig
from rlinf.models.hf_model import HFModel, count_weights
from rlinf.models.lora import apply_lora, merged_state_dict
from rlinf.models.precision import torch_dtype_of
from rlinf.options import from_mapping, option

_NO_GPU = ("None", "cpu", "disk")
_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass
class HuggingFacePolicyConfig(CausalLMConfig, TokenPolicyConfig):
    """Keyword arguments of ``HuggingFacePolicy``."""

    sequence_packing: bool = option(False, "Lay the rows of such a micro-batch end to end instead of padding them.")
    gradient_checkpointing: bool = option(
        False, "Keep the inputs of each repeated block only, and recompute the rest in the backward pass."
    )
    compile: bool = option(False, "Run the repeated blocks through torch.compile in train().")
    lora: dict[str, Any] | None = option(
        None, "Train LoRA adapters only: rank, alpha, dropout, target_modules; {}: defaults."
    )


class HuggingFacePolicy(TokenPolicy):
    """A policy over any causal language model that transformers can load.

    If ``torch.distributed`` is initialised, every rank holds the model and calls ``train`` with its own rows. Gradients and counts
    are summed over the ranks, so the number of ranks changes a step no more than the number of micro-batches does.

    Weights in 16 bits are updated through float32 copies that also accumulate the gradients, because RL steps are smaller than the
    rounding of 16 bits. Dropout is always off; otherwise probability ratios would not start at 1.

    Args:
        model_name: Folder or hub id.
        **kwargs: Fields of ``HuggingFacePolicyConfig``.

    Attributes:
        model: The trained model.
        temperature: Temperature of the log-probabilities.

    Raises:
        ConfigError: A keyword is unknown or contradicts another.
        CheckpointError: ``model_name`` cannot be loaded.
        MissingDependencyError: Quantisation is asked for without bitsandbytes.
    """

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        refuse_other_names(kwargs)
        self.config = from_mapping(HuggingFacePolicyConfig, kwargs)
        check_trainable(self.config)
        _check_training(self.config)
        lora = None if self.config.lora is None else from_mapping(LoraConfig, self.config.lora, "lora")
        self.model_name = model_name
        self.temperature = self.config.temperature
        _check_memory(model_name, self.config)
        self.model = self._load()
        if self.config.sequence_packing and not keeps_sequences_apart(self.model):
            raise ConfigError(
                f"sequence_packing=True, but {type(self.model).__name__} lets packed sequences attend to each other. "
                "Pass sequence_packing=False"
            )
        if lora is not None:
            apply_lora(HFModel(self.model), lora)
        if self.config.compile:
            check_compiler(self.model.device.type)
        set_training_options(self.model, recomputed=self.config.gradient_checkpointing, compiled=self.config.compile)
        reference = None if lora is None else self.model  # without its adapters
        self._begin(self.model.config.get_text_config(), rank(), reference)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate a completion per row; ``logprobs`` equal ``get_logprobs`` of the output."""
        return generate_tokens(self.model, data, self.config, greedy, self._random, self.config.tokenizer)

    def get_reference_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """Return ``get_logprobs`` of the model without adapters, or of a frozen copy that the first call makes.

        Raises:
            CheckpointError: The first call comes after a step, and ``model_name`` no longer holds the initial weights.
        """
        with _without_adapters(self.model):
            return super().get_reference_logprobs(data)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder that transformers, vLLM and other policies can load; adapters are merged into the weights.

        All ranks must call this; rank 0 writes. Raises ConfigError if the weights are quantised.
        """
        if self.config.load_in_8bit or self.config.load_in_4bit:
            raise ConfigError("Adapters cannot be merged into quantised weights. Load them in 16 or 32 bits")
        if rank() == 0:
            merged = None if self.config.lora is None else merged_state_dict(self.model)
            self.model.save_pretrained(folder, state_dict=merged)
        if world_size() > 1:
            dist.barrier()

    def _check_loss(self, loss_fn: LossFunction) -> None:
        super()._check_loss(loss_fn)
        dropout = (self.config.lora or {}).get("dropout", 0.0)
        if isinstance(loss_fn, TokenLoss) and loss_fn.compares and dropout > 0:
            raise ConfigError(
                f"lora.dropout={dropout} and {type(loss_fn).__name__}: with dropout, the log-probabilities of an unchanged "
                "policy change between passes. Pass lora={'dropout': 0.0}"
            )
        if world_size() > 1 and not isinstance(loss_fn, TokenLoss):
            raise ConfigError(f"{loss_fn} is not a TokenLoss, so it cannot be summed over {world_size()} ranks.")

    def _accumulate(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        if not isinstance(loss_fn, TokenLoss):
            return self._train_step.accumulate([data], lambda whole: self._any_loss(whole, loss_fn))
        counts, parts = self._prepare(data, loss_fn)

        def loss_of(part: BatchedDataDict) -> tuple[Tensor, dict[str, Tensor]]:
            output = loss_fn.from_logprobs(self._logprobs(self.model, part), part, counts)
            return output.loss, {**output.metrics, "loss": output.loss.detach()}

        totals = self._raise_on_all_ranks(lambda: self._train_step.accumulate(parts, loss_of))
        return {**totals.over_ranks(), "num_tokens": counts.tokens}

    def _any_loss(self, data: BatchedDataDict, loss_fn: LossFunction) -> tuple[Tensor, dict[str, Tensor]]:
        loss = loss_fn(self.model, data)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError(f"loss_fn returned {loss!r}; required: a tensor of one number with a gradient.")
        return loss, {"loss": loss.detach()}

    def _logprobs(self, model: Any, data: BatchedDataDict) -> Tensor:
        return batch_logprobs(model, data, self.temperature, self.config.sequence_packing)

    def _sum_gradients(self) -> None:
        for parameter in self._optimizer.masters if world_size() > 1 else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def _initial_model(self) -> nn.Module:
        return super()._initial_model() if self._train_step.num_steps else copy.deepcopy(self.model)

    def _load(self) -> nn.Module:
        return load_causal_lm(self.model_name, self.config)


def _check_training(config: HuggingFacePolicyConfig) -> None:
    if config.sequence_packing and config.max_tokens_per_microbatch is None:
        raise ConfigError("sequence_packing=True needs a row size. Pass e.g. max_tokens_per_microbatch=4096")
    if (config.load_in_8bit or config.load_in_4bit) and config.lora is None:
        raise ConfigError("Quantised weights cannot be trained, only adapters on them. Pass lora={}")


def training_bytes(num_parameters: int, bytes_of_a_weight: int) -> int:
    """Return the bytes of weights, gradients and AdamW's moments, and of the float32 copies for weights in 16 bits."""
    copies = 8 if bytes_of_a_weight < 4 else 0
    return num_parameters * (2 * bytes_of_a_weight + copies + 8)


def _check_memory(model_name: str, config: HuggingFacePolicyConfig) -> None:
    """Raise ConfigError if full training does not fit into the GPUs of a rank; called before weights are read."""
    places = config.device_map.values() if isinstance(config.device_map, dict) else [config.device_map]
    if config.lora is not None or not torch.cuda.is_available() or any(str(p) in _NO_GPU for p in places):
        return
    num_parameters = count_weights(model_name, config.trust_remote_code)
    needed = training_bytes(num_parameters, torch_dtype_of(config.torch_dtype).itemsize)
    is_spread = isinstance(config.device_map, dict) or config.device_map in _SPREAD
    alone = not is_spread or (config.device_map == "auto" and dist.is_initialized())
    gpus = [own_device().index] if alone else range(torch.cuda.device_count())
    available = sum(torch.cuda.get_device_properties(index).total_memory for index in gpus)
    if needed > available:
        raise ConfigError(
            f"Training all {num_parameters / 1e9:.3g} billion weights of '{model_name}' takes {needed / 1e9:.3g} GB for weights, gradients "
            f"and optimiser on every rank, but {'the GPU has' if len(gpus) == 1 else 'the GPUs have'} {available / 1e9:.3g} GB. "
            "Pass lora={} to train adapters, or train a smaller model"
        )


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
