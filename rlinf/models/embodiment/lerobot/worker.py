"""A policy of lerobot in an interpreter of its own: started, watched, started again once, and ended from here.

Messages have the codec of the wire (``rlinf.serving.codec``) and go over the pipe of a child process: nothing is unpickled.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf import errors
from rlinf.distributed.child_process import ChildProcess, child_end, exit_with_parent, failure_of
from rlinf.distributed.stack_dump import dump_stacks
from rlinf.errors import MissingDependencyError, PolicyServerError, RLinfError
from rlinf.models.embodiment.lerobot.config import LerobotConfig
from rlinf.models.embodiment.lerobot.runner import Answer, LocalRunner
from rlinf.serving import require_packages
from rlinf.serving.codec import decode, encode

logger = logging.getLogger("rlinf")

VARIABLE = "RLINF_LEROBOT_PYTHON"
OLDEST = (3, 12)
"""The first Python that lerobot 0.6 supports."""
ROOT = Path(__file__).parents[4]
OWN_PLACE = ROOT / ".venv-lerobot" / "bin" / "python"
"""Made by ``scripts/setup.sh --lerobot``."""


def runs_here() -> bool:
    """Return whether lerobot can be imported by this Python."""
    found = find_spec("lerobot") if sys.version_info >= OLDEST else None
    return found is not None and found.origin is not None  # a folder of that name, such as a clone, is not the package


def interpreter_for(given: str | None) -> str | None:
    """Return the Python that runs the policy; None: this one. Raise MissingDependencyError if none has lerobot.

    ``given`` is ``model.interpreter``. Without it: this Python, the variable RLINF_LEROBOT_PYTHON, ``.venv-lerobot`` of the clone.
    """
    fix = "Run bash scripts/setup.sh --lerobot, which makes .venv-lerobot, or set model.interpreter=<a Python with lerobot>"
    named = given or (None if runs_here() else os.environ.get(VARIABLE))
    if named is not None:
        path = Path(named).expanduser()
        if not os.access(path, os.X_OK) or path.is_dir():
            source = "model.interpreter" if given else VARIABLE
            raise MissingDependencyError(f"{source} is '{named}', which cannot be run. {fix}")
        return str(path)
    if runs_here():
        return None
    if os.access(OWN_PLACE, os.X_OK):
        return str(OWN_PLACE)
    version = ".".join(map(str, sys.version_info[:2]))
    found = f"Python {version} has no lerobot" + (", which needs 3.12 or later" if sys.version_info < OLDEST else "")
    raise MissingDependencyError(f"model=lerobot: {found}, and {OWN_PLACE} does not exist. {fix}")


class WorkerRunner:
    """Has the interface of ``LocalRunner``, and asks a process.

    A process that dies is started again, and asked the same again: a question holds all that its answer depends on. One that dies
    twice with a question, dies at the start or does not answer in time ends with a PolicyServerError.

    Args:
        interpreter: Python that runs it.
        timeout_s: Longest wait for an answer.
        start_timeout_s: Longest wait until the policy is loaded.
    """

    def __init__(
        self,
        interpreter: str,
        folder: str,
        config: LerobotConfig,
        timeout_s: float = 60.0,
        start_timeout_s: float = 300.0,
    ) -> None:
        require_packages("model.interpreter")
        self.interpreter, self.folder, self.config = interpreter, str(Path(folder).expanduser().resolve()), config
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.device = torch.device("cpu")
        self.num_restarts = 0
        self._child = ChildProcess()
        self._lock = threading.Lock()  # rollout threads ask in turn
        self._start()
        weakref.finalize(self, _end, self._child)

    def to(self, device: torch.device) -> None:
        """Let the policy answer on another device from now on."""
        self.device = device

    def ask(self, batch: Mapping[str, Any], noise: np.ndarray | None) -> Answer:
        """Ask for chunks and features, as ``LocalRunner.ask``."""
        reply = self._ask({"batch": dict(batch), "noise": noise, "device": str(self.device)})
        return Answer(reply["chunks"], reply["features"])

    def _start(self) -> None:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
        }
        main = "rlinf.models.embodiment.lerobot.worker:main"
        self._child.launch(main, f"the policy of {self.folder}", [], environment, interpreter=self.interpreter)
        start = {"folder": self.folder, "config": asdict(self.config), "num_threads": torch.get_num_threads()}
        try:
            self._child.connection.send_bytes(encode(start))
            told = self._reply(self.start_timeout_s, "model.connect_timeout_s", "has not loaded it")
        except (EOFError, OSError):
            status, words = self._child.ending()
            fix = f"Try it: {self.interpreter} -c 'import rlinf, lerobot', or bash scripts/setup.sh --lerobot"
            raise PolicyServerError(
                f"{self.interpreter}, which loads the policy of {self.folder}, {words} at the start. {fix}"
            ) from None
        except RLinfError:
            self._child.kill()
            raise
        self.feature_dim = int(told["feature_dim"])

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            data = encode(dict(question))
            for is_last in (False, True):
                if self._child.process is None:  # the question before ended it
                    self._start()
                try:
                    self._child.connection.send_bytes(data)
                    return self._reply(self.timeout_s, "model.timeout_s", "has not answered")
                except (EOFError, OSError):
                    _, words = self._child.ending()
                    if is_last:
                        fix = f"Look at what it printed, or at the memory of this machine. Try it: {self.interpreter} -c 'import lerobot'"
                        found = f"{self.interpreter}, which runs the policy of {self.folder}, {words} twice with the same question"
                        raise PolicyServerError(f"{found}. {fix}") from None
                    logger.warning("the policy of %s %s; it is started again, and asked again", self.folder, words)
                    self.num_restarts += 1
                    self._start()
                except BaseException as error:
                    if not isinstance(error, RLinfError):  # Ctrl-C: the answer on its way is not the next question's
                        self._child.kill()
                    raise
        raise AssertionError

    def _reply(self, timeout_s: float, key: str, what: str) -> dict[str, Any]:
        """Wait for the next message; raise the child's error, and PolicyServerError after the deadline."""
        connection = self._child.connection
        deadline = time.monotonic() + timeout_s
        while not connection.poll(min(1.0, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                dump_stacks(self._child.process, self._child.log)
                stack = "\n".join(self._child.read_log().splitlines()[:8])
                self._child.kill()
                found = (
                    f"{self.interpreter}, which runs the policy of {self.folder}, {what} within {timeout_s:g} s ({key})"
                )
                raise PolicyServerError(f"{found}; it was at\n{stack}\nSet {key}={10 * timeout_s:g}")
        reply = decode(connection.recv_bytes())
        if "error" in reply:
            kind = getattr(errors, str(reply["error"]), PolicyServerError)
            raise kind(str(reply["message"]))
        return reply


def _end(child: ChildProcess) -> None:
    with suppress(OSError):
        child.kill()


def main() -> None:
    """Run the child's side: load the folder that the first message names, then answer until the parent closes the pipe."""
    connection, _, parent = child_end()
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        _answer(connection)
    os._exit(0)


def _answer(connection: Connection) -> None:
    start = decode(connection.recv_bytes())
    torch.set_num_threads(start["num_threads"])
    runners: list[LocalRunner] = []

    def load() -> dict[str, Any]:
        runners.append(LocalRunner(start["folder"], LerobotConfig(**start["config"])))
        return {"feature_dim": runners[0].feature_dim}

    def ask(question: Mapping[str, Any]) -> dict[str, Any]:
        runners[0].to(torch.device(question["device"]))
        return runners[0].ask(question["batch"], question["noise"])._asdict()

    if _told(connection, load):
        while True:
            _told(connection, partial(ask, decode(connection.recv_bytes())))


def _told(connection: Connection, work: Callable[[], dict[str, Any]]) -> bool:
    """Send what some work returns, or its error; return whether it succeeded."""
    try:
        reply = work()
    except Exception as error:  # noqa: BLE001 - the parent raises it
        failure = failure_of(error)
        message = failure.message if failure.error else f"The policy's process: {failure.message}\n{failure.traceback}"
        connection.send_bytes(encode({"error": failure.error or "PolicyServerError", "message": message}))
        return False
    connection.send_bytes(encode(reply))
    return True
