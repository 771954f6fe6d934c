"""The interface of token policies, the keys of their data, and the protocol of their losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.generation_interface import GenerationDatumSpec, GenerationOutputSpec


class LogprobsSpec(TypedDict):
    """Log-probabilities of given tokens.

    Attributes:
        logprobs: float32 ``[B, S]``; column ``i`` is the log-probability of token ``i`` given the tokens before it. Column 0
            and padding are 0.
    """

    logprobs: torch.Tensor
    __extra__: Any


class TrainingDatumSpec(TypedDict, total=False):
    """Training data. Each loss (``rlinf.llm.losses``) documents which of the optional keys it needs.

    Attributes:
        input_ids: int64 ``[B, S]``, padded on the right.
        attention_mask: ``[B, S]``, 1 for tokens, 0 for padding.
        token_mask: ``[B, S]``, 1 for tokens to train on. Default: the response if ``generation_lengths`` is present, else all
            tokens but the first.
        sample_mask: ``[B]``, 0 for rows to ignore.
        advantages: float32 ``[B]`` or ``[B, S]``.
        old_logprobs: float32 ``[B, S]`` of the policy before the update.
        reference_logprobs: float32 ``[B, S]`` of the frozen reference policy.
        generation_logprobs: float32 ``[B, S]`` of the generation backend.
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
    """A loss that runs the model itself; ``PolicyInterface.train`` requires no more.

    The losses of this package are also ``TokenLoss``, so a policy can evaluate them in micro-batches.
    """

    def __call__(self, model: Any, data: BatchedDataDict[TrainingDatumSpec]) -> Tensor:
        """Return the scalar loss of a batch."""
        ...


class PolicyInterface(ABC):
    """A policy that generates, scores and learns. Tensors are padded on the right."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate a completion per prompt; ``greedy`` takes the most likely token instead of sampling."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """Return the log-probabilities of the tokens of each row, without gradients."""

    def get_reference_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobsSpec]:
        """Return ``get_logprobs`` of the policy before training, for losses that need a reference."""
        raise NotImplementedError(f"{type(self).__name__} keeps no reference policy")

    @abstractmethod
    def train(self, data: BatchedDataDict[TrainingDatumSpec], loss_fn: LossFunction) -> dict[str, Any]:
        """Take one optimiser step on the batch and return at least ``loss``."""
