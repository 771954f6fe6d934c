"""A vector env whose rows are spread over processes, here or on other machines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlinf.envs.base import VectorEnv


class Part:
    """Neighbouring rows ``ids`` of an env, in one process."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions of this part's rows in ``ids``."""
        return np.flatnonzero((ids >= self.ids[0]) & (ids <= self.ids[-1]))


class SpreadVectorEnv(VectorEnv):
    """Asks each part about its own rows, and puts the answers together."""

    @abstractmethod
    def _ask_rows(
        self, name: str, ids: np.ndarray, *arguments: Any, of_rows: Sequence[np.ndarray] = ()
    ) -> Mapping[Any, Any]:
        """Call a method of each part that has rows among ``ids``. Ask a replaced part again.

        ``of_rows``: arrays ``[K, ...]`` of which a part gets its rows, before the other arguments.
        """

    def render_frames(self, ids: Sequence[int], size: int) -> np.ndarray:
        """Return uint8 ``[K, size, size, 3]``."""
        self._check_reset()
        rows, frames = np.asarray(ids, dtype=np.int64), np.empty((len(ids), size, size, 3), dtype=np.uint8)
        for part, answer in self._ask_rows("render_frames", rows, size).items():
            frames[part.positions(rows)] = answer
        return frames

    def chunk_paths(self, ids: Sequence[int], chunks: np.ndarray, size: int) -> np.ndarray | None:
        """Return those of the parts, ``[K, C + 1, 2]``."""
        self._check_reset()
        rows, paths = np.asarray(ids, dtype=np.int64), np.empty((len(ids), chunks.shape[1] + 1, 2))
        for part, answer in self._ask_rows("chunk_paths", rows, size, of_rows=(chunks,)).items():
            if answer is None:
                return None
            paths[part.positions(rows)] = answer
        return paths

    def poses(self, ids: Sequence[int]) -> list[dict[str, list[float]]]:
        """Return the poses of the rows ``ids``."""
        self._check_reset()
        rows = np.asarray(ids, dtype=np.int64)
        found: dict[int, dict[str, list[float]]] = {}
        for part, answer in self._ask_rows("poses", rows).items():
            found |= dict(zip(part.positions(rows).tolist(), answer, strict=True))
        return [found[position] for position in range(len(rows))]
