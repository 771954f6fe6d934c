"""The child's side of ``ProcessCollector``: a ``RolloutCollector``, a replica of the policy, and the loop that plays."""

from __future__ import annotations

import logging
import logging.handlers
import mmap
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from torch import nn

from rlinf.distributed.child_process import exit_with_parent, failure_of, own_end
from rlinf.models.precision import autocast
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.shared_memory import read_task, write_answer
from rlinf.seeding import seed_everything

READY = "ready"
"""The first message of a worker, which can play from then on."""


@dataclass(frozen=True)
class RolloutTask:
    """The common task of all workers of a rank: their collectors, the policies that play, in shared memory, and its precision."""

    make_collector: Callable[..., RolloutCollector]
    models: nn.ModuleList
    precision: str


@dataclass(frozen=True)
class WorkerStart:
    """The first message to a worker, which can be read before any code of the user is imported.

    ``prepare`` is called before the task, which lies at ``start`` of the shared memory, is read. ``rank`` and
    ``num_ranks`` count the workers of all ranks.
    """

    prepare: Callable[[], object]
    start: int
    size: int
    rank: int
    num_ranks: int
    seed: int
    num_threads: int
    log_level: int


class _Sender:
    """Sends answers, log records and warnings to the parent, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, message: Any) -> None:
        with self._lock:
            self._connection.send(message)

    def put_nowait(self, message: Any) -> None:
        """Send a record or a warning, as ``logging.handlers.QueueHandler`` asks; a parent that has left needs none."""
        with suppress(OSError):
            self.send(message)

    def show_warning(self, message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        """Replace ``warnings.showwarning``."""
        self.put_nowait(warnings.WarningMessage(str(message), category, filename, lineno))


def main() -> None:
    """Run a worker."""
    connection, (memory, *answers), parent = own_end()
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()
    sender = _Sender(connection)
    try:
        # The requests end when the parent closes its end of the pipe, or dies.
        _work(_requests(connection), sender, memory, answers)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        with suppress(ConnectionResetError, BrokenPipeError):
            sender.send(failure_of(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Python would take its time to free all modules


def _requests(connection: Connection) -> Iterator[Any]:
    with suppress(EOFError, ConnectionResetError):
        while True:
            yield connection.recv()


def _work(requests: Iterator[Any], sender: _Sender, memory: int, answers: Sequence[int]) -> None:
    """Read a ``WorkerStart``; then, for each rollout, the number of the policy that plays, and the other arguments.

    The answer goes into the memory of that number.
    """
    for start in requests:
        logging.root.setLevel(start.log_level)
        logging.root.addHandler(logging.handlers.QueueHandler(cast("Any", sender)))
        warnings.showwarning = sender.show_warning
        torch.set_num_threads(start.num_threads)
        seed_everything(start.seed)
        start.prepare()
        task: RolloutTask = read_task(mmap.mmap(memory, start.start + start.size), start.start, start.size)
        models = task.models.eval()
        collector = task.make_collector(
            rank=start.rank, num_ranks=start.num_ranks, autocast=partial(autocast, models[0], task.precision)
        )
        try:
            sender.send(READY)
            for slot, arguments in requests:
                sender.send(write_answer(collector.collect(models[slot], **arguments), answers[slot]))
        finally:
            collector.close()
