"""Signals in a command that writes a folder."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def _answered(number: int, handler: Callable[..., Any]) -> Iterator[None]:
    """Answer a signal by ``handler`` inside; it arrives in the main thread alone, so that another thread changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


def sigterm_is_ctrl_c() -> AbstractContextManager[None]:
    """Let SIGTERM, with which a cluster announces that it takes the machine back, do what Ctrl-C does."""
    return _answered(signal.SIGTERM, _ctrl_c)


def _ctrl_c(*_: object) -> None:
    """Do what Ctrl-C does, also where a script has started the command by `&` and so lets it ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Let SIGINT take effect after the block, which must not be half done."""
    arrived: list[int] = []
    with _answered(signal.SIGINT, lambda number, _frame: arrived.append(number)):
        yield
    if arrived:
        _ctrl_c()
