"""What an audit's success rates say about a policy, by one rule.

Each question is about an effect in percentage points: the success that a change of the world costs, or that seeing the world gains.
It is compared with a quarter (``LEAST_FRACTION``) of the stake, the success beyond the better baseline. The answer is yes if the 95 %
interval of the effect lies above that, no if it lies below, and else unclear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlinf.evaluation.compare import Pairs
from rlinf.evaluation.intervals import difference_interval, wilson_interval
from rlinf.evaluation.result import EvaluationResult, Success
from rlinf.number_formats import format_interval, format_points

SMALL_CHANGES = ("paraphrased", "shifted_", "brighter_", "moved_")
"""Beginnings of the keys of conditions that a person would hardly mind."""
LEAST_FRACTION = 0.25
"""Fraction of the stake that decides."""
WHOLE_FRACTION = 1 - LEAST_FRACTION
"""Fraction of the stake below which a yes is a partial one."""

YES, NO, UNCLEAR, UNTOLD = "yes", "no", "unclear", "cannot be told"


@dataclass(frozen=True)
class ConditionRow:
    """Success in one condition.

    Attributes:
        title: The change, in words.
        success: None: the condition was not possible.
        pairs: The same episodes as evaluated (a) and in the condition (b); None: other episodes, or the evaluation itself.
        note: More about it, or why it was not possible.
    """

    key: str
    title: str
    success: Success | None = None
    pairs: Pairs | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        parts = {"success": self.success, "pairs": self.pairs}
        return vars(self) | {name: None if part is None else part.as_dict() for name, part in parts.items()}


@dataclass(frozen=True)
class Verdict:
    """The answer to a question.

    Attributes:
        answer: ``YES``, ``NO``, ``UNCLEAR`` or ``UNTOLD``.
        reason: The numbers, in one sentence.
        is_fault: The answer speaks against the policy or its success rate.
        share: Part of the stake that the effect of a yes explains, in [0, 1]; None: the answer is another one, or not about one effect.
        is_partial: The 95 % interval of that part lies below ``WHOLE_FRACTION``.
        breaks: Changes that are shown to cost success, with their points.
    """

    question: str
    answer: str
    reason: str
    is_fault: bool = False
    share: float | None = None
    is_partial: bool = False
    breaks: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool | None:
        """Whether the answer speaks for the policy; None: neither for nor against it, or only in part."""
        if self.is_fault or self.breaks:
            return False
        return None if self.is_partial or self.answer not in (YES, NO) else True

    @property
    def shown(self) -> str:
        """The answer with its fraction: ``yes (52%)``."""
        return self.answer if self.share is None else f"{self.answer} ({self.share:.0%})"


@dataclass(frozen=True)
class Effect:
    """Success that is lost or gained, its interval, and what could be.

    As text it is the change of success, so a loss is negative there, as in the table of conditions.
    """

    points: float
    low: float
    high: float
    stake: float
    is_loss: bool = False

    @property
    def answer(self) -> str:
        """Whether it is at least ``LEAST_FRACTION`` of the stake."""
        least = LEAST_FRACTION * self.stake
        return YES if self.low > least else NO if self.high < least else UNCLEAR

    @property
    def of_a_yes(self) -> dict[str, Any]:
        """``share`` and ``is_partial`` of a verdict; empty if the answer is another one."""
        share = min(1.0, self.points / self.stake) if self.stake else 1.0
        return {"share": share, "is_partial": self.high < WHOLE_FRACTION * self.stake} if self.answer == YES else {}

    def __str__(self) -> str:
        change, *interval = (
            (0.0 - self.points, 0.0 - self.high, 0.0 - self.low) if self.is_loss else (self.points, self.low, self.high)
        )
        return f"{format_points(change)} points of {100 * self.stake:.1f} (95 % interval {format_points(*interval)})"


def verdicts(rows: Mapping[str, ConditionRow], reset_successes: int, matched: Mapping[str, Pairs]) -> list[Verdict]:
    """Answer the questions of an audit.

    Args:
        rows: Conditions by key; ``clean`` is the evaluation itself.
        reset_successes: Episodes in which one env step without a policy succeeds.
        matched: ``baseline``: pairs of the better baseline (a) and the policy (b); ``pushed``: pairs of its replayed actions under
            pushes (a) and of itself under pushes (b).
    """
    clean = rows["clean"].success
    floor = max(rows[key].success.success_rate for key in ("idle", "random"))
    stake = clean.success_rate - floor
    text = f"{reset_successes} of {clean.episodes} succeed in the first env step without a policy"
    question, at_reset = "Are there episodes that succeed by themselves at once?", bool(reset_successes)
    found = [_beats_nothing(matched["baseline"]), Verdict(question, YES if at_reset else NO, text, at_reset)]
    is_better = found[0].answer == YES
    costs = partial(_by_loss, stake=stake, is_better=is_better)
    reads = costs("Does it read the instruction?", rows["swapped"], "another instruction")
    other, what = rows["other_images"], "the first image of another episode"
    if other.success is None:
        other, what = rows["black"], "a black image"
    looks = costs("Does it look at the images?", other, what)
    what = "the first state of another episode"
    feels = costs("Does it use the robot's state?", rows["other_state"], what, no_is_fault=False)
    reacts = _reacts(rows, matched.get("pushed"), stake, is_better)
    found += [reads, looks, feels, reacts]
    found.append(_remembers(rows, stake, floor, is_better, looks.answer, reacts.answer))
    return [*found, _breaks(rows, stake, is_better)]


def judged_verdict(clean: EvaluationResult, idle: Success) -> Verdict:
    """Answer whether the seen successes of an evaluation are true, where somebody else than the simulator decides on success.

    Args:
        idle: Seen success without a policy: what can be said where the simulator does not tell.
    """
    question = "Is the success that is seen true?"
    told = [one.true_success for one in clean.results if one.success and one.true_success is not None]
    if not told:
        why = f"the simulator judges none of {clean.successes} seen successes; {idle} are seen without a policy"
        return Verdict(question, UNTOLD, f"{why}; judge some by hand, from the videos of an evaluation")
    false = told.count(False)
    low, high = wilson_interval(false, len(told))
    counts = f"{false} of {len(told)} seen successes are false (95 % {format_interval(low, high, ' - ')})"
    answer = NO if false else YES
    return Verdict(question, answer, f"{counts}; by the simulator, {clean.true_success} succeed", bool(false))


def _lost(row: ConditionRow, stake: float) -> Effect:
    low, high = row.pairs.interval
    return Effect(0.0 - row.pairs.difference, 0.0 - high, 0.0 - low, stake, is_loss=True)


def _beats_nothing(pairs: Pairs) -> Verdict:
    low, high = pairs.interval
    points = f"{format_points(pairs.difference)} points (95 % interval {format_points(low, high)}) over the better one of both"
    answer = YES if low > 0 else NO if pairs.difference <= 0 else UNCLEAR
    return Verdict("Is it better than random actions and than doing nothing?", answer, points, answer != YES)


def _not_better(question: str) -> Verdict:
    return Verdict(
        question, UNTOLD, "there is nothing to lose: it is not shown to be better than random actions and doing nothing"
    )


def _by_loss(
    question: str, row: ConditionRow, what: str, stake: float, is_better: bool, no_is_fault: bool = True
) -> Verdict:
    """Ask whether a change costs success."""
    if row.success is None:
        return Verdict(question, UNTOLD, row.note)
    if not is_better:
        return _not_better(question)
    effect = _lost(row, stake)
    is_fault = no_is_fault and effect.answer == NO
    return Verdict(question, effect.answer, f"{what}: {effect}", is_fault, **effect.of_a_yes)


def _reacts(rows: Mapping[str, ConditionRow], pushed: Pairs | None, stake: float, is_better: bool) -> Verdict:
    """Ask whether it notices what happens: a frozen view costs success, or it recovers from pushes better than its replayed actions."""
    question = "Does it react to what happens?"
    if not is_better:
        return _not_better(question)
    if rows["frozen"].pairs is None:
        return Verdict(question, UNTOLD, rows["frozen"].note)
    frozen = _lost(rows["frozen"], stake)
    reason = f"a view that is frozen at the start: {frozen}"
    effects, answers = [frozen], [frozen.answer]
    replayed = rows["pushed_replay"]
    if pushed is not None and replayed.pairs is not None:
        at_stake = -replayed.pairs.difference
        if replayed.pairs.interval[1] < 0:
            low, high = pushed.interval
            gain = Effect(pushed.difference, low, high, at_stake)
            effects.append(gain)
            answers.append(gain.answer)
            reason += f"; pushed, against its own actions replayed: {gain}"
        else:
            answers.append(UNCLEAR)
            reason += "; the pushes do not stop its replayed actions either"
    answer = YES if YES in answers else NO if set(answers) == {NO} else UNCLEAR
    largest = max((one.of_a_yes for one in effects), key=lambda found: found.get("share", -1.0))
    return Verdict(question, answer, reason, answer == NO, **largest)


def _remembers(
    rows: Mapping[str, ConditionRow], stake: float, floor: float, is_better: bool, looks: str, reacts: str
) -> Verdict:
    """Ask whether it lives on initial states that it was trained on, or on one motion that fits all."""
    question = "Does it remember instead?"
    clean, seen, rote = rows["clean"].success, rows["seen"].success, rows["other_actions"]
    reasons, answers = [], []
    if seen is None:
        reasons.append(rows["seen"].note)
    else:
        counts = (seen.successes, clean.successes), (seen.episodes, clean.episodes)
        low, high = difference_interval(*counts)
        effect = Effect(seen.success_rate - clean.success_rate, low, high, max(seen.success_rate - floor, 0.0))
        answers.append(effect.answer)
        reasons.append(f"on initial states of training: {effect}")
    if rote.success is not None and is_better:
        effect = _lost(rote, stake)
        blind = NO in (looks, reacts)
        if effect.answer == NO:
            answers.append(YES if blind else UNCLEAR)
            reasons.append(f"its actions of other episodes succeed as well: {effect}, so one motion fits all episodes")
        else:
            answers.append(NO if effect.answer == YES else UNCLEAR)
            reasons.append(f"its actions of other episodes: {effect}")
    if not answers or (seen is None and answers == [NO]):
        return Verdict(question, UNTOLD, "; ".join(reasons) or "there is nothing to compare")
    answer = YES if YES in answers else NO if set(answers) == {NO} else UNCLEAR
    return Verdict(question, answer, "; ".join(reasons), answer == YES)


def _breaks(rows: Mapping[str, ConditionRow], stake: float, is_better: bool) -> Verdict:
    """Ask whether a small change costs success; a yes is not a fault, because the rate is about the unchanged world."""
    question = "Do small changes of words, images or places stop it?"
    if not is_better:
        return _not_better(question)
    played = [row for key, row in rows.items() if key.startswith(SMALL_CHANGES) and row.pairs is not None]
    if not played:
        return Verdict(question, UNTOLD, "none of them was possible")
    effects = {row.title: _lost(row, stake) for row in played}
    answers = {title: effect.answer for title, effect in effects.items()}
    broken = {title: effect for title, effect in effects.items() if answers[title] == YES}
    shown = [f"{title}: {effect}" for title, effect in broken.items()]
    breaks = tuple(f"{title} ({format_points(0.0 - effect.points)} points)" for title, effect in broken.items())
    answer = YES if shown else NO if set(answers.values()) == {NO} else UNCLEAR
    return Verdict(
        question,
        answer,
        "; ".join(shown) or f"none of {len(effects)} is shown to cost a quarter of {100 * stake:.1f} points",
        breaks=breaks,
    )
