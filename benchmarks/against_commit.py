"""An experiment as the code is now, next to the same experiment of an earlier commit: the same numbers, and no slower?

Both trees run the experiment alternately, each in a process of its own, once for each seed. ``ours`` and ``peer`` are the median seconds
of training that ``summary.json`` states; ``equal_metrics`` says whether the metrics of both trees are equal but for times. A change that
only moves code must give 1.0 and true on one thread. ``success`` is what the run ends with, by tree and seed.

With ``--benchmark update`` each tree runs its own ``benchmarks/update.py`` instead; ``ours`` and ``peer`` are the medians of its ``ours``, a rate.
Overrides then go to our tree only.

    python benchmarks/against_commit.py <commit> [--experiment quickstart] [--seeds 0 0 0] [--threads 1] [overrides ...]
    python benchmarks/against_commit.py <commit> --benchmark update [overrides ...]
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


def run(tree: Path, command: list[str], threads: int) -> str:
    """Run a command of a tree; return what it prints."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def train(tree: Path, folder: Path, words: list[str], threads: int) -> tuple[float, float | None, list[dict]]:
    """Train; return the seconds of training, the success in the end, and the lines of metrics without times."""
    run(tree, ["-m", "rlinf", "train", *words, f"hydra.run.dir={folder}", f"cluster.num_threads={threads}"], threads)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: x for name, x in line.items() if not name.startswith(OF_TIME)} for line in lines]
    summary = json.loads((folder / "summary.json").read_text())
    return summary["train_wall_s"], summary.get("success_after_rl"), metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--benchmark", help="a script of benchmarks/ whose `ours` is a rate, instead of an experiment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 0, 0], help="one round for each")
    parser.add_argument("--threads", type=int, default=1)
    arguments, overrides = parser.parse_known_args()
    values: dict[str, list[float]] = {"ours": [], "peer": []}
    success: dict[str, list[float | None]] = {"ours": [], "peer": []}
    metrics: dict[str, list[list[dict]]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = {"ours": ROOT, "peer": folder / "tree"}
        add = ["git", "-C", ROOT, "worktree", "add", "-q", "--detach", trees["peer"], arguments.commit]
        subprocess.run(add, check=True)
        try:
            for number, seed in enumerate(arguments.seeds):
                for side in ("ours", "peer") if number % 2 else ("peer", "ours"):
                    if arguments.benchmark:
                        words = overrides if side == "ours" else []
                        out = run(trees[side], [f"benchmarks/{arguments.benchmark}.py", *words], arguments.threads)
                        values[side].append(json.loads(out.splitlines()[-1])["ours"])
                    else:
                        words = [f"experiment={arguments.experiment}", f"seed={seed}", *overrides]
                        result = train(trees[side], folder / f"{side}_{number}", words, arguments.threads)
                        for kept, value in zip((values, success, metrics), result, strict=True):
                            kept[side].append(value)
                    print(f"{side} {number}: {values[side][-1]:.1f} {'' if arguments.benchmark else 's'}", flush=True)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", trees["peer"]], check=True)
    ours, peer = (statistics.median(values[side]) for side in ("ours", "peer"))
    result = {
        "name": f"{arguments.benchmark or arguments.experiment} against {arguments.commit}", "ours": ours, "peer": peer,
        "ratio": ours / peer if arguments.benchmark else peer / ours, "seeds": arguments.seeds, "threads": arguments.threads,
        "overrides": overrides,
    }  # fmt: skip
    if not arguments.benchmark:
        result |= {"success": success, "equal_metrics": metrics["ours"] == metrics["peer"]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
