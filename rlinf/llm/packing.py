"""Choose the rows for each forward pass, pack several sequences into one row, and restrict attention to each sequence.

Position ids in a packed row restart at 0 with each sequence, and attention must be block-diagonal. Transformers models that build their
masks with ``create_causal_mask`` infer this from the position ids if there is neither an attention mask nor a cache, with the kernels
``eager``, ``sdpa``, ``flex_attention`` and ``flash_attention_2``, including sliding windows (``eager`` and ``sdpa`` are tested). Models
with state-space or convolution layers, or custom attention, may not; ``keeps_sequences_apart`` tests it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import and_masks, packed_sequence_mask_function, sdpa_mask

from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError

SDPA_BY_SEQUENCE = "sdpa_by_sequence"
"""Name of ``attend_by_sequence`` as an ``attn_implementation`` in transformers."""


def first_fit_decreasing(lengths: Sequence[int], capacity: int, num_bins_multiple: int = 1) -> list[list[int]]:
    """Pack items into few bins of ``capacity`` by first-fit decreasing (Johnson 1973); return each bin's item indices in ascending order.

    The bins with the most items are halved until the number of bins is a multiple of ``num_bins_multiple``.
    """
    check_fits(lengths, capacity)
    bins: list[list[int]] = []
    free: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        chosen = next((index for index, left in enumerate(free) if lengths[item] <= left), len(bins))
        if chosen == len(bins):
            bins.append([])
            free.append(capacity)
        bins[chosen].append(item)
        free[chosen] -= lengths[item]
    while len(bins) % num_bins_multiple:
        largest = max(range(len(bins)), key=lambda index: len(bins[index]))
        if len(bins[largest]) == 1:
            raise ConfigError(
                f"{len(lengths)} sequences cannot fill a multiple of {num_bins_multiple} bins of {capacity} tokens. "
                f"Use shards=1, or a number of sequences that {num_bins_multiple} divides"
            )
        bins.append(bins[largest][1::2])
        bins[largest] = bins[largest][::2]
    return [sorted(items) for items in bins]


def token_budget_runs(lengths: Sequence[int], max_tokens: int, length_multiple: int = 1) -> list[int]:
    """Split rows into consecutive runs with padded size ``rows * longest`` at most ``max_tokens``; return the number of rows per run.

    Lengths are first rounded up to a multiple of ``length_multiple``.
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
    """Return the row numbers in each micro-batch of a process; ``rows_per_sample`` consecutive rows stay together.

    ``max_tokens`` limits a micro-batch's padded size or, if ``packed``, the sum of its lengths.
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
    """Distribute rows over shards in order of decreasing length, and split all shards into micro-batches at the same positions."""
    ordered = sorted(rows, key=lambda row: -lengths[row])
    dealt = [ordered[rank::shards] for rank in range(shards)]
    # At each position, the first shard has the longest row.
    runs = token_budget_runs([lengths[row] for row in dealt[0]], max_tokens, length_multiple)
    bounds = [sum(runs[:index]) for index in range(len(runs) + 1)]
    return [[part[bounds[i] : bounds[i + 1]] for i in range(len(runs))] for part in dealt]


def check_fits(lengths: Sequence[int], max_tokens: int) -> None:
    """Raise ConfigError if a sequence does not fit into a micro-batch."""
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"A sequence of {longest} tokens is longer than max_tokens_per_microbatch={max_tokens}. Pass {longest} or more"
        )


def pack_rows(input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate right-padded rows ``[B, S]`` with ``lengths [B]``.

    Return token ids and position ids, both ``[1, sum(lengths)]``; positions restart at 0 with each sequence.
    """
    mask = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths.to(input_ids.device).unsqueeze(1)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    return input_ids[mask].unsqueeze(0), positions[mask].unsqueeze(0)


@dataclass(frozen=True)
class PackedRow:
    """Sequences in a packed row, passed instead of an attention mask.

    Attributes:
        lengths: Lengths of the sequences.
        masks: One bool mask ``[1, 1, length, length]`` per sequence; None for causal attention.
    """

    lengths: list[int]
    masks: list[Tensor | None]


@dataclass(frozen=True)
class _Rows:
    lengths: list[int]
    packed: bool


_ROWS: ContextVar[_Rows | None] = ContextVar("rows of the running pass", default=None)


@contextmanager
def known_rows(lengths: list[int], packed: bool) -> Iterator[None]:
    """Set the lengths used by ``attend_each_sequence``, for right-padded rows or for the sequences in one packed row."""
    token = _ROWS.set(_Rows(lengths, packed))
    try:
        yield
    finally:
        _ROWS.reset(token)


def attend_each_sequence(model: nn.Module) -> None:
    """Make an ``sdpa`` model attend within ``known_rows`` without a large mask, which saves work and does not change results."""
    if attention_of(model) == "sdpa":
        model.set_attn_implementation(SDPA_BY_SEQUENCE)


def attention_of(model: nn.Module) -> str:
    """Return the name of a model's attention kernel."""
    return getattr(model.config.get_text_config(), "_attn_implementation", "")


def packed_inputs(model: nn.Module, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Return the model arguments for running right-padded rows ``[B, S]`` as one packed row."""
    ids, positions = pack_rows(input_ids, lengths)
    inputs = {"input_ids": ids, "position_ids": positions}
    # Pass a mask, because transformers would otherwise search the positions for sequences, which waits for the GPU.
    return inputs | ({"attention_mask": torch.ones_like(ids)} if attention_of(model) == SDPA_BY_SEQUENCE else {})


def attend_by_sequence(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PackedRow | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run transformers' ``sdpa`` separately on each sequence in a ``PackedRow``, and unchanged for all remaining inputs."""
    # A kernel with a mask would compute and discard the scores between sequences, which are most scores in a packed row.
    if not isinstance(attention_mask, PackedRow):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    parts, sequences = [], (tensor.split(attention_mask.lengths, dim=2) for tensor in (query, key, value))
    for queries, keys, values, mask in zip(*sequences, attention_mask.masks, strict=True):
        # With is_causal, the kernel computes only half of the scores.
        settings = kwargs if mask is not None else kwargs | {"is_causal": True}
        parts.append(sdpa_attention_forward(module, queries, keys, values, mask, **settings)[0])
    return torch.cat(parts, dim=1), None


def _is_cpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cpu"


def mask_by_sequence(
    *args: Any,
    q_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | PackedRow | None:
    """Return the mask for ``attend_by_sequence`` inside ``known_rows``, otherwise call ``sdpa_mask`` with the same arguments."""
    rows, on_cpu = _ROWS.get(), _is_cpu(device)
    options = {"q_length": q_length, "local_size": local_size, "device": device, **kwargs}
    if rows is None or (on_cpu and not rows.packed):
        options |= {"allow_is_causal_skip": allow_is_causal_skip, "attention_mask": attention_mask}
        return sdpa_mask(*args, mask_function=mask_function, **options)
    is_causal = allow_is_causal_skip and (local_size is None or local_size >= q_length)
    # Right-padded rows need no mask, because no token sees the padding after it; sdpa_mask would wait for the GPU to detect this.
    if is_causal:
        return PackedRow(rows.lengths, [None] * len(rows.lengths)) if rows.packed else None
    options["allow_is_causal_skip"] = False
    if not rows.packed:
        return sdpa_mask(*args, mask_function=mask_function, attention_mask=attention_mask, **options)
    numbers = torch.arange(len(rows.lengths)).repeat_interleave(torch.tensor(rows.lengths))
    apart = packed_sequence_mask_function(to_device(numbers, device)[None])
    full = sdpa_mask(*args, mask_function=and_masks(mask_function, apart), **options)
    masks, start = [], 0
    for length in rows.lengths:
        part = slice(start, start := start + length)
        mask = full[..., part, part]
        # A comparison on the GPU would wait for it.
        masks.append(None if on_cpu and mask[0, 0].equal(torch.ones_like(mask[0, 0]).tril()) else mask)
    return PackedRow(rows.lengths, masks)


AttentionInterface.register(SDPA_BY_SEQUENCE, attend_by_sequence)
AttentionMaskInterface.register(SDPA_BY_SEQUENCE, mask_by_sequence)


def keeps_sequences_apart(model: nn.Module) -> bool:
    """Return whether a model in evaluation mode treats packed sequences independently (tested on two short sequences)."""
    sequences = probe_tokens(model).view(2, -1)
    lengths = torch.full((2,), sequences.shape[1])
    inputs = packed_inputs(model, sequences, lengths)
    return _reads_only(model, sequences[1:], inputs, known_rows(lengths.tolist(), packed=True))


def ignores_left_padding(model: nn.Module) -> bool:
    """Return whether left padding, as in ``generate``, does not change the logits of a model in evaluation mode."""
    ids = probe_tokens(model)
    mask = torch.ones_like(ids)
    mask[:, : ids.shape[1] // 2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return _reads_only(model, ids[:, ids.shape[1] // 2 :], inputs)


def _reads_only(
    model: nn.Module, last: Tensor, inputs: dict[str, Tensor], rows: AbstractContextManager | None = None
) -> bool:
    """Return whether a row's last logits depend only on its last tokens ``[1, S]``; ``rows`` is the context for ``inputs``."""
    # A small leak may be below 16-bit rounding, so check gradients: for a token that is not used, they are exactly 0 in every dtype.
    length, embedded = last.shape[1], []

    def make_leaf(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(make_leaf)
    try:
        with torch.enable_grad(), rows or nullcontext():
            logits = model(**inputs, use_cache=False).logits[0, -length:].float()
            (gradient,) = torch.autograd.grad(logits.square().sum(), embedded[0])
    finally:
        hook.remove()
    with torch.no_grad():
        output = model(input_ids=last, use_cache=False).logits[0]
    # Compare relative to the maximum logit, because different shapes round differently.
    tolerance = 1e-3 if output.dtype == torch.float32 else 5e-2
    same = (output.float() - logits.detach()).abs().max() <= tolerance * output.float().abs().max()
    return bool(same) and not bool(gradient[:, :-length].any())


def probe_tokens(model: nn.Module) -> Tensor:
    """Return tokens ``[1, 16]`` that are not special tokens (such as image or end) in the configuration."""
    special = {value for key, value in model.config.to_dict().items() if "token" in key and isinstance(value, int)}
    plain = [token for token in range(model.config.get_text_config().vocab_size) if token not in special]
    return torch.tensor([[plain[i % len(plain)] for i in range(16)]], device=model.get_input_embeddings().weight.device)
