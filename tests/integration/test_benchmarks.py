"""Benchmarks run at a small size, and their last line is what the documentation promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vector_env", "--sizes 2 --rounds 1 --steps 2"),
        ("rollout", "--num-envs 4 --num-chunks 2 --rounds 1"),
        ("update", "--rounds 1 rollout.num_envs=8 rollout.num_chunks=4 trainer.minibatch_size=16"),
        ("weight_push", "--parameters 200000 --width 64 --rounds 1"),
        ("offpolicy_update", "--updates 2 --rounds 1 --batch-size 8 --hidden-size 8"),
    ],
)
def test_last_line_is_json_with_a_ratio(name, arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"benchmarks/{name}.py", *arguments.split()]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["name"] == name and {"ours", "peer", "ratio", "sizes"} <= report.keys()
    if name == "vector_env":
        assert set(report["sizes"]["2"]) == {"ours", "sync", "async", "ratio"}
        assert abs(report["ratio"] - report["ours"] / report["peer"]) < 0.01
    assert min(report["ours"], report["peer"], report["ratio"]) > 0
