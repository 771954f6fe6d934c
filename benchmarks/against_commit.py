"""Checks whether the current code has the same metrics as an earlier commit and is not slower.

The two trees are run alternately, each time in a separate process.

    python benchmarks/against_commit.py <commit> [--experiment quickstart] [--seeds 0 0 0] [--threads 1] [overrides ...]
    python benchmarks/against_commit.py <commit> --benchmark update [overrides ...]
    python benchmarks/against_commit.py <commit> --commands [models help ...] [--rounds 5]

An experiment is run once per seed. ``ours`` and ``peer`` are the median training times from ``summary.json`` in seconds;
``equal_metrics`` is true if all metrics except times are equal. A change that only moves code must result in 1.0 and true on one
thread. ``success`` is the final success rate by tree and seed.

With ``--benchmark update``, each tree runs its own ``benchmarks/update.py``, and ``ours`` and ``peer`` are the medians of its ``ours``,
which is a rate. Overrides are then applied only to our tree.

With ``--commands``, the CPU time of commands is measured: the median user plus system time of the process and its children, in
seconds, because wall time also depends on other programs on the machine. The first run of each command in each tree fills the
Python and disk caches, and is excluded. For ``first_step``, the time is measured until a ``tabletop_ppo_mlp`` run prints its first
iteration, including the preceding evaluation; for other commands, until the command ends. ``sizes`` contains the results of each
command; ``ours``, ``peer`` and ``ratio`` are for the first command.
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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OF_TIME = ("time", "throughput", "memory")
"""Prefixes of metrics that differ from run to run."""
COMMANDS = {
    "misspelt_experiment": ["train", "experiment=quickstrat"],
    "models": ["models"],
    "missing_folder": ["evaluate", "checkpoint=no_such_folder"],
    "cfg_job": ["train", "experiment=tabletop_ppo_mlp", "--cfg", "job"],
    "help": ["--help"],
    "help_of_train": ["train", "--help"],
    "help_of_launch": ["launch", "--help"],
    "first_step": ["train", "experiment=tabletop_ppo_mlp", "trainer.max_steps=2", "cluster.num_threads=1"],
}


def environment(tree: Path, threads: int) -> dict[str, str]:
    """Return the environment in which a tree's commands run."""
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def run(tree: Path, command: list[str], threads: int) -> str:
    """Run a command in a tree and return its output."""
    # Kept to as many cores as threads: the script of an old tree may set threads of its own.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    command = ["taskset", "-c", cores, sys.executable, *command]
    done = subprocess.run(
        command, cwd=tree, env=environment(tree, threads), check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def train(tree: Path, folder: Path, words: list[str], threads: int) -> tuple[float, float | None, list[dict]]:
    """Train, and return the training time in seconds, the final success rate, and the metrics without times."""
    run(tree, ["-m", "rlinf", "train", *words, f"hydra.run.dir={folder}", f"cluster.num_threads={threads}"], threads)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: x for name, x in line.items() if not name.startswith(OF_TIME)} for line in lines]
    summary = json.loads((folder / "summary.json").read_text())
    return summary["train_wall_s"], summary.get("success_after_rl"), metrics


def spent(process: int) -> float:
    """Return the CPU time of a process and its ended children, in seconds."""
    values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, values)) / os.sysconf("SC_CLK_TCK")


def answer_s(tree: Path, name: str, folder: Path) -> float:
    """Run a command of a tree in an empty folder; return its CPU time, or the CPU time until the first iteration."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rlinf", *COMMANDS[name]], cwd=folder, env=environment(tree, 1), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    at_step, last = None, ""
    for line in process.stdout:
        last = line
        if at_step is None and line.startswith("rl 1/"):
            at_step = spent(process.pid)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 2) or (name == "first_step" and at_step is None):
        raise SystemExit(f"rlinf {' '.join(COMMANDS[name])} of {tree} ended with {status}: {last}")
    return usage.ru_utime + usage.ru_stime if at_step is None else at_step


def alternately(trees: dict[str, Path], rounds: int) -> list[tuple[int, str]]:
    """Return each run's round number and side. The side that runs first alternates between rounds."""
    return [(number, side) for number in range(rounds) for side in (trees if number % 2 else reversed(trees))]


def compare_commands(trees: dict[str, Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result for ``--commands``."""
    sizes = {}
    for name in arguments.commands or COMMANDS:
        seconds = {side: [] for side in trees}
        for _, side in alternately(trees, arguments.rounds + 1):
            with tempfile.TemporaryDirectory() as folder:
                seconds[side].append(answer_s(trees[side], name, Path(folder)))
        ours, peer = (statistics.median(seconds[side][1:]) for side in trees)
        sizes[name] = {"ours": round(ours, 2), "peer": round(peer, 2), "saved": round(peer - ours, 2)}
        print(f"{name:<20} {ours:6.2f} s  {peer:6.2f} s before", flush=True)
    first = next(iter(sizes.values()))
    numbers = {"ours": first["ours"], "peer": first["peer"], "ratio": round(first["peer"] / first["ours"], 2)}
    return {"name": f"start-up against {arguments.commit}", **numbers, "sizes": sizes}


def compare_runs(
    trees: dict[str, Path], folder: Path, arguments: argparse.Namespace, overrides: list[str]
) -> dict[str, Any]:
    """Return the result for an experiment, or for ``--benchmark``."""
    values: dict[str, list[float]] = {side: [] for side in trees}
    success: dict[str, list[float | None]] = {side: [] for side in trees}
    metrics: dict[str, list[list[dict]]] = {side: [] for side in trees}
    for number, side in alternately(trees, len(arguments.seeds)):
        if arguments.benchmark:
            words = overrides if side == "ours" else []
            out = run(trees[side], [f"benchmarks/{arguments.benchmark}.py", *words], arguments.threads)
            values[side].append(json.loads(out.splitlines()[-1])["ours"])
        else:
            words = [f"experiment={arguments.experiment}", f"seed={arguments.seeds[number]}", *overrides]
            result = train(trees[side], folder / f"{side}_{number}", words, arguments.threads)
            for kept, value in zip((values, success, metrics), result, strict=True):
                kept[side].append(value)
        print(f"{side} {number}: {values[side][-1]:.1f} {'' if arguments.benchmark else 's'}", flush=True)
    ours, peer = (statistics.median(values[side]) for side in trees)
    result = {
        "name": f"{arguments.benchmark or arguments.experiment} against {arguments.commit}", "ours": ours, "peer": peer,
        "ratio": ours / peer if arguments.benchmark else peer / ours,
        "sizes": {"seeds": arguments.seeds, "threads": arguments.threads, "overrides": overrides},
    }  # fmt: skip
    if not arguments.benchmark:
        result |= {"success": success, "equal_metrics": metrics["ours"] == metrics["peer"]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--benchmark", help="run this script of benchmarks/ instead, whose `ours` must be a rate")
    parser.add_argument("--commands", nargs="*", choices=COMMANDS, help="time these commands, or all if none are given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 0, 0], help="seeds, with one round each")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per command")
    parser.add_argument("--threads", type=int, default=1)
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = {"ours": ROOT, "peer": folder / "tree"}
        add = ["git", "-C", ROOT, "worktree", "add", "-q", "--detach", trees["peer"], arguments.commit]
        subprocess.run(add, check=True)
        try:
            if arguments.commands is None:
                result = compare_runs(trees, folder, arguments, overrides)
            else:
                result = compare_commands(trees, arguments)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", trees["peer"]], check=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
