"""Rules by which an evaluation ends before its list of episodes does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.sequential import decided_at, rate_confidence_sequence
from rlinf.types import EpisodeResult

DECIDED = "decided"
"""``evaluation.stop_when`` that ends when the test against ``evaluation.compare`` decides."""

Episode = tuple[str, str, int, int]
"""Suite, task, initial state and seed, without ``task_id``, which depends on ``env.tasks``."""


def episode_of(result: EpisodeResult) -> Episode:
    """Return what names the episode of a result in every evaluation."""
    return result.spec.suite, result.task, result.spec.init_state_id, result.spec.seed


class StopRule(Protocol):
    """Says when enough episodes have been played."""

    def stop_at(self, results: Sequence[EpisodeResult]) -> int | None:
        """Return the smallest number of first episodes that are enough; None: more are needed.

        ``results`` are the first ones of the list, in its order, whatever the order in which the episodes ended.
        """
        ...


@dataclass(frozen=True)
class UntilDecided:
    """Until the sequential paired test (``rlinf.evaluation.sequential``) tells the policy from a baseline.

    Attributes:
        baseline: Whether the baseline succeeded in each episode of the list.
        num_planned: Episodes of the list.
    """

    baseline: Mapping[Episode, bool]
    num_planned: int

    def stop_at(self, results: Sequence[EpisodeResult]) -> int | None:
        played = [one for one in results if episode_of(one) in self.baseline]
        signs = [int(one.success) - int(self.baseline[episode_of(one)]) for one in played]
        count = decided_at(signs, self.num_planned)
        return None if count is None else 1 + results.index(played[count - 1])


@dataclass(frozen=True)
class UntilNarrow:
    """Until the 95 % interval of the success rate that holds at any moment is at most ``width`` wide."""

    width: float

    def stop_at(self, results: Sequence[EpisodeResult]) -> int | None:
        successes = 0
        for number, one in enumerate(results, start=1):
            successes += one.success
            low, high = rate_confidence_sequence(successes, number)
            if high - low <= self.width:
                return number
        return None


def stop_rule(stop_when: str | float | None, baseline: EvaluationResult | None, num_planned: int) -> StopRule | None:
    """Return the rule that ``evaluation.stop_when`` asks for; None: play the whole list."""
    if stop_when is None:
        return None
    if stop_when == DECIDED and baseline is not None:
        return UntilDecided({episode_of(one): bool(one.success) for one in baseline.results}, num_planned)
    return UntilNarrow(float(stop_when))
