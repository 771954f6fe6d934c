"""Iterations per second of training while the next rollout is played, next to one after the other.

``ours`` is ``cluster.max_staleness=1 rollout.worker_processes=1``, ``peer`` the same run with ``max_staleness=0``. The env sleeps as long as
a heavy simulator computes, so that two cores do not limit, and so much that a rollout takes as long as an update, which a first run
measures. Seconds of the iterations but for the first two of each run; ``seconds`` has the means of their parts.

    python benchmarks/async_training.py [--iterations 12] [--rounds 2]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean

from rlinf.commands.train import train
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.tracking import read_metrics

PLUGIN = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "slow_tabletop.py"
NUM_ENVS, NUM_CHUNKS, EPOCHS, WARM_UP = 16, 16, 24, 2


def iterations(staleness: int, sleep_s: float, num_iterations: int) -> list[dict[str, float]]:
    """Train; return the seconds of the parts of each iteration after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "model=mlp", f"plugins=[{PLUGIN}]", "env=tabletop", "env.name=slow_tabletop", "env.cameras=[]", f"env.sleep_s={sleep_s}",
            f"rollout.num_envs={NUM_ENVS}", f"rollout.num_chunks={NUM_CHUNKS}", "rollout.worker_processes=1", "trainer.minibatch_size=64",
            "model.micro_batch_size=64", f"algorithm.update_epochs={EPOCHS}", "algorithm.tis_cap=2.0", "algorithm.critic_warmup_steps=0",
            "trainer.learning_rate=1e-5", f"trainer.max_steps={num_iterations}", "evaluation.num_episodes=1", "evaluation.num_envs=1",
            "evaluation.num_videos_per_task=0", "evaluation.probe=false", "tracking.tensorboard=false", "tracking.progress=false",
            "cluster.num_threads=1", f"cluster.max_staleness={staleness}", f"output_dir={folder}/out",
        ]  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            train(build_config(compose_config(words)))
        lines = [line for line in read_metrics(Path(folder) / "out") if "train/loss" in line]
    parts = [
        {name: line[f"time/{name}_s"] for name in ("rollout", "sync", "logprob", "update", "total")} for line in lines
    ]
    totals = [0.0] + [each["total"] for each in parts]
    return [each | {"total": end - start} for each, start, end in zip(parts, totals[:-1], totals[1:], strict=True)][
        WARM_UP:
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    sys.path.append(str(PLUGIN.parent))  # the processes inherit it
    unpadded = iterations(0, 0.0, WARM_UP + 4)
    missing = mean(each["logprob"] + each["update"] - each["rollout"] for each in unpadded)
    sleep_s = max(0.0, missing / (NUM_ENVS * NUM_CHUNKS))
    found: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for _ in range(args.rounds):
        for staleness, each in found.items():
            each += iterations(staleness, sleep_s, args.iterations)
    seconds = {
        name: {part: round(mean(one[part] for one in found[staleness]), 3) for part in found[staleness][0]}
        for name, staleness in (("ours", 1), ("peer", 0))
    }
    ours, peer = (1 / mean(each["total"] for each in found[staleness]) for staleness in (1, 0))
    print(
        json.dumps(
            {
                "name": "iterations per second, cluster.max_staleness=1 against 0",
                "ours": round(ours, 3),
                "peer": round(peer, 3),
                "ratio": round(ours / peer, 2),
                "iterations": len(found[0]),
                "envs": NUM_ENVS,
                "chunks": NUM_CHUNKS,
                "epochs": EPOCHS,
                "sleep_s_of_a_rollout": round(sleep_s * NUM_ENVS * NUM_CHUNKS, 3),
                "seconds": seconds,
            }
        )  # fmt: skip
    )


if __name__ == "__main__":
    main()
