"""Log-probabilities of the tokens of whole sequences, for every caller the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlinf.distributed.packing import pack_rows
from rlinf.models.embodiment.base import token_logprobs


def sequence_logprobs(
    model: Any, input_ids: Tensor, attention_mask: Tensor, temperature: float = 1.0, packed: bool = False
) -> Tensor:
    """Score every token by the tokens before it.

    Args:
        model: Causal language model whose output has ``logits``.
        input_ids: int64 ``[B, S]``, padded on the right.
        attention_mask: bool ``[B, S]``.
        temperature: Divides the logits.
        packed: Lay the rows end to end and run them as one (see ``rlinf.distributed.packing`` for which models can).

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
        logits = model(input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False).logits
        scored = logits[:, :-1][predicted[:, 1:]]
    # Only columns that are wanted become float32: the vocabulary is the largest axis there is.
    logprobs, _ = token_logprobs(scored, input_ids[predicted].to(scored.device), temperature)
    result = torch.zeros(input_ids.shape, dtype=torch.float32, device=logprobs.device)
    return result.masked_scatter(predicted.to(logprobs.device), logprobs)
