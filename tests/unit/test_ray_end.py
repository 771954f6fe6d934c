"""What a run that is killed has started for Ray ends with it; another process of the same run does not."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from processes import is_running

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
