"""Generation with transformers' ``generate`` and a custom sampler."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig as HFGenerationConfig
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.llm.batch_checks import verify_right_padding, verify_token_ids
from rlinf.llm.batched_data_dict import BatchedDataDict, tokens_and_mask
from rlinf.llm.causal_lm import CausalLMConfig, load_causal_lm, padding_token
from rlinf.llm.decoding import next_token_only, static_cache
from rlinf.llm.end_tokens import end_tokens
from rlinf.llm.generation_interface import (
    SEEDS_KEY,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    generation_output,
)
from rlinf.llm.logprobs import TOKEN_TYPE_KEYS, context_length, image_inputs
from rlinf.llm.packing import ignores_left_padding
from rlinf.models.precision import evaluation_mode
from rlinf.models.sampling import sample_tokens, token_logprobs
from rlinf.options import from_mapping, option

_CONSUMED = ("input_ids", "attention_mask", "output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs",
             SEEDS_KEY)  # fmt: skip


@dataclass
class SamplingConfig:
    """Sampling settings; those in the checkpoint's generation_config are ignored."""

    max_new_tokens: int = option(128, "Maximum response length in tokens.", minimum=1)
    temperature: float = option(1.0, "Sampling temperature, which divides the logits.", minimum=1e-6)
    top_p: float | None = option(None, "Nucleus sampling probability.", minimum=1e-6, maximum=1)
    top_k: int | None = option(None, "Sample from the k most likely tokens.", minimum=1)
    repetition_penalty: float = option(1.0, "Repetition penalty (Keskar et al. 2019).", minimum=1e-6)
    allowed_token_ids: list[int] | None = option(None, "Tokens that may be sampled, such as action bins; null: all.")
    do_sample: bool = option(True, "Sample tokens; false: always decode greedily.")
    pad_token_id: int | None = option(None, "Padding token; null: the model's own.")
    eos_token_id: int | list[int] | None = option(None, "End tokens; null: the model's own; []: none.")
    max_model_len: int | None = option(None, "Maximum tokens in prompt and response; null: model's limit.", minimum=1)
    seed: int = option(0, "Seed for sampling.")


OTHER_NAMES = {
    "max_tokens": "max_new_tokens=<number>",
    "stop": "eos_token_id=[<ids>]; text is not decoded here",
    "stop_strings": "eos_token_id=[<ids>]; text is not decoded here",
    "stop_token_ids": "eos_token_id=[<ids>]",
    "ignore_eos": "eos_token_id=[]",
}
"""Setting names from different libraries, and their equivalents here."""
MEDIA_TOKEN = re.compile(r"(image|video|audio|vision|boi|eoi|boa|eoa)_(\w+_)?token_(id|index)")
"""Configuration fields that contain the tokens for images, videos and audio."""


@dataclass
class HuggingFaceGenerationConfig(CausalLMConfig, SamplingConfig):
    """Keyword arguments for ``HuggingFaceGeneration``."""

    backend: str = option("hf", "Backend in a GenerationConfig, which must be hf here.", choices=("hf",))


class HuggingFaceGeneration(GenerationInterface):
    """Generation backend with a transformers model.

    Media tokens (``media_tokens``) are never sampled, because a completion contains no media.

    Output ``logprobs`` are computed from ``softmax(logits / temperature)`` over ``allowed_token_ids``, before top-k, top-p and the
    repetition penalty. If none of these four is set, they equal ``get_logprobs`` of a policy with equal temperature. Top-k, top-p and
    the penalty make sampling off-policy.

    Args:
        model_name: Folder or hub id.
        **kwargs: Fields of ``HuggingFaceGenerationConfig``.
    """

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        reject_other_names(kwargs)
        self.config = from_mapping(HuggingFaceGenerationConfig, kwargs)
        self.model = load_causal_lm(model_name, self.config)
        self.temperature = self.config.temperature  # also applies to the log-probabilities
        self._device = next(self.model.parameters()).device
        self._movable = not hasattr(self.model, "hf_device_map")
        self._random = torch.Generator().manual_seed(self.config.seed)

    def prepare_for_generation(self, *args: object, **kwargs: object) -> None:
        """Move the weights back to their original device. Idempotent."""
        if self._movable:
            self.model.to(self._device)

    def finish_generation(self, *args: object, **kwargs: object) -> None:
        """Move the weights to main memory, unless ``device_map`` distributes the model. Idempotent."""
        if self._movable and self._device.type != "cpu":
            self.model.to("cpu")
            torch.accelerator.empty_cache()

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate one completion per row; the batch's remaining rows affect it only through floating-point rounding."""
        self.prepare_for_generation()
        return generate_tokens(self.model, data, self.config, greedy, self._random, self.config.tokenizer)


def reject_other_names(settings: Iterable[str]) -> None:
    """Raise ConfigError for sampling settings that have a different name here."""
    for name in settings:
        if name in OTHER_NAMES:
            raise ConfigError(f"There is no setting '{name}'. Pass {OTHER_NAMES[name]}")


def verify_sampling_tokens(config: SamplingConfig, vocab_size: int) -> None:
    """Raise ConfigError if a setting contains tokens outside the vocabulary, or allows no tokens."""
    for name in ("allowed_token_ids", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        ids = [] if value is None else [value] if isinstance(value, int) else value
        unknown = sorted({token for token in ids if not 0 <= token < vocab_size})
        if unknown or (name == "allowed_token_ids" and value == []):
            raise ConfigError(
                f"{name} contains {unknown[:8]}; expected ids from 0 to {vocab_size - 1}. Pass {name}=None"
            )


def media_tokens(config: Any) -> list[int]:
    """Return a vision-language model's tokens for images, videos and audio, as listed in its configuration."""
    vocab_size = config.get_text_config().vocab_size
    named = {value for name, value in config.to_dict().items() if MEDIA_TOKEN.fullmatch(name) and type(value) is int}
    return sorted(token for token in named if 0 <= token < vocab_size)


@torch.no_grad()
def generate_tokens(
    model: nn.Module,
    data: BatchedDataDict[GenerationDatumSpec],
    config: SamplingConfig,
    greedy: bool,
    random: torch.Generator,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> BatchedDataDict[GenerationOutputSpec]:
    """Complete right-padded rows with any causal language model from transformers.

    Args:
        random: CPU generator; row ``i`` uses the ``i``-th random numbers drawn in a call. Not used with ``sampling_seeds``.
        tokenizer: Supplies padding and end tokens that both ``config`` and the model lack.
    """
    data = BatchedDataDict(data)
    vocab_size = model.config.get_text_config().vocab_size
    verify_token_ids(data, vocab_size)
    verify_right_padding(data, raise_error=True)
    verify_sampling_tokens(config, vocab_size)
    ids, mask = tokens_and_mask(data)
    prompt_lengths = mask.sum(-1).tolist()
    ends = end_tokens(model, tokenizer, config.eos_token_id)
    pad = padding_token(model, tokenizer, config.pad_token_id, ends)
    limits = _new_tokens_allowed(prompt_lengths, config, context_length(model))
    uniforms = _uniforms(data, config.max_new_tokens, random) if config.do_sample and not greedy else None
    # Move all inputs for decoding to the device once instead of at every token.
    device = next(model.parameters()).device
    columns, banned = None, torch.tensor(media_tokens(model.config), dtype=torch.int64, device=device)
    if config.allowed_token_ids is not None:
        columns = torch.tensor(sorted(set(config.allowed_token_ids)), device=device)
        banned = banned[:0]
    responses, logprobs = [ids] * data.size, [ids] * data.size
    may_pad = len(set(prompt_lengths)) == 1 or _ignores_left_padding(model)
    # Rows near the end of the context must stop earlier, and some models are affected by left padding, so batch only equal rows.
    groups = [(allowed, 0 if may_pad else length) for allowed, length in zip(limits, prompt_lengths, strict=True)]
    for group in sorted(set(groups)):
        rows, allowed = [row for row, value in enumerate(groups) if value == group], group[0]
        prompts = [ids[row, : prompt_lengths[row]] for row in rows]
        drawn = None if uniforms is None else to_device(uniforms[rows], device)
        sampler = _Sampler(config, drawn, columns, banned)
        inputs = image_inputs(model, data.select_indices(rows), max(map(len, prompts)))
        settings = {"max_new_tokens": allowed, "pad_token_id": pad, "eos_token_id": ends or None}
        completions = _continue(model, prompts, inputs, sampler, settings)
        for row, (tokens, scores) in zip(rows, completions, strict=True):
            responses[row], logprobs[row] = tokens, scores
    prompts = [row[:length].long() for row, length in zip(ids, prompt_lengths, strict=True)]
    extra = {key: value for key, value in data.items() if key not in _CONSUMED}
    return BatchedDataDict({**extra, **generation_output(prompts, responses, logprobs, pad)})


def _uniforms(data: BatchedDataDict, num_tokens: int, random: torch.Generator) -> Tensor:
    """Return random numbers ``[B, num_tokens]`` for a call, drawn from its row seeds if present."""
    if SEEDS_KEY not in data:
        return torch.rand(data.size, num_tokens, generator=random)
    rows = [torch.Generator().manual_seed(seed) for seed in data[SEEDS_KEY].tolist()]
    return torch.stack([torch.rand(num_tokens, generator=row) for row in rows])


def _ignores_left_padding(model: nn.Module) -> bool:
    """Return whether a model ignores left padding, which some recurrent layers do not (tested once per model)."""
    if not hasattr(model, "ignores_left_padding"):
        with evaluation_mode(model):
            model.ignores_left_padding = ignores_left_padding(model)
    return model.ignores_left_padding


def _continue(
    model: nn.Module, prompts: list[Tensor], inputs: dict[str, Tensor], sampler: _Sampler, settings: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Return response tokens and log-probabilities per prompt; ``settings`` are arguments for ``generate``."""
    input_device, device = prompts[0].device, next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), settings["pad_token_id"], dtype=torch.long, device=input_device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
        for key in TOKEN_TYPE_KEYS & inputs.keys():
            inputs[key][row] = inputs[key][row].roll(width - len(prompt))
    ids, mask = to_device(ids, device), to_device(mask, device)  # one copy instead of one per row
    sampler.prompt_mask = mask.bool()
    # The checkpoint's generation_config would add its own sampling settings.
    saved_config, model.generation_config = model.generation_config, HFGenerationConfig()
    try:
        with evaluation_mode(model), next_token_only(model, sampler.columns):
            sequences = model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=static_cache(model, width + settings["max_new_tokens"]),
                **inputs,
                generation_config=HFGenerationConfig(do_sample=False, **settings),
                logits_processor=LogitsProcessorList([sampler]),
                # The weights are already gathered, so ranks need not synchronise at each token.
                synced_gpus=False,
            )
    finally:
        model.generation_config = saved_config
    tokens, logprobs = sequences[:, width:].to(input_device), torch.stack(sampler.logprobs, dim=1).to(input_device)
    ends = torch.tensor(settings["eos_token_id"] or [], device=input_device, dtype=tokens.dtype)
    ended = torch.isin(tokens, ends)
    counts = torch.where(ended.any(-1), ended.int().argmax(-1) + 1, tokens.shape[1]).tolist()
    return [(tokens[row, :count], logprobs[row, :count]) for row, count in enumerate(counts)]


class _Sampler(LogitsProcessor):
    """Logits processor that samples each row's token and masks all remaining tokens, so that greedy search in ``generate`` selects it.

    This way, ``generate`` handles the architecture's caches and inputs, while a sample depends only on its row. ``logprobs`` contains
    float32 ``[B]`` per step. ``prompt_mask`` bool ``[B, S]`` must be set before the first step.
    """

    prompt_mask: Tensor

    def __init__(self, config: SamplingConfig, uniforms: Tensor | None, columns: Tensor | None, banned: Tensor) -> None:
        self.config, self.columns, self.banned = config, columns, banned
        # A uniform random number that rounds to 1 would select the last token even with probability 0.
        self.uniforms = None if uniforms is None else uniforms.clamp(max=1 - 1e-6)
        self.logprobs: list[Tensor] = []
        self._restrictions = LogitsProcessorList()
        if config.top_k is not None:
            self._restrictions.append(TopKLogitsWarper(config.top_k))
        if config.top_p is not None and config.top_p < 1:
            self._restrictions.append(TopPLogitsWarper(config.top_p))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = self._allowed(self._penalize(input_ids, scores.float())) / self.config.temperature
        if len(self.banned):
            logits.index_fill_(1, self.banned, -torch.inf)
        if self.uniforms is None:
            tokens = logits.argmax(-1)
        else:
            uniforms = self.uniforms[:, len(self.logprobs)]
            tokens = sample_tokens(self._restrictions(input_ids, logits), True, uniforms=uniforms)
        self.logprobs.append(token_logprobs(self._allowed(scores), tokens, self.config.temperature)[0])
        tokens = tokens if self.columns is None else self.columns[tokens]
        return torch.full_like(scores, -torch.inf).scatter(1, tokens.unsqueeze(1), 0.0)

    def _allowed(self, scores: Tensor) -> Tensor:
        return scores if self.columns is None else scores[:, self.columns]

    def _penalize(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Apply the repetition penalty to each row's tokens, excluding padding."""
        penalty = self.config.repetition_penalty
        if penalty == 1:
            return scores
        real = torch.ones_like(input_ids, dtype=torch.bool)
        real[:, : self.prompt_mask.shape[1]] = self.prompt_mask
        seen = torch.zeros_like(scores).scatter_add(1, input_ids, real.to(scores.dtype)) > 0
        return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def _new_tokens_allowed(prompt_lengths: list[int], config: SamplingConfig, declared: int | None) -> list[int]:
    limit = config.max_model_len or declared
    if limit is None:
        return [config.max_new_tokens] * len(prompt_lengths)
    if declared and limit > declared:
        raise ConfigError(f"max_model_len={limit} exceeds the model's limit. Pass max_model_len={declared}")
    longest = max(prompt_lengths)
    if longest >= limit:
        raise ConfigError(f"A prompt has {longest} tokens, but max_model_len={limit} allows at most {limit - 1}")
    return [min(config.max_new_tokens, limit - length) for length in prompt_lengths]
