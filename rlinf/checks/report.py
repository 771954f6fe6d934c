"""What the checks of models share: a row of the table of ``rlinf diagnose``, and the batches and the limit of all of them."""

from __future__ import annotations

from dataclasses import dataclass

BATCH_SIZES = (1, 4)
MAX_EXP_GAP = 1.05
"""Largest accepted ``mean(exp|difference|)`` of log-probabilities in 16 bits; 1 is equality."""


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        name: What was tried.
        passed: Whether it held; None if there was nothing to decide, and ``detail`` says why.
        detail: The numbers.
    """

    name: str
    passed: bool | None
    detail: str
