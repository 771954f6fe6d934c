"""Outcome of a run: the change in success, return, reward or loss from start to end, with an interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rlinf.evaluation.intervals import STUDENT_T_95, difference_interval
from rlinf.evaluation.result import Success

ROSE, FELL, DID_NOT_RISE, UNKNOWN = "rose", "fell", "did_not_rise", "inconclusive"
MASTERED = 0.95
"""Success rate, or fraction of the full reward, above which the task is considered mastered."""
MATTERS, SLIGHT = 0.1, 0.05
"""Smallest relevant increase in success, and smallest decrease that is reported."""
# Use 99 % because at 95 %, one in 20 runs without a change would be reported as changed.
CERTAIN = 2.5758 / 1.96
"""Ratio of the half-widths of a 99 % and a 95 % interval."""


@dataclass(frozen=True)
class Outcome:
    """Change in the measured quantity from the first to the last part of the run.

    Attributes:
        verdict: ``rose``, ``fell``, ``did_not_rise`` or ``inconclusive``; refers to ``measure`` itself, even if it is a loss.
        measure: ``success``, ``return``, ``reward`` or ``loss``.
        is_good: Whether the measure certainly improved or could not improve any further.
    """

    verdict: str
    measure: str
    text: str
    is_good: bool
    steps: tuple[int, int]

    def made_worse(self, start: str | None) -> list[str]:
        """Return a warning if training made the policy worse; ``start`` names the initial weights (None: random)."""
        if self.verdict != FELL or self.measure == "loss":
            return []
        initial = f"it started with {start or 'random weights'}"
        return [f"training made the policy worse: the {self.measure} fell {self.text}; {initial}"]

    def __str__(self) -> str:
        if self.verdict == UNKNOWN:
            return f"outcome: inconclusive whether the {self.measure} changed: {self.text}"
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
    """Compare the first and last success in ``counts`` (step and counts).

    Args:
        place: Where success was counted; used in the text.
        fix: Override that would make the outcome conclusive.
        interval: 95 % interval of the paired change over episodes; None if the two are independent (Newcombe 1998, method 10).
    """
    (start, first), (end, last) = counts[0], counts[-1]
    low, high = interval or difference_interval((last.successes, first.successes), (last.episodes, first.episodes))
    change, is_mastered = last.success_rate - first.success_rate, last.success_rate >= MASTERED
    certain_low, certain_high = certainly(change, low, high)
    if certain_low > 0:
        verdict, note = ROSE, ""
    elif certain_high < 0 and change <= -SLIGHT:
        verdict, note = FELL, ""
    elif is_mastered and first.success_rate >= MASTERED:
        verdict, note = DID_NOT_RISE, "; nothing was left to learn"
    elif low <= 0 and high < MATTERS:
        verdict, note = DID_NOT_RISE, f"; a rise by {100 * MATTERS:.0f} points is excluded"
    else:
        verdict, note = UNKNOWN, f". To decide, set {fix}"
    step, best = max(counts, key=lambda point: point[1].success_rate)
    if best.interval[0] > max(first.interval[1], last.interval[1]):
        note = f"; it was {best} at step {step}{note}"
    points = f"by {100 * change:+.1f} points (95 % {100 * low:+.1f} to {100 * high:+.1f})"
    text = f"from {first} at step {start} to {last} at step {end} {place}, {points}{note}"
    return Outcome(verdict, measure, text, verdict == ROSE or is_mastered, (start, end))


def outcome_of_intervals(
    means: Sequence[tuple[int, float, float, float]], fix: str, interval: tuple[float, float] | None = None
) -> Outcome:
    """Compare the first and last mean return of evaluations (step, mean and ends of its 95 % interval).

    ``interval`` is the 95 % interval of the paired change over episodes, or None if the two are independent.
    """
    (start, first, *ends), (end, last, *last_ends) = means[0], means[-1]
    half, change = math.hypot(ends[1] - ends[0], last_ends[1] - last_ends[0]) / 2, last - first
    text = f"from {first:.4g} at step {start} to {last:.4g} at step {end} of the evaluations"
    low, high = interval or (change - half, change + half)
    # Ignore changes below 3 % of the first mean; an increase by a fifth of it is relevant.
    return _outcome_of_change(
        "return", text, (start, end), (change, low, high), 0.03 * abs(first), 0.2 * abs(first), fix
    )


def outcome_of_values(
    measure: str, steps: Sequence[int], values: Sequence[float], fix: str, full: float = math.inf
) -> Outcome:
    """Compare the first and last quarter of ``values``; ``full`` is the maximum possible value."""
    window = max(3, len(values) // 4)
    first, last = fmean(values[:window]), fmean(values[-window:])
    low, high, std = change_interval(values, window)
    # Ignore changes below 3 % or 1.5 std of an iteration; changes of 20 % or 3 std are relevant.
    slight = max(0.03 * abs(first), 1.5 * std)
    matters = max(0.2 * abs(first), 3 * std, 0.05 * full if full < math.inf else 0)
    text = f"from {first:.4g} (steps {steps[0]} to {steps[window - 1]}) to {last:.4g} (steps {steps[-window]} to {steps[-1]})"
    change = (last - first, low, high)
    return _outcome_of_change(
        measure, text, (steps[0], steps[-1]), change, slight, matters, fix, last >= MASTERED * full
    )


def _outcome_of_change(
    measure: str,
    text: str,
    steps: tuple[int, int],
    interval: tuple[float, float, float],
    slight: float,
    matters: float,
    fix: str,
    is_mastered: bool = False,
) -> Outcome:
    """Return the outcome of a change and its 95 % ``interval`` (change, low, high).

    Changes below ``slight`` are ignored; improvements above ``matters`` are relevant.
    """
    change, low, high = interval
    sign, (certain_low, certain_high) = -1 if measure == "loss" else 1, certainly(change, low, high)
    if certain_low > 0 and change >= slight:
        verdict, note = ROSE, ""
    elif certain_high < 0 and -change >= slight:
        verdict, note = FELL, ""
    elif max(sign * low, sign * high) <= matters:
        verdict, note = DID_NOT_RISE, f"; a {'rise' if sign > 0 else 'fall'} by {matters:.3g} is excluded"
    else:
        verdict, note = UNKNOWN, f". To decide, set {fix}"
    is_good = verdict == (ROSE if sign > 0 else FELL) or is_mastered
    text = f"{text}, by {change:+.3g} (95 % {low:+.3g} to {high:+.3g}){note}"
    return Outcome(verdict, measure, text, is_good, steps)


def certainly(change: float, low: float, high: float) -> tuple[float, float]:
    """Return the ends of the 99 % interval of a change, given the ends of its 95 % interval."""
    return change - CERTAIN * (change - low), change + CERTAIN * (high - change)


def change_interval(values: Sequence[float], window: int) -> tuple[float, float, float]:
    """Return the 95 % interval of the change between the first and last mean of ``window`` values, and the std of a single early value.

    The std ``s`` is estimated from second differences ``a - 2b + c``, which have variance ``6 s^2`` (von Neumann et al. 1941, Annals of
    Mathematical Statistics 12:153, for first differences).
    """
    # Second differences remove the trend, so that learning is not mistaken for noise. Estimate the noise of each half separately.
    half = len(values) // 2
    early, late = (
        math.sqrt(fmean((a - 2 * b + c) ** 2 / 6 for a, b, c in zip(part, part[1:], part[2:], strict=False)))
        for part in (values[:half], values[-half:])
    )
    degrees = min(half - 2, len(STUDENT_T_95))  # of one half, because the second half may have no noise
    width = STUDENT_T_95[degrees - 1] * math.hypot(early, late) / math.sqrt(window)
    change = fmean(values[-window:]) - fmean(values[:window])
    return change - width, change + width, early
