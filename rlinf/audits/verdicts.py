"""Verdicts of an audit: what its success rates show about a policy.

Each verdict concerns an effect in percentage points: the success lost to a disturbance, or gained by observing the world. The effect is
compared with a threshold, ``LEAST_FRACTION`` of the stake (the success above the better baseline). The verdict is yes if the effect's
95 % interval is above the threshold, no if it is below, and otherwise unclear.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from rlinf.evaluation.compare import Pairs
from rlinf.evaluation.intervals import difference_interval, wilson_interval
from rlinf.evaluation.result import EvaluationResult, Success
from rlinf.files import Json
from rlinf.number_formats import format_interval, format_points

SMALL_CHANGES = ("paraphrased", "shifted_", "brighter_", "moved_")
"""Key prefixes of disturbances that would hardly affect a human operator."""
LEAST_FRACTION = 0.25
"""Minimum effect for a yes, as a fraction of the stake."""
FULL_FRACTION = 1 - LEAST_FRACTION
"""Effects below this fraction of the stake are partial."""

YES, NO, UNCLEAR, UNKNOWN = "yes", "no", "unclear", "cannot be determined"


@dataclass(frozen=True)
class ConditionRow:
    """Success under one condition.

    Attributes:
        success: Success under the condition; None if it was not possible.
        pairs: Pairs of the undisturbed evaluation (a) and the condition (b); None for different episodes or the evaluation itself.
        note: Details, or why the condition was not possible.
    """

    key: str
    title: str
    success: Success | None = None
    pairs: Pairs | None = None
    note: str = ""

    def as_dict(self) -> Json:
        """Return everything as JSON values."""
        parts = {"success": self.success, "pairs": self.pairs}
        return vars(self) | {name: None if part is None else part.as_dict() for name, part in parts.items()}


@dataclass(frozen=True)
class Verdict:
    """The audit's conclusion on one question.

    Attributes:
        outcome: ``YES``, ``NO``, ``UNCLEAR`` or ``UNKNOWN``.
        is_fault: Whether the verdict is evidence against the policy or its success rate.
        fraction: If the verdict is yes, the fraction of the stake explained by the effect, in [0, 1]; None if no, or not about one effect.
        is_partial: Whether the 95 % interval of that fraction is below ``FULL_FRACTION``.
        breaks: Disturbances that reduce success, with the loss in percentage points.
    """

    question: str
    outcome: str
    reason: str
    is_fault: bool = False
    fraction: float | None = None
    is_partial: bool = False
    breaks: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool | None:
        """Whether the verdict is in favour of the policy; None if it is neutral or partial."""
        if self.is_fault or self.breaks:
            return False
        return None if self.is_partial or self.outcome not in (YES, NO) else True

    @property
    def shown(self) -> str:
        """The outcome with its fraction: ``yes (52%)``."""
        return self.outcome if self.fraction is None else f"{self.outcome} ({self.fraction:.0%})"


@dataclass(frozen=True)
class Effect:
    """Success lost or gained, its interval, and the stake; a loss is formatted as a negative number."""

    points: float
    low: float
    high: float
    stake: float
    is_loss: bool = False

    @property
    def outcome(self) -> str:
        """Whether the effect is at least ``LEAST_FRACTION`` of the stake."""
        least = LEAST_FRACTION * self.stake
        return YES if self.low > least else NO if self.high < least else UNCLEAR

    @property
    def extent(self) -> Json:
        """The verdict's ``fraction`` and ``is_partial``; empty unless the outcome is yes."""
        fraction = min(1.0, self.points / self.stake) if self.stake else 1.0
        is_partial = self.high < FULL_FRACTION * self.stake
        return {"fraction": fraction, "is_partial": is_partial} if self.outcome == YES else {}

    def __str__(self) -> str:
        change, *interval = (
            (0.0 - self.points, 0.0 - self.high, 0.0 - self.low) if self.is_loss else (self.points, self.low, self.high)
        )
        return f"{format_points(change)} points of {100 * self.stake:.1f} (95 % interval {format_points(*interval)})"


def verdicts(rows: Mapping[str, ConditionRow], reset_successes: int, matched: Mapping[str, Pairs]) -> list[Verdict]:
    """Return the verdicts of an audit.

    Args:
        rows: Conditions by key; ``clean`` is the evaluation itself.
        reset_successes: Number of episodes in which one env step without a policy succeeds.
        matched: ``baseline`` pairs the better baseline (a) with the policy (b); ``pushed`` pairs the policy's replayed actions (a) with
            the policy (b), both under pushes.
    """
    clean = rows["clean"].success
    floor = max(rows[key].success.success_rate for key in ("idle", "random"))
    stake = clean.success_rate - floor
    text = f"{reset_successes} of {clean.episodes} succeed in the first env step without a policy"
    question, at_reset = "Do some episodes succeed immediately, without a policy?", bool(reset_successes)
    better = _beats_baselines(matched["baseline"])
    is_better = better.outcome == YES
    costs = partial(_by_loss, stake=stake, is_better=is_better)
    reads = costs("Does it read the instruction?", rows["swapped"], "a different instruction")
    images, disturbance = rows["other_images"], "the first image of a different episode"
    if images.success is None:
        images, disturbance = rows["black"], "a black image"
    looks = costs("Does it look at the images?", images, disturbance)
    disturbance = "the first state of a different episode"
    uses_state = costs("Does it use the robot's state?", rows["other_state"], disturbance, no_is_fault=False)
    reacts = _reacts(rows, matched.get("pushed"), stake, is_better)
    return [
        better,
        Verdict(question, YES if at_reset else NO, text, at_reset),
        reads,
        looks,
        uses_state,
        reacts,
        _memorises(rows, stake, floor, is_better, looks.outcome, reacts.outcome),
        _breaks(rows, stake, is_better),
    ]


def success_label_verdict(clean: EvaluationResult, idle: Success) -> Verdict:
    """Return whether the detected successes are true, for an env that does not use the simulator's success.

    Args:
        idle: Success detected without a policy, shown if the simulator reports no success.
    """
    question = "Are the detected successes true?"
    labels = [result.true_success for result in clean.results if result.success and result.true_success is not None]
    if not labels:
        counts = (
            f"the simulator reports none of {clean.successes} detected successes; {idle} are detected without a policy"
        )
        return Verdict(question, UNKNOWN, f"{counts}; label some manually from the videos of an evaluation")
    false = labels.count(False)
    low, high = wilson_interval(false, len(labels))
    counts = f"{false} of {len(labels)} detected successes are false (95 % {format_interval(low, high, ' - ')})"
    outcome = NO if false else YES
    return Verdict(question, outcome, f"{counts}; by the simulator, {clean.true_success} succeed", bool(false))


def _loss(row: ConditionRow, stake: float) -> Effect:
    low, high = row.pairs.interval
    return Effect(0.0 - row.pairs.difference, 0.0 - high, 0.0 - low, stake, is_loss=True)


def _beats_baselines(pairs: Pairs) -> Verdict:
    low, high = pairs.interval
    points = (
        f"{format_points(pairs.difference)} points (95 % interval {format_points(low, high)}) above the better of both"
    )
    outcome = YES if low > 0 else NO if pairs.difference <= 0 else UNCLEAR
    return Verdict("Is it better than random actions and than doing nothing?", outcome, points, outcome != YES)


def _not_better(question: str) -> Verdict:
    return Verdict(
        question, UNKNOWN, "no success to lose, as it is not shown to be better than random actions and doing nothing"
    )


def _by_loss(
    question: str, row: ConditionRow, disturbance: str, stake: float, is_better: bool, no_is_fault: bool = True
) -> Verdict:
    """Return whether a disturbance reduces success."""
    if row.success is None:
        return Verdict(question, UNKNOWN, row.note)
    if not is_better:
        return _not_better(question)
    effect = _loss(row, stake)
    is_fault = no_is_fault and effect.outcome == NO
    return Verdict(question, effect.outcome, f"{disturbance}: {effect}", is_fault, **effect.extent)


def _reacts(rows: Mapping[str, ConditionRow], pushed: Pairs | None, stake: float, is_better: bool) -> Verdict:
    """Return whether the policy loses success with frozen observations, or recovers from pushes better than its replayed actions."""
    question = "Does it react to changes during an episode?"
    if not is_better:
        return _not_better(question)
    if rows["frozen"].pairs is None:
        return Verdict(question, UNKNOWN, rows["frozen"].note)
    frozen = _loss(rows["frozen"], stake)
    reason = f"observations frozen at the start: {frozen}"
    effects, outcomes = [frozen], [frozen.outcome]
    replayed = rows["pushed_replay"]
    if pushed is not None and replayed.pairs is not None:
        at_stake = -replayed.pairs.difference
        if replayed.pairs.interval[1] < 0:
            low, high = pushed.interval
            gain = Effect(pushed.difference, low, high, at_stake)
            effects.append(gain)
            outcomes.append(gain.outcome)
            reason += f"; pushed, compared with its replayed actions: {gain}"
        else:
            # If replayed actions succeed despite the pushes, the comparison cannot show that reacting helps.
            outcomes.append(UNCLEAR)
            reason += "; but its replayed actions do not fail under the pushes either"
    outcome = YES if YES in outcomes else NO if set(outcomes) == {NO} else UNCLEAR
    largest = max((effect.extent for effect in effects), key=lambda extent: extent.get("fraction", -1.0))
    return Verdict(question, outcome, reason, outcome == NO, **largest)


def _memorises(
    rows: Mapping[str, ConditionRow], stake: float, floor: float, is_better: bool, looks: str, reacts: str
) -> Verdict:
    """Return whether success depends on initial states seen in training, or on one motion that fits all episodes."""
    question = "Does it memorise instead?"
    clean, seen, replayed = rows["clean"].success, rows["seen"].success, rows["other_actions"]
    reasons, outcomes = [], []
    if seen is None:
        reasons.append(rows["seen"].note)
    else:
        counts = (seen.successes, clean.successes), (seen.episodes, clean.episodes)
        low, high = difference_interval(*counts)
        effect = Effect(seen.success_rate - clean.success_rate, low, high, max(seen.success_rate - floor, 0.0))
        outcomes.append(effect.outcome)
        reasons.append(f"on initial states of training: {effect}")
    if replayed.success is not None and is_better:
        effect = _loss(replayed, stake)
        blind = NO in (looks, reacts)
        if effect.outcome == NO:
            outcomes.append(YES if blind else UNCLEAR)
            reasons.append(
                f"its actions from different episodes succeed as well: {effect}, so one motion fits all episodes"
            )
        else:
            outcomes.append(NO if effect.outcome == YES else UNCLEAR)
            reasons.append(f"its actions from different episodes: {effect}")
    # A no requires results on the initial states of training: the policy may have memorised states even if replayed actions fail.
    if not outcomes or (seen is None and outcomes == [NO]):
        return Verdict(question, UNKNOWN, "; ".join(reasons) or "no conditions can be compared")
    outcome = YES if YES in outcomes else NO if set(outcomes) == {NO} else UNCLEAR
    return Verdict(question, outcome, "; ".join(reasons), outcome == YES)


def _breaks(rows: Mapping[str, ConditionRow], stake: float, is_better: bool) -> Verdict:
    """Return whether a small disturbance reduces success; a yes is not a fault, because the success rate is for the undisturbed env."""
    question = "Do small changes of wording, images or positions make it fail?"
    if not is_better:
        return _not_better(question)
    disturbed = [row for key, row in rows.items() if key.startswith(SMALL_CHANGES) and row.pairs is not None]
    if not disturbed:
        return Verdict(question, UNKNOWN, "none of them was possible")
    effects = {row.title: _loss(row, stake) for row in disturbed}
    outcomes = {title: effect.outcome for title, effect in effects.items()}
    broken = {title: effect for title, effect in effects.items() if outcomes[title] == YES}
    shown = [f"{title}: {effect}" for title, effect in broken.items()]
    breaks = tuple(f"{title} ({format_points(0.0 - effect.points)} points)" for title, effect in broken.items())
    outcome = YES if shown else NO if set(outcomes.values()) == {NO} else UNCLEAR
    return Verdict(
        question,
        outcome,
        "; ".join(shown) or f"none of {len(effects)} is shown to cost a quarter of {100 * stake:.1f} points",
        breaks=breaks,
    )
