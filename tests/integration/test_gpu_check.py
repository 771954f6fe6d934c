"""The checks of a GPU run at tiny size without one, and a missed threshold, a crash and a hang end with a table and a failure."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def run(output: Path, *words: str, script: Path = SCRIPT) -> subprocess.CompletedProcess:
    command = [sys.executable, str(script), "--output", str(output), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_checks_of_one_process_run_at_tiny_size(tmp_path):
    page = tmp_path / "gpu_results.md"
    done = run(page, "--device", "cpu", "--tiny", "--only", "G4", "G5")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in page.read_text().splitlines() if line.startswith("| G")]
    assert {row.split("|")[1].strip() for row in rows} == {"G4", "G5"}
    assert "the loss is finite | True | True | yes" in page.read_text()
    assert "needs the full size on a GPU" in page.read_text(), "a number that only a GPU has must not look measured"
    assert "tiny models" in page.read_text()


def test_a_missed_threshold_and_a_crash_and_a_hang_fail_with_a_table(gpu_check, tmp_path):
    broken = tmp_path / "broken.py"
    faults = """
def missed(setting):
    "Misses."
    return [at_most("G1", "a number", 2.0, 1.0)]
def crashed(setting):
    "Crashes."
    raise RuntimeError("planted")
def hung(setting):
    "Hangs."
    time.sleep(60)
def fine(setting):
    "Holds."
    return [at_most("G4", "a number", 1.0, 1.0)]
CHECKS = {"G1": missed, "G2": crashed, "G3": hung, "G4": fine}
LIMIT_S = {"G1": 60, "G2": 60, "G3": 8, "G4": 60}
"""
    source = SCRIPT.read_text()
    marker = "# -- the table"
    assert marker in source
    broken.write_text(source.replace(marker, faults + marker))
    page = tmp_path / "page.md"
    done = run(page, "--device", "cpu", "--tiny", script=broken)
    assert done.returncode == 1
    assert "planted" in done.stderr
    for row in (
        "| G1 | a number | 2 | at most 1 | **no** |", "| G2 | Crashes. | ended with status 1 | a result | **no** |",
        "| G3 | Hangs. | took longer than 8 s | a result | **no** |", "| G4 | a number | 1 | at most 1 | yes |",
    ):  # fmt: skip
        assert row in page.read_text()
    alone = run(page, "--device", "cpu", "--tiny", "--only", "G4", script=broken)
    assert alone.returncode == 0, "a control: where everything holds, the status is 0"


def test_all_checks_together_take_at_most_25_minutes_and_full_size_needs_a_gpu(gpu_check, tmp_path):
    assert sum(gpu_check.LIMIT_S.values()) <= 25 * 60
    assert gpu_check.LIMIT_S.keys() == gpu_check.CHECKS.keys()
    done = run(tmp_path / "page.md", "--device", "cpu")
    assert done.returncode == 2 and "--device cpu needs --tiny" in done.stderr
    assert not (tmp_path / "page.md").exists()
