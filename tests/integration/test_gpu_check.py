"""The checks of a GPU run at tiny size without one, and a missed threshold, a crash and a hang end with a table and a failure."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import shutil
import subprocess
import sys
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
    names = ("__main__", "checks", "openvla", "policies", "rows", "runs")
    yield SimpleNamespace(**{name: importlib.import_module(f"gpu_check.{name}") for name in names})
    sys.path.remove(str(PACKAGE.parent))


def run(output: Path, *words: str, scripts: Path = PACKAGE.parent) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gpu_check", "--output", str(output), *words]
    environment = os.environ | {"PYTHONPATH": f"{scripts}:{ROOT}"}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)


def test_the_checks_of_one_process_run_at_tiny_size(tmp_path):
    page = tmp_path / "gpu_results.md"
    done = run(page, "--device", "cpu", "--tiny", "--only", "G4", "G5")
    assert done.returncode == 0, done.stdout + done.stderr
    table, meaning = page.read_text().split("## What the rows mean")
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if line.startswith("| G")]
    assert all(f"| {check} " in meaning for check in ("G4", "G5 times", "M5"))
    assert {row[1] for row in rows} == {"G0", "G4", "G5"}, "G5 reads the model that G0 draws"
    assert "the losses are finite | True | True | yes" in table
    unmeasured = [row for row in rows if row[3].startswith("not measured: ")]
    assert {row[5] for row in unmeasured} == {""}, "a number that only a GPU has must not look measured"
    assert {"not measured: needs the full size on a GPU", "not measured: needs a GPU"} <= {row[3] for row in unmeasured}
    assert "Not yet run on a GPU" in table and "tiny models" in " ".join(table.split())


FAULTS = """
def missed(setting):
    "Misses."
    rows = Rows("G1")
    rows.at_most("a number", 2.0, 1.0)
    return rows
def crashed(setting):
    "Crashes."
    raise RuntimeError("planted")
def hung(setting):
    "Hangs."
    import time
    time.sleep(60)
def fine(setting):
    "Holds."
    rows = Rows("G4")
    rows.at_most("a number", 1.0, 1.0)
    return rows
from gpu_check.rows import Rows
ONE_GPU = {"G1": Check(missed, 1, 60), "G2": Check(crashed, 1, 60), "G3": Check(hung, 1, 1), "G4": Check(fine, 1, 60)}
"""


def test_a_missed_threshold_and_a_crash_and_a_hang_fail_with_a_table(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "gpu_check", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "gpu_check" / "checks.py", "a") as file:
        file.write(FAULTS)
    page = tmp_path / "page.md"
    done = run(page, "--device", "cpu", "--tiny", scripts=tmp_path)
    assert done.returncode == 1
    assert "planted" in done.stderr
    for row in (
        "| G1 | a number | 2 | at most 1 | **no** |", "| G2 | Crashes. | ended with status 1 | a result | **no** |",
        "| G3 | Hangs. | took longer than 4 s | a result | **no** |", "| G4 | a number | 1 | at most 1 | yes |",
    ):  # fmt: skip
        assert row in page.read_text()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--device", "cpu"], "--device cpu needs --tiny"),
        (["--device", "cpu", "--tiny", "--gpus", "9"], "--gpus 9: expected 2 to 8"),
        (["--device", "cpu", "--tiny", "--only", "M1"], "--only M1: expected any of G0, G1"),
        (["--device", "cuda", "--gpus", "2"], "torch sees 0 GPUs. Add --device cpu --tiny"),
    ],
)
def test_what_cannot_run_is_refused(gpu_check, monkeypatch, capsys, words, error):
    monkeypatch.setattr(sys, "argv", ["gpu_check", *words])
    monkeypatch.setattr(gpu_check.__main__.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        gpu_check.__main__.main()
    assert ended.value.code == 2 and error in capsys.readouterr().err


def test_all_checks_together_take_at_most_25_minutes(gpu_check):
    checks = gpu_check.checks
    assert sum(check.limit_s for check in checks.ONE_GPU.values()) <= 30 * 60
    for check in (*checks.ONE_GPU.values(), *checks.SEVERAL_GPUS.values()):
        assert check.expected_s < check.limit_s and check.run.__doc__


def test_every_configuration_of_full_size_is_valid_and_builds_without_weights(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda *_: None)
    setting = gpu_check.rows.Setting("cuda", False, tmp_path, tmp_path / "openvla")
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
