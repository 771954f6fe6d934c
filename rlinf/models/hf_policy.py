"""A causal language model of transformers as an RL policy: generate, score, learn."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from rlinf.algorithms.token_losses import TokenCounts, TokenLoss
from rlinf.config.options import from_mapping, option
from rlinf.distributed.batched_data_dict import BatchedDataDict
from rlinf.distributed.packing import keeps_sequences_apart, micro_batch_rows
from rlinf.distributed.process_group import sum_over_ranks, world_size
from rlinf.errors import CheckpointError, ConfigError, NonFiniteError
from rlinf.models.causal_lm import CausalLMConfig, evaluation_mode, load_causal_lm
from rlinf.models.config import LoraConfig
from rlinf.models.generation.hf_generation import SamplingConfig, generate_tokens
from rlinf.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationOutputSpec,
    tokens_and_mask,
    verify_right_padding,
)
from rlinf.models.hf_model import HFModel
from rlinf.models.interfaces import LogprobsSpec, LossFunction, PolicyInterface, TrainingDatumSpec
from rlinf.models.logprobs import sequence_logprobs


@dataclass
class HuggingFacePolicyConfig(CausalLMConfig, SamplingConfig):
    """Keyword arguments of ``HuggingFacePolicy``; ``temperature`` is that of generation and of all log-probabilities."""

    learning_rate: float = option(1e-5, "Of AdamW.", minimum=0)
    weight_decay: float = option(0.0, "Of AdamW.", minimum=0)
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm.", minimum=0)
    micro_batch_size: int = option(8, "Rows of one forward-backward pass.", minimum=1)
    max_tokens_per_microbatch: int | None = option(None, "Instead: rows by tokens, padding included.", minimum=1)
    sequence_packing: bool = option(False, "Lay the rows of such a micro-batch end to end instead of padding them.")
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    lora: dict[str, Any] | None = option(
        None, "Train adapters only: rank, alpha, dropout, target_modules; {}: defaults."
    )


class HuggingFacePolicy(PolicyInterface):
    """Policy over any causal language model that transformers loads.

    With ranks (``torch.distributed`` initialised), every rank holds the model and calls ``train`` with rows of its own:
    gradients and counts are summed, so ranks change a step no more than micro-batches do.

    Weights in 16 bits are updated through float32 copies, because steps of RL are smaller than their rounding.

    Args:
        model_name: Folder or hub id.
        **kwargs: Fields of ``HuggingFacePolicyConfig``.

    Attributes:
        model: The trained model.
        temperature: Of the log-probabilities.

    Raises:
        ConfigError: An unknown or contradicting keyword.
        CheckpointError: Nothing can be loaded from ``model_name``.
        MissingDependencyError: Quantisation without bitsandbytes.
    """

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        self.config = from_mapping(HuggingFacePolicyConfig, kwargs)
        _check(self.config)
        lora = None if self.config.lora is None else from_mapping(LoraConfig, self.config.lora, "lora")
        self.model_name = model_name
        self.temperature = self.config.temperature
        self.model = load_causal_lm(model_name, self.config)
        if self.config.sequence_packing and not keeps_sequences_apart(self.model, _probe_tokens(self.model)):
            raise ConfigError(
                f"sequence_packing=True, but {type(self.model).__name__} lets packed sequences see each other. "
                "Type sequence_packing=False"
            )
        if lora is not None:
            _add_adapters(self.model, lora)
        if self.config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = _MasterAdamW(self.model, self.config.learning_rate, self.config.weight_decay)
        self._num_steps = 0
        self._reference: nn.Module | None = None
        self._checksum = _checksum(self.model)
        self._random = torch.Generator().manual_seed(self.config.seed)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Continue each row; ``logprobs`` are those that ``get_logprobs`` gives of the result."""
        return generate_tokens(self.model, data, self.config, greedy, self._random, self.config.tokenizer)

    def get_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """Log-probabilities of prompts, training data, or outputs of a generation (``output_ids``)."""
        return self._score(self.model, data)

    def get_reference_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """The same of the policy before its first step: a frozen copy made at first need, or the model without adapters.

        Raises:
            CheckpointError: The copy is needed after the first step, and ``model_name`` holds other weights by now.
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
            ``loss``, ``grad_norm`` (before clipping), ``num_tokens`` and the metrics of the loss.

        Raises:
            ConfigError: The batch does not fit the loss, or the loss cannot be used with ranks.
            NonFiniteError: Loss or gradient is NaN or infinite; the weights are as before.
        """
        data = BatchedDataDict(data)
        self.model.zero_grad(set_to_none=True)
        self.model.train()
        try:
            if isinstance(loss_fn, TokenLoss):
                metrics = self._accumulate(data, loss_fn)
            elif world_size() > 1:
                raise ConfigError(
                    f"{loss_fn} is no TokenLoss, and only a TokenLoss can be summed over {world_size()} ranks."
                )
            else:
                loss = loss_fn(self.model, data)
                loss.backward()
                metrics = {"loss": loss.item()}
        finally:
            self.model.eval()
        parameters = self._optimizer.parameters
        if world_size() > 1:
            _sum_gradients(parameters)
        grad_norm = float(nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))
        if not torch.isfinite(torch.tensor([metrics["loss"], grad_norm])).all():
            raise NonFiniteError(
                f"The loss is {metrics['loss']} and the gradient norm {grad_norm}; the step was not taken."
            )
        self._optimizer.step()
        self._num_steps += 1
        self.model.zero_grad(set_to_none=True)
        return {**metrics, "grad_norm": grad_norm}

    def _accumulate(self, data: BatchedDataDict, loss_fn: TokenLoss) -> dict[str, float]:
        if loss_fn.needs_reference and "reference_logprobs" not in data:
            data["reference_logprobs"] = self.get_reference_logprobs(data)["logprobs"]
        own = loss_fn.counts(data)
        counts = TokenCounts(*sum_over_ranks([own.tokens, own.samples]))
        totals: dict[str, float] = {}
        for rows in self._micro_batches(data, loss_fn.rows_per_sample):
            part = data.select_indices(rows)
            output = loss_fn.from_logprobs(self._logprobs(self.model, part), part, counts)
            output.loss.backward()
            for name, value in {**output.metrics, "loss": output.loss.detach()}.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        totals = dict(zip(totals, sum_over_ranks(list(totals.values())), strict=True))
        return {**totals, "num_tokens": counts.tokens}

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
        """float32 ``[B, S]`` of the rows; the columns that are padding in all of them are not computed."""
        ids, mask = tokens_and_mask(data)
        width = int(mask.sum(-1).max())
        device = next(model.parameters()).device
        logprobs = sequence_logprobs(
            model, ids[:, :width].to(device), mask[:, :width].to(device), self.temperature, self.config.sequence_packing
        )
        return F.pad(logprobs, (0, ids.shape[1] - width))

    def _micro_batches(self, data: BatchedDataDict, rows_per_sample: int) -> list[list[int]]:
        verify_right_padding(data, raise_error=True)
        lengths = tokens_and_mask(data)[1].sum(-1).tolist()
        size, config = self.config.micro_batch_size, self.config
        if config.max_tokens_per_microbatch is not None:
            return micro_batch_rows(lengths, config.max_tokens_per_microbatch, config.sequence_packing, rows_per_sample)
        if size % rows_per_sample:
            raise ConfigError(
                f"micro_batch_size={size} splits samples of {rows_per_sample} rows. Type micro_batch_size={rows_per_sample}"
            )
        return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]

    def _initial_model(self) -> nn.Module:
        if self._num_steps == 0:
            return copy.deepcopy(self.model)
        model = load_causal_lm(self.model_name, self.config)
        if _checksum(model) != self._checksum:
            raise CheckpointError(
                f"'{self.model_name}' no longer holds the weights that this policy began with, so they cannot be its "
                "reference. Call get_reference_logprobs once before the first train"
            )
        return model


class _MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) on float32 copies of parameters in 16 bits, and on others directly."""

    def __init__(self, model: nn.Module, learning_rate: float, weight_decay: float) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self.parameters]
        self._adamw = torch.optim.AdamW(self._masters, lr=learning_rate, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        self._adamw.step()
        for parameter, master in zip(self.parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None


def _check(config: HuggingFacePolicyConfig) -> None:
    for name, neutral in (("top_k", (None,)), ("top_p", (None, 1.0)), ("repetition_penalty", (1.0,))):
        value = getattr(config, name)
        if value not in neutral:
            raise ConfigError(
                f"{name}={value} changes what is sampled but not the log-probabilities that are trained. "
                f"Type {name}={neutral[-1]}, or generate with HuggingFaceGeneration"
            )
    if config.sequence_packing and config.max_tokens_per_microbatch is None:
        raise ConfigError(
            "sequence_packing=True needs the size of a packed row. Type e.g. max_tokens_per_microbatch=4096"
        )
    if str(config.torch_dtype).endswith("float16") and "bfloat16" not in str(config.torch_dtype):
        raise ConfigError(
            f"torch_dtype={config.torch_dtype} loses small gradients in training. Type torch_dtype='bfloat16'"
        )
    if (config.load_in_8bit or config.load_in_4bit) and config.lora is None:
        raise ConfigError("Quantised weights cannot be trained, only adapters on them. Type lora={}")


def _probe_tokens(model: Any) -> Tensor:
    tokens = torch.arange(1, 17) % model.config.get_text_config().vocab_size
    return tokens.view(2, 8).to(next(model.parameters()).device)


def _add_adapters(model: Any, lora: LoraConfig) -> None:
    """Put adapters into the layers; ``HFModel`` knows which of any family."""
    from rlinf.models.lora import apply_lora

    apply_lora(HFModel(model), lora)


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off inside, and on again whatever happens."""
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


def _checksum(model: nn.Module) -> list[float]:
    """Sum of each tensor: tells whether a folder still holds the same weights."""
    return [
        float(tensor.detach().double().sum()) for tensor in model.state_dict().values() if tensor.is_floating_point()
    ]
