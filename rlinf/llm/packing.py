"""Choose the rows of each forward pass, lay several sequences end to end in one row, and attend to each alone.

The position ids of a packed row restart at 0 with each sequence, and attention must be block-diagonal. Models of transformers
that build their masks with ``create_causal_mask`` derive this from the position ids if they get no attention mask and no cache,
for the kernels ``eager``, ``sdpa``, ``flex_attention`` and ``flash_attention_2``, including sliding windows (tested: ``eager``
and ``sdpa``). Models with state-space or convolution layers, or with attention code of their own, may not;
``keeps_sequences_apart`` finds out.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlinf.errors import ConfigError

SDPA_BY_SEQUENCE = "sdpa_by_sequence"
"""Name of ``attend_by_sequence`` as an ``attn_implementation`` of transformers."""


def first_fit_decreasing(lengths: Sequence[int], capacity: int, num_bins_multiple: int = 1) -> list[list[int]]:
    """Pack items into few bins of ``capacity``: the longest first, each into the first bin with room (Johnson 1973).

    Bins with most items are halved until the number of bins is a multiple of ``num_bins_multiple``. Return ascending item indices.
    """
    check_fits(lengths, capacity)
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        chosen = next((index for index, left in enumerate(room) if lengths[item] <= left), len(bins))
        if chosen == len(bins):
            bins.append([])
            room.append(capacity)
        bins[chosen].append(item)
        room[chosen] -= lengths[item]
    while len(bins) % num_bins_multiple:
        largest = max(range(len(bins)), key=lambda index: len(bins[index]))
        if len(bins[largest]) == 1:
            raise ConfigError(
                f"{len(lengths)} sequences do not make a multiple of {num_bins_multiple} bins of {capacity} tokens. "
                f"Use shards=1, or a number of sequences that {num_bins_multiple} divides"
            )
        bins.append(bins[largest][1::2])
        bins[largest] = bins[largest][::2]
    return [sorted(each) for each in bins]


def token_budget_runs(lengths: Sequence[int], max_tokens: int, length_multiple: int = 1) -> list[int]:
    """Cut rows into consecutive runs whose padded size ``rows * longest`` is at most ``max_tokens``.

    Lengths are first rounded up to a multiple of ``length_multiple``. Return the number of rows of each run.
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


def micro_batch_rows(
    lengths: Sequence[int], max_tokens: int, packed: bool, rows_per_sample: int = 1
) -> list[list[int]]:
    """Return the row numbers of the micro-batches of one process; ``rows_per_sample`` neighbours stay together.

    A micro-batch has a padded size of at most ``max_tokens``, or that sum of lengths if it is ``packed`` by first-fit decreasing.
    """
    samples = [lengths[start : start + rows_per_sample] for start in range(0, len(lengths), rows_per_sample)]
    if packed:
        groups = first_fit_decreasing([sum(sample) for sample in samples], max_tokens)
    else:
        order = sorted(range(len(samples)), key=lambda index: -max(samples[index]))
        runs = token_budget_runs([rows_per_sample * max(samples[index]) for index in order], max_tokens)
        ends = [sum(runs[: index + 1]) for index in range(len(runs))]
        groups = [order[end - run : end] for run, end in zip(runs, ends, strict=True)]
    return [[sample * rows_per_sample + row for sample in group for row in range(rows_per_sample)] for group in groups]


def deal_by_length(
    rows: Sequence[int], lengths: Sequence[int], shards: int, max_tokens: int, length_multiple: int = 1
) -> list[list[list[int]]]:
    """Deal rows over shards by decreasing length, and cut all shards into micro-batches at the same places.

    The rows must be a multiple of ``shards``; ``lengths`` are by row number, the other arguments as in ``token_budget_runs``.
    """
    ordered = sorted(rows, key=lambda row: -lengths[row])
    dealt = [ordered[rank::shards] for rank in range(shards)]
    # At each position the first shard has the longest row.
    runs = token_budget_runs([lengths[row] for row in dealt[0]], max_tokens, length_multiple)
    bounds = [sum(runs[:index]) for index in range(len(runs) + 1)]
    return [[share[bounds[i] : bounds[i + 1]] for i in range(len(runs))] for share in dealt]


def check_fits(lengths: Sequence[int], max_tokens: int) -> None:
    """Raise ConfigError if a sequence does not fit into a micro-batch."""
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"A sequence of {longest} tokens is longer than max_tokens_per_microbatch={max_tokens}. "
            f"Use max_tokens_per_microbatch={longest} or more"
        )


def pack_rows(input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Lay right-padded rows ``[B, S]`` with ``lengths [B]`` end to end.

    Return token ids and position ids, both ``[1, sum(lengths)]``; the positions restart at 0 with each sequence.
    """
    mask = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths.to(input_ids.device).unsqueeze(1)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    return input_ids[mask].unsqueeze(0), positions[mask].unsqueeze(0)


def attend_each_sequence(model: Any) -> None:
    """Let a model whose kernel is ``sdpa`` attend to each sequence of a packed row alone: less work for a CPU, equal numbers."""
    if model.config.get_text_config()._attn_implementation == "sdpa":
        model.set_attn_implementation(SDPA_BY_SEQUENCE)


def attend_by_sequence(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run the ``sdpa`` of transformers on each sequence of a packed row, and on any other input as it is.

    A CPU kernel also computes the scores between sequences, which the mask discards. They are most of a packed row.

    The arguments are as for ``sdpa``: ``query [B, heads, S, head_dim]``, ``attention_mask`` bool ``[B, 1, S, S]`` or None.
    """
    lengths = [] if position_bias is not None else _sequence_lengths(query, attention_mask)
    if len(lengths) < 2:
        return sdpa_attention_forward(module, query, key, value, attention_mask, position_bias=position_bias, **kwargs)
    parts, start = [], 0
    for queries, keys, values in zip(*(each.split(lengths, dim=2) for each in (query, key, value)), strict=True):
        own = slice(start, start := start + queries.shape[2])
        mask, settings = attention_mask[..., own, own], kwargs
        if torch.equal(mask[0, 0], torch.ones_like(mask[0, 0]).tril()):
            mask, settings = None, kwargs | {"is_causal": True}  # the kernel then skips half of the scores
        parts.append(sdpa_attention_forward(module, queries, keys, values, mask, **settings)[0])
    return torch.cat(parts, dim=1), None


def _sequence_lengths(query: Tensor, mask: Tensor | None) -> list[int]:
    """Return the lengths of the sequences of one packed row, or nothing. A sequence begins where a token does not see the one before."""
    columns = query.shape[2]
    if mask is None or mask.dtype != torch.bool or mask.shape != (1, 1, columns, columns):
        return []
    starts = [0, *((~mask[0, 0].diagonal(-1)).nonzero().flatten() + 1).tolist()]
    return [stop - start for start, stop in zip(starts, [*starts[1:], columns], strict=True)]


AttentionInterface.register(SDPA_BY_SEQUENCE, attend_by_sequence)
AttentionMaskInterface.register(SDPA_BY_SEQUENCE, sdpa_mask)


def keeps_sequences_apart(model: Any) -> bool:
    """Return whether a model in evaluation mode keeps the sequences of a packed row apart, tried on two short ones."""
    sequences = probe_tokens(model).view(2, -1)
    ids, positions = pack_rows(sequences, torch.full((2,), sequences.shape[1]))
    return _reads_only(model, sequences[1:], {"input_ids": ids, "position_ids": positions})


def ignores_left_padding(model: Any) -> bool:
    """Return whether left padding, which ``generate`` needs, leaves the logits of a model in evaluation mode unchanged."""
    ids = probe_tokens(model)
    mask = torch.ones_like(ids)
    mask[:, : ids.shape[1] // 2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return _reads_only(model, ids[:, ids.shape[1] // 2 :], inputs)


def _reads_only(model: Any, last: Tensor, inputs: dict[str, Tensor]) -> bool:
    """Return whether the last logits of a row depend on its last tokens ``[1, S]`` only.

    Comparing logits is not enough, because a small leak may be below the rounding of 16 bits. The gradient to a token that is not
    read is exactly 0 in every number format.
    """
    length, embedded = last.shape[1], []

    def make_leaf(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(make_leaf)
    try:
        with torch.enable_grad():
            logits = model(**inputs, use_cache=False).logits[0, -length:].float()
            (gradient,) = torch.autograd.grad(logits.square().sum(), embedded[0])
    finally:
        hook.remove()
    with torch.no_grad():
        output = model(input_ids=last, use_cache=False).logits[0]
    # Relative to the largest logit; other shapes round differently.
    tolerance = 1e-3 if output.dtype == torch.float32 else 5e-2
    same = (output.float() - logits.detach()).abs().max() <= tolerance * output.float().abs().max()
    return bool(same) and not bool(gradient[:, :-length].any())


def probe_tokens(model: Any) -> Tensor:
    """Return tokens ``[1, 16]`` without a special meaning in the configuration (an image, an end)."""
    special = {value for key, value in model.config.to_dict().items() if "token" in key and isinstance(value, int)}
    plain = [token for token in range(model.config.get_text_config().vocab_size) if token not in special]
    return torch.tensor([[plain[i % len(plain)] for i in range(16)]], device=model.get_input_embeddings().weight.device)
