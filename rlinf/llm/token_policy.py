"""Base class for token policies, with their settings, scoring and training in micro-batches, and the reference policy."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlinf.distributed.deadlines import heartbeat
from rlinf.distributed.parallel import full_tensor
from rlinf.distributed.process_group import sum_over_ranks
from rlinf.distributed.transfers import fetch
from rlinf.errors import CheckpointError, ConfigError
from rlinf.llm.batch_checks import verify_right_padding, verify_token_ids
from rlinf.llm.batched_data_dict import BatchedDataDict, tokens_and_mask
from rlinf.llm.generation_interface import GenerationDatumSpec
from rlinf.llm.hf_generation import SamplingConfig
from rlinf.llm.losses import TokenCounts, TokenLoss
from rlinf.llm.packing import micro_batch_rows
from rlinf.llm.policy_interface import LogprobsSpec, LossFunction, PolicyInterface, TrainingDatumSpec
from rlinf.memory import memory_metrics
from rlinf.models.loading import num_positions
from rlinf.models.precision import evaluation_mode, torch_dtype_of
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.train_step import TrainStep
from rlinf.options import option
from rlinf.seeding import derive_seed

Result = TypeVar("Result")

SUM_CHUNK = 2**24
"""Number of elements converted to float64 at a time, which take 128 MiB."""
DEFAULT_ROWS = 8
"""``micro_batch_size=None`` without an estimate of memory."""


@dataclass
class TokenPolicyConfig(SamplingConfig):
    """Keyword arguments shared by all token policies. ``temperature`` applies to generation and all log-probabilities."""

    learning_rate: float = option(1e-5, "Learning rate.", minimum=0, maximum=1)
    weight_decay: float = option(0.0, "Weight decay.", minimum=0)
    optimizer: str = option("AdamW", "Optimiser.", choices=("AdamW", "Adam"))
    betas: list[float] = option([0.9, 0.999], "Adam betas.")
    epsilon: float = option(1e-8, "Adam epsilon.", minimum=0)
    max_grad_norm: float = option(1.0, "Gradient norm above which gradients are clipped.", minimum=1e-6)
    micro_batch_size: int | None = option(None, "Rows per pass; null: 8, or as the GPU's memory allows.", minimum=1)
    max_tokens_per_microbatch: int | None = option(None, "Limit micro-batches by tokens instead of rows.", minimum=1)


class TokenPolicy(PolicyInterface):
    """Policy based on a causal language model.

    A subclass loads ``model``, sets ``model_name``, ``config`` and ``temperature``, and calls ``_init_training``.
    """

    model: nn.Module
    config: TokenPolicyConfig
    model_name: str
    temperature: float

    def _init_training(self, text_config: Any, rank: int, **train_step: Any) -> None:
        """Create the optimiser and the random generator. Rank 0 samples with ``seed`` itself, all remaining ranks with derived seeds."""
        config = self.config
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = MasterAdamW(
            trained, decoupled=config.optimizer == "AdamW", lr=config.learning_rate, weight_decay=config.weight_decay,
            betas=tuple(config.betas), eps=config.epsilon,
        )  # fmt: skip
        self._optimizer.check_trains(self.model)
        self._train_step = TrainStep(self._optimizer, config.max_grad_norm, **train_step)
        seed = config.seed if rank == 0 else derive_seed(config.seed, "generation", rank)
        self._random = torch.Generator().manual_seed(seed)
        self._text_config = text_config
        self._reference: nn.Module | None = None
        self._checksum: list[float] | None = None

    @property
    def optimizer(self) -> MasterAdamW:
        """The model's optimiser."""
        return self._optimizer

    @property
    def num_steps(self) -> int:
        """Number of optimiser steps taken."""
        return self._train_step.num_steps

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step, or of the next one if there has been no step yet."""
        return self._optimizer.param_groups[0]["lr"]

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate for the next steps."""
        self._train_step.set_learning_rate(rate)

    def get_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """Return log-probabilities for prompts, training data or generation outputs (``output_ids``)."""
        return self._score(self.model, data)

    def get_reference_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """Return ``get_logprobs`` of the initial policy; raise CheckpointError if ``model_name`` has changed."""
        if self._reference is None:
            initial = self._load()
            self._check_initial(initial)
            self._reference = initial.requires_grad_(False).eval()
        return self._score(self._reference, data)

    def train(self, data: BatchedDataDict[TrainingDatumSpec], loss_fn: LossFunction) -> dict[str, Any]:
        """Take one optimiser step.

        Return ``loss``, ``grad_norm`` (before clipping), ``num_tokens``, the loss's metrics, and ``memory/...``. Raise ConfigError on all
        ranks if any rank's rows are invalid for the loss, or the policy does not support the loss. Raise NonFiniteError, without
        changing the weights, if the loss or a gradient is NaN or infinite.

        Args:
            data: This data-parallel rank's rows. If a ``TokenLoss`` needs ``reference_logprobs`` that are missing, they are computed.
            loss_fn: A ``TokenLoss`` is evaluated in micro-batches. For any different loss, ``HuggingFacePolicy`` calls
                ``loss_fn(model, data)`` with the complete batch, because it is unknown how the loss averages.
        """
        data = BatchedDataDict(data)
        self._check_loss(loss_fn)
        self._optimizer.zero_grad()
        self.model.train()
        try:
            metrics = self._accumulate(data, loss_fn)
        finally:
            self.model.eval()
        # Compute the checksum before the first step changes the weights, so that reloading the reference later can be verified.
        if self._train_step.num_steps == 0 and self._reference is None:
            self._checksum = weights_checksum(self.model)
        norm = self._train_step.apply(metrics["loss"])
        return {**metrics, "grad_norm": norm, **memory_metrics()}

    @abstractmethod
    def _load(self) -> nn.Module:
        """Load the model from ``model_name``."""

    @abstractmethod
    def _accumulate(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        """Accumulate gradients over micro-batches and ranks; return metrics summed over all ranks."""

    @abstractmethod
    def _logprobs(self, model: nn.Module, data: BatchedDataDict) -> Tensor:
        """Return log-probabilities for one micro-batch, float32 ``[B, S]``."""

    def _sum_values(self, values: list[float]) -> list[float]:
        """Sum values over the data-parallel ranks."""
        return sum_over_ranks(values)

    def _check_loss(self, loss_fn: LossFunction) -> None:
        if not callable(loss_fn) or isinstance(loss_fn, type):
            raise ConfigError(f"loss_fn is {loss_fn!r}; expected a loss. Pass e.g. rlinf.algorithms.NLLLossFn()")
        if isinstance(loss_fn, TokenLoss) and loss_fn.temperature not in (1.0, self.temperature):
            raise ConfigError(
                f"{type(loss_fn).__name__} has temperature={loss_fn.temperature}, but the policy scores with "
                f"temperature={self.temperature}. Pass temperature={self.temperature} in the loss, or leave it out"
            )

    def _prepare(self, data: BatchedDataDict, loss_fn: TokenLoss) -> tuple[TokenCounts, list[BatchedDataDict]]:
        """Return the counts over all ranks, and this rank's micro-batches, with reference log-probabilities if needed."""

        def prepare() -> tuple[TokenCounts, list[list[int]], bool]:
            is_missing = loss_fn.needs_reference and "reference_logprobs" not in data
            return loss_fn.counts(data), self._micro_batches(data, loss_fn.rows_per_sample), is_missing

        local, rows, is_missing = self._raise_on_all_ranks(prepare)
        tokens, samples, num_missing = self._sum_values([local.tokens, local.samples, float(is_missing)])
        counts = TokenCounts(tokens, samples)
        if num_missing:
            reference = self.get_reference_logprobs(data)["logprobs"]
            data.setdefault("reference_logprobs", reference)
        parts = [data.select_indices(part_rows) for part_rows in rows]

        # Do a dry run, so that the loss can reject its data before the passes in which ranks wait for each other.
        def check() -> None:
            for part in parts:
                loss_fn.from_logprobs(torch.zeros(tokens_and_mask(part)[0].shape), part, counts)

        self._raise_on_all_ranks(check)
        return counts, parts

    def _raise_on_all_ranks(self, function: Callable[[], Result]) -> Result:
        """Run a function; if any data-parallel rank raises ConfigError, raise it on all, so that none hangs in a collective."""
        result, error = None, None
        try:
            result = function()
        except ConfigError as raised:
            error = raised
        num_failed = int(self._sum_values([float(error is not None)])[0])
        if error is not None:
            raise error
        if num_failed:
            raise ConfigError(f"{num_failed} other rank(s) rejected their rows, so no step was taken")
        return result

    @torch.no_grad()
    def _score(self, model: nn.Module, data: BatchedDataDict) -> BatchedDataDict[LogprobsSpec]:
        data = BatchedDataDict(data)
        ids, _ = tokens_and_mask(data)
        logprobs = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        batches, scores = self._micro_batches(data, rows_per_sample=1), []
        with evaluation_mode(model):
            for rows in batches:
                scores.append(self._logprobs(model, data.select_indices(rows)))
                heartbeat()
        # Copy once at the end, so that micro-batches do not wait for the device.
        if scores:
            logprobs[[row for rows in batches for row in rows]] = torch.cat(scores).to(ids.device)
        return BatchedDataDict({"logprobs": logprobs})

    def _micro_batches(self, data: BatchedDataDict, rows_per_sample: int) -> list[list[int]]:
        """Check a batch and return the row numbers for each forward pass; ``rows_per_sample`` consecutive rows stay together."""
        text = self._text_config
        verify_token_ids(data, text.vocab_size)
        verify_right_padding(data, raise_error=True)
        lengths = tokens_and_mask(data)[1].sum(-1).tolist()
        context = num_positions(text)
        if context is not None and max(lengths) > context:
            raise ConfigError(f"A row has {max(lengths)} tokens; expected at most the model's {context} positions")
        size = self._rows_per_pass(max([1, *lengths]))
        if self.config.max_tokens_per_microbatch is not None:
            packed = getattr(self.config, "sequence_packing", False)
            return micro_batch_rows(lengths, self.config.max_tokens_per_microbatch, packed, rows_per_sample)
        if self.config.micro_batch_size is None:
            size = max(rows_per_sample, size - size % rows_per_sample)
        if size % rows_per_sample:
            raise ConfigError(f"micro_batch_size={size} splits a sample. Pass micro_batch_size={rows_per_sample}")
        return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]

    def _rows_per_pass(self, length: int) -> int:
        """Return the rows of a micro-batch whose longest row has ``length`` tokens."""
        return self.config.micro_batch_size or DEFAULT_ROWS

    def _check_initial(self, model: nn.Module) -> None:
        """Raise CheckpointError if a reloaded model does not have the initial weights."""
        expected = self._checksum or weights_checksum(self.model)
        pairs = zip(weights_checksum(model), expected, strict=True)
        # Allow a tolerance, because shards are summed in a different order.
        if not all(math.isclose(actual, initial, rel_tol=1e-9, abs_tol=1e-9) for actual, initial in pairs):
            raise CheckpointError(
                f"'{self.model_name}' no longer has the initial weights. Call get_reference_logprobs before the first train"
            )


def check_trainable(config: TokenPolicyConfig) -> None:
    """Raise ConfigError for float16 weights, and for settings that make sampling differ from the scored distribution."""
    neutral_values = {
        "top_k": (None,), "top_p": (None, 1.0), "repetition_penalty": (1.0,), "allowed_token_ids": (None,),
    }  # fmt: skip
    for name, neutral in neutral_values.items():
        value = getattr(config, name)
        if value not in neutral:
            raise ConfigError(f"{name}={value} changes only the sampling distribution. Pass {name}={neutral[-1]}")
    if torch_dtype_of(config.torch_dtype) == torch.float16:
        raise ConfigError(f"torch_dtype={config.torch_dtype} loses small gradients. Pass torch_dtype='bfloat16'")


def weights_checksum(model: nn.Module) -> list[float]:
    """Return the sum of each tensor, to detect changed weights in a folder (a collective call with shards)."""
    sums = [full_tensor(_sum(p.detach())) for p in model.parameters() if p.is_floating_point()]
    return fetch(sums)


def _sum(tensor: Tensor) -> Tensor:
    """Return a tensor's sum in float64."""
    # Sum in chunks, because torch makes a float64 copy of all elements that it sums in one call.
    if tensor.numel() <= SUM_CHUNK or isinstance(tensor, DTensor):
        return tensor.double().sum()
    return torch.stack([part.double().sum() for part in tensor.flatten().split(SUM_CHUNK)]).sum()
