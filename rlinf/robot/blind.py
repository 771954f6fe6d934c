"""Two policies that play each episode in an order which nobody who watches is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rlinf.evaluation.evaluator import Video
from rlinf.evaluation.stopping import Episode, episode_of
from rlinf.robot.loop import RobotEpisodes
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeResult, EpisodeSpec


class BlindPairs:
    """Plays each episode with both policies (an ``Episodes``, whose results are the second policy's).

    Before an episode both policies are asked, so the pause before the first action does not tell who acts.

    Args:
        sides: Episodes of the first policy, the baseline, and of the second, on one robot.
        known: Results of earlier processes, in the order of play.
        keep: Called with each result as soon as it is known, and not told whose it is.
        seed: Of the order.

    Attributes:
        results: Of each policy, by episode.
        baseline: Success of the first policy.
    """

    def __init__(
        self,
        sides: Sequence[RobotEpisodes],
        known: Sequence[EpisodeResult],
        keep: Callable[[EpisodeResult], None],
        seed: int,
    ) -> None:
        self.sides, self.keep, self.seed = sides, keep, seed
        self.results: tuple[dict[EpisodeSpec, EpisodeResult], ...] = ({}, {})
        self.baseline: dict[Episode, bool] = {}
        for side in sides:
            side.thinking = sides
        for result in known:
            self._note(next(side for side in self.order(result.spec) if result.spec not in self.results[side]), result)

    @property
    def num_restarts(self) -> int:
        return self.sides[0].num_restarts

    def order(self, spec: EpisodeSpec) -> tuple[int, int]:
        """Return which policy plays an episode first, and which plays it then."""
        words = (spec.suite, spec.task_id, spec.init_state_id, spec.seed)
        first = derive_seed(self.seed, "blind", *words) % 2
        return first, 1 - first

    def run(self, specs: Sequence[EpisodeSpec], on_result: Callable[[EpisodeResult], None]) -> list[EpisodeResult]:
        for spec in specs:
            for side in self.order(spec):
                if spec not in self.results[side]:
                    self._note(side, self.sides[side].run([spec], self.keep)[0])
        return [self.results[1][spec] for spec in specs]

    def record(self, numbered: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int) -> list[Video]:
        return []

    def _note(self, side: int, result: EpisodeResult) -> None:
        self.results[side][result.spec] = result
        if side == 0:
            self.baseline[episode_of(result)] = bool(result.success)
