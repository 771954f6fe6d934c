"""Interface for generation backends, and the keys in their data and settings."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf.llm.batched_data_dict import BatchedDataDict

SEEDS_KEY = "sampling_seeds"


class GenerationDatumSpec(TypedDict):
    """Prompts to complete.

    Attributes:
        input_ids: int64 ``[B, S]``, padded on the right.
        attention_mask: ``[B, S]``, 1 for tokens, 0 for padding; its sums are the prompt lengths.
        sampling_seeds: int64 ``[B]``, optional seed per row, which makes a row's samples independent of batch, rank and earlier calls.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    __extra__: Any


class GenerationOutputSpec(TypedDict):
    """Prompts and responses, with the prompts' remaining keys.

    Attributes:
        output_ids: int64 ``[B, S]``, prompt and response without padding between them, padded on the right.
        generation_lengths: int64 ``[B]``, number of tokens in the response, including the end-of-sequence token.
        unpadded_sequence_lengths: int64 ``[B]``, number of tokens in prompt and response.
        logprobs: float32 ``[B, S]``, log-probabilities of the generated tokens; 0 for prompts and padding.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    __extra__: Any


def generation_output(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], logprobs: Sequence[Tensor], pad_token_id: int
) -> BatchedDataDict[GenerationOutputSpec]:
    """Build a ``GenerationOutputSpec`` from each row's prompt, response (both int64 ``[length]``) and float32 log-probabilities."""
    rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    scores = [F.pad(values, (len(prompt), 0)) for prompt, values in zip(prompts, logprobs, strict=True)]
    device = rows[0].device
    return BatchedDataDict(
        {
            "output_ids": pad_sequence(rows, batch_first=True, padding_value=pad_token_id),
            "generation_lengths": torch.tensor([len(response) for response in responses], device=device),
            "unpadded_sequence_lengths": torch.tensor([len(row) for row in rows], device=device),
            "logprobs": pad_sequence(scores, batch_first=True),
        }
    )


class GenerationConfig(TypedDict, total=False):
    """Settings for a generation backend; ``None`` or a missing key means no restriction.

    ``backend`` is ``"hf"`` or ``"vllm"``, and ``model_name`` is a folder or hub id.
    ``rlinf.llm.hf_generation.SamplingConfig`` documents the remaining keys.
    """

    backend: str
    model_name: str
    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    repetition_penalty: float
    allowed_token_ids: list[int] | None
    do_sample: bool
    pad_token_id: int
    eos_token_id: int | list[int]


class VllmConfig(GenerationConfig, total=False):
    """Settings for vLLM. Pass engine arguments in ``vllm_cfg`` or at the top level; ``seed`` is the sampling seed (default 0)."""

    vllm_cfg: dict[str, Any]
    seed: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    max_model_len: int


class GenerationInterface(ABC):
    """Base class for backends that generate token sequences."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate one completion per row; see ``PolicyInterface.generate``."""

    @abstractmethod
    def prepare_for_generation(self, *args: object, **kwargs: object) -> None:
        """Allocate memory and load weights. Idempotent."""

    @abstractmethod
    def finish_generation(self, *args: object, **kwargs: object) -> None:
        """Free the accelerator's memory. Idempotent."""
