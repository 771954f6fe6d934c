"""Episodes per second of `rlinf evaluate` by several players next to one, with envs that sleep as long as a heavy simulator computes.

``ours`` is ``cluster.num_players=2`` (or ``--players``), ``peer`` is 1, both on Ray on this machine. A sleeping env leaves the cores to the
other players, so this measures what players cost each other, not the speed of a simulator. The seconds of the episodes count (``wall_s`` of
the result), the fastest of the rounds; ``command_s`` includes the start of Ray and of the players.

    python benchmarks/evaluation_players.py [--players 2] [--episodes 200] [--sleep-s 0.02] [--rounds 2]
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
from rlinf.preflight.validation import validate

PLUGIN = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "slow_tabletop.py"
NUM_ENVS = 16


def seconds_of(players: int, episodes: int, sleep_s: float) -> tuple[float, float]:
    """Evaluate the small MLP on ``players`` players; return the seconds of the episodes and of the command."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "model=mlp", f"plugins=[{PLUGIN}]", "env=tabletop", "env.name=slow_tabletop", "env.cameras=[]",
            f"env.sleep_s={sleep_s}", f"evaluation.num_episodes={episodes}", f"evaluation.num_envs={NUM_ENVS}",
            "evaluation.num_videos_per_task=0", "evaluation.probe=false", "cluster.num_threads=1", "cluster.device=cpu",
            "cluster.start=ray", f"cluster.num_players={players}", "tracking.progress=false", f"output_dir={folder}/out",
        ]  # fmt: skip
        config, start = build_config(compose_config(words)), time.perf_counter()
        validate(config, "evaluate")
        with contextlib.redirect_stdout(io.StringIO()):
            result = evaluate(config)
        return result.wall_s, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--players", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--sleep-s", type=float, default=0.02, help="of each row's step")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    sys.path.append(str(PLUGIN.parent))  # players inherit it
    found: dict[int, list[tuple[float, float]]] = {args.players: [], 1: []}
    for _ in range(args.rounds):
        for players, times in found.items():
            times.append(seconds_of(players, args.episodes, args.sleep_s))
            print(json.dumps({"players": players, "episodes_s": times[-1][0], "command_s": times[-1][1]}), flush=True)
    (ours, our_command), (peer, peer_command) = (min(found[players]) for players in (args.players, 1))
    line = {
        "name": f"episodes per second, {args.players} players against 1",
        "ours": round(args.episodes / ours, 2), "peer": round(args.episodes / peer, 2), "ratio": round(peer / ours, 2),
        "episodes": args.episodes, "sleep_s": args.sleep_s, "envs": NUM_ENVS, "rounds": args.rounds,
        "command_s": [round(our_command, 1), round(peer_command, 1)],
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
