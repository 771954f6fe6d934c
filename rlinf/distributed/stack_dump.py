"""Dump the Python stacks of a silent process; ``faulthandler`` writes them on a signal even while C code runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import IO

DUMP_SIGNAL = signal.SIGUSR1
"""The signal that the process has registered with ``faulthandler``."""
POLL_S = 0.3
MAX_POLLS = 10
"""After these the process is killed without its stacks; a stopped process writes none."""


def dump_stacks(process: subprocess.Popen, log: IO) -> None:
    """Make ``process`` write its stacks to ``log``; return once it has, it has ended, or ``MAX_POLLS`` have passed."""
    size = before = os.fstat(log.fileno()).st_size
    process.send_signal(DUMP_SIGNAL)
    for _ in range(MAX_POLLS):
        time.sleep(POLL_S)
        last, size = size, os.fstat(log.fileno()).st_size
        if size == last > before or process.poll() is not None:
            return
