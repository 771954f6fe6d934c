"""Runs episodes of two policies in a hidden random order, for a blind comparison."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rlinf.evaluation.evaluator import Video
from rlinf.evaluation.stopping import Episode, episode_of
from rlinf.robot.loop import RobotEpisodes
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeResult, EpisodeSpec


class BlindPairs:
    """Runs each episode with both policies (an ``Episodes`` that returns the second policy's results).

    Args:
        sides: Episodes of the baseline and of the second policy, on the same robot.
        known: Results of earlier processes, in execution order.
        save: Called with each result as soon as it is known, without the policy's name.
    """

    def __init__(
        self,
        sides: Sequence[RobotEpisodes],
        known: Sequence[EpisodeResult],
        save: Callable[[EpisodeResult], None],
        seed: int,
    ) -> None:
        self.sides, self.save, self.seed = sides, save, seed
        self.results: tuple[dict[EpisodeSpec, EpisodeResult], ...] = ({}, {})
        self.baseline: dict[Episode, bool] = {}
        # Both policies compute a chunk before each episode, so the pause before the first action reveals nothing.
        for side in sides:
            side.warmed_up = sides
        # Saved results contain no policy name. The drawn order depends only on the seed, so it assigns them again after a restart.
        for result in known:
            self._note(next(side for side in self.order(result.spec) if result.spec not in self.results[side]), result)

    @property
    def num_restarts(self) -> int:
        return self.sides[0].num_restarts

    def order(self, spec: EpisodeSpec) -> tuple[int, int]:
        """Return the policies' indices in the order in which they run an episode."""
        first = derive_seed(self.seed, "blind", spec.suite, spec.task_id, spec.init_state_id, spec.seed) % 2
        return first, 1 - first

    def run(self, specs: Sequence[EpisodeSpec], on_result: Callable[[EpisodeResult], None]) -> list[EpisodeResult]:
        for spec in specs:
            for side in self.order(spec):
                if spec not in self.results[side]:
                    self._note(side, self.sides[side].run([spec], self.save)[0])
        return [self.results[1][spec] for spec in specs]

    def record(self, numbered: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int) -> list[Video]:
        return []

    def _note(self, side: int, result: EpisodeResult) -> None:
        self.results[side][result.spec] = result
        if side == 0:
            self.baseline[episode_of(result)] = bool(result.success)
