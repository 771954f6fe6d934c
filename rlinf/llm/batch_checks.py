"""Checks that policies and generation backends apply to token batches before computing."""

import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.llm.batched_data_dict import IMAGE_KEYS, Batch, BatchedDataDict, tokens_and_mask


def verify_right_padding(data: Batch, pad_token_id: int | None = None, raise_error: bool = False) -> bool:
    """Return whether every row has at least one token, followed only by padding (with ``pad_token_id`` if given).

    With ``raise_error``, raise ConfigError for the first bad row instead.
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
            raise ConfigError(f"Row {row} has no tokens: its mask is 0 everywhere. At least one token is required")
        if mask[row].equal(expected[row]):
            raise ConfigError(f"Row {row} has padding with tokens that differ from pad_token_id={pad_token_id}")
        first = int((~mask[row]).nonzero()[0, 0])
        raise ConfigError(f"Row {row} is not right-padded: column {first} is padding before tokens. Move it to the end")
    return not bool(bad.any())


def verify_text_only(data: Batch, reader: str, instead: str) -> None:
    """Raise ConfigError if a batch has inputs that the class ``reader`` would ignore; ``instead`` is a class that supports images."""
    for key in (*IMAGE_KEYS, "position_ids", "inputs_embeds"):
        if key in data:
            images = f", or use {instead}" if key in IMAGE_KEYS else ""
            raise ConfigError(f"The batch has '{key}', but {reader} accepts only token ids. Remove it{images}")


def response_mask(data: Batch) -> Tensor:
    """Return a bool mask ``[B, S]`` for the generated tokens in a ``GenerationOutputSpec``, whether truncated or not."""
    ids, mask = tokens_and_mask(data)
    ends = data.get("unpadded_sequence_lengths", mask.sum(-1)).to(ids.device)
    starts = (ends - data["generation_lengths"].to(ids.device)).unsqueeze(1)
    return mask & (torch.arange(ids.shape[1], device=ids.device) >= starts)


def verify_token_ids(data: Batch, vocab_size: int | None = None) -> None:
    """Raise ConfigError unless a batch has rows and integer token ids, which must be below ``vocab_size`` if given."""
    ids, mask = tokens_and_mask(data)
    if not BatchedDataDict(data).size:
        raise ConfigError(f"The batch has no rows: its tokens have shape {list(ids.shape)}. Pass at least one row")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(f"The token ids have dtype {ids.dtype}; expected integers. Pass input_ids.long()")
    if vocab_size is None:
        return
    bad = ((ids < 0) | (ids >= vocab_size)) & mask
    if bad.any():
        row = int(bad.any(-1).nonzero()[0, 0])
        token = int(ids[row][bad[row]][0])
        raise ConfigError(
            f"Row {row} has the token id {token}; expected 0 to {vocab_size - 1} (vocab_size={vocab_size}). Use its tokenizer"
        )
