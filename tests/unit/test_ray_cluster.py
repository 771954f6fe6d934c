"""The connection of a process to Ray, with a module in its place that notes what it draws."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from processes import is_running

from rlinf.distributed.ray.cluster import initialise
from rlinf.errors import ConfigError

HEAD = "192.0.2.1:6379"


def numbers_after(init) -> float:
    """Seed, connect with ``init``, and return the next number."""
    context = SimpleNamespace(gcs_address=HEAD)
    random.seed(5)
    assert initialise(SimpleNamespace(init=init, get_runtime_context=lambda: context), HEAD) == HEAD
    return random.random()


def test_two_ranks_of_one_seed_have_connections_of_two_names_and_the_same_numbers_afterwards():
    """Ray draws the name from Python's random numbers; if two have one name, the head answers only one of them."""
    names = []
    numbers = [numbers_after(lambda **_: names.append(random.getrandbits(64))) for _ in range(2)]
    random.seed(5)
    assert len(set(names)) == 2 and numbers == [random.random()] * 2


def test_a_connection_that_fails_leaves_the_numbers_as_they_were():
    def reject(**_):
        raise ConnectionError("nobody listens")

    random.seed(5)
    before = random.getstate()
    with pytest.raises(ConfigError, match=f"cannot connect to {HEAD}: nobody listens"):
        initialise(SimpleNamespace(init=reject), HEAD)
    assert random.getstate() == before


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray; extra 'ray'")
def test_ray_draws_names_from_pythons_numbers():
    """If this fails, ``initialise`` need not seed them any more."""
    from ray._raylet import GcsErrorSubscriber

    before = random.getstate()
    GcsErrorSubscriber(worker_id=b"x" * 28, address="127.0.0.1:1")
    assert random.getstate() != before


RUN = """
import os, signal, subprocess, sys, time
from rlinf.distributed.ray.end import end_with_this_process
SLEEP = "import time; time.sleep(60)  # {}"
START = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', {!r}]).pid, flush=True); time.sleep(60)  # ray"
daemon = subprocess.Popen([sys.executable, "-c", START.format(SLEEP.format("ray"))], start_new_session=True, stdout=subprocess.PIPE)
other = subprocess.Popen([sys.executable, "-c", SLEEP.format("of the user")], start_new_session=True, stdout=subprocess.DEVNULL)
agent = int(daemon.stdout.readline())
end_with_this_process([daemon.pid])
time.sleep(3)
print(daemon.pid, agent, other.pid, flush=True)
os.kill(daemon.pid, signal.SIGKILL) if sys.argv[1] == "daemon" else None  # as the system does where Ray asks for it
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc, which Linux has")
@pytest.mark.parametrize("also", ["nothing", "daemon"])
def test_daemons_and_what_they_have_started_end_with_a_killed_run(also):
    done = subprocess.run([sys.executable, "-c", RUN, also], stdout=subprocess.PIPE, text=True, timeout=60)
    daemon, agent, other = map(int, done.stdout.split())
    try:
        until = time.monotonic() + 10
        while time.monotonic() < until and (is_running(daemon) or is_running(agent)):
            time.sleep(0.1)
        assert not is_running(daemon) and not is_running(agent) and is_running(other)
    finally:
        subprocess.run(["kill", "-9", str(other)], check=True)
