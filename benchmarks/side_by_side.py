"""Two processes that take turns: ours, and that of another library in a Python of its own.

A benchmark starts each side with ``Side(python, script, settings)``. The script reads the settings, and answers messages until there
are none, with ``serve``. Only the standard library is needed here, because the other library's Python imports this module too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Side:
    """A process that answers messages.

    Args:
        name: In messages about it.
        python: Its interpreter.
        script: File that calls ``serve``.
        settings: JSON values that its ``answer`` is made from.
    """

    def __init__(self, name: str, python: str, script: Path, settings: dict[str, Any]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()
        threads = {key: str(settings["threads"]) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [python, str(script), "--side"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=os.environ | threads | quiet,
        )  # fmt: skip
        self._send(settings)

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a message, and return the answer."""
        try:
            self._send(message)
            line = self._process.stdout.readline()
            while line and not line.startswith("{"):  # what the imports of a package print
                line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise SystemExit(f"{self.name} ended:\n{self._log.read().decode(errors='replace')[-4000:]}")
        return json.loads(line)

    def _send(self, message: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def serve(make_answer: Callable[[dict[str, Any]], Callable[..., dict[str, Any]]]) -> None:
    """Answer messages until the other end closes. What else is printed goes to stderr.

    Args:
        make_answer: Takes the settings; returns a function of the fields of a message.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = make_answer(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        answers.write(json.dumps(answer(**json.loads(line))) + "\n")
        answers.flush()


def distinct_words(text: str) -> float:
    """Return the share of the words of a text that differ: a reward."""
    words = text.split()
    return len(set(words)) / max(1, len(words))


class Stopwatch:
    """Times what runs inside, in seconds of the clock and of this process's processor time."""

    times: dict[str, float]

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        clock, processor = self._start
        self.times = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - processor}


def memory_mb(key: str) -> float:
    """Return ``VmRSS`` (now) or ``VmHWM`` (peak) of this process in 1e6 bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e6
