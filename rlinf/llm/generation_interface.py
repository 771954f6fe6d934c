"""What an engine that generates tokens can do, and the keys of its data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypedDict

import torch

from rlinf.llm.batched_data_dict import BatchedDataDict


class GenerationDatumSpec(TypedDict):
    """Prompts.

    Attributes:
        input_ids: int64 ``[B, S]``, padded on the right.
        attention_mask: ``[B, S]``, 1 for tokens, 0 for padding; it gives the lengths.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    __extra__: Any


class GenerationOutputSpec(TypedDict):
    """Prompts and responses. Further keys of the prompts are passed on.

    Attributes:
        output_ids: int64 ``[B, S]``, prompt and response without padding between them, padded on the right.
        generation_lengths: int64 ``[B]``, tokens of the response, the end-of-sequence token included.
        unpadded_sequence_lengths: int64 ``[B]``, tokens of prompt and response.
        logprobs: float32 ``[B, S]`` of the generated tokens; 0 for the prompt and for padding.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    __extra__: Any


class GenerationConfig(TypedDict, total=False):
    """Settings of an engine. ``None`` or a missing key is not a restriction.

    Attributes:
        backend: ``"hf"`` or ``"vllm"``.
        model_name: Folder or hub id.
        max_new_tokens: Largest number of tokens of a response; missing: 128.
        temperature: Divides the logits.
        top_p: Sample from the most likely tokens whose probabilities add up to this.
        top_k: Sample from this many most likely tokens.
        repetition_penalty: Divides positive (multiplies negative) logits of tokens that came before (Keskar et al. 2019).
        allowed_token_ids: Choose among these tokens only.
        do_sample: False: greedy, whatever ``generate`` is called with.
        pad_token_id: Fills rows that ended.
        eos_token_id: Ends a row; one id or several.
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
    """Settings of vLLM: engine arguments lie in ``vllm_cfg``, or next to the others.

    Attributes:
        vllm_cfg: ``tensor_parallel_size``, ``gpu_memory_utilization``, ``max_model_len`` and further engine arguments.
        seed: Of the sampling (0).
    """

    vllm_cfg: dict[str, Any]
    seed: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    max_model_len: int


class GenerationInterface(ABC):
    """An engine that continues token sequences."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Continue each row.

        Args:
            data: Prompts.
            greedy: Take the most likely token instead of sampling.
        """

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Get memory and weights in place; again and again does no harm."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """Give the accelerator's memory back; again and again does no harm."""
