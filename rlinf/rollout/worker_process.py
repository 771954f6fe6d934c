"""The child's side of ``ProcessCollector``: a ``RolloutCollector``, a replica of the policy, and the loop that plays."""

from __future__ import annotations

import logging
import logging.handlers
import mmap
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from rlinf.distributed.child_process import exit_with_parent, failure_of, own_end
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.precision import autocast
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.shared_memory import read_task, write_answer


@dataclass(frozen=True)
class RolloutTask:
    """What all workers of a rank have in common.

    Attributes:
        prepare: Called first in each process.
        make_collector: Called with ``rank``, ``num_ranks`` and ``autocast``.
        model: The policy, whose tensors are shared.
        precision: In which the policy computes (``rlinf.models.precision.autocast``).
        num_threads: Threads of torch in each process.
        log_level: Least level of the records that the parent logs.
    """

    prepare: Callable[[], object]
    make_collector: Callable[..., RolloutCollector]
    model: ActionModel
    precision: str
    num_threads: int
    log_level: int


class _Sender:
    """Sends answers, log records and warnings to the parent, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def put_nowait(self, message: Any) -> None:
        """Send a message; the name is what ``logging.handlers.QueueHandler`` calls."""
        with self._lock:
            self._connection.send(message)

    def show_warning(self, message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        """Replace ``warnings.showwarning``."""
        self.put_nowait(warnings.WarningMessage(str(message), category, filename, lineno))


def main() -> None:
    """Run a worker."""
    connection, (memory, answers), parent = own_end()
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()
    sender = _Sender(connection)
    try:
        _work(_requests(connection), sender, memory, answers)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        with suppress(ConnectionResetError, BrokenPipeError):
            sender.put_nowait(failure_of(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Python would take its time to free all modules


def _requests(connection: Connection) -> Iterator[Any]:
    """Yield what the parent sends until it closes its end of the pipe, which also happens when it dies."""
    with suppress(EOFError, ConnectionResetError):
        while True:
            yield connection.recv()


def _work(requests: Iterator[Any], sender: _Sender, memory: int, answers: int) -> None:
    """Play as the parent asks: first where the task is and who this worker is, then the arguments of each rollout."""
    for start, size, rank, num_ranks in requests:
        task: RolloutTask = read_task(mmap.mmap(memory, start + size), start, size)
        logging.root.setLevel(task.log_level)
        logging.root.addHandler(logging.handlers.QueueHandler(cast("Any", sender)))
        warnings.showwarning = sender.show_warning
        torch.set_num_threads(task.num_threads)
        task.prepare()
        model = task.model.eval()
        collector = task.make_collector(
            rank=rank, num_ranks=num_ranks, autocast=partial(autocast, model, task.precision)
        )
        try:
            for arguments in requests:
                sender.put_nowait(write_answer(collector.collect(model, **arguments), answers))
        finally:
            collector.close()
