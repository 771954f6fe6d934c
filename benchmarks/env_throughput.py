"""Our vector envs against gymnasium's asynchronous and synchronous ones, on the same simulators, rendered, in one run.

Meta-World and LIBERO: the peers get single envs around the same ``Simulator`` class, so that physics, pictures and GL settings
are the same on every side; the tabletop's single env is that of ``vector_env.py``. Every side has ``--num-envs`` envs,
random actions, one thread per process and no limit on the length of episodes. Rounds of the sides alternate; the best round of
each counts. Ours is in one thread, ``make_env(config, num_envs)`` as it comes, with one worker process per core for the simulators,
and in two threads, each with half of the envs and workers of its own, as ``RolloutCollector`` has them. The better of the
two (``rollout.num_lanes``) is compared with the better of the peers.

env only: one action a call, and a picture of every env after every action. As both sides draw the same pictures with the
same class, nearly all the time is the simulator's, and what can differ is how well the cores are kept busy.

with policy: before every chunk of ``--chunk-len`` actions a policy has to be asked, which takes ``--policy-s`` seconds of
sleep elsewhere, as on an accelerator: a lock lets in one call at a time, and a call takes as long for a half of the envs as for
all of them, as with a large model at small batches, which is the assumption least in favour of halves. gymnasium knows no
chunks: its envs draw after every action, and wait while the policy is asked. Ours draws once per chunk, and one of two threads
steps while the other asks. 8 actions a call are what OpenVLA-OFT and pi0 execute.

    python benchmarks/env_throughput.py [--envs tabletop metaworld libero] [--seconds 30]

The last line is one JSON object; ``ratio`` is the smallest one with a policy on Meta-World and LIBERO.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from vector_env import SingleTabletop

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs import ENVS, make_env
from rlinf.envs.config import EnvConfig
from rlinf.errors import RLinfError
from rlinf.imports import import_string

SETTINGS = {
    "tabletop": ["env=tabletop", "env.tasks=[reach]", "env.state=none", "env.image_size=64"],
    "metaworld": ["env=metaworld", "env.tasks=[push-v3]", "env.image_size=128"],
    "libero": ["env=libero_spatial", "env.image_size=128", "env.rendering=fast"],
}
ENDLESS = 1_000_000


class SingleEnv(gymnasium.Env):
    """A ``Simulator`` as a gymnasium env that shows its cameras after every step."""

    def __init__(self, config: EnvConfig) -> None:
        env = ENVS.get(config.name)(config, 1, True)  # tells bounds and episodes, and starts nothing
        self._episodes, self._generator = env.episode_specs("train"), np.random.default_rng(0)
        self._simulator = import_string(env.simulator_class)(config, env.task_names)
        size = config.image_size
        image = gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict({camera: image for camera in config.cameras})
        self.action_space = env.single_action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self._simulator.reset(self._episodes[int(self._generator.integers(len(self._episodes)))])
        return self._simulator.observe().images, {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        step = self._simulator.step(action)
        return self._simulator.observe().images, step.dense_reward, step.success or step.terminated, False, {}

    def close(self) -> None:
        self._simulator.close()


class Side:
    """Envs in threads, each of which asks the policy and steps its envs in turn, at the same time as the others.

    Args:
        parts: For each thread, what applies a chunk of actions ``[B, C, D]`` to its envs, and ``B``.
        envs: To close in the end.
    """

    def __init__(self, parts: list[tuple[Callable[[np.ndarray], Any], int]], envs: list[Any]) -> None:
        self.parts, self.envs = parts, envs

    def rate(self, seconds: float, actions: np.ndarray, policy: Callable[[], None]) -> float:
        """Env steps per second with chunks ``actions [N, B, C, D]``, for about ``seconds``."""
        begin = time.perf_counter()
        num_steps = [0] * len(self.parts)

        def play(part: int) -> None:
            step, rows = self.parts[part]
            number = 0
            while number < 2 or time.perf_counter() < begin + seconds:
                policy()
                step(actions[number % len(actions), :rows])
                num_steps[part] += rows * actions.shape[2]
                number += 1

        threads = [threading.Thread(target=play, args=(part,)) for part in range(1, len(self.parts))]
        for thread in threads:
            thread.start()
        play(0)  # in this thread, to which the graphics contexts of the synchronous peer belong
        for thread in threads:
            thread.join()
        return sum(num_steps) / (time.perf_counter() - begin)

    def close(self) -> None:
        for env in self.envs:
            env.close()


def ours(config: EnvConfig, num_envs: int, num_worker_threads: int) -> Side:
    """Our envs, split over threads."""
    envs = [
        make_env(config, len(rows), auto_reset=True) for rows in np.array_split(np.arange(num_envs), num_worker_threads)
    ]
    for env in envs:
        env.reset(seed=0)
    return Side([(env.chunk_step, env.num_envs) for env in envs], envs)


def peer(config: EnvConfig, num_envs: int, kind: str) -> Side:
    """gymnasium's vector env of ``kind`` "sync" or "async"."""
    make = SingleTabletop if config.name == "tabletop" else functools.partial(SingleEnv, config)
    if kind == "sync":
        env = SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    else:
        env = AsyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP, context="spawn")
    env.reset(seed=0)

    def step(actions: np.ndarray) -> None:
        for position in range(actions.shape[1]):
            env.step(actions[:, position])

    return Side([(step, num_envs)], [env])


class Accelerator:
    """Takes ``call_s`` seconds for a call, and one call at a time."""

    def __init__(self, call_s: float) -> None:
        self.call_s, self._lock = call_s, threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            time.sleep(self.call_s)


def compare(name: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return env steps per second of each side, and the ratio, for both parts."""
    config = build_config(compose_config([*SETTINGS[name], f"env.max_episode_steps={ENDLESS}"])).env
    num_envs = arguments.num_envs
    sides: dict[str, Side] = {}
    results: dict[str, dict[str, float]] = {}
    try:
        sides["one_thread"] = ours(config, num_envs, 1)
        sides["two_threads"] = ours(config, num_envs, 2)
        sides["sync"], sides["async"] = (peer(config, num_envs, kind) for kind in ("sync", "async"))
        action_dim = sides["one_thread"].envs[0].action_dim
        low, high = sides["one_thread"].envs[0].action_low, sides["one_thread"].envs[0].action_high
        for part, chunk_len, policy in (
            ("env_only", 1, lambda: None),
            ("with_policy", arguments.chunk_len, Accelerator(arguments.policy_s)),
        ):
            shape = (16, num_envs, chunk_len, action_dim)
            actions = np.random.default_rng(0).uniform(low, high, shape).astype(np.float32)
            best = dict.fromkeys(sides, 0.0)
            for _ in range(arguments.rounds):
                for side, envs in sides.items():
                    best[side] = max(best[side], envs.rate(arguments.seconds / arguments.rounds, actions, policy))
            mine, theirs = max(best["one_thread"], best["two_threads"]), max(best["sync"], best["async"])
            results[part] = {"ours": mine, "peer": theirs, "ratio": mine / theirs} | best
            line = ", ".join(f"{side} {rate:.1f}" for side, rate in best.items())
            print(f"{name}, {num_envs} envs, {part}: {line} env steps/s; ratio {mine / theirs:.2f}", flush=True)
    finally:
        for side in sides.values():
            side.close()
    return results


def main() -> None:
    """Print a line for each part of each env, and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--envs", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each side in each part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk-len", type=int, default=8)
    parser.add_argument("--policy-s", type=float, default=0.1)
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "0"}  # of the peers' processes, as ours have it
    sizes = {}
    for name in arguments.envs:
        try:
            sizes[name] = compare(name, arguments)
        except RLinfError as error:
            print(f"{name} is left out: {error}", flush=True)
    cases = [parts["with_policy"] for name, parts in sizes.items() if name != "tabletop"]
    smallest = min(cases or [parts["env_only"] for parts in sizes.values()], key=lambda case: case["ratio"])
    rounded = {
        name: {part: {side: round(rate, 3) for side, rate in rates.items()} for part, rates in parts.items()}
        for name, parts in sizes.items()
    }
    report = {key: round(smallest[key], 3) for key in ("ours", "peer", "ratio")}
    print(json.dumps({"name": "env_throughput", **report, "sizes": rounded}))


if __name__ == "__main__":
    main()
