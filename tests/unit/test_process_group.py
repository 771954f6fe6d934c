"""Starting ranks."""

import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked_processes import forked_processes
from torch.distributed.device_mesh import init_device_mesh

from rlinf import memory
from rlinf.checkpoints.checkpoint_manager import CheckpointManager
from rlinf.distributed import launch, process_group
from rlinf.distributed.transfers import fetch

pytestmark = pytest.mark.new_processes


@pytest.fixture
def forked():
    """Ranks whose end is tested, not their start."""
    with forked_processes():
        yield


def fail_on_the_second_rank(_argument) -> None:
    if process_group.rank() == 1:
        raise KeyError("what went wrong")
    process_group.any_rank(True)  # fails too, because the other rank is gone


def test_the_error_of_the_rank_that_failed_first_is_told(forked):
    with pytest.raises(launch.RankError, match="Rank 1 failed(?s:.*)fail_on_the_second_rank(?s:.*)what went wrong"):
        launch.launch(fail_on_the_second_rank, None, 2, "cpu")


def save_asynchronously_on_a_gpu(folder) -> None:
    world, gpu = dist.group.WORLD, torch.device("cuda:0")
    world.bound_device_id = gpu  # as ``init_process_group(device_id=...)`` of a rank with a GPU leaves it
    with pytest.raises(RuntimeError, match="device type cuda"):
        dist.new_group(backend=process_group.GLOO)
    manager = CheckpointManager(folder, save_mode="async")
    assert process_group.gather_objects(process_group.rank(), manager._group) == [0, 1]
    assert world.bound_device_id == gpu
    world.bound_device_id = None  # there is none, and ranks end with a barrier on it


def check_the_groups_of_a_mesh() -> None:
    mesh = process_group.new_mesh("cpu", 2)
    assert mesh.mesh.tolist() == [[0], [1]] and mesh.mesh_dim_names == ("replicas", "shards")
    for name, ranks in {"replicas": [0, 1], "shards": [process_group.rank()]}.items():
        assert dist.get_process_group_ranks(mesh.get_group(name)) == ranks
        options = mesh.get_group(name)._get_backend(torch.device("cpu")).options
        assert options._threads == 1 and options._timeout == process_group.GROUP_TIMEOUT
    torchs = init_device_mesh("cpu", (2, 1)).get_group(1)._get_backend(torch.device("cpu"))
    assert torchs.options._timeout < process_group.GROUP_TIMEOUT, (
        "a control: ranks may wait for longer between two updates"
    )


def check_healthy_ranks(folder) -> None:
    assert process_group.gather_objects({"rank": process_group.rank()}) == [{"rank": 0}, {"rank": 1}]
    for group in (dist.group.WORLD, process_group.new_group(ranks=[0, 1])):
        assert group._get_backend(torch.device("cpu")).options._threads == 1
    check_the_groups_of_a_mesh()
    save_asynchronously_on_a_gpu(folder)


def test_ranks_gather_objects_in_one_thread_and_save_asynchronously_in_a_group_of_their_own(tmp_path, forked):
    """With the two threads that are gloo's default its heap breaks now and then, about once in some hours of tests."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._threads == 2  # else this is not needed
    finally:
        dist.destroy_process_group()
    assert process_group.gather_objects("x") == ["x"], "without a group"
    launch.launch(check_healthy_ranks, tmp_path, 2, "cpu")


def kill_the_first_rank(number: int) -> None:
    if process_group.rank() == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), number)
    process_group.any_rank(True)  # fails, because the other rank is gone


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_is_killed_is_the_cause_and_not_the_one_that_lost_its_connection(number, capfd, forked):
    with pytest.raises(launch.RankError, match=f"^Rank 0 was killed by {number.name}. "):
        launch.launch(kill_the_first_rank, number, 2, "cpu")
    crashed = "in kill_the_first_rank" in capfd.readouterr().err  # the stack that Python prints
    assert crashed == (number == signal.SIGSEGV)


def test_ctrl_c_while_ranks_start_is_one_interrupt_that_they_do_not_hear_themselves(monkeypatch, capfd):
    wait, ends = multiprocessing.connection.wait, []

    def interrupted(sentinels):
        monkeypatch.undo()
        ranks = multiprocessing.active_children()
        for process in ranks:  # as a terminal does
            os.kill(process.pid, signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        ends.extend(ranks)
        return wait(sentinels)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(multiprocessing.connection, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch.launch(time.sleep, 600, 2, "cpu")
    assert [process.exitcode for process in ends] == 2 * [-signal.SIGTERM]
    assert "Traceback" not in capfd.readouterr().err and signal.getsignal(signal.SIGINT) is handler


def test_on_gpus_only_what_lies_there_goes_over_nccl():
    backends = dist.BackendConfig(dist.Backend(process_group.backend_of("cuda"))).get_device_backend_map()
    assert backends == {"cpu": process_group.GLOO, "cuda": "nccl"}
    assert process_group.backend_of("cpu") == process_group.GLOO


class NotStarted(Exception):
    """Instead of processes."""


def test_nobody_else_can_take_the_port_of_ranks_that_are_still_starting(monkeypatch):
    taken = []

    def start_processes(_run, arguments, **_options):
        port = next(value for value in arguments if isinstance(value, int) and value > 1024)
        for number in (port, 0):  # 0, any free port, is the control
            with socket.socket() as other:
                try:
                    other.bind(("127.0.0.1", number))
                except OSError:
                    taken.append(number)
        assert taken == [port]
        raise NotStarted

    monkeypatch.setattr(launch.mp, "start_processes", start_processes)
    with pytest.raises(NotStarted):
        launch.launch(print, None, 2, "cpu")


def fail_and_let_the_other_wait(_argument) -> None:
    if process_group.rank() == 1:
        raise KeyError("what went wrong")
    time.sleep(60)


def test_a_rank_that_waits_elsewhere_is_ended_and_not_taken_for_the_cause(monkeypatch, forked):
    monkeypatch.setattr(launch, "GRACE_S", 0.1)
    with pytest.raises(launch.RankError, match="^Rank 1 failed"):
        launch.launch(fail_and_let_the_other_wait, None, 2, "cpu")
    assert not multiprocessing.active_children()


class Rank:
    """A process that has ended, but has no exit code when it is asked for the first time; or one that runs until it is killed."""

    def __init__(self, sentinel, exit_codes) -> None:
        self.sentinel, self.exit_codes, self.killed = sentinel, exit_codes, False

    @property
    def exitcode(self):
        if self.killed:
            return -signal.SIGKILL
        return self.exit_codes.pop(0) if len(self.exit_codes) > 1 else self.exit_codes[0]

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        self.killed = True

    terminate = kill

    def join(self, timeout=None):
        assert timeout is not None or self.exitcode is not None, "a wait without end"


def test_a_rank_that_has_no_exit_code_yet_when_its_sentinel_closes_still_ends_the_others(monkeypatch):
    failed, waiting = Rank("failed", [None, None, 1]), Rank("waiting", [None])

    def wait(sentinels, timeout=None):
        assert timeout is not None or "failed" in sentinels, "nothing is left to wait for"
        return []

    def join():
        raise launch.RankError("Rank 0 failed")

    context = SimpleNamespace(processes=[failed, waiting], join=join)
    monkeypatch.setattr(launch.mp, "start_processes", lambda *_, **__: context)
    monkeypatch.setattr(launch.multiprocessing.connection, "wait", wait)
    with pytest.raises(launch.RankError, match="Rank 0 failed"):
        launch.launch(print, None, 2, "cpu")
    assert waiting.killed


@pytest.mark.parametrize(("variable", "expected"), [("3,2", "3 5"), (None, "4 5")])
def test_the_threads_of_a_rank_are_those_of_the_key_then_of_the_variable_then_its_share_of_the_cores(
    variable, expected
):
    """In a new process, as torch reads the variable when it starts; nine cores, two ranks."""
    words = """
import torch, rlinf.distributed.process_group as group
group.num_cores = lambda: 9
for key in (None, 5):
    group.set_num_threads(key, 2)
    print(torch.get_num_threads(), end=" ")
"""
    given = {} if variable is None else {"OMP_NUM_THREADS": variable}
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")} | given
    found = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == expected


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 8), ("max 100000", 8), (None, 8)],
)
def test_a_container_has_the_cores_of_its_quota(tmp_path, monkeypatch, quota, expected):
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(f"{quota}\n")
    monkeypatch.setattr(memory, "CPU_QUOTA", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert memory.num_cores() == expected


def test_numbers_come_in_their_order_without_rounding():
    numbers = [0.1, torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), torch.tensor(3), torch.tensor([True])]
    fetched = fetch([*numbers, torch.tensor(2.5, requires_grad=True), 2**24 + 1, torch.tensor(2**24 + 1)])
    assert fetched == [0.1, float(torch.tensor(0.1)), 0.1, 3.0, 1.0, 2.5, 2.0**24 + 1, 2.0**24 + 1]
    assert fetch([]) == []
