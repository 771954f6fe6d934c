"""Ranks that fork from a process which has imported what they need: a new interpreter takes four seconds of a core for that."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import Any

import pytest
import torch.multiprocessing as mp

PRELOADED = [
    "rlinf.commands.train",
    "rlinf.recipes.run",
    "rlinf.models.embodiment.mlp_action_model",
    "pytest",
    "hypothesis",
]
SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""A process that is spawned ignores those of them that its parent ignores."""


class Inherited:
    """What a spawned process has of its parent and a forked one of the fork server: environment, signals, output."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.ignored = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"output": [DupFd(number) for number in (1, 2)]}

    def take(self) -> None:
        """Take it over in the new process."""
        os.environ.clear()
        os.environ.update(self.environment)
        for number in self.ignored:
            signal.signal(number, signal.SIG_IGN)
        for number, descriptor in zip((1, 2), self.output, strict=True):
            os.dup2(descriptor.detach(), number)


def _take_and_call(rank: int, inherited: Inherited, function: Callable[..., None], arguments: tuple) -> None:
    inherited.take()
    function(rank, *arguments)


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Let ``launch`` fork its ranks instead of spawning them."""
    start = mp.start_processes

    def forked(function, args=(), nprocs=1, start_method="spawn", **more):
        return start(_take_and_call, (Inherited(), function, args), nprocs, start_method="forkserver", **more)

    multiprocessing.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mp, "start_processes", forked)
        yield
