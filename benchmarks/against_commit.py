"""An experiment as the code is now, next to the same experiment of an earlier commit: the same numbers, and no slower?

Both trees run the experiment alternately, each in a process of its own, with one thread and the same seed. ``ours`` and ``peer`` are
the median seconds of training that ``summary.json`` states; ``equal_metrics`` says whether the metrics of all runs are equal but for
times. A change that only moves code must give 1.0 and true.

    python benchmarks/against_commit.py <commit> [--experiment quickstart] [--rounds 3] [overrides ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_TIME = ("time", "throughput", "memory")
"""First parts of the names of metrics that differ from run to run."""


def run(tree: Path, folder: Path, arguments: list[str]) -> tuple[float, list[dict]]:
    """Train in a process; return the seconds of training and the lines of metrics without times."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rlinf", "train", *arguments, f"hydra.run.dir={folder}", "cluster.num_threads=1"]
    subprocess.run(command, cwd=folder.parent, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: x for name, x in line.items() if not name.startswith(OF_TIME)} for line in lines]
    return json.loads((folder / "summary.json").read_text())["train_wall_s"], metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--rounds", type=int, default=3)
    arguments, overrides = parser.parse_known_args()
    words = [f"experiment={arguments.experiment}", "seed=0", *overrides]
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    metrics = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = {"ours": ROOT, "peer": folder / "tree"}
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "-q", "--detach", trees["peer"], arguments.commit], check=True
        )
        try:
            for number in range(arguments.rounds):
                for side in ("ours", "peer") if number % 2 else ("peer", "ours"):
                    taken, lines = run(trees[side], folder / f"{side}_{number}", words)
                    seconds[side].append(taken)
                    metrics.append(lines)
                    print(f"{side} {number}: {taken:.1f} s", flush=True)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", trees["peer"]], check=True)
    ours, peer = (statistics.median(seconds[side]) for side in ("ours", "peer"))
    result = {
        "name": f"{arguments.experiment} against {arguments.commit}", "ours": ours, "peer": peer, "ratio": peer / ours,
        "rounds": arguments.rounds, "overrides": overrides, "equal_metrics": all(lines == metrics[0] for lines in metrics),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
