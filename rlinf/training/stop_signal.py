"""End a run gracefully on SIGINT, SIGTERM, SIGUSR1 and SIGHUP; signals of commands that write a folder."""

import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from rlinf.distributed.process_group import gather_objects, world_size
from rlinf.distributed.start import started_here


class StopRequested(Exception):
    """Raised after a signal, once all training is saved."""


class StopSignal:
    """Handles SIGINT, SIGTERM, SIGUSR1 (batch systems) and SIGHUP (closed terminal) by ending the run after the current step.

    A second SIGINT ends the run immediately.

    Args:
        announce: Whether to print a line to stderr.
        saves: Whether training is saved before the run ends; mentioned in the line.

    Attributes:
        number: Number of the signal received, or None.
    """

    def __init__(self, announce: bool, saves: bool = True) -> None:
        self.announce, self.saves = announce, saves
        self.number: int | None = None
        self._raises = False
        self._terminals: list[int] = []

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside the context."""
        # A process that starts several ranks forwards every signal to them as SIGTERM; otherwise each rank would receive Ctrl-C twice.
        numbers = stop_signals() if started_here(world_size()) == 1 else [signal.SIGTERM]
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        previous = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Make signals raise ``StopRequested`` inside the context; use only where no training state can be lost."""
        if self.number is not None:
            raise StopRequested("stopped by a signal")
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def together(self, part: Callable[[], Any]) -> list[Any]:
        """Run ``part()`` on every rank and return all results (a collective call); raise StopRequested on all ranks after a signal."""
        result = None
        with suppress(StopRequested), self.interrupting():
            result = [part()]  # in a list, because None means interrupted
        results = gather_objects(result)
        if any(rank_result is None for rank_result in results):
            raise StopRequested("stopped by a signal")
        return [rank_result[0] for rank_result in results]

    def _handle(self, number: int, _frame: object) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        leave_lost_terminals(self._terminals)
        if self.announce:
            when = "now" if self._raises else "after this step"
            with suppress(OSError):  # the process reading a pipe may have exited
                # Do not use print, because the handler may interrupt a write to the same buffered stream.
                fate = "is saved first" if self.saves else "is not saved"
                os.write(2, f"\nstopping {when}; training so far {fate}\n".encode())
        if self._raises:
            self._raises = False
            raise StopRequested("stopped by a signal")


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a run, excluding SIGHUP if it is ignored, e.g. because of `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *([] if ignored else [signal.SIGHUP])]


def leave_lost_terminals(numbers: Sequence[int]) -> None:
    """Redirect output from a closed terminal to /dev/null, so that a write error does not end the run."""
    for number in numbers:
        try:
            termios.tcgetattr(number)
        except termios.error:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, number)
            os.close(devnull)


@contextmanager
def _handled(number: int, handler: Callable[..., Any]) -> Iterator[None]:
    """Handle a signal with ``handler`` inside the block."""
    # Python delivers signals to the main thread only, and other threads may not install handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


def sigterm_is_ctrl_c() -> AbstractContextManager[None]:
    """Treat SIGTERM, which clusters send before preemption, like Ctrl-C."""
    return _handled(signal.SIGTERM, _ctrl_c)


def _ctrl_c(*_: object) -> None:
    # A command started by a script with `&` ignores SIGINT, so raising that signal would have no effect.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Delay SIGINT until the end of the block."""
    arrived: list[int] = []
    with _handled(signal.SIGINT, lambda number, _frame: arrived.append(number)):
        yield
    if arrived:
        _ctrl_c()
