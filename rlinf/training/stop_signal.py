"""SIGINT, SIGTERM, SIGUSR1 and SIGHUP: an orderly end of a run."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rlinf.distributed.process_group import gather_objects, world_size
from rlinf.distributed.start import started_here


class StopRequested(Exception):
    """A signal asked for an orderly end; all training is saved."""


class StopSignal:
    """The first SIGINT, SIGTERM, SIGUSR1 (from a batch system) or SIGHUP (a terminal that is closed, unless `nohup` has the process
    ignore it), which ends a run after the present step; a second SIGINT ends it at once.

    Args:
        announce: Say so on stderr, on rank 0.
        saves: Training is saved before the end; False: the announcement says that it is lost.

    Attributes:
        number: Of the signal; None while there was none.
    """

    def __init__(self, announce: bool, saves: bool = True) -> None:
        self.announce, self.saves = announce, saves
        self.number: int | None = None
        self._raises = False
        self._terminals: list[int] = []

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside. The process that starts several ranks itself turns all of them into SIGTERM."""
        numbers = stop_signals() if started_here(world_size()) == 1 else [signal.SIGTERM]
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
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

    def together(self, part: Callable[[], Any]) -> list[Any]:
        """Run ``part()``, which a signal may stop, on every rank (a collective call); returns what all have returned.

        Raise StopRequested on all ranks if one of them was stopped.
        """
        mine = None
        with suppress(StopRequested), self.at_once():
            mine = [part()]
        made = gather_objects(mine)
        if any(each is None for each in made):
            raise StopRequested("stopped by a signal")
        return [each[0] for each in made]

    def _handle(self, number: int, _frame: object) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        leave_lost_terminals(self._terminals)
        if self.announce:
            when = "now" if self._raises else "after this step"
            with suppress(OSError):  # a pipe that nobody reads any more
                # Not print: the handler may interrupt a write to the same buffered stream.
                kept = "is saved first" if self.saves else "is not saved"
                os.write(2, f"\nstopping {when}; what was trained {kept}\n".encode())
        if self._raises:
            self._raises = False
            raise StopRequested("stopped by a signal")


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a run; SIGHUP only where nobody, as `nohup`, has chosen to ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *([] if ignored else [signal.SIGHUP])]


def leave_lost_terminals(numbers: Sequence[int]) -> None:
    """Send output for terminals that were closed since nowhere: an error there would end the run unsaved."""
    for number in numbers:
        try:
            termios.tcgetattr(number)
        except termios.error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
