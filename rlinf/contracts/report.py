"""Shared by the checks of models: a row of the table of ``rlinf diagnose``, and the sizes of their batches."""

from __future__ import annotations

from dataclasses import dataclass

BATCH_SIZES = (1, 4)


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        name: The property that was checked.
        passed: Whether it held; None if there was nothing to decide, and ``detail`` says why.
        detail: The numbers.
    """

    name: str
    passed: bool | None
    detail: str
