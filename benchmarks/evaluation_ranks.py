"""Seconds of `rlinf evaluate` on one rank and on several, with envs that sleep as long as a heavy simulator computes.

``evaluation`` is the time of the episodes (``wall_s`` of the result), ``command`` includes the start of the ranks. A sleeping
env leaves the cores to the other ranks, so this measures what ranks cost each other, not the speed of a simulator.

    python benchmarks/evaluation_ranks.py [--ranks 1 2] [--episodes 200] [--sleep-s 0.01]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path

from rlinf.commands.evaluate import evaluate
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config

PLUGIN = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "slow_tabletop.py"


def seconds_of(ranks: int, episodes: int, sleep_s: float) -> dict[str, float]:
    """Evaluate the small MLP on ``ranks`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "model=mlp", f"plugins=[{PLUGIN}]", "env=tabletop", "env.name=slow_tabletop", "env.cameras=[]",
            f"env.sleep_s={sleep_s}", f"evaluation.num_episodes={episodes}", "evaluation.num_envs=16",
            "evaluation.num_videos_per_task=0", "evaluation.probe=false", "cluster.num_threads=1", "tracking.progress=false",
            f"cluster.num_processes={ranks}", f"output_dir={folder}/out",
        ]  # fmt: skip
        config, start = build_config(compose_config(words)), time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            result = evaluate(config)
        return {"evaluation": result.wall_s, "command": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--sleep-s", type=float, default=0.01, help="of each row's step")
    args = parser.parse_args()
    sys.path.append(str(PLUGIN.parent))  # spawned ranks inherit it
    first = None
    for ranks in args.ranks:
        found = seconds_of(ranks, args.episodes, args.sleep_s)
        first = first or found
        speed = {f"{name}_s": round(value, 2) for name, value in found.items()}
        print(
            json.dumps({"ranks": ranks, **speed, "times": round(first["evaluation"] / found["evaluation"], 2)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
