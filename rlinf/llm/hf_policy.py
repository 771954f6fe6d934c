"""A causal language model of transformers as an RL policy that generates, scores and learns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from rlinf.distributed.devices import own_device
from rlinf.distributed.process_group import rank, sum_over_ranks, world_size
from rlinf.errors import CheckpointError, ConfigError
from rlinf.llm.batched_data_dict import BatchedDataDict, tokens_and_mask
from rlinf.llm.causal_lm import CausalLMConfig, load_causal_lm
from rlinf.llm.generation_interface import GenerationDatumSpec, GenerationOutputSpec
from rlinf.llm.hf_generation import SamplingConfig, generate_tokens, refuse_other_names
from rlinf.llm.logprobs import batch_logprobs, context_length, micro_batches
from rlinf.llm.losses import TokenCounts, TokenLoss
from rlinf.llm.packing import keeps_sequences_apart
from rlinf.llm.policy_interface import LogprobsSpec, LossFunction, PolicyInterface, TrainingDatumSpec
from rlinf.memory import memory_metrics
from rlinf.models.config import LoraConfig
from rlinf.models.hf_model import HFModel, count_weights
from rlinf.models.lora import apply_lora, merged_state_dict
from rlinf.models.precision import evaluation_mode, torch_dtype_of
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.train_step import Totals, TrainStep
from rlinf.options import from_mapping, option
from rlinf.seeding import derive_seed

Result = TypeVar("Result")
_NO_GPU = ("None", "cpu", "disk")
_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass
class TokenPolicyConfig(SamplingConfig):
    """Keyword arguments of all token policies. ``temperature`` applies to generation and to all log-probabilities."""

    learning_rate: float = option(1e-5, "Learning rate of AdamW.", minimum=0, maximum=1)
    weight_decay: float = option(0.0, "Weight decay of AdamW.", minimum=0)
    max_grad_norm: float = option(1.0, "Clip the gradient to this norm.", minimum=1e-6)
    micro_batch_size: int = option(8, "Rows of one forward-backward pass.", minimum=1)
    max_tokens_per_microbatch: int | None = option(
        None, "Batch by tokens, padding included, instead of by rows.", minimum=1
    )


@dataclass
class HuggingFacePolicyConfig(CausalLMConfig, TokenPolicyConfig):
    """Keyword arguments of ``HuggingFacePolicy``."""

    sequence_packing: bool = option(False, "Lay the rows of such a micro-batch end to end instead of padding them.")
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    lora: dict[str, Any] | None = option(
        None, "Train LoRA adapters only: rank, alpha, dropout, target_modules; {}: defaults."
    )


class HuggingFacePolicy(PolicyInterface):
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
        self.model = load_causal_lm(model_name, self.config)
        if self.config.sequence_packing and not keeps_sequences_apart(self.model):
            raise ConfigError(
                f"sequence_packing=True, but {type(self.model).__name__} lets packed sequences attend to each other. "
                "Pass sequence_packing=False"
            )
        if lora is not None:
            _add_adapters(self.model, lora)
        if self.config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = MasterAdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=self.config.learning_rate,
            weight_decay=self.config.weight_decay,
        )
        self._train_step = TrainStep(self._optimizer, self.config.max_grad_norm)
        self._reference: nn.Module | None = None
        self._checksum: list[float] | None = None
        self._random = sampling_generator(self.config.seed, rank())

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate a completion per row; ``logprobs`` equal ``get_logprobs`` of the output."""
        return generate_tokens(self.model, data, self.config, greedy, self._random, self.config.tokenizer)

    def get_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """Return the log-probabilities of prompts, training data or generation outputs (``output_ids``)."""
        return self._score(self.model, data)

    def get_reference_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """Return ``get_logprobs`` of the policy before its first step.

        The reference is the model without adapters, or a frozen copy that the first call makes.

        Raises:
            CheckpointError: The first call comes after a step, and ``model_name`` no longer holds the initial weights.
        """
        if self.config.lora is not None:
            with _without_adapters(self.model):
                return self._score(self.model, data)
        if self._reference is None:
            self._reference = self._initial_model().requires_grad_(False).eval()
        return self._score(self._reference, data)

    def train(self, data: BatchedDataDict[TrainingDatumSpec], loss_fn: LossFunction) -> dict[str, Any]:
        """Take one optimiser step.

        Args:
            data: Rows of this rank, one or more. A ``TokenLoss`` that needs ``reference_logprobs`` gets them here if they are missing.
            loss_fn: A ``TokenLoss`` is evaluated in micro-batches; any other ``loss_fn(model, data)`` gets the whole batch
                at once, since how it averages is not known.

        Returns:
            ``loss``, ``grad_norm`` (before clipping), ``num_tokens``, the metrics of the loss, and ``memory/...``
            (``rlinf.memory``).

        Raises:
            ConfigError: The batch does not fit the loss (on any rank: all raise), or the loss cannot be used with the policy.
            NonFiniteError: Loss or gradient is NaN or infinite; the weights are as before.
        """
        data = BatchedDataDict(data)
        check_loss(loss_fn, self.temperature, (self.config.lora or {}).get("dropout", 0.0))
        self._optimizer.zero_grad()
        self.model.train()
        try:
            if isinstance(loss_fn, TokenLoss):
                metrics = self._accumulate(data, loss_fn)
            elif world_size() > 1:
                raise ConfigError(
                    f"{loss_fn} is not a TokenLoss, and only a TokenLoss can be summed over {world_size()} ranks."
                )
            else:
                metrics = self._train_step.accumulate([data], lambda whole: self._any_loss(whole, loss_fn))
        finally:
            self.model.eval()
        if world_size() > 1:
            _sum_gradients(self._optimizer.masters)
        if self._train_step.num_steps == 0 and self._reference is None and self.config.lora is None:
            self._checksum = weights_checksum(self.model)
        grad_norm = self._train_step.apply(metrics["loss"])
        return {**metrics, "grad_norm": grad_norm, **memory_metrics()}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder that transformers, vLLM and other policies can load; adapters are merged into the weights.

        All ranks must call this; rank 0 writes.

        Raises:
            ConfigError: The weights are quantised, so adapters cannot be merged into them.
        """
        if self.config.load_in_8bit or self.config.load_in_4bit:
            raise ConfigError(
                "Adapters cannot be merged into quantised weights. Pass load_in_8bit=False, load_in_4bit=False"
            )
        if rank() == 0:
            merged = None if self.config.lora is None else merged_state_dict(self.model)
            self.model.save_pretrained(folder, state_dict=merged)
        if world_size() > 1:
            dist.barrier()

    def _accumulate(self, data: BatchedDataDict, loss_fn: TokenLoss) -> dict[str, float]:
        def prepare() -> tuple[TokenCounts, list[BatchedDataDict]]:
            counts = loss_fn.counts(data)
            rows = self._micro_batches(data, loss_fn.rows_per_sample)
            if loss_fn.needs_reference and "reference_logprobs" not in data:
                data["reference_logprobs"] = self.get_reference_logprobs(data)["logprobs"]
            return counts, [data.select_indices(each) for each in rows]

        own, parts = raise_on_all_ranks(prepare)
        counts = TokenCounts(*sum_over_ranks([own.tokens, own.samples]))

        def loss_of(part: BatchedDataDict) -> tuple[Tensor, dict[str, Tensor]]:
            output = loss_fn.from_logprobs(self._logprobs(self.model, part), part, counts)
            return output.loss, {**output.metrics, "loss": output.loss.detach()}

        totals: Totals = raise_on_all_ranks(lambda: self._train_step.accumulate(parts, loss_of))
        return {**totals.over_ranks(), "num_tokens": counts.tokens}

    def _any_loss(self, data: BatchedDataDict, loss_fn: LossFunction) -> tuple[Tensor, dict[str, Tensor]]:
        loss = loss_fn(self.model, data)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError(f"loss_fn returned {loss!r}; required: a tensor of one number with a gradient.")
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def _score(self, model: Any, data: BatchedDataDict) -> BatchedDataDict[LogprobsSpec]:
        data = BatchedDataDict(data)
        ids, _ = tokens_and_mask(data)
        logprobs = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        with evaluation_mode(model):
            for rows in self._micro_batches(data, rows_per_sample=1):
                logprobs[rows] = self._logprobs(model, data.select_indices(rows)).to(ids.device)
        return BatchedDataDict({"logprobs": logprobs})

    def _logprobs(self, model: Any, data: BatchedDataDict) -> Tensor:
        return batch_logprobs(model, data, self.temperature, self.config.sequence_packing)

    def _micro_batches(self, data: BatchedDataDict, rows_per_sample: int) -> list[list[int]]:
        config = self.config
        return micro_batches(
            data,
            config.micro_batch_size,
            config.max_tokens_per_microbatch,
            config.sequence_packing,
            rows_per_sample,
            context_length(self.model),
            self.model.config.get_text_config().vocab_size,
        )

    def _initial_model(self) -> nn.Module:
        if self._train_step.num_steps == 0:
            return copy.deepcopy(self.model)
        model = load_causal_lm(self.model_name, self.config)
        if weights_checksum(model) != self._checksum:
            raise CheckpointError(
                f"'{self.model_name}' no longer holds the weights that this policy began with, so they cannot be its "
                "reference. Call get_reference_logprobs once before the first train"
            )
        return model


def check_loss(loss_fn: Any, temperature: float, lora_dropout: float = 0.0) -> None:
    """Check that a policy can train with a loss.

    Args:
        loss_fn: Argument of ``train``.
        temperature: Temperature of the policy.
        lora_dropout: Dropout of its adapters.

    Raises:
        ConfigError: ``loss_fn`` is not a loss, has another temperature, or compares log-probabilities despite dropout.
    """
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise ConfigError(f"loss_fn is {loss_fn!r}; required: a loss. Give e.g. rlinf.algorithms.NLLLossFn()")
    if not isinstance(loss_fn, TokenLoss):
        return
    if loss_fn.temperature not in (1.0, temperature):
        raise ConfigError(
            f"{type(loss_fn).__name__} has temperature={loss_fn.temperature}, but the policy scores with "
            f"temperature={temperature}. Pass temperature={temperature} in the loss, or leave it out"
        )
    if loss_fn.compares and lora_dropout > 0:
        raise ConfigError(
            f"lora.dropout={lora_dropout} and {type(loss_fn).__name__}: with dropout, the log-probabilities of an unchanged "
            "policy change between passes. Pass lora={'dropout': 0.0}"
        )


def raise_on_all_ranks(
    function: Callable[[], Result], sum_values: Callable[[list[float]], list[float]] = sum_over_ranks
) -> Result:
    """Run ``function`` on every rank. If any rank raises ConfigError, raise on all, so that none hangs in a collective.

    Args:
        function: Function without collectives.
        sum_values: Sums numbers over the ranks.
    """
    result, error = None, None
    try:
        result = function()
    except ConfigError as raised:
        error = raised
    num_failed = int(sum_values([float(error is not None)])[0])
    if error is not None:
        raise error
    if num_failed:
        raise ConfigError(f"{num_failed} other rank(s) refused their rows, so no step was taken. See their messages")
    return result


def check_trainable(config: TokenPolicyConfig) -> None:
    """Raise ConfigError for sampling that differs from the scored distribution, and for weights in float16."""
    neutral_values = {
        "top_k": (None,), "top_p": (None, 1.0), "repetition_penalty": (1.0,), "allowed_token_ids": (None,),
    }  # fmt: skip
    for name, neutral in neutral_values.items():
        value = getattr(config, name)
        if value not in neutral:
            raise ConfigError(
                f"{name}={value} changes what is sampled but not the log-probabilities that are trained. "
                f"Pass {name}={neutral[-1]}, or generate with HuggingFaceGeneration"
            )
    if torch_dtype_of(config.torch_dtype) == torch.float16:
        raise ConfigError(
            f"torch_dtype={config.torch_dtype} loses small gradients in training. Pass torch_dtype='bfloat16'"
        )


def _check_training(config: HuggingFacePolicyConfig) -> None:
    if config.sequence_packing and config.max_tokens_per_microbatch is None:
        raise ConfigError(
            "sequence_packing=True needs the size of a packed row. Pass e.g. max_tokens_per_microbatch=4096"
        )
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


def _add_adapters(model: Any, lora: LoraConfig) -> None:
    """Add LoRA adapters to the layers that ``HFModel`` names."""
    apply_lora(HFModel(model), lora)


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


def _sum_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def sampling_generator(seed: int, rank: int) -> torch.Generator:
    """Return the random generator of a data-parallel rank; rank 0 uses ``seed`` itself."""
    return torch.Generator().manual_seed(seed if rank == 0 else derive_seed(seed, "generation", rank))


def weights_checksum(model: nn.Module) -> list[float]:
    """Return the sum of each tensor, to detect whether a folder still holds the same weights."""
    return [float(tensor.detach().double().sum()) for tensor in model.parameters() if tensor.is_floating_point()]
