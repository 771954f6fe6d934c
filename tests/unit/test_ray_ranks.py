"""The process of a rank below its actor, without Ray: output, exit status, signals, environment, and its end with the actor."""

from __future__ import annotations

import importlib.util
import os
import pickle
import select
import signal
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from processes import is_running, wait_until

from rlinf.cluster.machine import CommandMachine
from rlinf.distributed.launch import launch
from rlinf.distributed.ray import ranks as ray_ranks
from rlinf.distributed.ray.ranks import RankAgent, RemoteRank
from rlinf.errors import ConfigError, RankError, RankKilledError

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray; extra 'ray'")


PATH = [*sys.path, "/a_folder_of_plugins"]


def work(source: str) -> bytes:
    """What the command sends to a rank that runs ``source``."""
    return pickle.dumps((exec, (source,)))


def told(agent: RankAgent, source: str, folder: Path, **environment: str) -> tuple[dict[int, str], int]:
    """Return what a rank writes to stdout (1) and stderr (2), and its exit status."""
    *written, status = agent.run(work(source), PATH, environment, str(folder))
    return {
        stream: b"".join(data for number, data in written if number == stream).decode() for stream in (1, 2)
    }, status


def test_output_and_exit_status_come_from_the_rank_with_its_own_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    source = (
        "import os, sys; print(os.getcwd(), os.environ['RANK'], os.environ.get('OMP_NUM_THREADS'), '/a_folder_of_plugins' in sys.path, sys.argv); "
        "print('a fault', file=sys.stderr); sys.exit(7)"
    )
    streams, status = told(RankAgent(), source, tmp_path, RANK="3")
    assert streams == {1: f"{tmp_path} 3 None True ['-c']\n", 2: "a fault\n"} and status == 7
    streams, _ = told(RankAgent(), "import os; print(os.environ['OMP_NUM_THREADS'])", tmp_path, OMP_NUM_THREADS="2")
    assert streams[1] == "2\n"


def test_a_child_that_keeps_the_output_open_does_not_hide_the_end_of_a_rank(tmp_path):
    source = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    streams, status = told(RankAgent(), source, tmp_path)
    assert status == 0
    os.kill(int(streams[1]), signal.SIGKILL)


AGENT = """
import sys
from rlinf.distributed.ray.ranks import RankAgent
for told in RankAgent().run(bytes.fromhex(sys.argv[1]), sys.path, {}, "."):
    print(told[1].decode(), flush=True)
"""


def test_a_rank_ends_with_its_actor(tmp_path):
    source = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    agent = subprocess.Popen([sys.executable, "-c", AGENT, work(source).hex()], stdout=subprocess.PIPE, text=True)
    rank = int(agent.stdout.readline())
    assert is_running(rank), "control"
    agent.kill()
    agent.wait()
    assert wait_until(lambda: not is_running(rank), 60)


def test_a_rank_runs_the_code_of_the_command_and_not_what_lies_in_its_folder(tmp_path):
    """The folder of the command holds another rlinf, which Python would take first."""
    (tmp_path / "rlinf").mkdir()
    (tmp_path / "rlinf" / "__init__.py").write_text("raise RuntimeError('another rlinf')")
    source = "import rlinf; print(rlinf.__file__)"
    streams, status = told(RankAgent(), source, tmp_path)
    assert status == 0 and streams[1] == f"{Path(ray_ranks.__file__).parents[2] / '__init__.py'}\n"
    *written, status = RankAgent().run(work(source), [str(tmp_path)], {}, str(tmp_path))
    assert status == 1 and b"another rlinf" in b"".join(data for _, data in written), "control"


class Agent:
    """Has no process; what a rank tells is given."""

    class signal:
        remote = staticmethod(lambda number: None)


def followed(monkeypatch, *told: object) -> RemoteRank:
    """Return a rank that has told this (an exception: raised instead), once it is followed no longer."""

    def get(told):
        if isinstance(told, Exception):
            raise told
        return told

    monkeypatch.setattr("ray.get", get)
    rank = RemoteRank(Agent(), told)
    rank._thread.join(60)
    assert select.select([rank.sentinel], [], [], 0)[0] and not rank.is_alive()
    return rank


@needs_ray
@pytest.mark.parametrize(
    ("error", "exitcode", "lost", "fault"),
    [
        ("ActorDiedError()", -9, "The actor died unexpectedly before finishing this task", None),
        ("RayTaskError('', 'trace\\nFileNotFoundError: none', OSError())", 1, None, "FileNotFoundError: none"),
        ("ValueError('surprise')", -9, "ValueError: surprise", None),
    ],
)
def test_whatever_ends_the_output_ends_the_rank(monkeypatch, error, exitcode, lost, fault):
    import ray.exceptions

    rank = followed(monkeypatch, (1, b""), eval(error, vars(ray.exceptions)))
    assert (rank.exitcode, rank.lost, rank.fault) == (exitcode, lost, fault)
    rank.join()
    assert rank.exitcode == exitcode
    # A second end, as of `join` in another thread, changes nothing and closes no file.
    descriptors = set(os.listdir("/proc/self/fd"))
    rank._end(7)
    assert rank.exitcode == exitcode and set(os.listdir("/proc/self/fd")) == descriptors
    silent = followed(monkeypatch, (1, b""))
    assert silent.exitcode == -9 and silent.lost == "its actor ended without an exit status"


@pytest.mark.parametrize(
    ("ends", "error", "words"),
    [
        ([(-9, None, None)] * 2, RankKilledError, "Rank 0 was killed by SIGKILL; Rank 1 was killed by SIGKILL"),
        ([(-9, "gone", None)] * 2, RankKilledError, "Rank 0 was lost: gone; Rank 1 was lost: gone"),
        ([(-9, "gone", None), (1, None, "no folder")], RankError, "Rank 1 could not be run: no folder"),
        ([(1, None, None)] * 2, RankError, "Rank 0 ended with status 1"),
    ],
)
def test_ranks_that_have_all_ended_before_the_command_looks_are_told_by_their_ends(ends, error, words):
    """As where the machine of all of them is lost."""

    class Ended(RemoteRank):
        def __init__(self, exitcode, lost, fault):
            self.exitcode, self.lost, self.fault, self.sentinel = exitcode, lost, fault, None

        def join(self, timeout=None):
            pass

        def end_agent(self):
            pass

    places = types.SimpleNamespace(host="127.0.0.1", start=lambda *_: [Ended(*end) for end in ends])
    with pytest.raises(error, match=words) as caught:
        launch(print, None, 2, "cpu", places=places)
    assert type(caught.value) is error


@needs_ray
@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        ("ActorDiedError()", RankKilledError, "lost before it could start: The actor died unexpectedly"),
        ("ActorDiedError(RayTaskError('', 'ImportError', ImportError()))", ConfigError, "Install the same version"),
        ("GetTimeoutError()", ConfigError, "no free places for 1 ranks for 5 s"),
    ],
)
def test_a_loss_at_the_start_is_no_fault_of_the_installation(monkeypatch, error, raised, words):
    import ray.exceptions

    def get(*_, **__):
        raise eval(error, vars(ray.exceptions))

    monkeypatch.setattr("ray.get", get)
    agent = types.SimpleNamespace(where=Agent.signal)
    agent.where.remote = staticmethod(lambda *_: None)
    with pytest.raises(raised, match=words):
        ray_ranks._nodes_of([agent], 5.0, None)


def test_a_device_of_egl_that_was_chosen_for_the_command_is_not_that_of_a_rank(tmp_path, monkeypatch):
    sent = []
    remote = types.SimpleNamespace(remote=lambda work, path, environment, folder: sent.append((path, environment)))
    monkeypatch.setattr("rlinf.distributed.ray.ranks.RemoteRank", lambda agent, output: None)
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "2")
    places = ray_ranks.RankPlaces("127.0.0.1", [types.SimpleNamespace(run=remote)], ["here"])
    places.start(print, (), 1)
    monkeypatch.setenv("RLINF_CHOSEN_EGL_DEVICE_ID", "2")
    places.start(print, (), 1)
    assert [environment.get("MUJOCO_EGL_DEVICE_ID") for _, environment in sent] == ["2", None]
    assert all(os.path.isabs(entry) for path, _ in sent for entry in path)


def test_a_machine_without_the_folders_or_with_other_software_takes_no_rank(tmp_path):
    machine = CommandMachine.here([])
    machine.check_for_rank([str(tmp_path)])
    with pytest.raises(ConfigError, match=f"has no folder {tmp_path}/run; expected .* output_dir=<a shared folder>"):
        machine.check_for_rank([str(tmp_path), f"{tmp_path}/run"])
    other = replace(machine, host="elsewhere", software=machine.software | {"version of torch": "1.0"})
    with pytest.raises(ConfigError, match="version of torch: machine 1 on .* machine 0 on elsewhere has 1.0"):
        other.check_for_rank([])


@needs_ray
def test_a_full_disk_or_a_reader_that_has_gone_does_not_hide_the_end_of_a_rank(monkeypatch):
    def write(stream, data):
        raise BrokenPipeError

    monkeypatch.setattr("rlinf.distributed.ray.ranks.os.write", write)
    rank = followed(monkeypatch, (1, b"lost"), (2, b"lost"), 7)
    assert (rank.exitcode, rank.lost, rank.fault) == (7, None, None)


def test_a_signal_reaches_the_rank(tmp_path):
    agent = RankAgent()
    output = agent.run(work("import os, time; os.write(1, b'ready'); time.sleep(600)"), PATH, {}, str(tmp_path))
    assert next(output) == (1, b"ready")
    agent.signal(signal.SIGTERM)
    assert list(output) == [-signal.SIGTERM]
    agent.signal(signal.SIGTERM)  # it has ended
