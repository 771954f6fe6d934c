"""Prefetching of batches in threads while the model trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Batch = TypeVar("Batch")

BATCHES_PER_WORKER = 2
"""Prefetched batches per thread."""


class Prefetcher(Generic[Batch]):
    """Computes the batches of consecutive optimiser steps in threads, and returns them in order.

    ``make_batch(step)`` is thread-safe; decoding images releases the GIL. 0 ``num_workers``: on demand.
    """

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
        """Return the batch of the next step, or raise the exception of its thread."""
        if self._executor is None:
            self._next_step += 1
            return self._make_batch(self._next_step - 1)
        batch = self._ahead.popleft().result()
        self._submit()
        return batch

    def _submit(self) -> None:
        self._ahead.append(self._executor.submit(self._make_batch, self._next_step))
        self._next_step += 1
