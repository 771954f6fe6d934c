"""Kills worker processes of a simulator while an evaluation runs, and counts its episodes.

Every ``--every`` seconds one worker, chosen at random, gets SIGKILL, until ``--seconds`` have passed; then the evaluation ends by
itself. The policy is a small network of random weights that samples. In the end each planned episode must have finished
exactly once.

    python benchmarks/env_kill.py [--seconds 300] [--every 20] [env=metaworld env.max_episode_steps=50 ...]

The last line is one JSON object; the exit status is 1 where an episode is missing or was counted twice.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter

import numpy as np
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed.process_group import set_num_threads
from rlinf.envs import make_env
from rlinf.envs.process.env import ProcessVectorEnv
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.models import build_policy
from rlinf.types import EpisodeResult

OVERRIDES = ["env=metaworld", "env.tasks=[reach-v3,push-v3]", "env.image_size=64", "env.max_episode_steps=50",
             "model=mlp", "model.init_config.state_dim=4", "model.action_token_len=4"]  # fmt: skip


class Killer(threading.Thread):
    """Sends SIGKILL to a worker of ``env`` every ``every_s`` seconds until ``seconds`` have passed."""

    def __init__(self, env: ProcessVectorEnv, seconds: float, every_s: float) -> None:
        super().__init__(daemon=True)
        self.env, self.every_s, self.end = env, every_s, time.monotonic() + seconds
        self.num_kills = 0

    def run(self) -> None:
        generator = np.random.default_rng(0)
        while time.monotonic() + self.every_s < self.end:
            time.sleep(self.every_s)
            process = generator.choice(self.env.worker_processes())
            print(f"kill -9 {process.pid}", flush=True)
            process.kill()
            self.num_kills += 1


def main() -> None:
    """Evaluate in batches of episodes until the time is over, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--num-envs", type=int, default=8)
    arguments = parser.parse_args()
    restarts = int(arguments.seconds / arguments.every) + 1
    config = build_config(compose_config([*OVERRIDES, *arguments.overrides, f"env.max_restarts={restarts}"]))
    set_num_threads(None, 1)
    torch.manual_seed(0)
    env = make_env(config.env, arguments.num_envs, auto_reset=False)
    policy = build_policy(config, {"norm_stats": {config.env.name: env.action_statistics()}})
    episodes = env.episode_specs("eval")
    finished: Counter = Counter()
    planned = []

    def count(result: EpisodeResult) -> None:
        finished[result.spec] += 1

    killer = Killer(env, arguments.seconds, arguments.every)
    killer.start()
    while time.monotonic() < killer.end:
        batch = list(episodes[len(planned) : len(planned) + arguments.num_envs])
        if not batch:
            break
        planned += batch
        evaluate_policy(policy, env, batch, greedy=False, on_result=count)
    env.close()
    report = {
        "name": "env_kill",
        "planned": len(planned),
        "finished": len(finished),
        "duplicates": sum(number - 1 for number in finished.values()),
        "kills": killer.num_kills,
        "restarts": env.num_restarts,
    }
    print(json.dumps(report))
    raise SystemExit(report["finished"] != report["planned"] or report["duplicates"] > 0)


if __name__ == "__main__":
    main()
