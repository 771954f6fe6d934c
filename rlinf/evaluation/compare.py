"""Paired comparison of two evaluations on the same episodes.

Pairing removes the variance due to episode difficulty, so fewer episodes are needed to detect the same difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rlinf.errors import ConfigError
from rlinf.evaluation import intervals
from rlinf.evaluation.result import EvaluationResult, Success
from rlinf.evaluation.sequential import LEVEL, difference_confidence_sequence, sequential_p_value
from rlinf.evaluation.stopping import Episode, episode_of
from rlinf.files import Json
from rlinf.manifest import Mismatch, reject_mismatches
from rlinf.number_formats import format_p_value, format_points

EPISODES = "episodes"
"""Value of ``evaluation.allow_mismatch`` that allows the lists of episodes to differ."""
SEQUENTIAL_METHOD = "Sequential test of the episodes on which the two differ (Robbins 1970), two-sided: p-value and 95 % interval are valid at any time"
METHOD = "Exact conditional McNemar test, two-sided; 95 % interval of the paired difference: Newcombe 1998, method 10"
RETURN_METHOD = "Returns: exact sign test, two-sided, without episodes of equal returns; 95 % interval of the mean difference: percentile bootstrap of the pairs"

TOTAL = "all kinds"
CHANGE_METHOD = "Change of an effect: 95 % interval of the difference of paired differences by MOVER (Zou 2007)"


@dataclass(frozen=True)
class Pairs:
    """Paired outcomes of two policies: how many episodes both, only one, or neither solved."""

    both: int
    only_a: int
    only_b: int
    neither: int

    @property
    def a(self) -> Success:
        """Successes of the first policy."""
        return Success(self.both + self.only_a, self.episodes)

    @property
    def b(self) -> Success:
        """Successes of the second policy."""
        return Success(self.both + self.only_b, self.episodes)

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def difference(self) -> float:
        """Success rate of the second policy minus the first policy's."""
        return (self.only_b - self.only_a) / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of ``difference``."""
        return intervals.paired_difference_interval(self.both, self.only_b, self.only_a, self.neither)

    @property
    def p_value(self) -> float:
        """p-value of the exact McNemar test."""
        return mcnemar_exact(self.only_a, self.only_b)

    def as_dict(self) -> Json:
        """Return counts, difference, interval and p-value as JSON values."""
        return {
            "episodes": self.episodes, "successes_a": self.a.successes, "successes_b": self.b.successes,
            "only_a": self.only_a, "only_b": self.only_b, "difference": self.difference,
            "interval": list(self.interval), "p_value": self.p_value,
        }  # fmt: skip


@dataclass(frozen=True)
class SequentialPairs(Pairs):
    """Pairs from an evaluation that could end early; the interval and p-value are valid at any time.

    Attributes:
        signs: For each episode, in list order: 1 if only the second policy succeeded, -1 if only the first did, otherwise 0.
    """

    signs: tuple[int, ...]
    num_planned: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence sequence of ``difference``."""
        return difference_confidence_sequence(self.only_a, self.only_b, self.both + self.neither)

    @property
    def p_value(self) -> float:
        """p-value of the sequential test."""
        return sequential_p_value(self.signs, self.num_planned)

    def state(self) -> str:
        """Return which policy is better, or that this is not decided yet."""
        progress = f"after {self.episodes} of {self.num_planned} episodes"
        if self.p_value > LEVEL:
            return f"Not decided {progress}"
        low, high = self.interval
        # The test only asks which policy wins more often; the interval must cover every possible difference, so it is wider.
        doubt = "; by how much is still open, so the wider interval includes 0" if low <= 0 <= high else ""
        return f"Decided {progress}: {'b' if self.difference > 0 else 'a'} is better{doubt}"


@dataclass(frozen=True)
class ReturnPairs:
    """Returns ``a`` and ``b`` of two policies on the same episodes."""

    a: tuple[float, ...]
    b: tuple[float, ...]

    @cached_property
    def differences(self) -> list[float]:
        """Second policy's return minus the first policy's, per episode."""
        return [second - first for first, second in zip(self.a, self.b, strict=True)]

    @property
    def difference(self) -> float:
        """Mean of ``differences``."""
        return sum(self.differences) / len(self.differences)

    @property
    def higher_a(self) -> int:
        """Number of episodes in which the first policy's return is higher."""
        return sum(difference < 0 for difference in self.differences)

    @property
    def higher_b(self) -> int:
        """Number of episodes in which the second policy's return is higher."""
        return sum(difference > 0 for difference in self.differences)

    @cached_property
    def interval(self) -> tuple[float, float]:
        """95 % interval of ``difference``; infinite for a single episode."""
        return intervals.bootstrap_interval(self.differences)

    @property
    def p_value(self) -> float:
        """p-value of the sign test (Dixon and Mood 1946, JASA 41:557); ``mcnemar_exact`` is its binomial tail."""
        return mcnemar_exact(self.higher_a, self.higher_b)

    @property
    def change(self) -> str:
        """Difference with its interval, formatted as ``+12.3 (95 % +4.1 to +20.5)``."""
        low, high = self.interval
        return f"{self.difference:+.4g}" + (f" (95 % {low:+.4g} to {high:+.4g})" if len(self.a) > 1 else "")

    def as_dict(self) -> Json:
        """Return means, difference, interval (null for a single episode), counts and p-value as JSON values."""
        means = {f"mean_{name}": sum(values) / len(values) for name, values in (("a", self.a), ("b", self.b))}
        return {
            "episodes": len(self.a), **means, "difference": self.difference,
            "interval": list(self.interval) if len(self.a) > 1 else None,
            "higher_a": self.higher_a, "higher_b": self.higher_b, "p_value": self.p_value,
        }  # fmt: skip


@dataclass
class Comparison:
    """A paired comparison of two evaluations.

    Attributes:
        num_unpaired: Number of episodes that appear in only one of the two.
        sequential: Pairs of all tasks, if one of the two evaluations could end early.
        returns: Maps each task to the returns of its episodes; empty for questions and for evaluations that could end early.
        reports_success: Whether episodes can succeed; if not, only ``returns`` are compared.
        changes: How the effect of each kind of perturbation differs: ``kind``, number of ``episodes``, effects ``a`` and ``b`` (success
            with the perturbation minus without), ``difference`` and ``interval``; empty for evaluations that could end early.
    """

    per_task: dict[str, Pairs]
    num_unpaired: int = 0
    a: str = "a"
    b: str = "b"
    mismatches: list[str] = field(default_factory=list)
    unit: str = EPISODES
    sequential: SequentialPairs | None = None
    returns: dict[str, ReturnPairs] = field(default_factory=dict)
    reports_success: bool = True
    changes: list[Json] = field(default_factory=list)

    @property
    def total(self) -> Pairs:
        """Pairs of all tasks together."""
        if self.sequential is not None:
            return self.sequential
        return Pairs(*map(sum, zip(*map(astuple, self.per_task.values()), strict=True)))

    @cached_property
    def return_total(self) -> ReturnPairs | None:
        """Returns of all tasks together; None without ``returns``."""
        a, b = (sum((getattr(pairs, name) for pairs in self.returns.values()), ()) for name in ("a", "b"))
        return ReturnPairs(a, b) if a else None

    def as_dict(self) -> Json:
        """Return everything as JSON values; ``total`` is null if the env reports no success, and ``returns`` is null without returns."""
        tasks = self.per_task.items() if self.reports_success else ()
        returns = {task: pairs.as_dict() for task, pairs in self.returns.items()}
        return {
            "a": self.a, "b": self.b, "method": self.method, "test": self.test,
            "total": self.total.as_dict() if self.reports_success else None,
            "per_task": {task: pairs.as_dict() for task, pairs in tasks},
            "returns": {"total": self.return_total.as_dict(), "per_task": returns} if self.return_total else None,
            "num_unpaired": self.num_unpaired, "mismatches": self.mismatches, "unit": self.unit,
            "changes": self.changes,
        }  # fmt: skip

    @property
    def method(self) -> str:
        """How p-values and intervals are computed."""
        success_method = METHOD if self.sequential is None else SEQUENTIAL_METHOD
        methods = (
            (success_method, self.reports_success), (RETURN_METHOD, bool(self.returns)), (CHANGE_METHOD, bool(self.changes)),
        )  # fmt: skip
        return ". ".join(method for method, is_used in methods if is_used)

    @property
    def test(self) -> str:
        """Name of the test."""
        return "McNemar" if self.sequential is None else "sequential"

    def table(self) -> str:
        """Return a text table with one line per task and for the total, followed by the verdict."""
        lines = [
            f"a: {self.a}",
            f"b: {self.b}",
            *(self._success_rows() if self.reports_success else self._return_rows()),
        ]
        lines += [f"allowed by evaluation.allow_mismatch: {mismatch}" for mismatch in self.mismatches]
        lines += self._change_rows() if self.changes else []
        lines += [f"{self.sequential.state()}."] if self.sequential is not None else []
        return "\n".join([*lines, self.verdict(), f"{self.method}."])

    def _success_rows(self) -> list[str]:
        rows = [*self.per_task.items(), ("total", self.total)]
        width = max(len(name) for name, _ in rows)
        head = f"{'task'.ljust(width)}    a k/n    b k/n   b - a  only a  only b  p ({self.test})"
        lines = [head]
        for name, pairs in rows:
            lines.append(
                f"{name.ljust(width)}  {pairs.a.count:>7}  {pairs.b.count:>7}  {format_points(pairs.difference):>6}  "
                f"{pairs.only_a:>6}  {pairs.only_b:>6}  {format_p_value(pairs.p_value).removeprefix('p = ')}"
            )
        return lines

    def _return_rows(self) -> list[str]:
        rows = [*self.returns.items(), ("total", self.return_total)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'task'.ljust(width)}  episodes  a higher  b higher  p (sign)  return b - a"]
        for name, pairs in rows:
            p_value = format_p_value(pairs.p_value).removeprefix("p = ")
            counts = f"{len(pairs.a):>8}  {pairs.higher_a:>8}  {pairs.higher_b:>8}  {p_value:>8}"
            lines.append(f"{name.ljust(width)}  {counts}  {pairs.change}")
        return lines

    def _change_rows(self) -> list[str]:
        width = max(len("perturbation"), *(len(row["kind"]) for row in self.changes))
        lines = ["", f"{'perturbation'.ljust(width)}  pairs  effect in a  effect in b   b - a  95 % interval"]
        for row in self.changes:
            effects = f"{format_points(row['a']):>11}  {format_points(row['b']):>11}"
            change = f"{format_points(row['difference']):>6}  {format_points(*row['interval'])}"
            lines.append(f"{row['kind'].ljust(width)}  {row['episodes']:>5}  {effects}  {change}")
        return [*lines, ""]

    def verdict(self) -> str:
        """Return one line each for total success and total returns, if available."""
        lines = [self._success_verdict()] if self.reports_success else []
        if self.return_total is not None:
            total = self.return_total
            lines.append(
                f"return b - a = {total.change}, higher in b in {total.higher_b} and in a in {total.higher_a} of {len(total.a)} "
                f"episodes, {format_p_value(total.p_value)}"
            )
        return "\n".join(lines)

    def _success_verdict(self) -> str:
        total = self.total
        return (
            f"b - a = {format_points(total.difference)} percentage points, 95 % interval {format_points(*total.interval)}, "
            f"{format_p_value(total.p_value)}"
        )


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Return the two-sided p-value of the hypothesis that two policies succeed equally often on the same episodes; 1 if they never differ.

    McNemar 1947 (Psychometrika 12:153), in the exact conditional form instead of the chi-squared approximation. If neither policy is
    better, ``only_a`` follows binomial(n, 1/2) over the ``n = only_a + only_b`` episodes on which they differ, and
    ``p = min(1, 2 sum_{i <= min(only_a, only_b)} C(n, i) / 2^n)``.
    """
    count = only_a + only_b
    ways, tail = 1, 0
    for number in range(min(only_a, only_b) + 1):
        tail += ways
        ways = ways * (count - number) // (number + 1)  # C(n, i + 1) from C(n, i)
    return min(1.0, 2 * tail / 2**count)


def compare(result_a: EvaluationResult, result_b: EvaluationResult, allow_mismatch: Sequence[str] = ()) -> Comparison:
    """Pair two results by task, initial state and seed.

    Raise ManifestMismatchError if actions were sampled differently, and ConfigError if the lists differ or repeat an episode.

    Args:
        allow_mismatch: With ``"episodes"``, only episodes common to both lists are compared; ``"greedy"``, ``"temperature"`` and
            ``"seed"`` accept differences in how actions were sampled.
    """
    message = "The two evaluations sampled actions differently (first: saved, second: present)"
    mismatches = reject_mismatches(sampling_differences(result_a, result_b), allow_mismatch, message)
    first, second = _by_episode(result_a, "first"), _by_episode(result_b, "second")
    fix = "Evaluate both with the same env, evaluation.split and evaluation.num_episodes"
    stopped = [result for result in (result_a, result_b) if result.stopping is not None]
    short = min(stopped, key=lambda result: len(result.results), default=None)
    # An evaluation that ended early contains only the first episodes of the same list, which is not a mismatch.
    if short is not None and {episode_of(result) for result in short.results} <= first.keys() & second.keys():
        allow_mismatch = [*allow_mismatch, EPISODES]
    comparison = pair_outcomes(first, second, EPISODES, fix, allow_mismatch)
    comparison.mismatches = [str(mismatch) for mismatch in mismatches]
    comparison.reports_success = result_a.total.is_reported or result_b.total.is_reported
    if short is not None:
        order = [key for key in map(episode_of, short.results) if key in first and key in second]
        num_planned = max(result.stopping["num_planned"] for result in stopped)
        _make_sequential(comparison, [(first[key], second[key]) for key in order], num_planned)
    else:
        comparison.returns, comparison.changes = _pair_returns(result_a, result_b), _changes(result_a, result_b)
    return comparison


def _pair_returns(result_a: EvaluationResult, result_b: EvaluationResult) -> dict[str, ReturnPairs]:
    """Return, for each task, the returns on the common episodes."""
    second = {episode_of(result): result.episode_return for result in result_b.results}
    tasks: dict[str, list[tuple[float, float]]] = {}
    for result in result_a.results:
        if episode_of(result) in second:
            tasks.setdefault(result_a.group_of(result.task), []).append(
                (result.episode_return, second[episode_of(result)])
            )
    return {task: ReturnPairs(*zip(*pairs, strict=True)) for task, pairs in tasks.items()}


def perturbed_outcomes(result: EvaluationResult) -> dict[Episode, tuple[str, bool, bool]]:
    """Map each perturbed episode whose twin was run to its kind, and to success without and with the perturbation, in list order."""
    success = {episode_of(row): bool(row.success) for row in result.results}
    pairs = {}
    for (suite, task, state, seed), perturbed in success.items():
        kind, twin = result.twins.get(task, ("", ""))
        if (plain := success.get((suite, twin, state, seed))) is not None:
            pairs[suite, task, state, seed] = kind, plain, perturbed
    return pairs


def _changes(before: EvaluationResult, after: EvaluationResult) -> list[Json]:
    """Return ``Comparison.changes``, over the pairs that both have run; the last row is over all kinds."""
    first, second = perturbed_outcomes(before), perturbed_outcomes(after)
    common = [key for key in first if key in second]
    kinds = [*dict.fromkeys(first[key][0] for key in common), TOTAL] if common else []
    rows = []
    for kind in kinds:
        keys = [key for key in common if kind in (first[key][0], TOTAL)]
        tables = [np.array([table[key][1:] for key in keys], dtype=int) for table in (first, second)]
        low, high = intervals.difference_of_differences_interval(*tables)
        a, b = ((table[:, 1] - table[:, 0]).mean().item() for table in tables)
        rows.append({"kind": kind, "episodes": len(keys), "a": a, "b": b, "difference": b - a, "interval": [low, high]})
    return rows


def _make_sequential(
    comparison: Comparison, pairs: Sequence[tuple[tuple[str, bool], tuple[str, bool]]], num_planned: int
) -> None:
    """Switch a comparison to the sequential test of ``pairs``, which are in list order."""
    signs: dict[str, list[int]] = {}
    for (task, a), (_, b) in pairs:
        signs.setdefault(task, []).append(b - a)
    all_signs = tuple(b - a for (_, a), (_, b) in pairs)
    comparison.sequential = SequentialPairs(*astuple(comparison.total), all_signs, num_planned)
    comparison.per_task = {
        task: SequentialPairs(*astuple(task_pairs), tuple(signs[task]), num_planned)
        for task, task_pairs in comparison.per_task.items()
    }


Outcomes = Mapping[Any, tuple[str, bool]]
"""Maps each episode (or question) to its task (or category) and success."""


def pair_outcomes(first: Outcomes, second: Outcomes, unit: str, fix: str, allow_mismatch: Sequence[str]) -> Comparison:
    """Pair the ``unit`` that two results have in common; raise ConfigError if they differ and ``unit`` is not in ``allow_mismatch``."""
    common = [key for key in first if key in second]
    unpaired = len(first) + len(second) - 2 * len(common)
    sizes = f"The first result has {len(first)} {unit} and the second {len(second)}"
    if not common:
        raise ConfigError(f"{sizes}, and they have none in common. {fix}")
    if unpaired and unit not in allow_mismatch:
        raise ConfigError(
            f"{sizes}, {len(common)} of them in common; a paired comparison needs the same list. {fix}, or compare the "
            f"common ones: set 'evaluation.allow_mismatch=[{','.join([*allow_mismatch, unit])}]'"
        )
    outcomes: dict[str, list[tuple[bool, bool]]] = {}
    for key in common:
        outcomes.setdefault(first[key][0], []).append((first[key][1], second[key][1]))
    cells = ((True, True), (True, False), (False, True), (False, False))
    per_task = {task: Pairs(*(pairs.count(cell) for cell in cells)) for task, pairs in outcomes.items()}
    return Comparison(per_task, unpaired, unit=unit)


def sampling_differences(result_a: EvaluationResult, result_b: EvaluationResult) -> list[Mismatch]:
    """Return differences in how actions were sampled; temperature and seed are only compared if both evaluations sample."""
    names = ["greedy"] if result_a.greedy or result_b.greedy else ["temperature", "seed"]
    pairs = {name: (getattr(result_a, name), getattr(result_b, name)) for name in names}
    return [Mismatch(name, old, new, must_match=True) for name, (old, new) in pairs.items() if old != new]


def _by_episode(result: EvaluationResult, which: str) -> Outcomes:
    """Return outcomes by episode; raise ConfigError if one occurs twice."""
    outcomes = {
        episode_of(episode): (result.group_of(episode.task), bool(episode.success)) for episode in result.results
    }
    if len(outcomes) < len(result.results):
        rows = f"{len(result.results)} rows for {len(outcomes)} episodes"
        raise ConfigError(f"The {which} result has {rows}, but each must have been run exactly once. Evaluate again")
    return outcomes
