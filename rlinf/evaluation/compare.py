"""Two evaluations on the same episodes, compared pair by pair.

Two intervals that overlap do not show that two policies are equally good: part of the spread is the difficulty of the
episodes, which both share. Pairing takes it out, so fewer episodes show the same difference.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.errors import CheckpointError, ConfigError
from rlinf.evaluation.intervals import paired_difference_interval
from rlinf.evaluation.result import EvaluationResult, Success
from rlinf.files import follow_latest, write_text
from rlinf.manifest import MANIFEST_FILE, POLICY_FIELDS, Manifest, Mismatch, check_allowed, refuse
from rlinf.manifest import compare as compare_manifests
from rlinf.tracking.tracker import read_metrics
from rlinf.types import EpisodeResult

CLOSING_TAGS = ("after_rl", "after_sft")
"""Names of the evaluation with which a run ends, in ``eval/`` of its folder: that of RL, and that of a run that only clones."""
COMPARISON_FILE = "compare.json"
RESULT_FILE = "result.json"
EPISODES, CONDITIONS = "episodes", "conditions"
"""Names in ``evaluation.allow_mismatch`` besides the fields of a manifest: the lists differ, a manifest is missing."""
COMPARISON_NAMES = (EPISODES, CONDITIONS, "greedy", "temperature")
"""All names that only a comparison knows. ``seed`` is a field of the manifest."""
METHOD = "Exact conditional McNemar test, two-sided; 95 % interval of the paired difference: Newcombe 1998, method 10"


@dataclass(frozen=True)
class Pairs:
    """``N`` episodes that both policies played: successes of both, of the first or second alone, of neither."""

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
        """``N``."""
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def difference(self) -> float:
        """Success rate of the second policy minus that of the first."""
        return (self.only_b - self.only_a) / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of ``difference``."""
        return paired_difference_interval(self.both, self.only_b, self.only_a, self.neither)

    @property
    def p_value(self) -> float:
        """Of the exact McNemar test."""
        return mcnemar_exact(self.only_a, self.only_b)

    def as_dict(self) -> dict[str, Any]:
        """Return counts, difference, interval and p-value as JSON values."""
        return {
            "episodes": self.episodes, "successes_a": self.a.successes, "successes_b": self.b.successes,
            "only_a": self.only_a, "only_b": self.only_b, "difference": self.difference,
            "interval": list(self.interval), "p_value": self.p_value,
        }  # fmt: skip


@dataclass
class Comparison:
    """What ``compare`` found.

    Attributes:
        per_task: Task to its pairs, in the order of the first result.
        num_unpaired: Episodes that only one of the two has.
        a, b: Names of the two, for tables.
        mismatches: Differences of conditions that were let pass.
    """

    per_task: dict[str, Pairs]
    num_unpaired: int = 0
    a: str = "a"
    b: str = "b"
    mismatches: list[str] = field(default_factory=list)

    @property
    def total(self) -> Pairs:
        """All tasks together."""
        pairs = self.per_task.values()
        names = ("both", "only_a", "only_b", "neither")
        return Pairs(*(sum(getattr(one, name) for one in pairs) for name in names))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "a": self.a, "b": self.b, "method": METHOD, "total": self.total.as_dict(),
            "per_task": {task: pairs.as_dict() for task, pairs in self.per_task.items()},
            "num_unpaired": self.num_unpaired, "mismatches": self.mismatches,
        }  # fmt: skip

    def table(self) -> str:
        """Return a text table, one line per task and the total, and a sentence about the total."""
        rows = [*self.per_task.items(), ("total", self.total)]
        width = max(len(name) for name, _ in rows)
        lines = [f"a: {self.a}", f"b: {self.b}"]
        lines.append(f"{'task'.ljust(width)}    a k/n    b k/n   b - a  only a  only b  p (McNemar)")
        for name, pairs in rows:
            counts = [f"{one.successes}/{one.episodes}" for one in (pairs.a, pairs.b)]
            lines.append(
                f"{name.ljust(width)}  {counts[0]:>7}  {counts[1]:>7}  {100 * pairs.difference:+6.1f}  "
                f"{pairs.only_a:>6}  {pairs.only_b:>6}  {p_text(pairs.p_value).removeprefix('p = ')}"
            )
        lines += [f"allowed by evaluation.allow_mismatch: {mismatch}" for mismatch in self.mismatches]
        return "\n".join([*lines, self.verdict(), f"{METHOD}."])

    def verdict(self) -> str:
        """Return the total in one sentence."""
        total = self.total
        low, high = (100 * end for end in total.interval)
        return (
            f"b - a = {100 * total.difference:+.1f} percentage points, 95 % interval {low:+.1f} to {high:+.1f}, "
            f"{p_text(total.p_value)}"
        )


def p_text(p_value: float) -> str:
    """Return ``p = 0.00012``; of one that no float64 holds, what is known of it."""
    return f"p = {p_value:.3g}" if p_value else f"p < {sys.float_info.min:.0e}"


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact test that two policies succeed equally often on the same episodes.

    McNemar 1947 (Psychometrika 12:153), in its exact conditional form instead of the chi-squared approximation: given
    ``n = only_a + only_b`` episodes on which they differ, ``only_a`` is binomial(n, 1/2) if neither is better, and
    ``p = min(1, 2 sum_{i <= min(only_a, only_b)} C(n, i) / 2^n)``.

    Args:
        only_a: Episodes on which only the first succeeded.
        only_b: Episodes on which only the second did.

    Returns:
        The p-value; 1 where they never differ.
    """
    count = only_a + only_b
    ways, tail = 1, 0
    for number in range(min(only_a, only_b) + 1):
        tail += ways
        ways = ways * (count - number) // (number + 1)  # C(n, i + 1) from C(n, i)
    return min(1.0, 2 * tail / 2**count)


def compare(result_a: EvaluationResult, result_b: EvaluationResult, allow_mismatch: Sequence[str] = ()) -> Comparison:
    """Pair two results by task, initial state and seed.

    Args:
        result_a, result_b: Of two policies on the same list of episodes, in any order.
        allow_mismatch: With ``"episodes"`` in it, lists may differ, and what both have is compared; ``"greedy"``,
            ``"temperature"`` and ``"seed"``: how actions were drawn.

    Raises:
        ManifestMismatchError: Actions were drawn in different ways: the difference would not be the policies' alone.
        ConfigError: The lists differ and that is not allowed, an episode occurs twice, or none is common.
    """
    sentence = "Actions were drawn in different ways in the two evaluations (first: saved, second: present)"
    mismatches = refuse(sampling_differences(result_a, result_b), allow_mismatch, sentence)
    first, second = _by_episode(result_a, "first"), _by_episode(result_b, "second")
    common = [key for key in first if key in second]
    unpaired = len(first) + len(second) - 2 * len(common)
    if not common:
        raise ConfigError(
            f"The first result has {len(first)} episodes and the second {len(second)}, and they have none in common. "
            "Evaluate both with the same env, evaluation.split and evaluation.num_episodes"
        )
    if unpaired and EPISODES not in allow_mismatch:
        raise ConfigError(
            f"The first result has {len(first)} episodes and the second {len(second)}, {len(common)} of them in "
            "common; a paired comparison needs the same list. Evaluate both with the same env.tasks and "
            "evaluation.num_episodes, or compare the common ones: type "
            f"'evaluation.allow_mismatch=[{','.join([*allow_mismatch, EPISODES])}]'"
        )
    outcomes: dict[str, list[tuple[bool, bool]]] = {}
    for key in common:
        outcomes.setdefault(key[1], []).append((bool(first[key].success), bool(second[key].success)))
    cells = ((True, True), (True, False), (False, True), (False, False))
    per_task = {task: Pairs(*(seen.count(cell) for cell in cells)) for task, seen in outcomes.items()}
    return Comparison(per_task, unpaired, mismatches=[str(one) for one in mismatches])


def compare_folders(
    folder_a: str | os.PathLike, folder_b: str | os.PathLike, allow_mismatch: Sequence[str] = ()
) -> Comparison:
    """Compare two evaluations that lie on disk, write ``compare.json`` into the second folder and renew its report.

    Args:
        folder_a, folder_b: Evaluation folders, their ``result.json``, or run folders. Of a run, its closing evaluation is
            compared. The first one is the baseline.
        allow_mismatch: Fields of the manifest in which the conditions may differ; ``"episodes"``: the lists may;
            ``"conditions"``: a manifest may be missing; ``"greedy"``, ``"temperature"``, ``"seed"``: the way in which
            actions were drawn. What belongs to the policy may always differ.

    Raises:
        CheckpointError: A folder holds no result, or no manifest.
        ManifestMismatchError: Simulator, its settings or versions differ, or how actions were drawn.
        ConfigError: The lists of episodes differ, or both are one folder.
    """
    from rlinf.evaluation.report import write_report

    folders = [evaluation_folder(path) for path in (folder_a, folder_b)]
    if folders[0].resolve() == folders[1].resolve():
        raise ConfigError(
            f"{folder_a} and {folder_b} are one evaluation, which cannot be compared with itself; required: two folders. "
            "Run rlinf evaluate --compare <baseline folder> <other folder>"
        )
    mismatches = check_conditions(*folders, allow_mismatch)
    results = [EvaluationResult.from_json(folder / RESULT_FILE) for folder in folders]
    comparison = compare(*results, allow_mismatch)
    comparison.a, comparison.b = (str(path) for path in folders)
    comparison.mismatches = mismatches + comparison.mismatches
    write_text(folders[1] / COMPARISON_FILE, json.dumps(comparison.as_dict(), indent=1))
    write_report(folders[1])
    return comparison


def closing_tags(lines: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """Return those of ``CLOSING_TAGS`` with which a run can end: once RL has begun, no longer the one of its cloning.

    Args:
        lines: Of the run's ``metrics.jsonl``.
    """
    return CLOSING_TAGS[:1] if any(line["phase"] == "rl" for line in lines) else CLOSING_TAGS


def evaluation_folder(path: str | os.PathLike) -> Path:
    """Return the folder of an evaluation, given it, its ``result.json``, or the run whose closing evaluation it is.

    Raises:
        CheckpointError: There is no result; names those that lie below.
    """
    folder = follow_latest(Path(path).expanduser())
    folder = folder.parent if folder.name == RESULT_FILE else folder
    if (folder / RESULT_FILE).is_file():
        return folder
    below = sorted(str(found.parent) for found in folder.glob(f"eval/*/{RESULT_FILE}"))
    for place in (folder / "eval" / tag for tag in closing_tags(read_metrics(folder) if below else [])):
        if (place / RESULT_FILE).is_file():
            return place
    hint = f"Name one of its evaluations: {', '.join(below)}" if below else "Name a folder that `rlinf evaluate` wrote"
    raise CheckpointError(f"{path} holds no {RESULT_FILE}, so there is nothing to compare. {hint}")


def check_conditions(folder_a: Path, folder_b: Path | Manifest, allow_mismatch: Sequence[str]) -> list[str]:
    """Refuse evaluations whose worlds differ; policies may.

    Args:
        folder_a: Folder of an evaluation.
        folder_b: Folder of another, or the manifest of one that has yet to run.
        allow_mismatch: As in ``compare_folders``.

    Returns:
        The differences that were let pass.

    Raises:
        CheckpointError: A manifest is missing.
        ManifestMismatchError: Conditions differ that change numbers.
    """
    places = [folder for folder in (folder_a, folder_b) if isinstance(folder, Path)]
    missing = [str(folder) for folder in places if not (folder / MANIFEST_FILE).is_file()]
    if missing:
        if CONDITIONS in allow_mismatch:
            return [f"{folder} has no {MANIFEST_FILE}; its conditions are not known" for folder in missing]
        raise CheckpointError(
            f"{' and '.join(missing)} has no {MANIFEST_FILE}, so nobody knows under which conditions it was evaluated. "
            f"Evaluate again, or set 'evaluation.allow_mismatch=[{','.join([*allow_mismatch, CONDITIONS])}]'"
        )
    first, second = (Manifest.load(one) if isinstance(one, Path) else one for one in (folder_a, folder_b))
    check_allowed(allow_mismatch, first, second, also=COMPARISON_NAMES)
    worlds = [one for one in compare_manifests(first, second) if one.field.partition(".")[0] not in POLICY_FIELDS]
    sentence = "The two evaluations ran under conditions that differ (first: saved, second: present)"
    return [str(one) for one in refuse(worlds, allow_mismatch, sentence) if one.must_match]


def sampling_differences(result_a: EvaluationResult, result_b: EvaluationResult) -> list[Mismatch]:
    """Return what differs in how actions were drawn; temperature and seed matter where they are sampled."""
    names = ["greedy"] if result_a.greedy or result_b.greedy else ["temperature", "seed"]
    pairs = {name: (getattr(result_a, name), getattr(result_b, name)) for name in names}
    return [Mismatch(name, old, new, must_match=True) for name, (old, new) in pairs.items() if old != new]


def _by_episode(result: EvaluationResult, which: str) -> dict[tuple[str, str, int, int], EpisodeResult]:
    """Return the results by suite, task, initial state and seed; ``task_id`` depends on ``env.tasks``."""
    found = {(one.spec.suite, one.task, one.spec.init_state_id, one.spec.seed): one for one in result.results}
    if len(found) < len(result.results):
        raise ConfigError(
            f"The {which} result has {len(result.results)} rows for {len(found)} episodes; each must have been run "
            "once. Evaluate again"
        )
    return found
