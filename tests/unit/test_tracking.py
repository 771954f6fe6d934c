"""Tracking: pinned names, lines that appear once whatever is interrupted, and sinks that resume."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import rlinf.recipes.metrics  # noqa: F401 - declares those of recipes
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.tracking import METRICS, Progress, Tracker, TrackingConfig, read_metrics, register_metric

JSONL = TrackingConfig(tensorboard=False, wandb=False)


def test_documentation_lists_every_metric_with_its_meaning_and_unit():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `([a-z_]+/[a-z_0-9]+)` \| (.*?) \| (.*) \|$", text, flags=re.M)
    documented = {name: (meaning.replace("\\|", "|"), unit) for name, unit, meaning in rows}
    assert documented == {name: tuple(metric) for name, metric in METRICS.items()}


def test_an_unknown_metric_names_the_closest_and_an_algorithm_can_pin_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("rlinf.tracking.metrics.METRICS", dict(METRICS))
    register_metric("train/mine", "A test.", "1")
    with Tracker(tmp_path, JSONL, {}) as tracker:
        with pytest.raises(ConfigError, match="train/polcy_loss.*Did you mean 'train/policy_loss'"):
            tracker.log(0, {"train/polcy_loss": 1.0})
        with pytest.raises(ConfigError, match="Unknown metric"):
            tracker.log(0, {"other/success_rate/reach": 1.0})
        tracker.log(0, {"eval/success_rate/reach the red block": 1.0, "train/mine": 2})
    (line,) = read_metrics(tmp_path)
    assert line["train/mine"] == 2.0


def test_lines_are_on_disk_at_once_and_valid_json(tmp_path):
    tracker = Tracker(tmp_path, JSONL, {})
    tracker.log(0, {"train/loss": float("nan"), "train/grad_norm": float("inf"), "train/entropy": 0.5})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert line["train/loss"] is None and line["train/grad_norm"] is None and line["train/entropy"] == 0.5
    assert line["step"] == 0 and line["phase"] == "rl" and line["time_s"] >= 0
    tracker.close()
    tracker.close()


def steps_of(folder) -> list[tuple[str, int]]:
    return [(line["phase"], line["step"]) for line in read_metrics(folder)]


def test_resume_drops_lines_at_or_beyond_the_resumed_step(tmp_path):
    with Tracker(tmp_path, JSONL, {}) as tracker:
        for step in range(30):
            tracker.log(step, {"sft/loss": 1.0})
        for step in range(5):
            tracker.log(step, {"train/loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "phase": "rl", "ti')  # cut by a crash
    assert steps_of(tmp_path)[30:] == [("rl", step) for step in range(5)]
    before = read_metrics(tmp_path)[32]["time_s"]
    with Tracker(tmp_path, JSONL, {}, run_id=tracker.run_id, resume_step=3) as resumed:
        assert resumed.state_dict() == tracker.state_dict()
        assert steps_of(tmp_path) == [("sft", s) for s in range(30)] + [("rl", s) for s in range(3)]
        resumed.log(3, {"train/loss": 2.0})
    lines = read_metrics(tmp_path)
    assert lines[-1]["train/loss"] == 2.0 and lines[-1]["time_s"] >= before
    with Tracker(tmp_path, JSONL, {}, run_id=tracker.run_id, resume_step=10, resume_phase="sft"):
        assert steps_of(tmp_path) == [("sft", s) for s in range(10)]
    with Tracker(tmp_path, JSONL, {}):
        assert steps_of(tmp_path) == [], "a new run starts an empty file"


@pytest.mark.parametrize(
    "damaged",
    [b"{not json}", b'"text"', b"[1, 2]", b"\xff\xfe\x00", b'{"step": 1}', b'{"step": "1", "phase": "rl", "time_s": 0.1}',
     b'{"step": 1, "phase": "??", "time_s": 0.1}', b'{"step": 1, "phase": "rl", "time_s": "x"}', b"\x00\x00\x00"],
)  # fmt: skip
def test_damaged_lines_neither_block_a_resume_nor_are_lost(tmp_path, caplog, damaged):
    with Tracker(tmp_path, JSONL, {}) as tracker:
        for step in range(3):
            tracker.log(step, {"train/loss": 1.0})
    lines = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], damaged, *lines[1:]]))
    assert steps_of(tmp_path) == [("rl", 0), ("rl", 1), ("rl", 2)] and "1 damaged lines are ignored" in caplog.text
    caplog.clear()
    for _ in range(2):
        with Tracker(tmp_path, JSONL, {}, run_id=tracker.run_id, resume_step=3):
            pass
    assert steps_of(tmp_path) == [("rl", 0), ("rl", 1), ("rl", 2)]
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == damaged + b"\n"
    assert len(caplog.records) == 1 and "moved to metrics.damaged.jsonl" in caplog.text


def test_a_full_disk_names_the_file_of_metrics(tmp_path):
    with Tracker(tmp_path, JSONL, {}) as tracker:
        tracker._file.close()
        tracker._file = open("/dev/full", "w")
        with pytest.raises(OSError, match=r"No space left on device \(.* MiB free\): '.*metrics.jsonl'"):
            tracker.log(0, {"train/loss": 1.0})
        with pytest.raises(OSError, match="No space"):
            tracker._file.close()


def test_disabled_weights_and_biases_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # importing it would raise
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with Tracker(tmp_path, TrackingConfig(tensorboard=False, wandb=True), {}) as tracker:
        tracker.log(0, {"train/loss": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    monkeypatch.setenv("WANDB_MODE", "offline")  # the control
    with pytest.raises(MissingDependencyError):
        Tracker(tmp_path, TrackingConfig(tensorboard=False, wandb=True), {})


def test_weights_and_biases_that_refuse_the_key_do_not_end_the_run(tmp_path, monkeypatch, caplog):
    class Rejecting(FakeWandb):
        class errors:
            class Error(Exception):
                pass

        def init(self, **arguments):
            raise self.errors.Error("WANDB_API_KEY invalid:\nAPI key must have 40+ characters")

    monkeypatch.setitem(__import__("sys").modules, "wandb", Rejecting())
    monkeypatch.setenv("WANDB_API_KEY", "wrong")
    with Tracker(tmp_path, TrackingConfig(tensorboard=False, wandb=True), {}) as tracker:
        tracker.log(0, {"train/loss": 1.0})
    assert steps_of(tmp_path) == [("rl", 0)]
    (said,) = (record.getMessage() for record in caplog.records)
    assert "WANDB_API_KEY invalid: API key must have" in said and "WANDB_MODE=disabled" in said


def test_the_real_wandb_refuses_a_key_with_the_error_that_is_caught(tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb", reason="wandb is an optional extra (pip install wandb)")
    monkeypatch.setenv("WANDB_API_KEY", "wrong")
    monkeypatch.setenv("WANDB_MODE", "online")
    with Tracker(tmp_path, TrackingConfig(tensorboard=False, wandb=True), {}) as tracker:
        tracker.log(0, {"train/loss": 1.0})
    assert steps_of(tmp_path) == [("rl", 0)] and "the run continues without it" in caplog.text


def test_tensorboard_holds_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(tmp_path, TrackingConfig(tensorboard=True), {}) as tracker:
        tracker.log(0, {"train/loss": 1.5})
        tracker.log(1, {"train/loss": 0.5})
        tracker.log(7, {"sft/loss": 3.0, "time/update_s": 2.0}, phase="sft")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 1.5), (1, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("sft/time/update_s")] == [(7, 2.0)]


class FakeWandb:
    """Stands for the wandb module: records what it is asked."""

    def __init__(self):
        self.calls, self.logged = [], []

    Settings = dict
    url = "https://wandb.example/me/runs/1"

    def init(self, **arguments):
        self.calls.append(arguments)
        return self

    def define_metric(self, *_, **__):
        pass

    def log(self, metrics):
        self.logged.append(metrics)

    def finish(self):
        self.calls.append("finish")


@pytest.mark.parametrize(("key", "mode"), [(None, "offline"), ("secret", "online")])
def test_wandb_is_offline_without_a_key_and_resumes_the_same_run(tmp_path, monkeypatch, capsys, key, mode):
    fake = FakeWandb()
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    config = TrackingConfig(tensorboard=False, wandb=True)
    with Tracker(tmp_path, config, {"seed": 3}) as tracker:
        tracker.log(4, {"train/loss": 1.0})
    with Tracker(tmp_path, config, {"seed": 3}, run_id=tracker.run_id, resume_step=5):
        pass
    first, _, second, _ = fake.calls
    assert first["mode"] == second["mode"] == mode
    assert first["name"] == tmp_path.name and first["dir"] == str(tmp_path)
    assert first["id"] == second["id"] == tracker.run_id and first["config"] == {"seed": 3}
    assert fake.logged == [{"train/loss": 1.0, "global_step": 4}]
    assert (f"wandb: {fake.url}" in capsys.readouterr().out) == (mode == "online"), "the link of the run"
    with Tracker(tmp_path, replace(config, wandb_project="mine", wandb_name="experiment/1"), {}):
        pass
    assert (fake.calls[4]["project"], fake.calls[4]["name"]) == ("mine", "experiment/1")


def test_a_missing_sink_is_reported_with_the_command_that_installs_it(tmp_path, monkeypatch):
    def fail(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(MissingDependencyError, match="pip install wandb.*tracking.wandb=false"):
        Tracker(tmp_path, TrackingConfig(tensorboard=False, wandb=True), {})
    with pytest.raises(MissingDependencyError, match="pip install tensorboard.*tracking.tensorboard=false"):
        Tracker(tmp_path, TrackingConfig(tensorboard=True), {})


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream: io.StringIO, *updates: tuple, seconds: float, **options) -> str:
    """What a progress line writes for updates so many seconds apart."""
    now = [0.0]
    progress = Progress(stream=stream, clock=lambda: now[0], **options)
    for phase, step, num_steps, more in updates:
        progress.update(phase, step, num_steps, **more)
        now[0] += seconds
    progress.close()
    return stream.getvalue()


def test_progress_rewrites_one_line_on_a_terminal():
    numbers = {"success_rate": 0.5, "env_steps_per_s": 1234}
    written = shown(Terminal(), *(("rl", step, 10, numbers) for step in range(3)), seconds=30)
    assert written.count("\n") == 1 and written.count("\r") == 3
    assert "rl 2/10 | success 50.0% | 1,234 env steps/s | 4m00s left" in written


def test_progress_prints_a_line_every_ten_seconds_elsewhere():
    written = shown(io.StringIO(), *(("sft", step, 100, {}) for step in range(101)), seconds=1)
    lines = written.splitlines()
    assert len(lines) == 11 and lines[-1].startswith("sft 100/100") and "\r" not in written


def test_time_left_of_a_resumed_run_counts_its_own_steps_only():
    written = shown(io.StringIO(), ("rl", 50, 100, {}), ("rl", 51, 100, {}), seconds=10, interval_s=0)
    assert written.splitlines()[-1].endswith("8m10s left")


def test_real_wandb_writes_offline_runs_of_one_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is an optional extra (pip install wandb)")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = TrackingConfig(tensorboard=False, wandb=True)
    with Tracker(tmp_path, config, {"seed": 3}) as tracker:
        tracker.log(0, {"train/loss": 1.0})
    with Tracker(tmp_path, config, {"seed": 3}, run_id=tracker.run_id, resume_step=1) as resumed:
        resumed.log(1, {"train/loss": 0.5})
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert folders and all(tracker.run_id in name for name in folders)
    assert all(any(path.glob("*.wandb")) for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert steps_of(tmp_path) == [("rl", 0), ("rl", 1)]
