"""Processes of this machine, as tests look for them."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

AGENTS = ("ray/dashboard/agent.py", "ray/_private/runtime_env/agent/main.py")
"""Commands of Ray's own processes that watch a daemon."""


def is_running(pid: int) -> bool:
    """Return whether a process has not ended (one that nobody has waited for has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(mark: str) -> dict[int, str]:
    """Return the processes whose environment holds ``mark``, each with its command."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
    return found


def nothing_is_left(mark: str, seconds: float = 60) -> bool:
    """Wait for the processes whose environment holds ``mark``; end Ray's two agents, which may take minutes to notice a loss.

    Returns:
        Whether all of them have ended.
    """

    def not_agents() -> list[int]:
        return [pid for pid, command in processes_of(mark).items() if not any(agent in command for agent in AGENTS)]

    if wait_until(lambda: not not_agents(), seconds):
        for pid in processes_of(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return wait_until(lambda: not processes_of(mark), seconds=5)


def engines_of(parent: int) -> list[int]:
    """Return the processes of vLLM engines that a process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(state[1]) == parent and b"vllm_process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def wait_until(condition: Callable[[], Any], seconds: float) -> Any:
    """Return the first true value of ``condition()``, or its last value after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    return condition()


def status_of_child(pid: int, seconds: float = 120) -> int:
    """Wait for a child process and return its wait status; one that runs after ``seconds`` is killed, and the test fails."""
    found: tuple[int, int] = wait_until(lambda: (ended := os.waitpid(pid, os.WNOHANG))[0] and ended, seconds)
    if not found:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail(f"child process {pid} had not ended after {seconds:g} s")
    return found[1]
