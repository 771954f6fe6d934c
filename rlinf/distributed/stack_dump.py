"""Where a silent process is: its Python stacks, which ``faulthandler`` writes on a signal even while C code runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import IO

DUMP_SIGNAL = signal.SIGUSR1
"""What the process has registered with ``faulthandler``."""
POLL_S = 0.3
MAX_POLLS = 10
"""After these a process is killed without its stacks: one that is stopped writes none."""


def dump_stacks(process: subprocess.Popen, log: IO) -> None:
    """Have ``process`` write its stacks to ``log``, and return when it has, has ended, or ``MAX_POLLS`` have passed."""
    size = before = os.fstat(log.fileno()).st_size
    process.send_signal(DUMP_SIGNAL)
    for _ in range(MAX_POLLS):
        time.sleep(POLL_S)
        last, size = size, os.fstat(log.fileno()).st_size
        if size == last > before or process.poll() is not None:
            return
