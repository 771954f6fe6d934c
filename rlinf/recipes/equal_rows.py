"""All ranks must read the same rows, which they divide: a script that divides its rows itself would have them train on others."""

from __future__ import annotations

from typing import Any

from rlinf.distributed.deadlines import deadline, portable
from rlinf.distributed.process_group import gather_objects, rank, world_size
from rlinf.distributed.sums import maximum
from rlinf.errors import ConfigError
from rlinf.recipes.datasets import StreamedRows
from rlinf.recipes.samples import tokens_of

CURE = "On every rank a script must give all rows, which are divided here"


def check_equal_rows(rows: Any) -> None:
    """Raise ConfigError on every rank if a dataset script gives other rows to one rank than to another (a collective call).

    Their number and the first, the middle and the last row are compared; of a stream, the first block. If one rank cannot pack a
    row, all ranks raise its error.
    """
    if isinstance(rows, StreamedRows):
        with deadline("start"):
            check_equal_stream(rows)
        return
    if world_size() == 1:
        return
    packed: dict[int, list[list[int]]] = {}
    error: Exception | None = None
    try:
        packed = {row: tokens_of(rows[row]) for row in (0, len(rows) // 2, len(rows) - 1)}
    except Exception as raised:  # noqa: BLE001 - whatever a packer raises, the other ranks wait for this one
        error = raised
    with deadline("start"):
        told = gather_objects((len(rows), packed, None if error is None else portable(error, rank())))
    for each in (error, *(other for *_, other in told)):
        if each is not None:
            raise each
    for number, (num_rows, others, _) in enumerate(told):
        found = f"rank 0 has {told[0][0]} rows, rank {number} has {num_rows}"
        if num_rows == told[0][0]:
            changed = [row for row in others if others[row] != told[0][1][row]]
            if not changed:
                continue
            found = f"row {changed[0]} of rank {number} is not that of rank 0"
        raise ConfigError(f"The dataset differs between the ranks: {found}. {CURE}")


def check_equal_stream(rows: Any) -> None:
    """Raise ConfigError on every rank if a stream has given them different blocks so far (a collective call); else do nothing."""
    if not isinstance(rows, StreamedRows) or world_size() == 1:
        return
    largest, negative_smallest = maximum(rows.digest, -rows.digest)
    if largest != -negative_smallest:
        raise ConfigError(
            f"The stream of {rows.source} differs between the ranks, in its rows up to {rows.num_read}. {CURE}"
        )
