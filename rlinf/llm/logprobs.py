"""Log-probabilities of the tokens of whole sequences, for every caller the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlinf.errors import ConfigError
from rlinf.llm.batch_checks import verify_right_padding, verify_token_ids
from rlinf.llm.batched_data_dict import IMAGE_KEYS, BatchedDataDict, join_padded, tokens_and_mask
from rlinf.llm.packing import micro_batch_rows, pack_rows
from rlinf.models.positions import num_positions
from rlinf.models.sampling import token_logprobs

TOKEN_TYPE_KEYS = {"token_type_ids", "mm_token_type_ids"}
"""``[B, S]`` that tell image tokens from text; generated tokens are text, which is 0."""
CHUNK_LOGITS = 2**25
"""Logits that exist at a time, 128 MiB of float32, of which a forward and backward pass holds up to five arrays."""
_TRIAL_COLUMNS = 2
_WHOLE_LOGITS: WeakSet[nn.Module] = WeakSet()  # models whose logits are more than ``_head_logits`` knows of
_KNOWN = {"input_ids", "attention_mask", "labels", *IMAGE_KEYS, *TOKEN_TYPE_KEYS}


def batch_logprobs(model: Any, data: Mapping[str, Any], temperature: float = 1.0, packed: bool = False) -> Tensor:
    """Score the rows of a batch, images included; columns that are padding in all rows are not computed.

    What padding holds does not matter.

    Args:
        model: Causal language model whose output has ``logits``.
        data: Prompts, training data or outputs of a generation, padded on the right.
        temperature: Divides the logits.
        packed: Lay the rows end to end.

    Returns:
        float32 ``[B, S]``, as ``sequence_logprobs``.

    Raises:
        ConfigError: The batch has images that the model does not take, or that are to be packed; or a row is longer than what
            the model declares.
    """
    ids, mask = tokens_and_mask(data)
    width = max(1, int(mask.sum(-1).max()))
    positions = context_length(model)
    if positions is not None and width > positions:
        raise ConfigError(
            f"A row has {width} tokens, and the model was made for {positions} positions (max_position_embeddings), behind which "
            f"its numbers mean nothing. Give rows of {positions} tokens or fewer"
        )
    device = next(model.parameters()).device
    inputs = image_inputs(model, data, width)
    if packed and inputs:
        raise ConfigError(f"sequence_packing=True has no place for {', '.join(inputs)}. Pass sequence_packing=False")
    logprobs = sequence_logprobs(
        model,
        ids.masked_fill(~mask, 0)[:, :width].to(device),
        mask[:, :width].to(device),
        temperature,
        packed,
        inputs,
    )
    return F.pad(logprobs, (0, ids.shape[1] - width))


def context_length(model: Any) -> int | None:
    """Largest number of positions of a model (``num_positions``); None if it declares none."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return num_positions(text)


def image_inputs(model: Any, data: Mapping[str, Any], width: int) -> dict[str, Tensor]:
    """Collect what a vision-language model takes besides the tokens, as its ``forward`` wants it.

    Args:
        model: Whose ``forward`` names what it takes.
        data: Batch with keys of ``IMAGE_KEYS`` and ``TOKEN_TYPE_KEYS``, or none of them.
        width: Columns of the tokens.

    Raises:
        ConfigError: The model takes no such images, or takes something of the batch that would be left out.
    """
    taken = inspect.signature(model.forward).parameters
    lost = [
        key for key, value in data.items() if key in taken and key not in _KNOWN and isinstance(value, Tensor | list)
    ]
    if lost:
        raise ConfigError(
            f"The batch has {lost}, which {type(model).__name__} takes and a policy does not pass on, so that the numbers "
            f"would be others. Leave out of the batch, or rename, {', '.join(lost)}"
        )
    weight = next(model.parameters())
    inputs = {}
    for key in IMAGE_KEYS:
        if key in data:
            if key not in taken:
                raise ConfigError(
                    f"The batch has '{key}', and {type(model).__name__} takes none. Leave it out of the batch"
                )
            images = join_padded(data[key], key) if isinstance(data[key], list) else data[key]
            if len(images):
                inputs[key] = images.to(weight.device, weight.dtype if images.is_floating_point() else images.dtype)
    for key in TOKEN_TYPE_KEYS:
        if key in data and key in taken:
            types = data[key][:, :width].to(weight.device)
            inputs[key] = F.pad(types, (0, width - types.shape[1]))
    return inputs


def sequence_logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    temperature: float = 1.0,
    packed: bool = False,
    inputs: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Score every token by the tokens before it.

    The vocabulary is the largest axis there is, so the head is applied to ``CHUNK_LOGITS`` at a time, and again in the
    backward pass, wherever ``_run_to_head`` finds out what the model does with it.

    Args:
        model: Causal language model whose output has ``logits``.
        input_ids: int64 ``[B, S]``, padded on the right.
        attention_mask: bool ``[B, S]``.
        temperature: Divides the logits.
        packed: Lay the rows end to end and run them as one (see ``rlinf.llm.packing`` for which models can).
        inputs: What else the model takes (``image_inputs``).

    Returns:
        float32 ``[B, S]``: column ``i`` is the log-probability of token ``i``; column 0 and padding are 0.
    """
    predicted = attention_mask.bool().clone()
    predicted[:, 0] = False
    if packed:
        ids, positions = pack_rows(input_ids, attention_mask.sum(-1))
        states, head = _run_to_head(model, {"input_ids": ids, "position_ids": positions})
        before = positions[:, 1:] > 0  # Position 0 is the first token of a sequence: what precedes it is another one.
    else:
        tokens = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
        states, head = _run_to_head(model, {**tokens, **(inputs or {})})
        before = predicted[:, 1:]
    scored = states[:, :-1][before.to(states.device)]
    logprobs = _chunked_logprobs(scored, input_ids[predicted].to(scored.device), head, temperature)
    result = torch.zeros(input_ids.shape, dtype=torch.float32, device=logprobs.device)
    return result.masked_scatter(predicted.to(logprobs.device), logprobs)


def _run_to_head(model: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Run a causal language model, without the logits of all columns where these are more than ``CHUNK_LOGITS``.

    A model that takes ``logits_to_keep`` can do with those of a few columns: its head is shown no others, and what it was
    given is kept. These few logits must be what ``_head_logits`` makes of it; otherwise the model runs again, with all.

    Returns:
        ``[B, S, H]`` and the function that makes logits ``[..., V]`` of it; where that is not known or not worth while, the
        logits and the identity.
    """
    head = None
    if inputs["input_ids"].numel() * model.config.get_text_config().vocab_size > CHUNK_LOGITS:
        takes_few = "logits_to_keep" in inspect.signature(model.forward).parameters and model not in _WHOLE_LOGITS
        head = model.get_output_embeddings() if takes_few else None
    if head is not None:
        given: list[Tensor] = []

        def show_few(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            given.extend(args)
            return tuple(states[:, :_TRIAL_COLUMNS] for states in args)

        hook = head.register_forward_pre_hook(show_few)
        try:
            logits = model(**inputs, use_cache=False).logits
        finally:
            hook.remove()
        if not given:
            return logits, lambda every: every

        def head_logits(states: Tensor) -> Tensor:
            return _head_logits(model.config.get_text_config(), head(states))

        if len(given) == 1 and given[0].shape[:-1] == inputs["input_ids"].shape:
            with torch.no_grad():
                if _are_equal(head_logits(given[0][:, :_TRIAL_COLUMNS]), logits):
                    return given[0], head_logits
        if logits.isfinite().all():  # others say nothing about the head
            _WHOLE_LOGITS.add(model)
    return model(**inputs, use_cache=False).logits, lambda every: every


def _head_logits(config: Any, logits: Tensor) -> Tensor:
    """What models make of the output of their head: Granite divides, Cohere multiplies, Gemma bounds it."""
    divisor, factor, bound = (
        getattr(config, name, None) for name in ("logits_scaling", "logit_scale", "final_logit_softcapping")
    )
    if divisor is not None:
        logits = logits / divisor
    if factor is not None:
        logits = logits * factor
    return logits if bound is None else bound * torch.tanh(logits / bound)


def _are_equal(ours: Tensor, logits: Tensor) -> bool:
    """Whether they differ by no more than an elementwise function rounds."""
    if ours.shape != logits.shape:
        return False
    rounding = 4 * max(torch.finfo(tensor.dtype).eps for tensor in (ours, logits))
    return torch.allclose(ours.float(), logits.float(), rtol=rounding, atol=0)


def _chunked_logprobs(states: Tensor, tokens: Tensor, head: Callable[[Tensor], Tensor], temperature: float) -> Tensor:
    """Log-probabilities float32 ``[N]`` of ``tokens [N]``, ``CHUNK_LOGITS`` at a time.

    A chunk's logits are not kept for the backward pass, which makes them again.
    """

    def score(states: Tensor, tokens: Tensor) -> Tensor:
        return token_logprobs(head(states), tokens, temperature)[0]

    if len(tokens) == 0:
        return score(states, tokens)
    with torch.no_grad():
        num_columns = head(states[:1]).shape[-1]
    rows = max(1, CHUNK_LOGITS // num_columns)
    if len(tokens) <= rows:
        return score(states, tokens)
    chunks = zip(states.split(rows), tokens.split(rows), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([score(*chunk) for chunk in chunks])
    return torch.cat([checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks])


def micro_batches(
    data: BatchedDataDict,
    size: int,
    max_tokens: int | None,
    packed: bool,
    rows_per_sample: int,
    context: int | None,
    vocab_size: int,
) -> list[list[int]]:
    """Choose the rows that share a forward pass.

    Args:
        data: Padded on the right.
        size: Rows of one pass, without ``max_tokens``.
        max_tokens: Largest padded size of a pass; of packed rows, the largest sum of lengths.
        packed: The rows of a pass are laid end to end.
        rows_per_sample: This many neighbouring rows stay together.
        context: Largest number of positions that the model declares.
        vocab_size: Tokens of the model.

    Raises:
        ConfigError: There is no row, or the keys have different numbers of them; a row is not padded on the right, has a token
            that the model does not know, does not fit, or would be split.
    """
    verify_token_ids(data, vocab_size)
    verify_right_padding(data, raise_error=True)
    lengths = tokens_and_mask(data)[1].sum(-1).tolist()
    if data.size and context is not None and max(lengths) > context:
        raise ConfigError(
            f"A row has {max(lengths)} tokens, more than the {context} positions of the model. Give shorter rows"
        )
    if max_tokens is not None:
        return micro_batch_rows(lengths, max_tokens, packed, rows_per_sample)
    if size % rows_per_sample:
        raise ConfigError(
            f"micro_batch_size={size} splits samples of {rows_per_sample} rows. Pass micro_batch_size={rows_per_sample}"
        )
    return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
