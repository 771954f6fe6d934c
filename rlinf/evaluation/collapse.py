"""When a policy has collapsed: what ``trainer.on_collapse`` goes by."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.evaluation.result import Success

IN_A_ROW = 2
"""Evaluations, one after the other, that must show it."""


def is_collapsed(best: Success, later: Success) -> bool:
    """Return whether ``later`` is certainly less than half of ``best``.

    Its 95 % Wilson interval ends below half of the best success rate, and below the interval of the best. A significant difference
    alone would not do: the best of many evaluations is best by luck too, so that three of four runs of 50 evaluations that stay
    where they are would be accused. With this rule, and twice in a row, at most one run in fifty is (100 episodes).
    """
    end = later.interval[1]
    return end < best.success_rate / 2 and end < best.interval[0]


def has_collapsed(evaluations: Sequence[Success]) -> bool:
    """Return whether each of the last ``IN_A_ROW`` evaluations is collapsed against the best one before them."""
    before, last = evaluations[:-IN_A_ROW], evaluations[-IN_A_ROW:]
    if not before:
        return False
    best = max(before, key=lambda each: each.success_rate)
    return all(is_collapsed(best, each) for each in last)
