"""Lines of the log of a recipe, each with the rank that wrote it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rlinf.tracking.progress import Progress

logger = logging.getLogger("rlinf")


class _Lines(logging.Handler):
    """Writes records between the updates of a live line; each of their lines begins with the rank."""

    def __init__(self, progress: Progress, rank: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[rlinf] %(asctime)s - rlinf - %(levelname)s - %(message)s"))
        self._head, self._progress = f"[rank{rank}]:", progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.note("\n".join(self._head + line for line in self.format(record).split("\n")))


@contextmanager
def shown_logs(progress: Progress, rank: int) -> Iterator[None]:
    """Show what the package logs inside, from the level INFO on: ``[rank0]:[rlinf] <time> - rlinf - INFO - <text>``."""
    handler, level = _Lines(progress, rank), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
