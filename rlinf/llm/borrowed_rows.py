"""Lend a row with images to ranks without images, because either all ranks or none must gather a vision tower's shards."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.distributed.process_group import broadcast_object, maximum, rank, world_size
from rlinf.llm.batched_data_dict import IMAGE_KEYS, Batch, BatchedDataDict, tokens_and_mask
from rlinf.llm.logprobs import TOKEN_TYPE_KEYS


def borrowed_rows(parts: Sequence[BatchedDataDict], num_passes: int) -> list[dict[str, Any] | None]:
    """Return for each pass the row with images that this rank must add to its micro-batch, or None (a collective call).

    A row is added if a different rank has images in the pass but this rank has none. It is this rank's shortest row with images, or, if
    it has none, that row from the first rank with images.

    Args:
        parts: This rank's micro-batches, at least one; the last one is repeated in additional passes.
        num_passes: Number of passes, equal on all ranks.
    """
    # Use a real row, which works for every model; a synthetic one would need the model's placeholders and image sizes.
    local = [bool(_rows_with_images(part)) for part in parts]
    local += local[-1:] * (num_passes - len(parts))
    row = _shortest_row(parts)
    nobody = world_size()
    some_rank_has_none, minus_lender, *anywhere = maximum(row is None, -nobody if row is None else -rank(), *local)
    lender = int(-minus_lender)  # the first rank with images
    if some_rank_has_none and lender != nobody:
        borrowed = broadcast_object(row, lender)
        row = borrowed if row is None else row
    return [row if there and not here else None for there, here in zip(anywhere, local, strict=True)]


def with_borrowed_row(part: Batch, chosen: Tensor, row: Batch) -> tuple[dict[str, Any], Tensor]:
    """Append a row to a micro-batch; return it for ``batch_scores``, and ``chosen`` bool ``[B, S]`` without the row's tokens.

    The row takes part in the forward and backward passes but not in the loss, so its gradients are 0.
    """
    ids, mask = tokens_and_mask(part)
    length = len(row["input_ids"])
    width = max(length, ids.shape[1])

    def with_row(values: Tensor, row_values: Tensor) -> Tensor:
        widened = F.pad(values, (0, width - values.shape[1], 0, 1))
        widened[-1, : len(row_values)] = row_values
        return widened

    joined = {key: value for key, value in part.items() if key != "output_ids"}
    joined["input_ids"] = with_row(ids, row["input_ids"])
    joined["attention_mask"] = with_row(mask, torch.ones(length, dtype=torch.bool))
    for key, value in row.items():
        if key in TOKEN_TYPE_KEYS:
            joined[key] = with_row(part.get(key, torch.zeros_like(ids)), value)
        elif key in IMAGE_KEYS:
            joined[key] = [*part.get(key, [value.new_zeros(0, *value.shape[1:])] * len(ids)), value]
    return joined, with_row(chosen, torch.zeros(length, dtype=torch.bool))


def _rows_with_images(data: Batch) -> list[int]:
    images = data.get("pixel_values", [])
    return [row for row in range(len(images)) if isinstance(images, Tensor) or len(images[row])]


def _shortest_row(parts: Sequence[BatchedDataDict]) -> dict[str, Any] | None:
    """Return the tokens ``[S]``, token types ``[S]`` and images of the shortest row with images, or None without images."""
    rows = [(int(tokens_and_mask(part)[1][row].sum()), part, row) for part in parts for row in _rows_with_images(part)]
    if not rows:
        return None
    length, part, row = min(rows, key=lambda candidate: candidate[0])
    result = {"input_ids": tokens_and_mask(part)[0][row, :length].cpu()}
    for key in part:
        if key in IMAGE_KEYS:
            images = part[key][row]
            result[key] = (images[None] if isinstance(part[key], Tensor) else images).cpu()
        elif key in TOKEN_TYPE_KEYS:
            result[key] = part[key][row, :length].cpu()
    return result
