"""Rows as the trainers of recipes read them, and the batch that they form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf.errors import ConfigError
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.logprobs import TOKEN_TYPE_KEYS

SKIP_BAD_ROWS = "train.train_policy.dataset.skip_bad_rows=true"


class BadRowError(ConfigError):
    """A row of a dataset cannot be used.

    Args:
        reason: The value found, and the requirement.
        row: Row number within the dataset; a packer does not know it, the dataset adds it.
        source: File or name of the dataset.
    """

    def __init__(self, reason: str, row: int | None = None, source: str = "") -> None:
        place = "A row of the dataset" if row is None else f"Row {row}{f' of {source}' if source else ''}"
        super().__init__(f"{place} cannot be used: {reason} Fix the row, or set {SKIP_BAD_ROWS} to leave such rows out")
        self.reason, self.row, self.source = reason, row, source

    def at(self, row: int, source: str) -> BadRowError:
        """Return the same error with the place of the row."""
        return BadRowError(self.reason, row, source)


@dataclass
class Sample:
    """A row to train on.

    Attributes:
        input_ids: Tokens of prompt and answer, ``[S]``.
        token_mask: True where the token is learned, ``[S]``.
        model_inputs: Inputs of a vision-language model besides the tokens (``pixel_values`` ...), of this row alone: as its
            processor returns them for one text. Empty for text.
        is_cut: The row is longer than ``policy.model_max_length``; ``input_ids`` are its first tokens.
    """

    input_ids: list[int]
    token_mask: list[bool]
    model_inputs: dict[str, Tensor] = field(default_factory=dict)
    is_cut: bool = False


@dataclass
class Prompt:
    """A row to generate for.

    Attributes:
        input_ids: Tokens, ``[S]``.
        model_inputs: See ``Sample``.
        reference: The right answer, for rewards, if any.
        row: The row itself, for rewards and for the report.
        previews: Small copies of its images as JPEG, for the report.
    """

    input_ids: list[int]
    model_inputs: dict[str, Tensor] = field(default_factory=dict)
    reference: str | None = None
    row: dict[str, Any] = field(default_factory=dict)
    previews: list[bytes] = field(default_factory=list)


def tokens_of(row: Any) -> list[list[int]]:
    """Return the tokens of a packed row: of a sample, a prompt, or a pair of samples."""
    return [each.input_ids for each in (row if isinstance(row, tuple) else (row,))]


def cut_and_equal(row: Any) -> tuple[bool, bool]:
    """Return whether a packed row was cut, and whether it is a pair of equal samples, from which DPO learns nothing."""
    samples = [each for each in (row if isinstance(row, tuple) else (row,)) if isinstance(each, Sample)]
    is_equal = len(samples) == 2 and samples[0].input_ids == samples[1].input_ids
    return any(sample.is_cut for sample in samples), is_equal


def collate(rows: Sequence[Sample] | Sequence[Prompt], pad_token_id: int = 0) -> BatchedDataDict:
    """Return rows as one batch, padded on the right.

    Returns:
        ``input_ids`` int64 and ``attention_mask`` bool ``[B, S]``; of samples also ``token_mask`` bool ``[B, S]``. Further keys
        are the model inputs that any row has: token types ``[B, S]``, and all others as a list of one tensor per row, which has
        length 0 for a row without images.
    """
    if not rows:
        raise ConfigError("collate got no rows; required: one or more.")
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
                    f"token_mask and input_ids of sample {number} have the lengths {lengths}; required: equal ones."
                )
        masks = [torch.tensor(sample.token_mask, dtype=torch.bool) for sample in samples]
        batch["token_mask"] = pad_sequence(masks, batch_first=True)
    inputs = [row.model_inputs for row in rows]
    for key in dict.fromkeys(key for each in inputs for key in each):
        present = next(each[key] for each in inputs if key in each)
        if key in TOKEN_TYPE_KEYS:
            text = [torch.zeros(1, len(row.input_ids), dtype=present.dtype) for row in rows]  # 0 is text
            types = [each.get(key, zeros)[0] for each, zeros in zip(inputs, text, strict=True)]
            batch[key] = pad_sequence(types, batch_first=True)
        else:
            empty = present.new_zeros(0, *present.shape[1:])
            batch[key] = [each.get(key, empty) for each in inputs]
    return BatchedDataDict(batch)
