"""Log-probabilities of the tokens of whole sequences, for every caller the same."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.distributed.batched_data_dict import IMAGE_KEYS, BatchedDataDict, join_padded
from rlinf.distributed.packing import micro_batch_rows, pack_rows
from rlinf.errors import ConfigError
from rlinf.models.embodiment.base import token_logprobs
from rlinf.models.generation.interfaces import tokens_and_mask, verify_right_padding, verify_token_ids

TOKEN_TYPE_KEYS = {"token_type_ids", "mm_token_type_ids"}
"""``[B, S]`` that tell image tokens from text; generated tokens are text, which is 0."""
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
        ConfigError: The batch has images that the model does not take, or that are to be packed.
    """
    ids, mask = tokens_and_mask(data)
    width = max(1, int(mask.sum(-1).max()))
    device = next(model.parameters()).device
    inputs = image_inputs(model, data, width)
    if packed and inputs:
        raise ConfigError(f"sequence_packing=True has no place for {', '.join(inputs)}. Type sequence_packing=False")
    logprobs = sequence_logprobs(
        model,
        ids.masked_fill(~mask, 0)[:, :width].to(device),
        mask[:, :width].to(device),
        temperature,
        packed,
        inputs,
    )
    return F.pad(logprobs, (0, ids.shape[1] - width))


def image_inputs(model: Any, data: Mapping[str, Any], width: int) -> dict[str, Tensor]:
    """Collect what a vision-language model takes beside the tokens, as its ``forward`` wants it.

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

    Args:
        model: Causal language model whose output has ``logits``.
        input_ids: int64 ``[B, S]``, padded on the right.
        attention_mask: bool ``[B, S]``.
        temperature: Divides the logits.
        packed: Lay the rows end to end and run them as one (see ``rlinf.distributed.packing`` for which models can).
        inputs: What else the model takes (``image_inputs``).

    Returns:
        float32 ``[B, S]``: column ``i`` is the log-probability of token ``i``; column 0 and padding are 0.
    """
    predicted = attention_mask.bool().clone()
    predicted[:, 0] = False
    if packed:
        ids, positions = pack_rows(input_ids, attention_mask.sum(-1))
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        before = positions[0, 1:] > 0  # Position 0 is the first token of a sequence: what precedes it is another one.
        scored = logits[0, :-1][before]
    else:
        logits = model(
            input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False, **(inputs or {})
        ).logits
        scored = logits[:, :-1][predicted[:, 1:]]
    # Only columns that are wanted become float32: the vocabulary is the largest axis there is.
    logprobs, _ = token_logprobs(scored, input_ids[predicted].to(scored.device), temperature)
    result = torch.zeros(input_ids.shape, dtype=torch.float32, device=logprobs.device)
    return result.masked_scatter(predicted.to(logprobs.device), logprobs)


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
            f"micro_batch_size={size} splits samples of {rows_per_sample} rows. Type micro_batch_size={rows_per_sample}"
        )
    return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
