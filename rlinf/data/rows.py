"""Batch demonstrations: row order, the rows of each chunk, and prefetching in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor

from rlinf.seeding import derive_seed
from rlinf.types import Observation

Batch = TypeVar("Batch")

BATCHES_PER_WORKER = 2
"""Prefetched batches per thread."""


class BatchSource(Protocol):
    """Demonstrations for behaviour cloning, in memory or on disk."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def rows(self, index: np.ndarray) -> tuple[Observation, Tensor]:
        """Return the rows ``index`` (int64 ``[B]``) and their actions ``[B, C, D]``. Thread-safe."""


def shuffled_rows(num_rows: int, step: int, batch_size: int, seed: int) -> np.ndarray:
    """Return an optimiser step's rows, int64 ``[batch_size]``; each epoch is a permutation, and a batch may span two epochs."""
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


class Prefetcher(Generic[Batch]):
    """Computes batches of consecutive steps in threads (0 workers: on demand) and returns them in order."""

    def __init__(self, make_batch: Callable[[int], Batch], first_step: int, num_workers: int) -> None:
        self._make_batch, self._next_step = make_batch, first_step
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="data") if num_workers else None
        self._ahead: deque[Future[Batch]] = deque()
        for _ in range(num_workers * BATCHES_PER_WORKER):
            self._submit()

    def __enter__(self) -> Prefetcher[Batch]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def next(self) -> Batch:
        """Return the next step's batch, or re-raise the exception from its thread."""
        if self._executor is None:
            self._next_step += 1
            return self._make_batch(self._next_step - 1)
        # Futures are queued in step order, whichever thread finishes first.
        batch = self._ahead.popleft().result()
        self._submit()
        return batch

    def _submit(self) -> None:
        self._ahead.append(self._executor.submit(self._make_batch, self._next_step))
        self._next_step += 1
