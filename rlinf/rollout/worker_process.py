"""Worker process of ``ProcessCollector``, with a ``RolloutCollector`` and a replica of the policy."""

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

from rlinf.distributed.child_process import child_end, exit_with_parent, failure_of
from rlinf.models.precision import autocast
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.shared_memory import read_task, write_reply
from rlinf.seeding import seed_everything

READY = "ready"
"""A worker's first message, sent once it can collect."""


@dataclass(frozen=True)
class RolloutTask:
    """Task of all workers of a rank: how to build their collectors, the policies in shared memory, and the precision."""

    make_collector: Callable[..., RolloutCollector]
    models: nn.ModuleList
    precision: str


@dataclass(frozen=True)
class WorkerStart:
    """First message, readable before user code is imported. ``prepare`` runs before the task at ``start`` is read."""

    prepare: Callable[[], object]
    start: int
    size: int
    rank: int
    num_ranks: int
    seed: int
    num_threads: int
    log_level: int


class _Sender:
    """Sends replies, log records and warnings to the parent. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, message: Any) -> None:
        with self._lock:
            self._connection.send(message)

    def put_nowait(self, message: Any) -> None:
        """Send a record or a warning for ``logging.handlers.QueueHandler``; ignore a parent that has exited."""
        with suppress(OSError):
            self.send(message)

    def show_warning(self, message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        """Replace ``warnings.showwarning``."""
        self.put_nowait(warnings.WarningMessage(str(message), category, filename, lineno))


def main() -> None:
    """Run a worker."""
    connection, (memory, *buffers), parent = child_end()
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()
    sender = _Sender(connection)
    try:
        # Requests end when the parent closes its end of the pipe or dies.
        _work(_requests(connection), sender, memory, buffers)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        with suppress(ConnectionResetError, BrokenPipeError):
            sender.send(failure_of(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a normal exit would spend time freeing all modules


def _requests(connection: Connection) -> Iterator[Any]:
    with suppress(EOFError, ConnectionResetError):
        while True:
            yield connection.recv()


def _work(requests: Iterator[Any], sender: _Sender, memory: int, buffers: Sequence[int]) -> None:
    """Read a ``WorkerStart``, then for each rollout the index of its policy and reply buffer, and the remaining arguments."""
    for start in requests:
        logging.root.setLevel(start.log_level)
        logging.root.addHandler(logging.handlers.QueueHandler(cast("Any", sender)))
        warnings.showwarning = sender.show_warning
        torch.set_num_threads(start.num_threads)
        seed_everything(start.seed)
        start.prepare()
        # Must follow `prepare`, because unpickling the task imports user classes that `prepare` may register.
        task: RolloutTask = read_task(mmap.mmap(memory, start.start + start.size), start.start, start.size)
        models = task.models.eval()
        collector = task.make_collector(
            rank=start.rank, num_ranks=start.num_ranks, autocast=partial(autocast, models[0], task.precision)
        )
        try:
            sender.send(READY)
            for slot, arguments in requests:
                sender.send(write_reply(collector.collect(models[slot], **arguments), buffers[slot]))
        finally:
            collector.close()
