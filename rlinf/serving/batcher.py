"""Batch requests from all connections for one inference thread."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

MAX_WAITING = 16
"""Maximum number of pending batches. Further requests are rejected, because they would only increase latency."""


class BusyError(RuntimeError):
    """Too many rows are pending."""


@dataclass
class _Request:
    rows: Sequence[Any]
    result: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Collects rows into batches of up to ``max_rows``, which one thread processes with ``act``.

    A batch starts as soon as it is full, every client has a pending request, or ``wait_s`` seconds have passed since its first
    row. A client has one request at a time, so a single client never waits for a batch to fill.

    ``act`` returns one result per row, independent of the remaining rows; an exception returned as a result is raised for its client.
    """

    def __init__(
        self, act: Callable[[list[Any]], Sequence[Any]], max_rows: int, wait_s: float, num_clients: Callable[[], int]
    ) -> None:
        self.act, self.max_rows, self.wait_s, self.num_clients = act, max_rows, wait_s, num_clients
        self._waiting: deque[_Request] = deque()
        self._current: list[_Request] = []
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._task = asyncio.create_task(self._run())

    async def submit(self, rows: Sequence[Any], timeout_s: float, *, waits: bool = False) -> list[Any]:
        """Return the results of rows; raise BusyError if too many are pending (unless ``waits``), TimeoutError if they are late."""
        if not waits and sum(len(request.rows) for request in (*self._current, *self._waiting)) >= self.most_rows:
            raise BusyError(f"{self.most_rows} observations or more are pending")
        requests = [_Request(rows[first : first + self.max_rows]) for first in range(0, len(rows), self.max_rows)]
        self._waiting += requests
        self.wake()
        results = await asyncio.wait_for(asyncio.gather(*(request.result for request in requests)), timeout_s)
        return [result for piece in results for result in piece]

    @property
    def most_rows(self) -> int:
        """Maximum number of rows per request, and of pending rows."""
        return MAX_WAITING * self.max_rows

    def wake(self) -> None:
        """Check again whether a batch can start, after rows arrived or a client left."""
        self._changed.set()

    async def close(self) -> None:
        """Stop the thread after its current batch."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # One task forms all batches, so no lock is needed; the event loop is not blocked while the thread computes.
            await self._wait_for_change()
            if not self._waiting:  # woken by a client that has left
                continue
            deadline = loop.time() + self.wait_s
            while len(self._waiting) < self.num_clients() and (left := deadline - loop.time()) > 0:
                if sum(len(request.rows) for request in self._waiting) >= self.max_rows:
                    break
                try:
                    await asyncio.wait_for(self._wait_for_change(), left)
                except TimeoutError:
                    break
            self._current = self._next_batch()
            await self._compute(self._current)
            self._current = []

    async def _wait_for_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _next_batch(self) -> list[_Request]:
        """Remove as many of the oldest requests from the queue as fit into a batch, but at least one."""
        batch: list[_Request] = []
        while self._waiting:
            request = self._waiting[0]
            if request.result.done():  # timed out, or the client has left
                self._waiting.popleft()
                continue
            if batch and sum(len(queued.rows) for queued in batch) + len(request.rows) > self.max_rows:
                break
            batch.append(self._waiting.popleft())
        if self._waiting:
            self._changed.set()  # so that the remaining requests start the next batch immediately
        return batch

    async def _compute(self, requests: Sequence[_Request]) -> None:
        """Process requests together or, if that fails, separately, so that only the bad request fails."""
        rows = [row for request in requests for row in request.rows]
        if not rows:
            return
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self.act, rows)
        except Exception as error:  # noqa: BLE001 re-raised for the client
            if len(requests) == 1:
                if not requests[0].result.done():
                    requests[0].result.set_exception(error)
                return
            for request in requests:
                await self._compute([request])
            return
        first = 0
        for request in requests:
            part_results = list(results[first : first + len(request.rows)])
            first += len(request.rows)
            errors = [result for result in part_results if isinstance(result, Exception)]
            if not request.result.done():
                request.result.set_exception(errors[0]) if errors else request.result.set_result(part_results)
