"""Rules for stopping an evaluation before the end of its list of episodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.sequential import decided_at, rate_confidence_sequence
from rlinf.number_formats import format_interval
from rlinf.types import EpisodeResult

DECIDED = "decided"
"""Value of ``evaluation.stop_when`` that stops once the test against ``evaluation.compare`` is decided."""

Episode = tuple[str, str, int, int]
"""Suite, task, initial state and seed; excludes ``task_id``, which depends on ``env.tasks``."""


def episode_of(result: EpisodeResult) -> Episode:
    """Return the key that identifies a result's episode across evaluations."""
    return result.spec.suite, result.task, result.spec.init_state_id, result.spec.seed


class StopRule(Protocol):
    """Decides after how many episodes an evaluation ends."""

    def stop_at(self, results: Sequence[EpisodeResult]) -> int | None:
        """Return the smallest sufficient number of episodes, or None to continue; ``results`` are in list order, not completion order."""
        ...


@dataclass(frozen=True)
class UntilDecided:
    """Stop when the sequential paired test (``rlinf.evaluation.sequential``) finds the policy different from a baseline.

    Attributes:
        baseline: Whether the baseline succeeded in each episode of the list.
        num_planned: Length of the list.
    """

    baseline: Mapping[Episode, bool]
    num_planned: int

    def stop_at(self, results: Sequence[EpisodeResult]) -> int | None:
        paired = [result for result in results if episode_of(result) in self.baseline]
        signs = [int(result.success) - int(self.baseline[episode_of(result)]) for result in paired]
        count = decided_at(signs, self.num_planned)
        return None if count is None else 1 + results.index(paired[count - 1])


@dataclass(frozen=True)
class UntilNarrow:
    """Stop when the 95 % confidence sequence of the success rate is at most ``width`` wide."""

    width: float

    def stop_at(self, results: Sequence[EpisodeResult]) -> int | None:
        successes = 0
        for number, result in enumerate(results, start=1):
            successes += result.success
            low, high = rate_confidence_sequence(successes, number)
            if high - low <= self.width:
                return number
        return None


def stop_rule(stop_when: str | float | None, baseline: EvaluationResult | None, num_planned: int) -> StopRule | None:
    """Return the rule for ``evaluation.stop_when``, or None to run the full list."""
    if stop_when is None:
        return None
    if stop_when == DECIDED and baseline is not None:
        return UntilDecided({episode_of(result): bool(result.success) for result in baseline.results}, num_planned)
    return UntilNarrow(float(stop_when))


def note_stopping(result: EvaluationResult, stop_when: str | float | None, num_planned: int) -> None:
    """Record the rule ``evaluation.stop_when``, if there is one, with a warning about the intervals of the result."""
    if stop_when is None:
        return
    result.stopping = {"stop_when": stop_when, "num_planned": num_planned}
    done = result.episodes
    interval = format_interval(*rate_confidence_sequence(result.total.successes, done))
    ended = f"ended after {done} of {num_planned} episodes" if done < num_planned else f"ran all {num_planned} episodes"
    result.warnings.append(
        f"The evaluation {ended} with evaluation.stop_when={stop_when}. The result's intervals do not account for early "
        f"stopping; a 95 % interval of the success rate that does is {interval}"
    )
