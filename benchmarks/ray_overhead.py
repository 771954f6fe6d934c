"""Seconds of an iteration with one player on Ray next to the same work in the rank's process, and seconds to start four players.

``ours`` is ``cluster.placement=split cluster.num_players=1 cluster.max_staleness=0``, ``peer`` the colocated run, whose numbers are the
same. The env sleeps as long as a heavy simulator computes, so that two cores do not decide and an iteration takes about five seconds.
``ratio`` is ``peer / ours``; the overhead of Ray is at most 10 % if it is 0.91 or more. ``start_s`` is the time from the beginning of the
reservation, which starts Ray, until four players have told where they are; ``reserved_s`` is the part of the reservation.

    python benchmarks/ray_overhead.py [--iterations 8] [--rounds 2] [--sleep-s 0.03] [--players 4]
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
from statistics import mean

from rlinf.cluster.actor import PlayerActor
from rlinf.cluster.reservation import reserved
from rlinf.commands.train import train
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.preflight.validation import validate
from rlinf.tracking import read_metrics

PLUGIN = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "slow_tabletop.py"
NUM_ENVS, NUM_CHUNKS, WARM_UP = 16, 16, 2


def configured(folder: str, players: int, sleep_s: float, num_iterations: int) -> RunConfig:
    """Return the configuration of a run with ``players`` players; 0: the rank plays."""
    words = [
        "model=mlp", f"plugins=[{PLUGIN}]", "env=tabletop", "env.name=slow_tabletop", "env.cameras=[]", f"env.sleep_s={sleep_s}",
        f"env.max_episode_steps={NUM_CHUNKS}",
        f"rollout.num_envs={NUM_ENVS}", f"rollout.num_chunks={NUM_CHUNKS}", "trainer.minibatch_size=64", "model.micro_batch_size=64",
        f"trainer.max_steps={num_iterations + WARM_UP}", "sft.max_steps=0", "evaluation.num_episodes=1", "evaluation.num_envs=1",
        "evaluation.num_videos_per_task=0", "evaluation.probe=false", "tracking.tensorboard=false", "tracking.progress=false",
        "cluster.num_threads=1", "cluster.device=cpu", f"output_dir={folder}/out",
    ]  # fmt: skip
    if players:
        words += ["cluster.start=ray", "cluster.placement=split", f"cluster.num_players={players}"]
    config = build_config(compose_config(words))
    validate(config)
    return config


def iterations(players: int, sleep_s: float, num_iterations: int) -> list[float]:
    """Train; return the seconds of each iteration after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            train(configured(folder, players, sleep_s, num_iterations))
        totals = [line["time/total_s"] for line in read_metrics(Path(folder) / "out") if "train/loss" in line]
    return [end - start for start, end in zip(totals[WARM_UP - 1 : -1], totals[WARM_UP:], strict=True)]


def start_of(players: int) -> tuple[float, float]:
    """Start players; return the seconds of the reservation, and those until all have told where they are."""
    with tempfile.TemporaryDirectory() as folder:
        config, start = configured(folder, players, 0.0, 1), time.perf_counter()
        with reserved(config) as reservation:
            import ray

            reserved_s = time.perf_counter() - start
            actors = [reservation.start(PlayerActor, number) for number in range(players)]
            ray.get([actor.where.remote() for actor in actors])
            return reserved_s, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sleep-s", type=float, default=0.03, help="of each row's step")
    parser.add_argument("--players", type=int, default=4, help="of the start")
    args = parser.parse_args()
    sys.path.append(str(PLUGIN.parent))  # players inherit it
    reserved_s, start_s = start_of(args.players)
    print(
        json.dumps({"players": args.players, "reserved_s": round(reserved_s, 2), "start_s": round(start_s, 2)}),
        flush=True,
    )
    found: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(args.rounds):
        for players, seconds in found.items():
            seconds += iterations(players, args.sleep_s, args.iterations)
    ours, peer = mean(found[1]), mean(found[0])
    line = {
        "name": "seconds of an iteration, a player on Ray against the rank's process",
        "ours": round(ours, 3), "peer": round(peer, 3), "ratio": round(peer / ours, 3), "iterations": len(found[0]),
        "envs": NUM_ENVS, "chunks": NUM_CHUNKS, "sleep_s": args.sleep_s, "players_started": args.players,
        "start_s": round(start_s, 2), "reserved_s": round(reserved_s, 2),
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
