"""Shared by the checks of models: a row of the table of ``rlinf diagnose``, and the sizes of their batches."""

from __future__ import annotations

from dataclasses import dataclass

BATCH_SIZES = (1, 4)


@dataclass(frozen=True)
class Check:
    """One row of the table: the property, whether it held, and the numbers.

    ``passed`` is None if there was nothing to decide, and ``detail`` says why.
    """

    name: str
    passed: bool | None
    detail: str
