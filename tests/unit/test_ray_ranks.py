"""The process of a rank below its actor, without Ray: output, exit status, signals, environment, and its end with the actor."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.cluster.machine import Machine
from rlinf.distributed.ray_ranks import RankAgent
from rlinf.errors import ConfigError


def work(source: str) -> bytes:
    """What the command sends to a rank that runs ``source``."""
    return pickle.dumps((["a_folder_of_plugins"], pickle.dumps((exec, (source,)))))


def told(agent: RankAgent, source: str, folder: Path, **environment: str) -> tuple[dict[int, str], int]:
    """Return what a rank writes to stdout (1) and stderr (2), and its exit status."""
    *written, status = agent.run(work(source), environment, str(folder))
    return {
        stream: b"".join(data for number, data in written if number == stream).decode() for stream in (1, 2)
    }, status


def test_output_and_exit_status_come_from_the_rank_with_its_own_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    source = (
        "import os, sys; print(os.getcwd(), os.environ['RANK'], os.environ.get('OMP_NUM_THREADS'), sys.path[-1]); "
        "print('a fault', file=sys.stderr); sys.exit(7)"
    )
    streams, status = told(RankAgent(), source, tmp_path, RANK="3")
    assert streams == {1: f"{tmp_path} 3 None a_folder_of_plugins\n", 2: "a fault\n"} and status == 7
    streams, _ = told(RankAgent(), "import os; print(os.environ['OMP_NUM_THREADS'])", tmp_path, OMP_NUM_THREADS="2")
    assert streams[1] == "2\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_rank(tmp_path, number):
    agent = RankAgent()
    output = agent.run(work("import os, time; os.write(1, b'ready'); time.sleep(600)"), {}, str(tmp_path))
    assert next(output) == (1, b"ready")
    agent.signal(number)
    assert list(output) == [-number]
    agent.signal(number)  # to nobody


def test_a_child_that_keeps_the_output_open_does_not_hide_the_end_of_a_rank(tmp_path):
    source = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    streams, status = told(RankAgent(), source, tmp_path)
    assert status == 0
    os.kill(int(streams[1]), signal.SIGKILL)


AGENT = """
import sys
from rlinf.distributed.ray_ranks import RankAgent
for told in RankAgent().run(bytes.fromhex(sys.argv[1]), {}, "."):
    print(told[1].decode(), flush=True)
"""


def test_a_rank_ends_with_its_actor(tmp_path):
    source = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    agent = subprocess.Popen([sys.executable, "-c", AGENT, work(source).hex()], stdout=subprocess.PIPE, text=True)
    rank = Path("/proc", agent.stdout.readline().strip(), "stat")
    assert rank.exists(), "control: it runs"
    agent.kill()
    agent.wait()
    deadline = time.monotonic() + 60
    while rank.exists() and rank.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not rank.exists() or rank.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_machine_without_the_folders_or_with_other_software_takes_no_rank(tmp_path):
    machine = Machine.here([])
    machine.check_for_rank([str(tmp_path)])
    with pytest.raises(ConfigError, match=f"has no folder {tmp_path}/run; required: .* output_dir=<a shared folder>"):
        machine.check_for_rank([str(tmp_path), f"{tmp_path}/run"])
    other = replace(machine, host="elsewhere", software=machine.software | {"version of torch": "1.0"})
    with pytest.raises(ConfigError, match="version of torch: machine 1 on .* machine 0 on elsewhere has 1.0"):
        other.check_for_rank([])
