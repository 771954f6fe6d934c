"""vLLM engines that fork from a process which has imported vLLM: a new interpreter takes nine seconds for that."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.forkserver import ForkServer
from types import SimpleNamespace
from typing import Any

import pytest
from forked_processes import ForkedProcess, Inherited, fork

from rlinf.engines import vllm_engine
from rlinf.engines.vllm_engine import PROCESS, engine_environment

PRELOADED = [
    "rlinf.engines.vllm_server",
    "rlinf.engines.vllm_requests",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
]


def _imported_with(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return what the modules of an engine read when they are imported."""
    names = ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL")
    return {name: environment.get(name) for name in names}


@cache
def _server() -> tuple[ForkServer, dict[str, str | None]]:
    """Return the server, which has the environment of an engine on CPUs, and the variables that its modules have read."""
    environment, server = engine_environment(1, []), ForkServer()
    server.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        server.ensure_running()
    return server, _imported_with(environment)


def _become_engine(inherited: Inherited, folder: str) -> None:
    inherited.take()
    connection, log = inherited.files
    for number in (1, 2):
        os.dup2(log, number)
    os.setsid()
    sys.argv = [PROCESS, str(connection), str(os.getppid()), folder]
    runpy.run_module(PROCESS, run_name="__main__", alter_sys=True)


def _start(command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int] = (), **more: Any) -> Any:
    own_packages = env.get("PYTHONPATH") == os.pathsep.join(path for path in sys.path if path)
    if command[1:3] != ["-m", PROCESS] or not own_packages or _imported_with(env) != _server()[1]:
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **more)
    inherited = Inherited(env, [*pass_fds, more["stdout"].fileno()])
    return ForkedProcess(fork(_become_engine, (inherited, command[-1]), _server()[0]))


@contextmanager
def forked_engines() -> Iterator[None]:
    """Let ``VllmEngine`` fork the engines of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": _start}))
        yield
