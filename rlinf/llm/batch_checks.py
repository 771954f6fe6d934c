"""Checks of token batches that every policy and every generation backend makes before it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.llm.batched_data_dict import IMAGE_KEYS, BatchedDataDict, tokens_and_mask


def verify_right_padding(data: Mapping[str, Any], pad_token_id: int | None = None, raise_error: bool = False) -> bool:
    """Check that the padding of prompts or outputs lies on the right only.

    Args:
        data: ``GenerationDatumSpec`` or ``GenerationOutputSpec``.
        pad_token_id: If given, padding columns must hold this token.
        raise_error: Raise instead of returning False.

    Returns:
        Whether every row is tokens, one or more, and then padding.

    Raises:
        ConfigError: With ``raise_error``: names the first bad row.
    """
    ids, mask = tokens_and_mask(data)
    lengths = mask.sum(-1)
    expected = torch.arange(mask.shape[1], device=mask.device) < lengths.unsqueeze(1)
    bad = (mask != expected).any(-1) | (lengths == 0)
    if pad_token_id is not None:
        bad |= ((ids != pad_token_id) & ~expected).any(-1)
    if raise_error and bad.any():
        row = int(bad.nonzero()[0, 0])
        if not lengths[row]:
            raise ConfigError(f"Row {row} has no tokens: its mask is 0 everywhere. Give each row one token or more")
        if mask[row].equal(expected[row]):
            raise ConfigError(f"Row {row} has other tokens than pad_token_id={pad_token_id} in its padding")
        first = int((~mask[row]).nonzero()[0, 0])
        raise ConfigError(
            f"Row {row} is not padded on the right: column {first} is padding, and tokens come after it. Put all tokens "
            "first and padding after them"
        )
    return not bool(bad.any())


def verify_text_only(data: Mapping[str, Any], reader: str, instead: str) -> None:
    """Refuse what would change the numbers of a model and is not read.

    Args:
        data: Prompts, training data or outputs of a generation.
        reader: Class that takes token ids and nothing else.
        instead: Class that takes images.

    Raises:
        ConfigError: Names the first such key.
    """
    for key in (*IMAGE_KEYS, "position_ids", "inputs_embeds"):
        if key in data:
            images = f", or use {instead}" if key in IMAGE_KEYS else ""
            raise ConfigError(
                f"The batch has '{key}', and {reader} takes token ids only. Leave it out of the batch{images}"
            )


def response_mask(data: Mapping[str, Any]) -> Tensor:
    """bool ``[B, S]``: the generated tokens of ``GenerationOutputSpec``, of rows that were cut short too."""
    ids, mask = tokens_and_mask(data)
    ends = data.get("unpadded_sequence_lengths", mask.sum(-1)).to(ids.device)
    starts = (ends - data["generation_lengths"].to(ids.device)).unsqueeze(1)
    return mask & (torch.arange(ids.shape[1], device=ids.device) >= starts)


def verify_token_ids(data: Mapping[str, Any], vocab_size: int | None = None) -> None:
    """Refuse what no model can read.

    Args:
        data: Prompts, training data or outputs of a generation.
        vocab_size: Tokens of the model; None: whoever comes next looks at it.

    Raises:
        ConfigError: There is no row, keys have different numbers of them, or a token is not an integer or not in the vocabulary.
    """
    ids, mask = tokens_and_mask(data)
    if not BatchedDataDict(data).size:
        raise ConfigError(f"The batch has no rows: its tokens are {list(ids.shape)}. Give one row or more")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(f"The token ids are {ids.dtype}; required: integers. Give input_ids.long()")
    if vocab_size is None:
        return
    bad = ((ids < 0) | (ids >= vocab_size)) & mask
    if bad.any():
        row = int(bad.any(-1).nonzero()[0, 0])
        raise ConfigError(
            f"Row {row} has the token id {int(ids[row][bad[row]][0])}; required: 0 to {vocab_size - 1}, since the model has "
            f"vocab_size={vocab_size}. Give tokens of the model's own tokenizer"
        )
