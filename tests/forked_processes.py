"""Ranks and rollout workers that fork from a process which has imported what they need: a new interpreter takes four seconds for that."""

import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import popen_forkserver
from multiprocessing.forkserver import ForkServer
from multiprocessing.popen_forkserver import Popen
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any

import pytest
import torch.multiprocessing as mp

from rlinf.distributed import child_process

# Not Ray, which keeps from its import on how machines of a cluster prove who they are.
PRELOADED = [
    "rlinf.commands.train",
    "rlinf.recipes.run",
    "rlinf.models.embodiment.mlp_action_model",
    "pytest",
    "hypothesis",
    "rlinf.cluster.rollout_worker",
]
SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""A process that is spawned ignores those of them that its parent ignores."""
_LOCK = threading.Lock()


class Inherited:
    """What a spawned process has of its parent and a forked one of the fork server: environment, signals, open files.

    Attributes:
        files: File descriptors; in the new process, those of the same files.
    """

    def __init__(self, environment: Mapping[str, str], files: Sequence[int] = ()) -> None:
        self.environment = dict(environment)
        self.ignored = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
        self.files = list(files)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"output": [DupFd(1), DupFd(2)], "files": [DupFd(number) for number in self.files]}

    def take(self) -> None:
        """Take it over in the new process."""
        os.environ.clear()
        os.environ.update(self.environment)
        tempfile.tempdir = None  # of the server
        for number in self.ignored:
            signal.signal(number, signal.SIG_IGN)
        for number, descriptor in zip((1, 2), self.output, strict=True):
            os.dup2(descriptor.detach(), number)
        self.files = [descriptor.detach() for descriptor in self.files]


def _take_and_call(rank: int, inherited: Inherited, function: Callable[..., None], arguments: tuple) -> None:
    inherited.take()
    function(rank, *arguments)


def _take_and_run(inherited: Inherited, function: Callable[..., None], arguments: tuple) -> None:
    inherited.take()
    function(*arguments)


def _take_and_execute(inherited: Inherited, source: str, words: Sequence[str]) -> None:
    inherited.take()
    sys.argv = ["-c", *words, str(os.getppid()), *map(str, inherited.files)]
    exec(source, {"__name__": "__main__"})


def _take_and_be_kernel(inherited: Inherited, folder: str, words: Sequence[str]) -> None:
    inherited.take()
    os.setsid()
    os.chdir(folder)
    sys.path[:0] = [folder, *os.environ["PYTHONPATH"].split(os.pathsep)]
    sys.argv = ["ipykernel_launcher", *words]
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)


def fork(function: Callable[..., None], arguments: tuple, server: ForkServer | None = None) -> Popen:
    """Call a function in a process that forks from the fork server of this process, or from another one."""
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    with _LOCK, pytest.MonkeyPatch.context() as patch:
        if server is not None:
            patch.setattr(popen_forkserver.forkserver, "connect_to_new_process", server.connect_to_new_process)
        return Popen(
            process
        )  # unlike ``process.start()`` keeps it from the children that ``multiprocessing`` waits for


def status_of_forked(function: Callable[..., None], *arguments: Any, seconds: float = 120) -> int:
    """Return the exit status of a forked process that calls a function, minus the number of the signal that ended it.

    The fork server has one thread. A process that ``os.fork`` makes of the one that runs tests waits forever for a lock that a thread
    of an earlier test held, or crashes in a library that is gone. One that runs after ``seconds`` is killed, and the test fails.
    """
    process = ForkedProcess(fork(_take_and_run, (Inherited(os.environ), function, arguments)))
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        pytest.fail(f"child process {process.pid} had not ended after {seconds:g} s")


class ForkedProcess:
    """What ``subprocess.Popen`` is for a process of ``ChildProcess``, for an engine, and for the kernel of a notebook."""

    stdin = stdout = stderr = None

    def __init__(self, process: Popen) -> None:
        self._process, self._lock = process, threading.Lock()
        self.pid: int = process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None. Any thread may ask, and only one reads it."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._process.poll()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""
        multiprocessing.connection.wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


def forked_kernel(command: Sequence[str], *, env: Mapping[str, str], cwd: str, **_: Any) -> ForkedProcess:
    """Start a kernel of Jupyter, as ``jupyter_client.launch_kernel`` does."""
    process = ForkedProcess(fork(_take_and_be_kernel, (Inherited(env), cwd, command[command.index("-f") :])))
    while process.poll() is None and os.getpgid(process.pid) != process.pid:  # its group, which is killed with it
        time.sleep(0.01)
    return process


@contextmanager
def forked_processes() -> Iterator[None]:
    """Let ``launch`` fork its ranks instead of spawning them, and ``ProcessCollector`` its workers."""
    start = mp.start_processes

    def start_ranks(function, args=(), nprocs=1, start_method="spawn", **more):
        inherited = Inherited(os.environ)
        return start(_take_and_call, (inherited, function, args), nprocs, start_method="forkserver", **more)

    def start_child(command, *, pass_fds, env, **more):
        _, _, source, path, _, *files = command
        if "from rlinf.rollout." not in source:  # simulators need no torch
            return subprocess.Popen(command, pass_fds=pass_fds, env=env, **more)
        return ForkedProcess(fork(_take_and_execute, (Inherited(env, map(int, files)), source, [path])))

    multiprocessing.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mp, "start_processes", start_ranks)
        patch.setattr(child_process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start_child}))
        yield
