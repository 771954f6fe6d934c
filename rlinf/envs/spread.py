"""A vector env whose rows are spread over processes, here or on other machines."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rlinf.envs.base import VectorEnv
from rlinf.envs.steps import SimulatorChunk
from rlinf.errors import SimulatorError
from rlinf.types import EpisodeSpec

logger = logging.getLogger("rlinf")

Call = tuple[str, tuple]
"""Name of a method, and its arguments."""


class Part:
    """Neighbouring rows ``ids`` of an env, in one process, which calls the first of them ``first``."""

    def __init__(self, ids: np.ndarray, first: int = 0) -> None:
        self.ids, self.first = ids, first

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions of this part's rows in ``ids``."""
        return np.flatnonzero((ids >= self.ids[0]) & (ids <= self.ids[-1]))


class SpreadVectorEnv(VectorEnv):
    """Asks each part about its own rows, and puts the answers together.

    A part that is lost is replaced, and all its rows are then in the first state of their episodes.
    """

    workers_name: ClassVar[str]
    restarts_key: ClassVar[str]
    _workers: list[Any]

    @abstractmethod
    def _call(self, calls: dict[Any, Call]) -> dict[Any, Any]:
        """Let each part call a method, all in parallel, and return the answers; a part that was lost has none."""

    @abstractmethod
    def _reset_call(self, part: Any, rows: np.ndarray) -> Call:
        """Return the call that resets the env's ``rows`` to their ``self._specs``."""

    def _places(self, ids: np.ndarray) -> dict[Any, np.ndarray]:
        """Return the positions in ``ids`` of each part's rows, for parts that have any."""
        return {part: at for part in self._workers if len(at := part.positions(ids))}

    def _reset_envs(self, ids: np.ndarray, specs: Sequence[EpisodeSpec]) -> None:
        # A part that is lost here is replaced, and the new one resets all its rows, these included.
        self._call({part: self._reset_call(part, ids[at]) for part, at in self._places(ids).items()})

    def _step_chunk(self, ids: np.ndarray, actions: np.ndarray, steps_left: np.ndarray) -> SimulatorChunk:
        chunk, places = SimulatorChunk.empty(*actions.shape[:2]), self._places(ids)
        calls = {
            part: ("step_chunk", (ids[at] - part.first, actions[at], steps_left[at])) for part, at in places.items()
        }
        for part, answer in self._call(calls).items():
            for array, values in zip(chunk, answer, strict=True):
                array[places[part]] = values
        return chunk

    def _ask_rows(
        self, name: str, ids: np.ndarray, *arguments: Any, of_rows: Sequence[np.ndarray] = ()
    ) -> Mapping[Any, Any]:
        """Call a method of each part that has rows among ``ids``. Ask a replaced part again.

        ``of_rows``: arrays ``[K, ...]`` of which a part gets its rows, before the other arguments.
        """
        return self._ask({
            part: (name, (ids[at] - part.first, *(array[at] for array in of_rows), *arguments))
            for part, at in self._places(ids).items()
        })  # fmt: skip

    def _ask(self, calls: dict[Any, Call]) -> dict[Any, Any]:
        answers: dict[Any, Any] = {}
        while pending := {part: call for part, call in calls.items() if part not in answers}:
            answers |= self._call(pending)
        return answers

    def _closed_error(self, calls: dict[Any, Call], env: str) -> SimulatorError:
        return SimulatorError(
            f"{next(iter(calls.values()))[0]} was called, but env.name={env} is closed: close() or a SimulatorError has "
            f"ended its {self.workers_name}. Make another env to continue"
        )

    def _restart_rows(self, ids: np.ndarray, loss: str, count: int, limit: int) -> None:
        """Mark the rows of a lost part; close the env and raise SimulatorError if ``count`` losses exceed the ``limit``."""
        if count > limit:
            self.close()
            raise SimulatorError(
                f"{loss}\n{count} {self.workers_name} have been lost ({self.restarts_key}={limit}). To continue, set "
                f"{self.restarts_key}={2 * count}"
            )
        logger.warning("%s\nIts episodes restart (restart %d of %d).", loss, count, limit)
        self._lost[ids] = True

    def rows_lost_with(self, ids: np.ndarray) -> np.ndarray:
        """Return all rows of the parts that own ``ids``."""
        return np.concatenate([ids[:0], *(part.ids for part in self._places(ids))])

    def expert_actions(self, **options: Any) -> np.ndarray:
        """Return the scripted experts' actions, float32 ``[B, D]``; 0 in idle rows."""
        self._check_reset()
        ids, actions = self._rows_in_use(), np.zeros((self.num_envs, self.action_dim), dtype=np.float32)
        for part, answer in self._ask_rows("expert_actions", ids, options).items():
            actions[ids[part.positions(ids)]] = answer
        return actions

    def render_frames(self, ids: Sequence[int], size: int) -> np.ndarray:
        self._check_reset()
        rows, frames = np.asarray(ids, dtype=np.int64), np.empty((len(ids), size, size, 3), dtype=np.uint8)
        for part, answer in self._ask_rows("render_frames", rows, size).items():
            frames[part.positions(rows)] = answer
        return frames

    def chunk_paths(self, ids: Sequence[int], chunks: np.ndarray, size: int) -> np.ndarray | None:
        """Return the paths of all parts, ``[K, C + 1, 2]``; None if one does not know them."""
        self._check_reset()
        rows, paths = np.asarray(ids, dtype=np.int64), np.empty((len(ids), chunks.shape[1] + 1, 2))
        for part, answer in self._ask_rows("chunk_paths", rows, size, of_rows=(chunks,)).items():
            if answer is None:
                return None
            paths[part.positions(rows)] = answer
        return paths

    def poses(self, ids: Sequence[int]) -> list[dict[str, list[float]]]:
        self._check_reset()
        rows, found = np.asarray(ids, dtype=np.int64), {}
        for part, answer in self._ask_rows("poses", rows).items():
            found |= dict(zip(part.positions(rows).tolist(), answer, strict=True))
        return [found[position] for position in range(len(rows))]
