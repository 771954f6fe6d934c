"""SIGINT and SIGTERM: an orderly end of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from rlinf.distributed.process_group import world_size


class StopRequested(Exception):
    """A signal asked for an orderly end; what was trained is saved."""


class StopSignal:
    """The first SIGINT or SIGTERM, which ends a run after the present step; a second SIGINT ends it at once.

    Args:
        announce: Say so on stderr, on rank 0.

    Attributes:
        number: Of the signal; None while there was none.
    """

    def __init__(self, announce: bool) -> None:
        self.announce = announce
        self.number: int | None = None
        self._raises = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Handle the signals inside. With several ranks, the process that started them turns SIGINT into SIGTERM."""
        numbers = (signal.SIGINT, signal.SIGTERM) if world_size() == 1 else (signal.SIGTERM,)
        previous = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal raise ``StopRequested`` inside, where nothing is trained."""
        if self.number is not None:
            raise StopRequested("stopped by a signal")
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _handle(self, number: int, _frame: object) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if self.announce:
            when = "now" if self._raises else "after this step"
            # Not print: the handler may interrupt a write to the same buffered stream.
            os.write(2, f"\nstopping {when}; what was trained is saved first\n".encode())
        if self._raises:
            self._raises = False
            raise StopRequested("stopped by a signal")
