"""Rollout speed: env steps per second end to end, against the slower of its two parts alone.

``ours`` is ``RolloutCollector`` with two worker threads (each acts for, and steps, one half of the envs). ``peer`` is the slower of stepping and rendering the same envs with given actions, and of running the same policy
on given observations. Doing one after the other reaches ``1 / (1/env + 1/policy)``, printed as ``in_turn``. The first
size is the quickstart's.

    python benchmarks/rollout.py [--num-envs 64 128 256] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed.process_group import set_num_threads
from rlinf.envs import make_env
from rlinf.envs.config import default_num_worker_threads
from rlinf.models import build_policy
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.sampler import EpisodeSampler
from rlinf.seeding import seed_everything


def rates_of(functions: dict[str, Callable[[], object]], num_steps: int, rounds: int) -> dict[str, float]:
    """Median steps per second of functions that make ``num_steps`` steps each.

    Each round runs all of them, so that a busy moment of the machine slows all alike. The first round is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(1 + rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: num_steps / statistics.median(taken[1:]) for name, taken in seconds.items()}


def measure(num_envs: int, num_chunks: int, rounds: int) -> dict[str, float]:
    """Env steps per second of the parts and of the whole."""
    config = build_config(compose_config(["experiment=quickstart"]))
    set_num_threads(None, 1)
    seed_everything(0)
    env = make_env(config.env, num_envs, auto_reset=True)
    model = build_policy(config, {"norm_stats": {config.env.name: env.action_statistics()}}).eval()
    observation, _ = env.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (num_chunks, num_envs, 1, env.action_dim)).astype(np.float32)

    def env_only() -> None:
        for t in range(num_chunks):
            env.chunk_step(actions[t])

    def policy_only() -> None:
        for _ in range(num_chunks):
            model.predict_action_batch(**model.preprocess(observation))

    sampler = EpisodeSampler(env.episode_specs("train"), len(env.task_names), num_groups=num_envs)
    collector = RolloutCollector(
        lambda count: make_env(config.env, count, auto_reset=True), sampler, num_envs=num_envs, num_chunks=num_chunks,
        temperature=1.0, num_worker_threads=config.rollout.num_lanes or default_num_worker_threads(config.env, num_envs),
    )  # fmt: skip
    functions = {
        "env_only": env_only,
        "policy_only": policy_only,
        "ours": lambda: collector.collect(model, 0, 0, needs_values=False),
    }
    rates = rates_of(functions, num_envs * num_chunks, rounds)
    collector.close()
    env.close()
    rates["in_turn"] = 1 / (1 / rates["env_only"] + 1 / rates["policy_only"])
    rates["ratio"] = rates["ours"] / min(rates["env_only"], rates["policy_only"])
    print(f"{num_envs:5} envs: " + "  ".join(f"{name} {value:.3g}" for name, value in rates.items()), flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--num-envs", type=int, nargs="+", default=[64, 128, 256], help="the first one is reported as ratio"
    )
    parser.add_argument("--num-chunks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    by_size = {size: measure(size, arguments.num_chunks, arguments.rounds) for size in arguments.num_envs}
    first = by_size[arguments.num_envs[0]]
    result = {
        "name": "rollout", "ours": round(first["ours"], 1), "peer": round(min(first["env_only"], first["policy_only"]), 1),
        "ratio": round(first["ratio"], 3), "unit": "env steps/s", "num_envs": arguments.num_envs[0],
        "num_chunks": arguments.num_chunks, "threads": torch.get_num_threads(),
        "ratio_by_num_envs": {size: round(rates["ratio"], 3) for size, rates in by_size.items()},
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
