"""Packed rows for recipes, and their collation into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf.errors import ConfigError
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.logprobs import TOKEN_TYPE_KEYS

Row = dict[str, Any]
"""A row of a dataset: values by column."""

Message = dict[str, Any]
"""A chat message: role, content (text, or a list of parts) and, for tools, calls."""

SKIP_BAD_ROWS = "train.train_policy.dataset.skip_bad_rows=true"


class BadRowError(ConfigError):
    """Raised for a dataset row that cannot be used.

    Args:
        reason: Text with the actual value and the requirement.
        row: Row number within the dataset, which the dataset adds with ``at``.
        source: The dataset's file or name.
    """

    def __init__(self, reason: str, row: int | None = None, source: str = "") -> None:
        place = "A row of the dataset" if row is None else f"Row {row}{f' of {source}' if source else ''}"
        super().__init__(f"{place} cannot be used: {reason} Fix the row, or set {SKIP_BAD_ROWS} to skip such rows")
        self.reason, self.row, self.source = reason, row, source

    def at(self, row: int, source: str) -> BadRowError:
        """Return the same error with a row number and source."""
        return BadRowError(self.reason, row, source)


@contextmanager
def row_named(row: int, source: str) -> Iterator[None]:
    """Turn a BadRowError into a ConfigError that names the row, without the hint to skip bad rows."""
    try:
        yield
    except BadRowError as error:
        raise ConfigError(f"Row {row} of {source}: {error.reason}") from None


@dataclass
class Sample:
    """A training row.

    Attributes:
        input_ids: Tokens of prompt and completion, ``[S]``.
        token_mask: True for learned tokens, ``[S]``.
        model_inputs: Additional inputs for a vision-language model (such as ``pixel_values``); empty for text.
        is_truncated: Whether ``input_ids`` are only the first ``policy.model_max_length`` tokens of a longer row.
    """

    input_ids: list[int]
    token_mask: list[bool]
    model_inputs: dict[str, Tensor] = field(default_factory=dict)
    is_truncated: bool = False


@dataclass
class Prompt:
    """A prompt to complete.

    Attributes:
        input_ids: Tokens, ``[S]``.
        model_inputs: See ``Sample``.
        reference: Reference for the rewards, if any.
        row, previews: The row's columns, for the rewards, and small JPEGs of its images, for the report.
    """

    input_ids: list[int]
    model_inputs: dict[str, Tensor] = field(default_factory=dict)
    reference: str | None = None
    row: Row = field(default_factory=dict)
    previews: list[bytes] = field(default_factory=list)


def tokens_of(row: Any) -> list[list[int]]:
    """Return the token lists in a packed row, which is a sample, a prompt, or a pair of samples."""
    return [item.input_ids for item in (row if isinstance(row, tuple) else (row,))]


def truncated_and_equal(row: Any) -> tuple[bool, bool]:
    """Return whether a packed row is truncated, and whether it is a pair of equal samples, from which DPO learns nothing."""
    samples = [item for item in (row if isinstance(row, tuple) else (row,)) if isinstance(item, Sample)]
    is_equal = len(samples) == 2 and samples[0].input_ids == samples[1].input_ids
    return any(sample.is_truncated for sample in samples), is_equal


def collate(rows: Sequence[Sample] | Sequence[Prompt], pad_token_id: int = 0) -> BatchedDataDict:
    """Collate rows into one right-padded batch.

    Returns:
        ``input_ids`` int64 and ``attention_mask`` bool ``[B, S]``; for samples also ``token_mask`` bool ``[B, S]``. The rows' model
        inputs are added: token types as a tensor ``[B, S]``, all remaining inputs as lists with one tensor per row, which has length
        0 without images.
    """
    if not rows:
        raise ConfigError("collate needs at least one row.")
    tokens = [torch.tensor(row.input_ids, dtype=torch.int64) for row in rows]
    batch: dict[str, Any] = {
        "input_ids": pad_sequence(tokens, batch_first=True, padding_value=pad_token_id),
        "attention_mask": pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in tokens], batch_first=True),
    }
    samples = [row for row in rows if isinstance(row, Sample)]
    if samples:
        for number, sample in enumerate(samples):
            if len(sample.token_mask) != len(sample.input_ids):
                lengths = f"{len(sample.token_mask)} and {len(sample.input_ids)}"
                raise ConfigError(
                    f"token_mask and input_ids of sample {number} have lengths {lengths}; expected equal lengths."
                )
        masks = [torch.tensor(sample.token_mask, dtype=torch.bool) for sample in samples]
        batch["token_mask"] = pad_sequence(masks, batch_first=True)
    inputs = [row.model_inputs for row in rows]
    for key in dict.fromkeys(key for row_inputs in inputs for key in row_inputs):
        present = next(row_inputs[key] for row_inputs in inputs if key in row_inputs)
        if key in TOKEN_TYPE_KEYS:
            # Rows without images consist of text, which is type 0.
            text = [torch.zeros(1, len(row.input_ids), dtype=present.dtype) for row in rows]
            types = [row_inputs.get(key, zeros)[0] for row_inputs, zeros in zip(inputs, text, strict=True)]
            batch[key] = pad_sequence(types, batch_first=True)
        else:
            empty = present.new_zeros(0, *present.shape[1:])
            batch[key] = [row_inputs.get(key, empty) for row_inputs in inputs]
    return BatchedDataDict(batch)
