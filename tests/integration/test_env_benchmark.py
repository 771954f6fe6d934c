"""The benchmark of the vector env runs, and its last line is what the documentation promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_last_line_is_json_with_a_ratio():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "benchmarks/vector_env.py", *"--sizes 2 --rounds 1 --steps 2".split()]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["name"] == "vector_env" and set(report["sizes"]["2"]) == {"ours", "sync", "async", "ratio"}
    assert abs(report["ratio"] - report["ours"] / report["peer"]) < 0.01
