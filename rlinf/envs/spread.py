"""A vector env divided among processes, on one or several machines."""

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
"""Name and arguments of a method call."""


class Part:
    """Consecutive envs ``ids`` in one process. ``first`` is subtracted from a global env index to obtain the index there."""

    def __init__(self, ids: np.ndarray, first: int = 0) -> None:
        self.ids, self.first = ids, first

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions of this part's envs in ``ids``."""
        return np.flatnonzero((ids >= self.ids[0]) & (ids <= self.ids[-1]))


class SpreadVectorEnv(VectorEnv):
    """Calls each part for its own envs and merges the results. All envs of a lost part restart their episodes."""

    workers_name: ClassVar[str]
    restarts_key: ClassVar[str]
    _workers: list[Any]

    @abstractmethod
    def _call(self, calls: dict[Any, Call]) -> dict[Any, Any]:
        """Call a method of each part in parallel and return the results, without entries for lost parts."""

    @abstractmethod
    def _reset_call(self, part: Any, rows: np.ndarray) -> Call:
        """Return the call that resets the envs ``rows`` to their ``self._specs``."""

    def _positions(self, ids: np.ndarray) -> dict[Any, np.ndarray]:
        return {part: at for part in self._workers if len(at := part.positions(ids))}

    def _reset_envs(self, ids: np.ndarray, specs: Sequence[EpisodeSpec]) -> None:
        # Not repeated for a part lost here, because its replacement resets all its envs, including these.
        self._call({part: self._reset_call(part, ids[at]) for part, at in self._positions(ids).items()})

    def _step_chunk(self, ids: np.ndarray, actions: np.ndarray, steps_left: np.ndarray) -> SimulatorChunk:
        chunk, positions = SimulatorChunk.empty(*actions.shape[:2]), self._positions(ids)
        calls = {
            part: ("step_chunk", (ids[at] - part.first, actions[at], steps_left[at])) for part, at in positions.items()
        }
        for part, result in self._call(calls).items():
            for array, values in zip(chunk, result, strict=True):
                array[positions[part]] = values
        return chunk

    def _call_rows(
        self, name: str, ids: np.ndarray, *arguments: Any, per_env: Sequence[np.ndarray] = ()
    ) -> Mapping[Any, Any]:
        """Call each part with envs in ``ids`` (again if it was replaced), passing its rows of ``per_env`` ``[K, ...]``."""
        return self._call_all({
            part: (name, (ids[at] - part.first, *(array[at] for array in per_env), *arguments))
            for part, at in self._positions(ids).items()
        })  # fmt: skip

    def _call_all(self, calls: dict[Any, Call]) -> dict[Any, Any]:
        # These calls do not change any state, so a replaced part can be called again.
        results: dict[Any, Any] = {}
        while pending := {part: call for part, call in calls.items() if part not in results}:
            results |= self._call(pending)
        return results

    def _closed_error(self, calls: dict[Any, Call], env: str) -> SimulatorError:
        return SimulatorError(
            f"{next(iter(calls.values()))[0]} was called, but env.name={env} is closed: close() or a SimulatorError has "
            f"ended its {self.workers_name}. Build a new env to continue"
        )

    def _restart_rows(self, ids: np.ndarray, loss: str, count: int, limit: int) -> None:
        """Mark a lost part's envs as lost; if ``count`` losses exceed the ``limit``, close and raise SimulatorError."""
        if count > limit:
            self.close()
            raise SimulatorError(
                f"{loss}\n{count} {self.workers_name} have been lost ({self.restarts_key}={limit}). To continue, set "
                f"{self.restarts_key}={2 * count}"
            )
        logger.warning("%s\nIts episodes restart (restart %d of %d).", loss, count, limit)
        self._lost[ids] = True

    def rows_lost_with(self, ids: np.ndarray) -> np.ndarray:
        return np.concatenate([ids[:0], *(part.ids for part in self._positions(ids))])

    def expert_actions(self, **options: Any) -> np.ndarray:
        self._check_reset()
        ids, actions = self._rows_in_use(), np.zeros((self.num_envs, self.action_dim), dtype=np.float32)
        for part, result in self._call_rows("expert_actions", ids, options).items():
            actions[ids[part.positions(ids)]] = result
        return actions

    def render_frames(self, ids: Sequence[int], size: int) -> np.ndarray:
        self._check_reset()
        rows, frames = np.asarray(ids, dtype=np.int64), np.empty((len(ids), size, size, 3), dtype=np.uint8)
        for part, result in self._call_rows("render_frames", rows, size).items():
            frames[part.positions(rows)] = result
        return frames

    def chunk_paths(self, ids: Sequence[int], chunks: np.ndarray, size: int) -> np.ndarray | None:
        self._check_reset()
        rows, paths = np.asarray(ids, dtype=np.int64), np.empty((len(ids), chunks.shape[1] + 1, 2))
        for part, result in self._call_rows("chunk_paths", rows, size, per_env=(chunks,)).items():
            if result is None:
                return None
            paths[part.positions(rows)] = result
        return paths

    def poses(self, ids: Sequence[int]) -> list[dict[str, list[float]]]:
        self._check_reset()
        rows, poses = np.asarray(ids, dtype=np.int64), {}
        for part, result in self._call_rows("poses", rows).items():
            poses |= dict(zip(part.positions(rows).tolist(), result, strict=True))
        return [poses[position] for position in range(len(rows))]
