"""Run a lerobot policy in a separate interpreter: start, monitor, restart (once) and stop its process."""

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
from rlinf.models.embodiment.lerobot.runner import LocalRunner, RunnerOutput
from rlinf.serving import require_packages
from rlinf.serving.codec import decode, encode

logger = logging.getLogger("rlinf")

VARIABLE = "RLINF_LEROBOT_PYTHON"
OLDEST = (3, 12)
"""The oldest Python version that lerobot 0.6 supports."""
ROOT = Path(__file__).parents[4]
OWN_PLACE = ROOT / ".venv-lerobot" / "bin" / "python"
"""Created by ``scripts/setup.sh --lerobot``."""


def runs_here() -> bool:
    """Return whether lerobot can be imported by this Python."""
    spec = find_spec("lerobot") if sys.version_info >= OLDEST else None
    # Ignore a mere folder of this name, such as a clone.
    return spec is not None and spec.origin is not None


def interpreter_for(given: str | None) -> str | None:
    """Return the Python to run the policy with, or None for this one; raise MissingDependencyError if none has lerobot.

    Candidates, in order: ``given`` (``model.interpreter``), this Python, RLINF_LEROBOT_PYTHON, ``.venv-lerobot`` of the clone.
    """
    fix = "Run bash scripts/setup.sh --lerobot, which creates .venv-lerobot, or set model.interpreter=<a Python with lerobot>"
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
    problem = f"Python {version} has no lerobot" + (", which needs 3.12 or later" if sys.version_info < OLDEST else "")
    raise MissingDependencyError(f"model=lerobot: {problem}, and {OWN_PLACE} does not exist. {fix}")


class WorkerRunner:
    """Has the interface of ``LocalRunner``, and delegates to a child process.

    If the process dies, it is restarted and the request is resent: the result depends only on the request. If it dies a
    second time, or dies while starting, or does not reply in time, PolicyServerError is raised.
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
        # Only one rollout thread may send a request at a time.
        self._lock = threading.Lock()
        self._start()
        weakref.finalize(self, _end, self._child)

    def to(self, device: torch.device) -> None:
        self.device = device

    def run(self, batch: Mapping[str, Any], noise: np.ndarray | None) -> RunnerOutput:
        """Return chunks and features; see ``LocalRunner.run``."""
        reply = self._request({"batch": dict(batch), "noise": noise, "device": str(self.device)})
        return RunnerOutput(reply["chunks"], reply["features"])

    def _start(self) -> None:
        excluded = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in excluded}
        main = "rlinf.models.embodiment.lerobot.worker:main"
        self._child.launch(main, f"the policy of {self.folder}", [], environment, interpreter=self.interpreter)
        start = {"folder": self.folder, "config": asdict(self.config), "num_threads": torch.get_num_threads()}
        try:
            self._child.connection.send_bytes(encode(start))
            reply = self._reply(self.start_timeout_s, "model.connect_timeout_s", "has not loaded it")
        except (EOFError, OSError):
            status, ending = self._child.ending()
            fix = f"Try {self.interpreter} -c 'import rlinf, lerobot', or run bash scripts/setup.sh --lerobot"
            raise PolicyServerError(
                f"{self.interpreter}, which loads the policy of {self.folder}, {ending} at the start. {fix}"
            ) from None
        except RLinfError:
            self._child.kill()
            raise
        self.feature_dim = int(reply["feature_dim"])

    def _request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            data = encode(dict(request))
            for is_last in (False, True):
                # The previous request may have stopped the process.
                if self._child.process is None:
                    self._start()
                try:
                    self._child.connection.send_bytes(data)
                    return self._reply(self.timeout_s, "model.timeout_s", "has not replied")
                except (EOFError, OSError):
                    _, ending = self._child.ending()
                    if is_last:
                        fix = f"Check its output and this machine's memory, and try {self.interpreter} -c 'import lerobot'"
                        problem = f"{self.interpreter}, which runs the policy of {self.folder}, {ending} twice with the same request"
                        raise PolicyServerError(f"{problem}. {fix}") from None
                    logger.warning("the policy of %s %s; restarting it and repeating the request", self.folder, ending)
                    self.num_restarts += 1
                    self._start()
                except BaseException as error:
                    # After Ctrl-C, the pending reply must not be taken for the next request's.
                    if not isinstance(error, RLinfError):
                        self._child.kill()
                    raise
        raise AssertionError

    def _reply(self, timeout_s: float, key: str, what: str) -> dict[str, Any]:
        """Wait for the next message; raise the child's error, or PolicyServerError on timeout."""
        connection = self._child.connection
        deadline = time.monotonic() + timeout_s
        while not connection.poll(min(1.0, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                dump_stacks(self._child.process, self._child.log)
                stack = "\n".join(self._child.read_log().splitlines()[:8])
                self._child.kill()
                problem = f"{self.interpreter}, with the policy {self.folder}, {what} within {timeout_s:g} s ({key})"
                raise PolicyServerError(f"{problem}; it was at\n{stack}\nSet {key}={10 * timeout_s:g}")
        reply = decode(connection.recv_bytes())
        if "error" in reply:
            kind = getattr(errors, str(reply["error"]), PolicyServerError)
            raise kind(str(reply["message"]))
        return reply


def _end(child: ChildProcess) -> None:
    with suppress(OSError):
        child.kill()


def main() -> None:
    """Run the child process: load the folder named in the first message, then reply until the parent closes the pipe."""
    connection, _, parent = child_end()
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        _serve(connection)
    os._exit(0)


def _serve(connection: Connection) -> None:
    start = decode(connection.recv_bytes())
    torch.set_num_threads(start["num_threads"])
    runners: list[LocalRunner] = []

    def load() -> dict[str, Any]:
        runners.append(LocalRunner(start["folder"], LerobotConfig(**start["config"])))
        return {"feature_dim": runners[0].feature_dim}

    def run(request: Mapping[str, Any]) -> dict[str, Any]:
        runners[0].to(torch.device(request["device"]))
        return runners[0].run(request["batch"], request["noise"])._asdict()

    if _reply_with(connection, load):
        while True:
            _reply_with(connection, partial(run, decode(connection.recv_bytes())))


def _reply_with(connection: Connection, work: Callable[[], dict[str, Any]]) -> bool:
    """Send the result of ``work``, or its error; return whether it succeeded."""
    try:
        reply = work()
    except Exception as error:  # noqa: BLE001 - re-raised by the parent
        failure = failure_of(error)
        message = failure.message if failure.error else f"The policy's process: {failure.message}\n{failure.traceback}"
        connection.send_bytes(encode({"error": failure.error or "PolicyServerError", "message": message}))
        return False
    connection.send_bytes(encode(reply))
    return True
