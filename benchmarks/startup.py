"""How much processor time commands take before they answer, next to an earlier commit.

Both trees run each command alternately, each in a process of its own. A number is the median of user and system time of the process and of
its children, in seconds; wall time would measure the other programs of the machine, too. The first run of each command in each tree fills
the caches of Python and of the disk, and is left out. ``first_step`` is the time until a run of ``tabletop_ppo_mlp`` prints its first
iteration, evaluation before it included; the others are the time of the whole command.

``sizes`` has the numbers of each command; ``ours``, ``peer`` and ``ratio`` are those of a misspelt experiment.

    python benchmarks/startup.py [--commit 50d27ae] [--rounds 5]
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
STEP = ["train", "experiment=tabletop_ppo_mlp", "trainer.max_steps=2", "cluster.num_threads=1"]
COMMANDS = {
    "misspelt experiment": ["train", "experiment=quickstrat"],
    "models": ["models"],
    "missing folder": ["evaluate", "checkpoint=no_such_folder"],
    "cfg job": ["train", "experiment=tabletop_ppo_mlp", "--cfg", "job"],
    "help": ["--help"],
    "help of train": ["train", "--help"],
    "help of launch": ["launch", "--help"],
    "first_step": STEP,
}


def spent(process: int) -> float:
    """Return the processor time of a process and of its children that have ended, in seconds."""
    values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, values)) / os.sysconf("SC_CLK_TCK")


def measure(tree: Path, words: list[str], folder: Path) -> float:
    """Run a command of a tree in an empty folder; return its processor time, or that until the first iteration."""
    one_thread = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rlinf", *words], cwd=folder, env=os.environ | one_thread, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    at_step, last = None, ""
    for line in process.stdout:
        last = line
        if at_step is None and line.startswith("rl 1/"):
            at_step = spent(process.pid)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 2) or (words == STEP and at_step is None):
        raise SystemExit(f"rlinf {' '.join(words)} of {tree} ended with {status}: {last}")
    return usage.ru_utime + usage.ru_stime if at_step is None else at_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="50d27ae")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    arguments = parser.parse_args()
    sizes = {}
    with tempfile.TemporaryDirectory() as name:
        trees = {"ours": ROOT, "peer": Path(name) / "tree"}
        add = ["git", "-C", ROOT, "worktree", "add", "-q", "--detach", trees["peer"], arguments.commit]
        subprocess.run(add, check=True)
        try:
            for command in arguments.commands:
                seconds = {side: [] for side in trees}
                for number in range(arguments.rounds + 1):
                    for side in ("ours", "peer") if number % 2 else ("peer", "ours"):
                        with tempfile.TemporaryDirectory() as folder:
                            seconds[side].append(measure(trees[side], COMMANDS[command], Path(folder)))
                ours, peer = (statistics.median(seconds[side][1:]) for side in ("ours", "peer"))
                sizes[command] = {"ours": round(ours, 2), "peer": round(peer, 2), "saved": round(peer - ours, 2)}
                print(f"{command:<20} {ours:6.2f} s  {peer:6.2f} s before", flush=True)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", trees["peer"]], check=True)
    first = sizes[arguments.commands[0]]
    print(json.dumps({"name": f"start-up against {arguments.commit}", "ours": first["ours"], "peer": first["peer"],
                      "ratio": round(first["peer"] / first["ours"], 2), "sizes": sizes}))  # fmt: skip


if __name__ == "__main__":
    main()
