"""Measures end-to-end rollout speed in env steps per second, and compares it with the slower of its two parts.

``ours`` uses two processes, each with a policy and half of the envs (``rollout.worker_processes=2``). ``threads`` uses two worker
threads in this process instead. ``peer`` is the slower of two parts: stepping and rendering the same envs with given actions, and
running the same policy on given observations with all torch threads. In sequence, the two parts would reach
``1 / (1/env + 1/policy)``, which is printed as ``in_turn``. The first size is the quickstart's.

Variants alternate in each round, and ``ratio`` is the median over rounds, so that a busy machine slows them equally.

    python benchmarks/rollout.py [--num-envs 64 128 256] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from rlinf.cluster.rollouts import make_collector
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed.process_group import set_num_threads
from rlinf.envs import make_env
from rlinf.models import build_policy
from rlinf.models.embodiment.base import ActionModel
from rlinf.rollout.collector import Collector
from rlinf.seeding import seed_everything


def seconds_of(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the time taken by each function in each round, in seconds. Each round runs all functions; the first is excluded."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(1 + rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: taken[1:] for name, taken in seconds.items()}


def roll_out(collector: Collector, model: ActionModel) -> None:
    """Collect one rollout."""
    collector.result(collector.submit(model, 0, 0, needs_values=False))


def measure(num_envs: int, num_chunks: int, rounds: int) -> dict[str, float]:
    """Return env steps per second for the two parts and for complete rollouts."""
    config = build_config(
        compose_config(["experiment=quickstart", f"rollout.num_envs={num_envs}", "rollout.worker_processes=2"])
    )
    config.rollout.num_chunks = num_chunks
    in_threads = replace(config, rollout=replace(config.rollout, worker_processes=0))
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

    collectors = {
        name: make_collector(each, env, model, nullcontext)
        for name, each in (("ours", config), ("threads", in_threads))
    }
    functions: dict[str, Callable[[], object]] = {"env_only": env_only, "policy_only": policy_only}
    for name, collector in collectors.items():
        functions[name] = partial(roll_out, collector, model)
    seconds = seconds_of(functions, rounds)
    for collector in collectors.values():
        collector.close()
    env.close()
    rates = {name: num_envs * num_chunks / statistics.median(taken) for name, taken in seconds.items()}
    rates["in_turn"] = 1 / (1 / rates["env_only"] + 1 / rates["policy_only"])
    peers = np.maximum(seconds["env_only"], seconds["policy_only"])
    rates["ratio"] = float(np.median(peers / seconds["ours"]))
    rates["ratio_threads"] = float(np.median(peers / seconds["threads"]))
    rates["processes"] = getattr(collectors["ours"], "num_processes", 0)
    print(f"{num_envs:5} envs: " + "  ".join(f"{name} {value:.3g}" for name, value in rates.items()), flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--num-envs", type=int, nargs="+", default=[64, 128, 256], help="numbers of envs; ratio is for the first"
    )
    parser.add_argument("--num-chunks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    by_size = {size: measure(size, arguments.num_chunks, arguments.rounds) for size in arguments.num_envs}
    first = by_size[arguments.num_envs[0]]
    result = {
        "name": "rollout", "ours": round(first["ours"], 1), "peer": round(min(first["env_only"], first["policy_only"]), 1),
        "ratio": round(first["ratio"], 3), "ratio_threads": round(first["ratio_threads"], 3), "unit": "env steps/s",
        "sizes": {"processes": first["processes"], "threads": torch.get_num_threads(), **vars(arguments)},
        "ratio_by_num_envs": {size: round(rates["ratio"], 3) for size, rates in by_size.items()},
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
