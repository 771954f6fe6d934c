"""Signal handling for commands that write a folder."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


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
