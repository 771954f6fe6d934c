"""Check that a dataset script passes the same rows on every rank; the trainer then divides them among the ranks."""

from typing import Any

from rlinf.distributed.deadlines import deadline, portable
from rlinf.distributed.process_group import gather_objects, rank, world_size
from rlinf.distributed.sums import maximum
from rlinf.errors import ConfigError
from rlinf.recipes.datasets import StreamedRows
from rlinf.recipes.samples import tokens_of

FIX = "A script must pass all rows on every rank; the trainer divides them"


def check_equal_rows(rows: Any) -> None:
    """Raise ConfigError on every rank if the rows differ between ranks (a collective call).

    The check compares the number of rows and the first, middle and last row; for a stream, in the first block. If one rank cannot pack a
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
    except Exception as raised:  # noqa: BLE001 - the other ranks wait for this one, no matter what a packer raises
        error = raised
    with deadline("start"):
        gathered = gather_objects((len(rows), packed, None if error is None else portable(error, rank())))
    # Prefer the local error, which has the traceback, over a copy from a different rank.
    for rank_error in (error, *(remote for *_, remote in gathered)):
        if rank_error is not None:
            raise rank_error
    expected_rows, expected, _ = gathered[0]
    for number, (num_rows, tokens, _) in enumerate(gathered):
        difference = f"rank 0 has {expected_rows} rows, rank {number} has {num_rows}"
        if num_rows == expected_rows:
            changed = [row for row in tokens if tokens[row] != expected[row]]
            if not changed:
                continue
            difference = f"row {changed[0]} of rank {number} differs from rank 0"
        raise ConfigError(f"The dataset differs between ranks: {difference}. {FIX}")


def check_equal_stream(rows: Any) -> None:
    """Raise ConfigError on every rank if ranks have read different blocks of a stream (a collective call); accept rows without a stream."""
    if not isinstance(rows, StreamedRows) or world_size() == 1:
        return
    # Reducing (x, -x) once yields both the maximum and the minimum.
    largest, negative_smallest = maximum(rows.digest, -rows.digest)
    if largest != -negative_smallest:
        raise ConfigError(f"The stream of {rows.source} differs between ranks in its first {rows.num_read} rows. {FIX}")
