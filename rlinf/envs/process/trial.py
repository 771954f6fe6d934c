"""Try a user's env in a separate process, so that a crash or a hang ends only that process."""

import os
import re
import threading
import traceback
from collections.abc import Callable, Generator
from typing import Any, cast

import numpy as np

import rlinf.errors
from rlinf.distributed.child_process import POLL_S, Failure, child_end, exit_with_parent, failure_of
from rlinf.envs.config import ProcessEnvConfig
from rlinf.envs.process.env import SLOW_CALLS, Worker
from rlinf.errors import SimulatorError

LOG_CHARACTERS = 2000
OTHER_STACKS = re.compile(r"^Thread 0x.*?(?=^Current thread)|^Extension modules:[^\n]*", re.MULTILINE | re.DOTALL)

Trial = Generator[str, None, Any]
"""Yields each call's name before the call; all but ``SLOW_CALLS`` are limited by ``env.step_timeout_s``. Returns the result."""


def run_in_child(trial: Callable[[Any], Trial], config: ProcessEnvConfig, what: str) -> Any:
    """Run the ``Trial`` of a module's function in a child process, which imports the module; raise its RLinfError, or a SimulatorError about ``what``."""
    worker, call, reply = Worker(np.zeros(1, dtype=np.int64)), "construction", cast(Any, None)
    environment = {"LP_NUM_THREADS": "0", **os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    worker.launch(f"{__name__}:main", f"the trial of {what}", [], environment, logs_output=True)
    try:
        worker.send((trial, config), config.reset_timeout_s)
        while not isinstance(reply, Failure | tuple):
            call = reply or call
            timeout_s, waited_s = config.reset_timeout_s if call in SLOW_CALLS else config.step_timeout_s, 0.0
            # Poll, because a process started by the env may hold the pipe open after the child has exited.
            while not worker.connection.poll(poll_s := min(POLL_S, timeout_s / 4)) and worker.process.poll() is None:
                if (waited_s := waited_s + poll_s) > timeout_s:
                    break
            reply = worker.give_up(timeout_s, call) if waited_s > timeout_s else worker.receive(timeout_s, call)
    finally:
        worker.kill()
    if not isinstance(reply, Failure):
        return reply[0]
    if reply.error is not None:
        raise getattr(rlinf.errors, reply.error)(reply.message)
    # A crash prints the stacks of all threads, but only the current one belongs to the user's code.
    log = OTHER_STACKS.sub("", worker.read_log())[-LOG_CHARACTERS:].strip()
    output = f" Its last output:\n{log}\n" if log else " It printed nothing. "
    raise SimulatorError(f"{what} fails in its first {call}: {reply.message}.{output}Fix the environment")


def run_trial(calls: Trial, report: Any = bool) -> Any:
    """Run a trial in this process and return its result; ``report`` is called with each call's name before the call."""
    try:
        while True:
            report(next(calls))
    except StopIteration as end:
        return end.value


def main() -> None:
    """Run a trial in this child process."""
    connection, _, parent = child_end()
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()
    try:
        trial, config = connection.recv()
        connection.send((run_trial(trial(config), connection.send),))
    except BaseException as error:  # noqa: BLE001 - the parent reports it
        failure, place = failure_of(error), traceback.extract_tb(error.__traceback__)[-1]
        where = "" if failure.error else f" ({place.filename}, line {place.lineno})"
        connection.send(failure._replace(message=failure.message + where))
