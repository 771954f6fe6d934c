"""Row indices of demonstrations: their order in optimiser steps, and the rows of a chunk."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
from torch import Tensor

from rlinf.seeding import derive_seed
from rlinf.types import Observation


class BatchSource(Protocol):
    """Demonstrations for behaviour cloning, in memory or on disk."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def rows(self, index: np.ndarray) -> tuple[Observation, Tensor]:
        """Return the rows ``index`` (int64 ``[B]``) and their actions ``[B, C, D]``. Thread-safe."""


def shuffled_rows(num_rows: int, step: int, batch_size: int, seed: int) -> np.ndarray:
    """Return the rows of optimiser step ``step``, int64 ``[batch_size]``.

    Every epoch is a permutation of all rows. A batch may contain the end of an epoch and the start of the next.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    index = np.empty(batch_size, dtype=np.int64)
    for epoch in np.unique(positions // num_rows):
        rows = positions // num_rows == epoch
        index[rows] = _epoch_order(num_rows, seed, int(epoch))[positions[rows] % num_rows]
    return index


@lru_cache(maxsize=2)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng(derive_seed(seed, "sft epoch", epoch)).permutation(num_rows)


def following_rows(rows: np.ndarray, last_rows: np.ndarray, chunk_len: int) -> np.ndarray:
    """Return each row and its ``chunk_len - 1`` successors, int64 ``[B, C]``, repeating the episode's last row past its end."""
    return np.minimum(rows[:, None] + np.arange(chunk_len), last_rows[:, None])
