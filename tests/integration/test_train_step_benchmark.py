"""The benchmark of a training step runs, and its last line is what its documentation says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_last_line_is_json_with_the_ratio_and_the_flops_of_the_formula():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = [
        "--sizes", "tiny", "--batch", "2", "--seq-len", "16", "--rounds", "1", "--matmul-size", "64", "--precision",
        "fp32",
    ]  # fmt: skip
    command = [sys.executable, str(ROOT / "benchmarks" / "train_step.py"), *options]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["name"] == "train_step" and report["ratio"] == pytest.approx(
        report["ours"] / report["peer"], abs=0.01
    )
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64  # attention, MLP, two norms
    multiplied = 2 * layer + 64 + 256 * 64  # and the last norm and the output head
    flops = 16 * (6 * multiplied + 12 * 2 * 64 * 16)
    size = report["sizes"]["tiny"]
    assert size["parameters"] == multiplied + 256 * 64
    assert size["gflop_per_sample"] == pytest.approx(flops / 1e9, abs=0.005)
