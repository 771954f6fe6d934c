"""The checks of a GPU run at tiny size without one, and a missed threshold, a crash and a hang end with a table and a failure."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf.engines import vllm_engine
from rlinf.errors import ConfigError
from rlinf.preflight.memory import policy_on_meta_device
from rlinf.preflight.validation import validate

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "scripts" / "gpu_check"


@pytest.fixture(scope="module")
def gpu_check():
    """The modules of the package."""
    sys.path.insert(0, str(PACKAGE.parent))
    names = ("__main__", "checks", "openvla", "policies", "results", "rows", "runs", "training")
    yield SimpleNamespace(**{name: importlib.import_module(f"gpu_check.{name}") for name in names})
    sys.path.remove(str(PACKAGE.parent))


def command(output: Path, *words: str, scripts: Path = PACKAGE.parent) -> dict:
    """Arguments of ``subprocess`` for a call of the checks at tiny size."""
    words = ("--device", "cpu", "--tiny", "--cache", str(output.parent / "cache"), "--output", str(output), *words)
    environment = os.environ | {"PYTHONPATH": f"{scripts}:{ROOT}"}
    return {"args": [sys.executable, "-m", "gpu_check", *words], "env": environment, "text": True}


def run(output: Path, *words: str, scripts: Path = PACKAGE.parent) -> subprocess.CompletedProcess:
    return subprocess.run(**command(output, *words, scripts=scripts), capture_output=True, timeout=400)


def test_the_checks_of_one_process_run_at_tiny_size(tmp_path):
    done = run(tmp_path / "gpu_results.json", "--only", "G4 7B", "G5")
    assert done.returncode == 0, done.stdout + done.stderr
    table, meaning = (tmp_path / "gpu_results.md").read_text().split("## What the rows mean")
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if line.startswith("| G")]
    assert all(f"| {check} " in meaning for check in ("G4", "G5 times", "M5"))
    assert {row[1] for row in rows} == {"G0", "G4 7B", "G5"}, "G5 reads the model that G0 draws"
    assert "the losses are finite | True | True | yes" in table
    unmeasured = [row for row in rows if row[3].startswith("not measured: ")]
    assert {row[5] for row in unmeasured} == {""}, "a number that only a GPU has must not look measured"
    assert {"not measured: needs the full size on a GPU", "not measured: needs a GPU"} <= {row[3] for row in unmeasured}
    assert "not a GPU, tiny models" in table


def test_a_learning_run_that_was_cut_continues_and_is_removed_at_its_end(gpu_check, tmp_path, monkeypatch):
    training, measured, starts = gpu_check.training, [], []
    rows = gpu_check.rows.Rows("G8 quickstart", "new", measured.append)
    setting = gpu_check.rows.Setting("cpu", True, tmp_path, tmp_path)
    folder = tmp_path / "learning" / "quickstart_new_tiny"
    original = training.train

    def stopped(setting, folder, words):
        starts.append(sorted(path.name for path in folder.glob("checkpoints/*")))
        result = original(setting, folder, [*words, f"trainer.max_steps={len(starts)}"])
        if len(starts) == 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(training, "train", stopped)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").touch()  # cut before the first checkpoint
    with pytest.raises(KeyboardInterrupt):
        training.learn(rows, setting, "quickstart", [])
    assert starts == [[]] and not measured
    training.learn(rows, setting, "quickstart", [])
    assert "rl_000001" in starts[1], "only the second iteration remains"
    assert [row.what.split(", ")[1].split()[0] for row in measured] == ["seconds", "success", "upper"]
    assert "256 env steps" in measured[1].what and not folder.exists()


PLANTED = """
import time
def missed(rows, setting):
    "Misses."
    rows.at_most("a number", 2.0, 1.0)
def crashed(rows, setting):
    "Crashes."
    rows.state("a number before", 1)
    raise RuntimeError("planted")
def hung(rows, setting):
    "Hangs."
    time.sleep(60)
def fine(rows, setting):
    "Holds."
    rows.at_most("a number", 1.0, 1.0)
def slow(rows, setting):
    "Hangs the first time."
    rows.state("first", 1)
    if not (setting.folder.parent / "mark").exists():
        (setting.folder.parent / "mark").touch()
        time.sleep(600)
    rows.state("second", 2)
"""


def planted(folder: Path, **times: tuple[int, int]) -> Path:
    """A copy of the package with the checks of ``PLANTED``, by their expected seconds and their limits."""
    shutil.copytree(PACKAGE, folder / "gpu_check", ignore=shutil.ignore_patterns("__pycache__"))
    table = ", ".join(f"'{name}': Check({name}, *{seconds})" for name, seconds in times.items())
    with open(folder / "gpu_check" / "checks.py", "a") as file:
        file.write(f"{PLANTED}\nONE_GPU = {{{table}}}\n")
    shutil.copy(ROOT / "pyproject.toml", folder.parent)
    return folder


def states(output: Path) -> dict[str, tuple]:
    """State and numbers of each check."""
    (attempts,) = json.loads(output.read_text()).values()
    return {name: (attempt["state"], [row["what"] for row in attempt["rows"]]) for name, attempt in attempts.items()}


def test_a_missed_threshold_and_a_crash_and_a_hang_fail_with_a_table(tmp_path):
    scripts = planted(tmp_path / "scripts", missed=(1, 60), crashed=(1, 60), hung=(1, 1), fine=(1, 60))
    output = tmp_path / "results.json"
    done = run(output, scripts=scripts)
    assert done.returncode == 1 and "planted" in done.stderr
    for row in (
        "| missed | a number | 2 | at most 1 | **no** |", "| crashed | Crashes. | ended with status 1 | a result | **no** |",
        "| hung | Hangs. | took longer than 4 s | a result | **no** |", "| fine | a number | 1 | at most 1 | yes |",
        "| crashed | a number before | 1 |  |  |",
    ):  # fmt: skip
        assert row in (tmp_path / "results.md").read_text()
    assert [state for state, _ in states(output).values()] == ["done", "failed", "failed", "done"]
    again = run(output, scripts=scripts)
    assert (again.returncode, again.stdout) == (0, ""), "done, or failed at this commit"


def test_a_killed_relay_keeps_its_numbers_and_the_next_call_continues(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    scripts = planted(tmp_path / "scripts", missed=(900, 999), fine=(1, 99), slow=(1, 600))
    output, end = tmp_path / "results.json", time.monotonic() + 300
    process = subprocess.Popen(**command(output, "--minutes", "10", scripts=scripts))
    while not (tmp_path / "mark").exists() and time.monotonic() < end:
        time.sleep(0.1)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert states(output) == {"fine": ("done", ["a number"]), "slow": ("cut", ["first"])}
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < end, "the check ends with its relay"
        time.sleep(0.1)
    done = run(output, "--minutes", "10", scripts=scripts)
    assert "fine" not in done.stdout, "a check that is done does not run again"
    assert states(output)["slow"] == ("done", ["first", "second"])
    assert "not run in this call: missed" in done.stdout, "900 s are expected"


def test_a_check_is_chosen_by_the_time_that_is_left_and_cut_at_its_end(gpu_check, tmp_path, monkeypatch):
    results, checks, run = gpu_check.results, gpu_check.checks.ONE_GPU, gpu_check.__main__
    file = results.Results(tmp_path / "results.json", "here", "new")
    arguments = SimpleNamespace(checks=checks, device="cpu", tiny=True, output=file.path, cache=tmp_path, results=file)
    assert run.choose(["G1", "G5", "G2"], arguments, 109, True) == "G2", "80 s"
    assert run.choose(["G1", "G5", "G2"], arguments, 110, True) == "G0", "which draws the model in 40 s, for G5 in 70 s"
    assert run.choose(["G1", "G5", "G2"], arguments, 79, False) == "G5"
    assert run.choose(["G1", "G5", "G2"], arguments, 69, False) is None
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", "--tiny"])
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGE.parent}:{ROOT}")
    assert run.run_check("G5", arguments, 0.1).state == "cut"
    assert results.seconds_needed(checks["G5"], file.write("G5", "cut", 100.0, [])) == 150, "more than was too short"
    assert results.seconds_needed(checks["G5"], file.write("G5", "done", 100.0, [])) == pytest.approx(110)


def test_the_order_is_first_the_lacking_then_those_that_failed_elsewhere(gpu_check):
    states = {"done": ("done", "new"), "failed here": ("failed", "new"), "failed": ("failed", "old")}
    states |= {"old": ("done", "old"), "cut": ("cut", "new")}
    attempts = {name: gpu_check.results.Attempt(*state, "", 100.0, []) for name, state in states.items()}
    checks = dict.fromkeys((*states, "none"), gpu_check.checks.Check(None, 50, 60))
    checks["absent"] = gpu_check.checks.Check(None, 50, 60, package="no_such_package")
    lacking = gpu_check.results.lacking
    assert lacking(checks, attempts, "new", lambda commit: commit == "new") == ["old", "cut", "none", "failed"]
    assert lacking(checks, attempts, "new", lambda commit: True) == ["cut", "none", "failed"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--device", "cpu"], "--device cpu needs --tiny"),
        (["--device", "cpu", "--tiny", "--gpus", "9"], "--gpus 9: expected 2 to 8"),
        (["--device", "cpu", "--tiny", "--only", "M1"], "--only M1: expected any of G4 7B, G4 3B"),
        (["--device", "cpu", "--tiny"], "--device cpu would add to the results of GPUs"),
        (["--device", "cuda", "--gpus", "2"], "torch sees 0 GPUs. Add --device cpu --tiny"),
    ],
)
def test_what_cannot_run_is_refused(gpu_check, monkeypatch, capsys, words, error):
    monkeypatch.setattr(sys, "argv", ["gpu_check", *words])
    monkeypatch.setattr(gpu_check.__main__.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        gpu_check.__main__.main()
    assert ended.value.code == 2 and error in capsys.readouterr().err


def test_the_page_is_generated_from_the_results(gpu_check, tmp_path):
    shutil.copy(ROOT / "docs" / "gpu_results.json", tmp_path)
    file = gpu_check.results.Results(tmp_path / "gpu_results.json", "", "")
    gpu_check.results.write_page(file, "What a GPU shows", gpu_check.checks.ONE_GPU)
    page = (ROOT / "docs" / "gpu_results.md").read_text()
    assert (tmp_path / "gpu_results.md").read_text() == page, "run bash scripts/gpu_check.sh --page"


def test_a_check_may_take_longer_than_expected(gpu_check):
    for check in (*gpu_check.checks.ONE_GPU.values(), *gpu_check.checks.SEVERAL_GPUS.values()):
        assert check.expected_s < check.limit_s and check.run.__doc__


def test_every_configuration_of_full_size_is_valid_and_builds_without_weights(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda *_: None)
    setting = gpu_check.rows.Setting("cuda", False, tmp_path, tmp_path)
    words = gpu_check.checks.words_of_runs(setting)
    random = gpu_check.openvla.configuration(words["G0"])
    model = policy_on_meta_device(random)
    assert 7.5e9 < sum(parameter.numel() for parameter in model.parameters()) < 7.8e9
    model.config.save_pretrained(setting.model)  # all that a check of a configuration reads of the folder
    sizes = {}
    for name, each in words.items():
        config = gpu_check.openvla.configuration(each)
        validate(config)
        model = policy_on_meta_device(config)
        sizes[name] = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sizes["G1"] == sizes["G3"] == sizes["G5"] and 1e8 < sizes["G1"] < 1.3e8, "adapters of a 7B, and heads"
    assert 1e8 < sizes["G8"] < 1.1e8
    without_folder = [word for word in words["G1"] if not word.startswith("model.model_path=")]
    with pytest.raises(ConfigError, match="model_path is null and model.init_config is empty"):  # a control
        validate(gpu_check.openvla.configuration(without_folder))


def test_a_trace_is_counted_within_its_step(gpu_check, tmp_path):
    def event(name, cat, ts, dur):
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur}

    events = [
        event("rl step 0", "user_annotation", 0, 100), event("rl step 1", "user_annotation", 100, 100),
        event("gemm", "kernel", 10, 50), event("gemm", "kernel", 110, 30), event("gemm", "kernel", 120, 30),
        event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 160, 10), event("Memcpy HtoD", "gpu_memcpy", 180, 5),
        event("cudaLaunchKernel", "cuda_runtime", 105, 1), event("cudaStreamSynchronize", "cuda_runtime", 165, 5),
        event("cudaStreamSynchronize", "cuda_runtime", 5, 5), {"ph": "i", "name": "mark", "ts": 0},
    ]  # fmt: skip
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    trace = gpu_check.runs.read_trace(path, "rl step 1")
    assert (trace.kernels, trace.copies_to_host, trace.syncs) == (2, 1, 1)
    assert trace.busy == pytest.approx(0.55), "40 of two kernels that overlap, 15 of copies"


def test_the_first_metric_that_differs_is_named(gpu_check):
    first = [
        {"step": 0, "train/loss": 1.0, "time/rollout_s": 1.0},
        {"step": 1, "train/loss": 2.0, "time/rollout_s": 1.0},
    ]
    second = [{**first[0], "time/rollout_s": 9.0, "time_s": 4.0}, {**first[1], "train/loss": 2.5}]
    assert (
        gpu_check.runs.first_difference(first, first)
        == gpu_check.runs.first_difference(first[:1], second[:1])
        == "none"
    )
    assert gpu_check.runs.first_difference(first, second) == "train/loss of iteration 1, by 2.0e-01"
    assert gpu_check.runs.first_difference(first, second[:1]) == "2 and 1 iterations"
    assert gpu_check.runs.largest_gap(first, second) == 0.5


def test_the_highest_number_of_a_block_is_kept(gpu_check):
    values = iter([5, 9, 7])
    seen = []

    def read():
        seen.append(next(values, 6))
        return seen[-1]

    with gpu_check.runs.Watched(read) as watched:
        assert gpu_check.runs.until(lambda: len(seen) > 3, 60)
    assert watched.highest == 9 - 5
