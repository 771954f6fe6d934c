"""Workers of Ray that fork from a process which has imported what they need: a new interpreter takes six seconds for that."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from forked_processes import fork

START = Path(__file__).with_name("fixtures") / "ray_worker.py"
NAME = "RLINF_FORKED_WORKERS"


def _become_worker(asked: socket.socket) -> None:
    """Do what Ray's default_worker.py does, without its new interpreter."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(asked, 1, 2)
    words, environment, folder = json.loads(asked.makefile("rb").read())
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # of the server
    sys.path[:0] = [
        place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path
    ]
    os.setsid()
    os.chdir(folder)
    from ray._private.workers import default_worker

    sys.argv = [default_worker.__file__, *words]
    runpy.run_path(default_worker.__file__, run_name="__main__")


def _serve(path: str) -> None:
    """Fork the workers for which daemons ask, until the process of the tests ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    parent = multiprocessing.parent_process().sentinel
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while parent not in wait([listener, parent]):
            asked, _ = listener.accept()
            with asked:
                if os.fork() == 0:
                    listener.close()
                    _become_worker(asked)
                    os._exit(0)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Let the daemons of Ray that are started meanwhile have their workers forked.

    By a process of its own: a driver that connects holds the lock of the interpreter until its first workers are there.
    """
    from ray._private.parameter import RayParams

    absent = RayParams.update_if_absent
    # Whoever connects starts a program of this user: the folder lets in nobody else.
    with tempfile.TemporaryDirectory(prefix="rlinf-") as folder, pytest.MonkeyPatch.context() as patch:
        path = f"{folder}/workers"
        server = fork(_serve, (path,))
        patch.setenv(NAME, path)
        patch.setattr(
            RayParams, "update_if_absent", lambda self, **more: absent(self, **more | {"worker_path": str(START)})
        )
        try:
            yield
        finally:
            os.kill(server.pid, signal.SIGTERM)
            server.wait()
