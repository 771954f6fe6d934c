"""Interface for token policies, the keys in their data, and the protocol for their losses."""

from abc import ABC, abstractmethod
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.generation_interface import GenerationDatumSpec, GenerationOutputSpec


class LogprobsSpec(TypedDict):
    """Token log-probabilities.

    ``logprobs`` is float32 ``[B, S]``; column ``i`` belongs to token ``i`` given the previous ones. Column 0 and padding are 0.
    """

    logprobs: torch.Tensor
    __extra__: Any


class TrainingDatumSpec(TypedDict, total=False):
    """Training data. Each loss (``rlinf.llm.losses``) documents its optional keys.

    Attributes:
        input_ids: int64 ``[B, S]``, padded on the right.
        attention_mask: ``[B, S]``, 1 for tokens, 0 for padding.
        token_mask: ``[B, S]``, 1 for trained tokens. Default: the response or, without ``generation_lengths``, all tokens but the first.
        sample_mask: ``[B]``, 0 for rows to ignore.
        advantages: float32 ``[B]`` or ``[B, S]``.
        old_logprobs: float32 ``[B, S]``, log-probabilities under the policy before the update.
        reference_logprobs: float32 ``[B, S]``, log-probabilities under the frozen reference policy.
        generation_logprobs: float32 ``[B, S]``, log-probabilities reported by the generation backend.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    token_mask: torch.Tensor
    sample_mask: torch.Tensor
    advantages: torch.Tensor
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    generation_logprobs: torch.Tensor
    __extra__: Any


class LossFunction(Protocol):
    """Loss that runs the model itself. This package's losses are also ``TokenLoss``, which supports micro-batches."""

    def __call__(self, model: Any, data: BatchedDataDict[TrainingDatumSpec]) -> Tensor:
        """Return the scalar loss of a batch."""
        ...


class PolicyInterface(ABC):
    """Policy that generates, scores and learns. All tensors are right-padded."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate one completion per prompt, sampled or ``greedy``."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """Return the log-probabilities of all tokens, without gradients."""

    def get_reference_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """Return ``get_logprobs`` of the initial policy, for losses that need a reference."""
        raise NotImplementedError(f"{type(self).__name__} has no reference policy")

    @abstractmethod
    def train(self, data: BatchedDataDict[TrainingDatumSpec], loss_fn: LossFunction) -> dict[str, Any]:
        """Take one optimiser step on the batch, and return metrics that include at least ``loss``."""
