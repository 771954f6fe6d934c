"""Requests of all connections, answered together by one thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

MAX_WAITING = 16
"""Batches of rows that may be under way. More are rejected: they would be answered later and later."""


class BusyError(RuntimeError):
    """Too many rows are under way already."""


@dataclass
class _Ask:
    rows: Sequence[Any]
    answer: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Collects rows and lets one thread answer them.

    A batch starts as soon as it is full, or every client has asked, or ``wait_s`` have passed since its first row. A client
    waits for its answer before it asks again, so one that is alone never waits for others.

    Args:
        act: ``rows -> one answer for each``, called in the thread. It must not let a row's answer depend on the others. An answer
            that is an exception goes to who asked for this row.
        max_rows: Rows of a batch. A request with more is answered in pieces.
        wait_s: Longest wait for rows of other clients.
        num_clients: Says how many clients there are.
    """

    def __init__(
        self, act: Callable[[list[Any]], Sequence[Any]], max_rows: int, wait_s: float, num_clients: Callable[[], int]
    ) -> None:
        self.act, self.max_rows, self.wait_s, self.num_clients = act, max_rows, wait_s, num_clients
        self._waiting: deque[_Ask] = deque()
        self._in_hand: list[_Ask] = []
        self._came = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._task = asyncio.create_task(self._run())

    async def ask(self, rows: Sequence[Any], timeout_s: float, *, waits: bool = False) -> list[Any]:
        """Return the answers to rows. With ``waits`` they are never too many: for a client that asks for one row at a time.

        Raises:
            BusyError: Too many rows are under way.
            TimeoutError: There was no answer in time. Rows that still wait are dropped.
        """
        if not waits and sum(len(ask.rows) for ask in (*self._in_hand, *self._waiting)) >= self.most_rows:
            raise BusyError(f"{self.most_rows} observations or more are under way")
        asks = [_Ask(rows[first : first + self.max_rows]) for first in range(0, len(rows), self.max_rows)]
        self._waiting += asks
        self.wake()
        answers = await asyncio.wait_for(asyncio.gather(*(ask.answer for ask in asks)), timeout_s)
        return [answer for piece in answers for answer in piece]

    @property
    def most_rows(self) -> int:
        """Rows that one request may have, and after which further requests are rejected."""
        return MAX_WAITING * self.max_rows

    def wake(self) -> None:
        """Look again whether a batch is full: rows came, or a client has left."""
        self._came.set()

    async def close(self) -> None:
        """End the thread after the batch that it works on."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._next()
            if not self._waiting:  # a client has left
                continue
            deadline = loop.time() + self.wait_s
            while len(self._waiting) < self.num_clients() and (left := deadline - loop.time()) > 0:
                if sum(len(ask.rows) for ask in self._waiting) >= self.max_rows:
                    break
                try:
                    await asyncio.wait_for(self._next(), left)
                except TimeoutError:
                    break
            self._in_hand = self._taken()
            await self._answer(self._in_hand)
            self._in_hand = []

    async def _next(self) -> None:
        """Wait until a request comes that has not been seen yet."""
        await self._came.wait()
        self._came.clear()

    def _taken(self) -> list[_Ask]:
        """Take the oldest requests, as many as fit into a batch, at least one."""
        taken: list[_Ask] = []
        while self._waiting:
            ask = self._waiting[0]
            if ask.answer.done():  # nobody waits for it any more
                self._waiting.popleft()
                continue
            if taken and sum(len(one.rows) for one in taken) + len(ask.rows) > self.max_rows:
                break
            taken.append(self._waiting.popleft())
        if self._waiting:
            self._came.set()  # the rest starts the next batch at once
        return taken

    async def _answer(self, asks: Sequence[_Ask]) -> None:
        """Answer requests together; if that fails, each alone, so that one cannot spoil the others."""
        rows = [row for ask in asks for row in ask.rows]
        if not rows:
            return
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self.act, rows)
        except Exception as error:  # noqa: BLE001 whatever a policy raises goes to who asked
            if len(asks) == 1:
                if not asks[0].answer.done():
                    asks[0].answer.set_exception(error)
                return
            for ask in asks:
                await self._answer([ask])
            return
        first = 0
        for ask in asks:
            own = list(answers[first : first + len(ask.rows)])
            first += len(ask.rows)
            rejected = [answer for answer in own if isinstance(answer, Exception)]
            if not ask.answer.done():
                ask.answer.set_exception(rejected[0]) if rejected else ask.answer.set_result(own)
