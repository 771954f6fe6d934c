"""Which rows share a forward pass: bins of sequences, and several sequences laid end to end in one row.

A packed row holds sequences one after another, and position ids that begin at 0 with each. Attention then has to be
block-diagonal. Models of transformers that build their masks with ``create_causal_mask`` do that by themselves from the
position ids when they get no attention mask and no cache, for the kernels ``eager``, ``sdpa``, ``flex_attention`` and
``flash_attention_2``, sliding windows included. Models with another memory than attention (state-space or convolution layers)
do not; ``keeps_sequences_apart`` tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError


def first_fit_decreasing(lengths: Sequence[int], capacity: int, num_bins_multiple: int = 1) -> list[list[int]]:
    """Pack items into few bins: the longest first, each into the first bin with room (Johnson 1973).

    Args:
        lengths: Tokens of each item.
        capacity: Largest sum of a bin.
        num_bins_multiple: The number of bins is brought to a multiple of this by halving the bins with most items.

    Returns:
        Item indices of each bin, ascending; bins in the order in which they were opened.

    Raises:
        ConfigError: An item is longer than ``capacity``, or there are too few items for the multiple.
    """
    check_fits(lengths, capacity)
    if len(lengths) < num_bins_multiple:
        raise ConfigError(
            f"{len(lengths)} sequences do not make {num_bins_multiple} bins. Use shards={len(lengths)} or fewer"
        )
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        chosen = next((index for index, left in enumerate(room) if lengths[item] <= left), None)
        if chosen is None:
            chosen = len(bins)
            bins.append([])
            room.append(capacity)
        bins[chosen].append(item)
        room[chosen] -= lengths[item]
    while len(bins) % num_bins_multiple:
        largest = max(range(len(bins)), key=lambda index: len(bins[index]))
        bins.append(bins[largest][1::2])
        bins[largest] = bins[largest][::2]
    return [sorted(each) for each in bins]


def token_budget_runs(lengths: Sequence[int], max_tokens: int, length_multiple: int = 1) -> list[int]:
    """Cut rows into runs whose padded size ``rows * longest`` stays within a number of tokens.

    Args:
        lengths: Tokens of each row, in the order in which the rows are taken.
        max_tokens: Largest padded size of a run.
        length_multiple: The longest is rounded up to a multiple of this.

    Returns:
        Number of rows of each run.

    Raises:
        ConfigError: A single row is larger than ``max_tokens``.
    """
    rounded = [-(-length // length_multiple) * length_multiple for length in lengths]
    check_fits(rounded, max_tokens)
    runs: list[int] = []
    longest = 0
    for length in rounded:
        if runs and max(longest, length) * (runs[-1] + 1) <= max_tokens:
            runs[-1] += 1
            longest = max(longest, length)
        else:
            runs.append(1)
            longest = length
    return runs


def check_fits(lengths: Sequence[int], max_tokens: int) -> None:
    """Refuse sequences that no micro-batch can hold.

    Raises:
        ConfigError: Names the longest.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"A sequence of {longest} tokens is longer than max_tokens_per_microbatch={max_tokens}. "
            f"Use max_tokens_per_microbatch={longest} or more"
        )


def pack_rows(input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Lay right-padded rows end to end.

    Args:
        input_ids: ``[B, S]``.
        lengths: int64 ``[B]``, tokens of each row.

    Returns:
        Token ids and position ids, both ``[1, sum(lengths)]``; the positions of each sequence begin at 0.
    """
    mask = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths.to(input_ids.device).unsqueeze(1)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    return input_ids[mask].unsqueeze(0), positions[mask].unsqueeze(0)


@torch.no_grad()
def keeps_sequences_apart(model: nn.Module, input_ids: Tensor, tolerance: float = 1e-2) -> bool:
    """Whether a packed row gives the logits of its sequences alone, tried on two short ones.

    Args:
        model: Causal language model in evaluation mode.
        input_ids: ``[2, S]`` tokens without padding.
        tolerance: Largest accepted difference, relative to the largest logit.
    """
    lengths = torch.full((2,), input_ids.shape[1])
    packed_ids, positions = pack_rows(input_ids, lengths)
    alone = model(input_ids=input_ids, use_cache=False).logits.float().flatten(0, 1)
    packed = model(input_ids=packed_ids, position_ids=positions, use_cache=False).logits.float()[0]
    return bool((alone - packed).abs().max() <= tolerance * alone.abs().max())
