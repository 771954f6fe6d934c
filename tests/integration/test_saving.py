"""When a run saves, what it keeps, who may write into its folder, and how it ends when its terminal is closed."""

import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import status_of_child
from run_results import SMALL_RUN, give_success, run_config, untimed_metrics, weights_of

from rlinf.commands.train import train
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError
from rlinf.files import locked_folder
from rlinf.tracking.progress import Progress
from rlinf.training import loop as loop_module
from rlinf.training.loop import Loop
from rlinf.training.rl_trainer import RLTrainer
from rlinf.training.state import LoopState
from rlinf.training.stop_signal import StopSignal

SMALL = [*SMALL_RUN, "trainer.max_steps=4"]
SFT = ["sft.max_steps=3", "sft.num_demonstrations=8", "sft.batch_size=16"]


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return run_config(folder, *SMALL, *overrides)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def same_policy(left: Path, right: Path, name: str) -> bool:
    first, second = (weights_of(folder, name) for folder in (left, right))
    return first.keys() == second.keys() and all(bool((first[key] == second[key]).all()) for key in first)


def test_a_run_saves_by_the_clock_and_no_number_changes(tmp_path):
    always, never = (
        ["trainer.save_every_minutes=1e-9", "trainer.max_keep=-1"],
        ["trainer.save_every_minutes=0", "trainer.max_keep=-1"],
    )
    train(config_of(tmp_path / "often", *SFT, *always))
    train(config_of(tmp_path / "once", *SFT, *never))
    assert saved(tmp_path / "once") == ["rl_000004", "sft_000003"]
    assert saved(tmp_path / "often") == [f"rl_{n:06d}" for n in (1, 2, 3, 4)] + [f"sft_{n:06d}" for n in (1, 2, 3)]
    assert same_policy(tmp_path / "often", tmp_path / "once", "rl_000004")
    assert untimed_metrics(tmp_path / "often") == untimed_metrics(tmp_path / "once")
    for name in ("sft_000002", "rl_000002"):  # what the clock has saved is resumed bit for bit
        copy = tmp_path / name
        shutil.copytree(tmp_path / "often", copy)
        train(config_of(copy, *SFT, *never, f"resume={copy / 'checkpoints' / name}"))
        assert same_policy(copy, tmp_path / "once", "rl_000004"), name
        assert untimed_metrics(copy) == untimed_metrics(tmp_path / "once")
        left = [path.name for path in (copy / "checkpoints" / "superseded_1").iterdir()]
        assert "rl_000003" in left, "what the earlier run had saved after that is kept, out of the way"


def test_asynchronous_checkpoints_change_no_number_and_are_resumed(tmp_path):
    """The whole run with checkpoints after every step, written by a thread; and a run that continues from one of these."""
    often = ("trainer.save_every=1", "trainer.save_every_minutes=0", "trainer.max_keep=-1")
    train(config_of(tmp_path / "async", *SFT, *often, "trainer.save_mode=async"))
    train(config_of(tmp_path / "sync", *SFT, *often))
    assert saved(tmp_path / "async") == saved(tmp_path / "sync")
    assert same_policy(tmp_path / "async", tmp_path / "sync", "rl_000002")
    assert same_policy(tmp_path / "async", tmp_path / "sync", "rl_000004")
    assert not list((tmp_path / "async" / "checkpoints").glob(".*"))
    train(config_of(tmp_path / "async", *SFT, *often, f"resume={tmp_path / 'async' / 'checkpoints' / 'rl_000002'}"))
    assert same_policy(tmp_path / "async", tmp_path / "sync", "rl_000004")


@pytest.fixture
def loop_of(tmp_path, monkeypatch):
    """Make a loop with a clock, whose checkpoints are only counted."""

    def make(clock, **settings) -> tuple[Loop, list[int]]:
        trainer, calls = replace(config_of(tmp_path).trainer, **settings), []
        checkpoints = SimpleNamespace(
            wait=lambda: None, names=list, save=lambda *_, **__: calls.append(loop.state.step)
        )
        monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=clock))
        loop = Loop(
            LoopState(phase="rl", step=1), tmp_path, trainer, {}, checkpoints=checkpoints, progress=None,
            stop_signal=StopSignal(announce=False),
        )  # fmt: skip
        loop.trainer = SimpleNamespace(
            model=None, optimizer=None, manifest=lambda: None, state_dict=dict, loop_state=dict, ends_run=False, last_tag="",
            best_checkpoint=lambda names: None, checkpoint_name="",
        )  # fmt: skip
        return loop, calls

    return make


@pytest.mark.parametrize("number", [0, 1])
def test_the_clock_of_rank_0_decides(monkeypatch, loop_of, number):
    monkeypatch.setattr(loop_module, "rank", lambda: number)
    now = [1000.0]
    loop, calls = loop_of(lambda: now[0])
    assert loop.settings.save_every_minutes == 10, "the default"
    for step, minutes in enumerate((1, 9.9, 10, 11, 19, 20, 31), start=1):
        loop.state.step, now[0] = step, 1000.0 + 60 * minutes
        loop.checkpoint_if_due(last=False)
    assert calls == ([3, 6, 7] if number == 0 else [])


def test_without_minutes_only_steps_count(loop_of):
    now = [0.0]
    loop, calls = loop_of(lambda: now[0], save_every_minutes=0.0, save_every=2)
    for step in range(1, 6):
        loop.state.step, now[0] = step, 1e6 * step
        loop.checkpoint_if_due(last=step == 5)
    assert calls == [2, 4, 5]


@pytest.mark.parametrize(
    ("rates", "kept", "best"),
    [
        ((0.25, 0.75, 0.5, 0.25, 0.0), ["rl_000001", "rl_000004"], "rl_000001"),
        ((0.25, 0.75, 0.75, 0.25, 0.0), ["rl_000002", "rl_000004"], "rl_000002"),  # of equals the newer
        ((0.0, 0.25, 0.5, 0.75, 1.0), ["rl_000004"], "rl_000004"),
    ],
)
@pytest.mark.parametrize("save_every", [0, 1])
def test_the_best_policy_survives_a_collapse_and_is_named(tmp_path, monkeypatch, capsys, rates, kept, best, save_every):
    give_success(monkeypatch, *rates)
    steps = ["trainer.eval_every=1", "trainer.max_keep=1", f"trainer.save_every={save_every}"]
    train(config_of(tmp_path, *steps))
    assert set(kept) <= set(saved(tmp_path)) and saved(tmp_path)[-1] == "rl_000004"
    assert len(saved(tmp_path)) <= 2
    found = json.loads((tmp_path / "summary.json").read_text())["best_checkpoint"]
    assert (found["name"], found["success_rate"]) == (best, max(rates))
    assert f"best checkpoint: {best} (" in capsys.readouterr().out
    state = json.loads((tmp_path / "checkpoints" / "rl_000004" / "state.json").read_text())
    assert state["best_checkpoint"] == (best if best != "rl_000004" else "rl_000003")  # the last one is evaluated later


def test_the_best_evaluation_is_the_newest_of_equals_above_0_with_a_checkpoint():
    def state(**evaluations):
        known = {tag: {"success_rate": rate, "checkpoint": name} for tag, (rate, name) in evaluations.items()}
        return LoopState(evaluations=known | {"old": {"success_rate": 1.0}})

    assert state(a=(0.5, "a"), b=(0.5, "b"), c=(0.2, "c")).best_evaluation({"a", "b", "c"}) == "b"
    assert state(a=(0.5, "a"), b=(0.5, "b"), c=(0.2, "c")).best_evaluation({"a", "c"}) == "a"
    assert state(a=(0.5, None), b=(0.0, "b")).best_evaluation({"b"}) is None


def test_a_run_that_rl_has_ruined_says_so_last_and_its_start_is_the_best(tmp_path, monkeypatch, capsys):
    train(config_of(tmp_path / "clone", *SFT, "trainer.max_steps=0"))
    start = str(tmp_path / "clone" / "checkpoints" / "sft_000003")
    few = [f"init_from={tmp_path / 'clone'}", "trainer.max_steps=2"]
    for rates, best in (((1.0, 0.0), start), ((0.25, 1.0), "rl_000002")):
        give_success(monkeypatch, *rates)
        train(config_of(tmp_path / best[-9:], *few))
        last = capsys.readouterr().out.splitlines()[-1]
        summary = json.loads((tmp_path / best[-9:] / "summary.json").read_text())
        assert summary["best_checkpoint"]["name"] == best
        is_worse = best == start
        assert ("-100.0 points (95 % -100.0 to -" in last and start in last) == is_worse
        assert (summary["outcome"]["verdict"] == "fell") == is_worse
        page = (tmp_path / best[-9:] / "report.html").read_text()
        assert best in page and (summary["outcome"]["text"] in page)


def test_an_interrupted_and_resumed_run_keeps_the_same_best(tmp_path, monkeypatch):
    steps = ["trainer.eval_every=1", "trainer.max_keep=1"]
    with monkeypatch.context() as patch:
        give_success(patch, 0.25, 0.75, 0.5)
        train(config_of(tmp_path, *steps, "trainer.max_steps=2"))
    give_success(monkeypatch, 0.5, 0.25, 0.0)
    train(config_of(tmp_path, *steps, f"resume={tmp_path}"))
    assert saved(tmp_path) == ["rl_000001", "rl_000004"]


def test_a_second_run_in_one_folder_is_refused_and_nothing_is_lost(tmp_path):
    train(config_of(tmp_path, "trainer.max_steps=1"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = config_of(tmp_path, "trainer.max_steps=2", f"resume={tmp_path}")
    with locked_folder(tmp_path), pytest.raises(ConfigError) as error:
        train(again)
    assert f"(process {os.getpid()} on " in str(error.value) and "output_dir=" in str(error.value)
    for path, content in before.items():
        assert path.name == ".lock" or path.read_bytes() == content
    train(again)  # a control: the first one has ended
    assert saved(tmp_path)[-1] == "rl_000002"


def test_the_lock_of_a_process_that_was_killed_is_open(tmp_path):
    code = "import sys, time, pathlib; from rlinf.files import locked_folder\nwith locked_folder(pathlib.Path(sys.argv[1])):\n    print('locked', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"locked\n"
        with (
            pytest.raises(ConfigError, match=rf"A different run is writing to .*\(process {process.pid} on"),
            locked_folder(tmp_path),
        ):
            pytest.fail("two writers")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with locked_folder(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} ")


def test_a_folder_that_is_gone_does_not_hide_what_went_wrong(tmp_path):
    folder = tmp_path / "runs" / "mine"
    with pytest.raises(ConfigError, match="the cause"), locked_folder(folder):
        shutil.rmtree(folder)
        raise ConfigError("the cause")
    with pytest.raises(ConfigError), locked_folder(folder):  # a control: the cleanup still does its work
        raise ConfigError("nothing was written")
    assert not folder.exists() and (tmp_path / "runs").is_dir()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EIO])
def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, caplog, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("rlinf.files.fcntl.flock", flock)
    with (
        nullcontext() if number != errno.EIO else pytest.raises(OSError, match="Input/output"),
        locked_folder(tmp_path),
    ):
        pass
    assert ("cannot be locked" in caplog.text) == (number != errno.EIO)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_other_signals_save_as_sigterm_does(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(RLTrainer, "_make_reference", lambda trainer: signal.raise_signal(number))
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        train(config_of(tmp_path))
    assert ended.value.code == 128 + number
    assert "rl_000000" in saved(tmp_path) and "resume=" in capsys.readouterr().err
    assert signal.getsignal(number) == before


def test_nohup_is_respected():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopSignal(announce=False)
        with stop.handled():
            signal.raise_signal(signal.SIGHUP)
        assert stop.number is None
    finally:
        signal.signal(signal.SIGHUP, previous)


HUNG_UP = """
import os, pathlib, sys
from rlinf.tracking.progress import Progress
from rlinf.training.stop_signal import StopSignal
stop, progress, step = StopSignal(announce=True), Progress(), 0
with stop.handled():
    print("ready", flush=True)
    while stop.number is None:
        step += 1
        progress.update("rl", step, 10**9)
print("\\nto a terminal that is gone", flush=True)
print("likewise", file=sys.stderr, flush=True)
pathlib.Path(sys.argv[1]).write_text(str(int(stop.number)))
"""


def test_a_closed_terminal_does_not_keep_a_run_from_saving(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", HUNG_UP, str(tmp_path / "saved")])
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 1024)
    os.close(terminal)
    status = status_of_child(pid)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (tmp_path / "saved").read_text() == str(int(signal.SIGHUP))


def test_progress_on_a_stream_that_is_gone_is_silent():
    class Gone:
        def isatty(self):
            return True

        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

        flush = write

    progress = Progress(stream=Gone())
    progress.update("rl", 1, 2)
    progress.note("more")
    progress.close()
