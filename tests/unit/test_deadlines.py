"""A wait between ranks that takes too long ends the run, with its name and the stacks of all processes."""

import inspect
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import is_running

from rlinf.commands.train import _execute_rank
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed import deadlines, launch, process_group
from rlinf.distributed.config import DeadlinesConfig
from rlinf.distributed.deadlines import Clock, DeadlineError, Watchdog, deadline, heartbeat, portable, report, reported
from rlinf.errors import ConfigError, RankError, RLinfError
from rlinf.optim.train_step import TrainStep
from rlinf.preflight.validation import validate
from rlinf.recipes.samples import BadRowError
from rlinf.training import train_worker
from rlinf.training.rollout_queue import RolloutQueue
from rlinf.types import EpisodeSpec

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "fixtures"))

from walk_env import WalkConfig, WalkVectorEnv  # noqa: E402

LIMIT_S = 2.0
SHORT = {"start": 300.0, "push": LIMIT_S, "rollout": LIMIT_S, "update": LIMIT_S, "save": 60.0, "evaluate": LIMIT_S}


def note(folder: str, name: str) -> None:
    (Path(folder) / name).write_text(f"{os.getpid()} {time.time()}")


def stop_before_an_update(folder: str) -> None:
    with deadline("update"):
        note(folder, f"rank{process_group.rank()}")
        if process_group.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.zeros(1))


def fall_asleep_before_a_push(folder: str) -> None:
    with deadline("push"):
        note(folder, f"rank{process_group.rank()}")
        if process_group.rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.zeros(1))


def play_in_a_simulator_that_falls_asleep(folder: str) -> None:
    env = WalkVectorEnv(WalkConfig(num_processes=2, fault_file=f"{folder}/fault", step_timeout_s=600), 2, False)
    env.reset(options={"episodes": [EpisodeSpec("walk", 0, 0, 0), EpisodeSpec("walk", 0, 1, 0)]})
    if process_group.rank() == 0:
        Path(folder, "simulators").write_text(" ".join(str(worker.process.pid) for worker in env._workers))
        Path(folder, "fault").write_text("step hang")
    dist.barrier()
    with deadline("rollout"):
        note(folder, f"rank{process_group.rank()}")
        if process_group.rank() == 0:
            env.chunk_step(torch.zeros(2, 1, 2).numpy())
        dist.all_reduce(torch.zeros(1))


def ranks_of(folder: Path) -> tuple[list[int], float]:
    """The processes of the ranks, and when the last of them started to wait."""
    told = [(folder / f"rank{rank}").read_text().split() for rank in (0, 1)]
    return [int(pid) for pid, _ in told], max(float(start) for _, start in told)


@pytest.mark.parametrize(
    ("function", "name", "stacks", "silent"),
    [
        (stop_before_an_update, "update", ["in stop_before_an_update"], True),
        (fall_asleep_before_a_push, "push", 2 * ["in fall_asleep_before_a_push"], False),
        (play_in_a_simulator_that_falls_asleep, "rollout", ["in chunk_step", "in fall_asleep"], False),
    ],
)
def test_a_hang_ends_with_its_name_and_the_stacks_of_all(function, name, stacks, silent, tmp_path, capfd):
    with pytest.raises(DeadlineError) as error:
        launch.launch(function, str(tmp_path), 2, "cpu", deadlines=SHORT)
    pids, start = ranks_of(tmp_path)
    seconds = time.time() - start
    log = capfd.readouterr().err
    assert re.match(rf"Rank [01] on .* was in '{name}' for more than 2 s", str(error.value))
    assert f"set cluster.deadlines.{name}=4" in str(error.value)
    assert ("no reply from rank 1" in str(error.value)) == silent
    for rank in (0, 1):
        assert log.count(f"--- rank {rank} on {socket.gethostname()} (process {pids[rank]})") == 1
    for words in set(stacks):
        assert log.count(words) >= stacks.count(words), log
    assert ("no reply: it is stopped" in log) == silent
    assert seconds < LIMIT_S + 10
    simulators = tmp_path / "simulators"
    pids += [int(pid) for pid in simulators.read_text().split()] if simulators.exists() else []
    assert len(pids) in (2, 4) and not any(is_running(pid) for pid in pids)


def work_long_in_short_steps(_argument) -> None:
    for _ in range(4):
        with deadline("update"):
            time.sleep(LIMIT_S / 2)
            dist.all_reduce(torch.zeros(1))


def test_many_waits_that_each_keep_their_deadline_end_well():
    """A control of the tests above: longer together than one deadline."""
    launch.launch(work_long_in_short_steps, None, 2, "cpu", deadlines=SHORT)


SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from rlinf.distributed import launch, process_group
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.start import launch_context

{inspect.getsource(note)}
{inspect.getsource(stop_before_an_update)}
def command():
    launch.launch(stop_before_an_update, os.environ["FOLDER"], 2, "cpu", deadlines={SHORT})
    return 0

sys.exit(launch.run_with_ranks(launch_context(os.environ), ["train"], command))
"""


def test_under_torchrun_every_rank_tells_the_error_and_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    logs = tmp_path / "logs"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--redirects=3",
        f"--log-dir={logs}", script,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline, log = time.monotonic() + 200, ""
        while "DeadlineError" not in log and time.monotonic() < deadline:
            time.sleep(0.2)
            log = "".join(path.read_text() for path in logs.rglob("stderr.log"))
        pids, start = ranks_of(tmp_path)
        assert time.time() - start < LIMIT_S + 10
        assert (
            "DeadlineError: Rank 0 on " in log and "no reply from rank 1" in log and "in stop_before_an_update" in log
        )
        os.kill(pids[1], signal.SIGKILL)  # torchrun itself does so after half a minute
        assert launcher.wait(60) != 0
        assert not any(is_running(pid) for pid in pids)
    finally:
        launcher.kill()


CALLS = ("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "barrier")


def train_and_note_unnamed_calls(config) -> None:
    """Train as a rank, and note in which wait each collective call was made."""
    found: list[tuple[str, str | None]] = []
    for name in CALLS:

        def noted(*arguments, _call=getattr(dist, name), _name=name, **options):
            found.append((_name, deadlines.clock.name))
            return _call(*arguments, **options)

        setattr(dist, name, noted)
    for owner, name in ((TrainStep, "apply"), (train_worker.TrainWorker, "evaluate"), (train_worker, "heartbeat")):

        def progress(*arguments, _call=getattr(owner, name), _name=name, **options):
            result = _call(*arguments, **options)
            found.append((_name, deadlines.clock.name))
            return result

        setattr(owner, name, progress)
    _execute_rank((config, None))
    dist.all_reduce(torch.zeros(1))  # a control, which is outside of every wait
    Path(config.output_dir, f"rollouts{process_group.rank()}").write_text(str(len(deadlines.clock.rollouts)))
    Path(config.output_dir, f"calls{process_group.rank()}").write_text(json.dumps(found))


def test_every_collective_call_of_a_run_is_in_a_named_wait(tmp_path):
    words = [
        "model=mlp", "env=tabletop", "env.tasks=[reach]", "env.cameras=[]", "env.max_episode_steps=8", "rollout.num_envs=4",
        "trainer.minibatch_size=8", "model.micro_batch_size=8", "trainer.max_steps=2", "trainer.eval_every=1",
        "trainer.save_every=1", "sft.max_steps=2", "sft.num_demonstrations=4", "sft.batch_size=8", "evaluation.num_episodes=4",
        "evaluation.num_envs=4", "evaluation.num_videos_per_task=0", "tracking.tensorboard=false", "tracking.progress=false",
        "cluster.num_threads=1", "cluster.num_processes=2", f"output_dir={tmp_path}",
    ]  # fmt: skip
    config = build_config(compose_config(words))
    validate(config)
    launch.launch(train_and_note_unnamed_calls, config, 2, "cpu")
    for rank in (0, 1):
        *calls, control = json.loads((tmp_path / f"calls{rank}").read_text())
        assert control == ["all_reduce", None]
        assert not [call for call in calls if call[1] is None]
        events = [name for name, _ in calls if name in ("apply", "evaluate", "heartbeat")]
        applied = [number for number, name in enumerate(events) if name == "apply"]
        scored = [number for number, name in enumerate(events) if name == "evaluate"]
        assert len(applied) >= 4 and all(events[number + 1] == "heartbeat" for number in applied)
        assert len(scored) == 2
        # The step before them has one, too.
        assert all(events[number - 2 : number] == ["heartbeat", "heartbeat"] for number in scored)
        assert (tmp_path / f"rollouts{rank}").read_text() == "2"
        assert {"start", "update", "rollout", "save", "evaluate"} <= {name for _, name in calls}


def test_the_deadline_of_a_rollout_follows_from_those_before():
    clock, given = Clock(), {"rollout": None, "update": 600.0}
    assert clock.limit(given) is None
    clock.switch("rollout")
    assert clock.limit(given) == deadlines.FIRST_ROLLOUT_S
    clock.rollouts.extend([1.0, 2.0, 3.0])
    assert clock.limit(given) == 1200.0
    clock.rollouts.extend([150.0, 160.0, 1000.0])
    assert list(clock.rollouts) == [2.0, 3.0, 150.0, 160.0, 1000.0] and clock.limit(given) == 1500.0
    assert clock.limit({"rollout": 7.0}) == 7.0
    clock.switch("update")
    assert clock.limit(given) == 600.0


def test_only_whole_rollouts_of_rl_count_for_the_deadline_of_the_next(monkeypatch):
    """Neither the demonstrations of an expert nor the few envs of a resample."""
    clock = Clock()
    monkeypatch.setattr(deadlines, "clock", clock)
    with deadline("rollout"):
        pass
    assert not clock.rollouts
    batch = SimpleNamespace(action_mask=torch.ones(2, 3), policy_version=torch.zeros(2))
    parts = SimpleNamespace(
        loop=SimpleNamespace(state=SimpleNamespace(env_steps=0, policy_version=0)),
        sync=SimpleNamespace(version=0, rollout_policy=None, rest=lambda: None, push=lambda version: None),
        worker=SimpleNamespace(model=None), config=SimpleNamespace(cluster=SimpleNamespace(max_staleness=0)),
    )  # fmt: skip
    collector = SimpleNamespace(submit=lambda *_: "handle", result=lambda _: batch)
    rollouts = RolloutQueue(parts, collector, needs_values=False, num_steps=1)
    rollouts.submit(0, 0)
    for env_groups in ([0], []):
        rollouts.repeat(0, 1, env_groups)
        assert not clock.rollouts
    rollouts.collect(0)
    assert len(clock.rollouts) == 1
    assert clock.name is None


def test_progress_begins_a_deadline_again_and_a_reset_is_never_lost():
    clock = deadlines.clock
    with deadline("update"):
        clock.tick(601.0)
        assert clock.expired({"update": 600.0}) == ("update", 600.0)
        heartbeat()
        assert clock.expired({"update": 600.0}) is None and clock.name == "update"
    own, entered, reset = Clock(), threading.Event(), threading.Thread(target=lambda: None)

    class Slow(float):
        """Seconds whose addition takes long enough for another thread to come between."""

        def __add__(self, other):
            reset.start()
            entered.wait(0.2)
            return float(self) + other

    reset = threading.Thread(target=lambda: (own.switch("save"), entered.set()))
    own.seconds = Slow(5.0)
    own.tick(1.0)
    reset.join()
    assert (own.name, own.seconds) == ("save", 0.0)


class TwoArgumentsError(RLinfError):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_be_read_elsewhere_is_told_with_its_text():
    class LocalError(RLinfError):
        pass

    store = dist.HashStore()
    assert isinstance(report(store, LocalError("here only")), RankError)
    assert type(reported(store)) is RankError and "here only" in str(reported(store))
    store = dist.HashStore()
    report(store, TwoArgumentsError(1, 2))
    assert type(reported(store)) is TwoArgumentsError and str(reported(store)) == "1 and 2"
    store = dist.HashStore()
    assert type(report(store, DeadlineError("first"))) is DeadlineError, "a control"
    assert str(report(store, RankError("second"))) == "first"


def test_the_wait_around_another_begins_again_after_it():
    clock = deadlines.clock
    with deadline("update"):
        clock.seconds = 5.0
        with pytest.raises(KeyError), deadline("save"):
            assert (clock.name, clock.seconds) == ("save", 0.0)
            raise KeyError
        assert (clock.name, clock.seconds) == ("update", 0.0)
    assert clock.name is None


def test_every_named_wait_has_a_deadline():
    names = set(re.findall(r'deadline\("(\w+)"\)', "".join(p.read_text() for p in (ROOT / "rlinf").rglob("*.py"))))
    assert names == {field for field in DeadlinesConfig.__dataclass_fields__}


class ComposedError(ConfigError):
    def __init__(self, reason, place="somewhere"):
        super().__init__(f"{reason} in {place}.", fix=1)
        self.place = place


def test_an_error_of_a_rank_keeps_its_class_and_its_text_in_another_process():
    error = ComposedError("A fault")
    error.add_note("a note")
    # A test file has no name by which another process could import it.
    pickled = pickle.loads(pickle.dumps(BadRowError("It is empty.", 3, "rows").with_message("said")))
    assert type(pickled) is BadRowError and str(pickled) == "said" and pickled.row == 3
    arrived = portable(error, 1)
    assert type(arrived) is ComposedError and arrived.place == "somewhere"
    assert str(arrived) == "A fault in somewhere. Pass fix=1\na note" and not hasattr(arrived, "__notes__")
    whole = pickle.loads(pickle.dumps(ConfigError("A fault.", fix=1)))
    assert str(whole) == "A fault. Pass fix=1" and whole.fix == {"fix": 1}


def test_a_rank_does_not_wait_for_ever_for_the_error_of_an_alarm(monkeypatch):
    monkeypatch.setattr(deadlines, "REPORT_S", 0.0)
    ended = []
    rank = SimpleNamespace(store=dist.HashStore(), _ended=threading.Event(), ends_process=False, _leave=ended.append)
    Watchdog._end_with_all_ranks(rank, 0.0)
    assert isinstance(ended[0], DeadlineError) and "before it could report" in str(ended[0])
    report(rank.store, DeadlineError("a control"))
    Watchdog._end_with_all_ranks(rank, 0.0)
    assert str(ended[1]) == "a control"
