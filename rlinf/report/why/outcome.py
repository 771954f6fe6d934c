"""Whether a run reached what it is for: success, return, reward or loss, first against last, with the interval of the change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rlinf.evaluation.intervals import STUDENT_T_95, difference_interval
from rlinf.evaluation.result import Success

ROSE, FELL, DID_NOT_RISE, UNKNOWN = "rose", "fell", "did_not_rise", "cannot_be_told"
MASTERED = 0.95
"""Success rate, or fraction of the full reward, from which there is nothing left to learn."""
MATTERS, SLIGHT = 0.1, 0.05
"""A rise of success that matters, and a fall that is too small to be called one."""
CERTAIN = 2.5758 / 1.96
"""Half-width of a 99 % interval over a 95 % interval's: at 95 %, one of 20 runs that stay where they are would be said to have changed."""


@dataclass(frozen=True)
class Outcome:
    """First against last.

    Attributes:
        verdict: ``rose``, ``fell``, ``did_not_rise`` or ``cannot_be_told``; of what ``measure`` names, also if that is a loss.
        measure: ``success``, ``return``, ``reward`` or ``loss``.
        text: The sentence without its verdict.
        is_good: It improved certainly, or there was nothing left to improve.
        is_mastered: There was nothing left to improve at the end.
        steps: First and last step.
    """

    verdict: str
    measure: str
    text: str
    is_good: bool
    is_mastered: bool
    steps: tuple[int, int]

    @property
    def is_bad(self) -> bool:
        """Whether it certainly did not improve."""
        return not self.is_good and self.verdict != UNKNOWN

    def made_worse(self, start: str | None) -> list[str]:
        """Return a line that training made the policy worse, which started at ``start`` (None: random weights); empty if it did not."""
        if self.verdict != FELL or self.measure == "loss":
            return []
        began = f"it started with {start or 'random weights'}"
        return [f"training made the policy worse: the {self.measure} fell {self.text}; {began}"]

    def __str__(self) -> str:
        if self.verdict == UNKNOWN:
            return f"outcome: it cannot be told whether the {self.measure} changed: {self.text}"
        changed = (
            "did not fall" if (self.measure, self.verdict) == ("loss", DID_NOT_RISE) else self.verdict.replace("_", " ")
        )
        return f"outcome: the {self.measure} certainly {changed}: {self.text}"


def outcome_of_counts(
    counts: Sequence[tuple[int, Success]],
    place: str,
    fix: str,
    measure: str = "success",
    interval: tuple[float, float] | None = None,
) -> Outcome:
    """Compare the first with the last success by step, counted in ``place``; ``fix`` would tell more.

    ``interval``: 95 % interval of the change over pairs of episodes. Without one, the two count as independent (Newcombe 1998, method 10).
    """
    (start, first), (end, last) = counts[0], counts[-1]
    low, high = interval or difference_interval((last.successes, first.successes), (last.episodes, first.episodes))
    change, is_mastered = last.success_rate - first.success_rate, last.success_rate >= MASTERED
    certain_low, certain_high = certainly(change, low, high)
    if certain_low > 0:
        verdict, then = ROSE, ""
    elif certain_high < 0 and change <= -SLIGHT:
        verdict, then = FELL, ""
    elif is_mastered and first.success_rate >= MASTERED:
        verdict, then = DID_NOT_RISE, "; nothing was left to rise"
    elif low <= 0 and high < MATTERS:
        verdict, then = DID_NOT_RISE, f"; a rise by {100 * MATTERS:.0f} points is excluded"
    else:
        verdict, then = UNKNOWN, f". To tell, set {fix}"
    step, best = max(counts, key=lambda each: each[1].success_rate)
    if best.interval[0] > max(first.interval[1], last.interval[1]):
        then = f"; it was {best} at step {step}{then}"
    points = f"by {100 * change:+.1f} points (95 % {100 * low:+.1f} to {100 * high:+.1f})"
    text = f"from {first} at step {start} to {last} at step {end} {place}, {points}{then}"
    return Outcome(verdict, measure, text, verdict == ROSE or is_mastered, is_mastered, (start, end))


def outcome_of_intervals(
    means: Sequence[tuple[int, float, float, float]], fix: str, interval: tuple[float, float] | None = None
) -> Outcome:
    """Compare the first with the last mean return of evaluations: step, mean and ends of its 95 % interval.

    ``interval``: 95 % interval of the change over pairs of episodes. Without one, half-widths of independent means add in squares. A
    change counts from 3 % of the first mean on. A rise by a fifth of it matters.
    """
    (start, first, *ends), (end, last, *last_ends) = means[0], means[-1]
    half, change = math.hypot(ends[1] - ends[0], last_ends[1] - last_ends[0]) / 2, last - first
    low, high = interval or (change - half, change + half)
    matters = 0.2 * abs(first)
    verdict, then = UNKNOWN, f". To tell, set {fix}"
    certain_low, certain_high = certainly(change, low, high)
    if (certain_low > 0 or certain_high < 0) and abs(change) >= 0.03 * abs(first):
        verdict, then = ROSE if low > 0 else FELL, ""
    elif high <= matters:
        verdict, then = DID_NOT_RISE, f"; a rise by {matters:.3g} is excluded"
    text = f"from {first:.4g} at step {start} to {last:.4g} at step {end} of the evaluations, by {change:+.3g} (95 % {low:+.3g} to {high:+.3g}){then}"
    return Outcome(verdict, "return", text, verdict == ROSE, False, (start, end))


def outcome_of_values(
    measure: str, steps: Sequence[int], values: Sequence[float], fix: str, full: float = math.inf
) -> Outcome:
    """Compare the first with the last quarter of values by step; ``full`` is the largest that there can be.

    A change counts from 3 % of the first size and 1.5 deviations of an iteration on. One of 20 % or 3 deviations matters.
    """
    window = max(3, len(values) // 4)
    first, last, (low, high, deviation) = (
        fmean(values[:window]),
        fmean(values[-window:]),
        change_interval(values, window),
    )
    change, is_mastered, sign = last - first, last >= MASTERED * full, -1 if measure == "loss" else 1
    slight, matters = (
        max(0.03 * abs(first), 1.5 * deviation),
        max(0.2 * abs(first), 3 * deviation, 0.05 * full if full < math.inf else 0),
    )
    certain_low, certain_high = certainly(change, low, high)
    if certain_low > 0 and change >= slight:
        verdict, then = ROSE, ""
    elif certain_high < 0 and -change >= slight:
        verdict, then = FELL, ""
    elif max(sign * low, sign * high) <= matters:
        verdict, then = DID_NOT_RISE, f"; a {'rise' if sign > 0 else 'fall'} by {matters:.3g} is excluded"
    else:
        verdict, then = UNKNOWN, f". To tell, set {fix}"
    ends = f"from {first:.4g} (steps {steps[0]} to {steps[window - 1]}) to {last:.4g} (steps {steps[-window]} to {steps[-1]})"
    text = f"{ends}, by {change:+.3g} (95 % {low:+.3g} to {high:+.3g}){then}"
    is_good = verdict == (ROSE if sign > 0 else FELL) or is_mastered
    return Outcome(verdict, measure, text, is_good, is_mastered, (steps[0], steps[-1]))


def certainly(change: float, low: float, high: float) -> tuple[float, float]:
    """Return the ends of the 99 % interval of a change, from the ends of its 95 % interval."""
    return change - CERTAIN * (change - low), change + CERTAIN * (high - change)


def change_interval(values: Sequence[float], window: int) -> tuple[float, float, float]:
    """Return the 95 % interval of the last minus the first mean of ``window`` values, and the deviation of a single early value.

    Iterations are drawn independently, given the policy. Second differences ``a - 2b + c`` have the variance ``6 s^2`` and no trend (von
    Neumann et al. 1941, Annals of Mathematical Statistics 12:153, for first ones). Each half of the run has its own ``s``.
    """
    half = len(values) // 2
    early, late = (
        math.sqrt(fmean((a - 2 * b + c) ** 2 / 6 for a, b, c in zip(part, part[1:], part[2:], strict=False)))
        for part in (values[:half], values[-half:])
    )
    degrees = min(half - 2, len(STUDENT_T_95))  # of one half: the other one may hardly vary
    width = STUDENT_T_95[degrees - 1] * math.hypot(early, late) / math.sqrt(window)
    change = fmean(values[-window:]) - fmean(values[:window])
    return change - width, change + width, early
