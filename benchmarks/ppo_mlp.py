"""Compares state-based PPO on the tabletop with Stable-Baselines3: env steps and seconds to 95 % success on held-out episodes.

``ours`` is ``rlinf train experiment=tabletop_ppo_mlp``; ``peer`` is Stable-Baselines3's PPO on the same simulator, with the same
networks ([256, 256], tanh), the same number of env steps per update phase and one thread each, in a separate environment:

    python -m venv /tmp/sb3 && /tmp/sb3/bin/pip install torch==2.13.0 stable-baselines3==2.9.2 mujoco==3.3.0 omegaconf pyyaml pillow
    python benchmarks/ppo_mlp.py --peer-python /tmp/sb3/bin/python [--seeds 2,3,4,5,6] [--against daa9868]

The peer is run with its own defaults (10 epochs, batch size 64, learning rate 3e-4, gamma 0.99) and with our experiment's settings,
and the better median is used. Both policies are evaluated greedily on the same 100 episodes after every update phase; this time is
excluded. On a busy machine, compare CPU seconds. ``--against REF`` also compares our training speed in env steps per second with a
git ref. Ratios are peer / ours, so values above 1 mean that ours needs less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET, NUM_EPISODES, MAX_ENV_STEPS = 0.95, 100, 150_000
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def train(folder: Path, root: Path, *overrides: str) -> list[dict]:
    """Run our experiment from the checkout ``root``, and return its metrics, one dict per line."""
    command = [sys.executable, "-m", "rlinf", "train", "experiment=tabletop_ppo_mlp", f"output_dir={folder}"]
    command += ["evaluation.num_videos_per_task=0", "cluster.num_threads=1", "tracking.progress=false", *overrides]
    env = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(root)}
    subprocess.run(command, check=True, env=env, cwd=folder.parent, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def ours(seed: int, folder: Path) -> dict[str, float]:
    """Train until the target is reached; return env steps, wall time and CPU time of training in seconds."""
    lines = train(
        folder, ROOT, f"seed={seed}", "trainer.eval_every=1", f"trainer.target_success_rate={TARGET}",
        f"evaluation.num_episodes={NUM_EPISODES}",
    )  # fmt: skip
    cpu_s = 0.0
    for line in lines:
        cpu_s += line.get("time/cpu_s", 0.0)
        if line.get("eval/success_rate", 0.0) >= TARGET:
            return {"env_steps": line["rollout/env_steps_total"], "seconds": line["time/total_s"], "cpu_s": cpu_s}
    raise SystemExit(f"seed {seed} did not reach {TARGET:.0%}: {folder}")


def peer(python: str, seed: int, settings: str) -> dict[str, float]:
    """Run this file in the peer's environment."""
    command = [python, str(Path(__file__).resolve()), "--run-peer", settings, "--seeds", str(seed)]
    env = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    output = subprocess.run(command, check=True, env=env, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def our_settings() -> dict[str, float]:
    """Settings of our experiment that also exist in Stable-Baselines3, under its names."""
    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config

    config = build_config(compose_config(["experiment=tabletop_ppo_mlp"]))
    return {
        "num_envs": config.rollout.num_envs, "n_steps": config.rollout.num_chunks, "n_epochs": config.algorithm.update_epochs,
        "batch_size": config.trainer.minibatch_size, "learning_rate": config.trainer.learning_rate,
        "gamma": config.algorithm.gamma, "gae_lambda": config.algorithm.gae_lambda,
        "log_std_init": config.model.init_config["initial_log_std"],
    }  # fmt: skip


def run_peer(settings: dict[str, float], seed: int) -> dict[str, float]:
    """Train Stable-Baselines3's PPO in this process until the target is reached."""
    import numpy as np
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecEnv

    from rlinf.envs import make_env
    from rlinf.envs.tabletop.config import TabletopConfig

    torch.set_num_threads(1)
    config = TabletopConfig(tasks=["reach"], cameras=[])

    class Tabletop(VecEnv):
        """Our vector env with the interface of Stable-Baselines3."""

        def __init__(self, num_envs: int) -> None:
            import gymnasium

            self.env = make_env(config, num_envs, auto_reset=True)
            space = gymnasium.spaces.Box(-np.inf, np.inf, (self.env.state_dim,), np.float32)
            super().__init__(num_envs, space, self.env.single_action_space)

        def reset(self) -> np.ndarray:
            return self.env.reset(seed=seed)[0].state

        def step_async(self, actions: np.ndarray) -> None:
            self.actions = actions

        def step_wait(self) -> tuple:
            observation, rewards, terminated, truncated, infos = self.env.step(self.actions)
            done, own = terminated | truncated, [{} for _ in rewards]
            for row in np.flatnonzero(done):
                own[row] = {
                    "terminal_observation": infos["final_obs"][row].state[0],
                    "TimeLimit.truncated": bool(truncated[row]),
                }
            return observation.state, rewards, done, own

        def close(self) -> None:
            self.env.close()

        def get_attr(self, name, indices=None):
            return [None] * self.num_envs

        def set_attr(self, name, value, indices=None):
            raise NotImplementedError

        def env_method(self, name, *arguments, indices=None, **keywords):
            raise NotImplementedError

        def env_is_wrapped(self, wrapper, indices=None):
            return [False] * self.num_envs

    evaluation = make_env(config, NUM_EPISODES, auto_reset=False)
    episodes = list(evaluation.episode_specs("eval")[:NUM_EPISODES])

    class Evaluate(BaseCallback):
        """Evaluates before each rollout, with the clock stopped."""

        def __init__(self) -> None:
            super().__init__()
            self.seconds, self.cpu_s, self.rate = 0.0, 0.0, 0.0

        def _on_training_start(self) -> None:
            self.since = (time.perf_counter(), time.process_time())

        def _on_rollout_start(self) -> None:
            self.seconds += time.perf_counter() - self.since[0]
            self.cpu_s += time.process_time() - self.since[1]
            observation = evaluation.reset(options={"episodes": episodes})[0]
            results = []
            while len(results) < NUM_EPISODES:
                actions, _ = self.model.predict(observation.state, deterministic=True)
                step = evaluation.chunk_step(actions[:, None])
                observation = step.observation
                results += [episode.success for episode in step.episodes]
            self.rate = sum(results) / len(results)
            self.since = (time.perf_counter(), time.process_time())

        def _on_step(self) -> bool:
            return self.rate < TARGET

    callback = Evaluate()
    model = PPO(
        "MlpPolicy", Tabletop(settings["num_envs"]), n_steps=settings["n_steps"], batch_size=settings["batch_size"],
        n_epochs=settings["n_epochs"], learning_rate=settings["learning_rate"], gamma=settings["gamma"],
        gae_lambda=settings["gae_lambda"], seed=seed, device="cpu",
        policy_kwargs={"net_arch": {"pi": [256, 256], "vf": [256, 256]}, "log_std_init": settings["log_std_init"]},
    )  # fmt: skip
    model.learn(MAX_ENV_STEPS, callback)
    if callback.rate < TARGET:
        raise SystemExit(f"seed {seed} did not reach {TARGET:.0%}: {callback.rate:.0%}")
    # The callback stops at the first step of the next rollout, which is excluded.
    num_steps = model.num_timesteps - settings["num_envs"]
    return {"env_steps": num_steps, "seconds": callback.seconds, "cpu_s": callback.cpu_s}


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each value."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def env_steps_per_s(root: Path, folder: Path) -> float:
    """Return the median over iterations of a short run without evaluations."""
    lines = train(folder, root, "trainer.max_steps=20", "evaluation.num_episodes=8")
    rates = [line["throughput/env_steps_per_s"] for line in lines if "throughput/env_steps_per_s" in line]
    return statistics.median(rates[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter of the environment with stable-baselines3")
    parser.add_argument("--seeds", default="2,3,4,5,6")
    parser.add_argument("--against", help="git ref for which env steps per second are also measured")
    parser.add_argument("--run-peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if arguments.run_peer:
        print(json.dumps(run_peer(json.loads(arguments.run_peer), seeds[0])))
        return
    same = our_settings()
    defaults = same | {"n_epochs": 10, "batch_size": 64, "learning_rate": 3e-4, "gamma": 0.99, "log_std_init": 0.0}
    runs: dict[str, list[dict[str, float]]] = {"ours": []}
    result: dict[str, object] = {
        "name": "ppo_mlp",
        "sizes": {"seeds": seeds, "num_envs": same["num_envs"], "hidden_sizes": [256, 256]},
    }
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.against:
            old = Path(scratch, "old")
            subprocess.run(
                ["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(old), arguments.against], check=True
            )
            try:
                before, now = (env_steps_per_s(root, Path(scratch, f"rate_{root.name}")) for root in (old, ROOT))
            finally:
                subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(old)], check=True)
            print(f"env steps/s: {arguments.against} {before:.0f}, now {now:.0f}, {now / before:.2f} times")
            result["env_steps_per_s"] = {arguments.against: round(before), "now": round(now)}
        for seed in seeds:  # in sequence, so that all runs have the machine to themselves
            runs["ours"].append(ours(seed, Path(scratch, f"ours_{seed}")))
            print(f"seed {seed} ours: {runs['ours'][-1]}", flush=True)
            for name, settings in (("defaults", defaults), ("same", same)) if arguments.peer_python else ():
                runs.setdefault(name, []).append(peer(arguments.peer_python, seed, json.dumps(settings)))
                print(f"seed {seed} peer, {name} settings: {runs[name][-1]}", flush=True)
    medians = {name: median(found) for name, found in runs.items()}
    for name, found in medians.items():
        shown = f"{found['env_steps']:,.0f} env steps, {found['seconds']:.2f} s, {found['cpu_s']:.2f} s of a processor"
        print(f"{name}: median {shown}")
    if arguments.peer_python:
        mine = medians["ours"]
        best = {key: min(medians["defaults"][key], medians["same"][key]) for key in mine}
        result |= {"ours": mine["seconds"], "peer": best["seconds"], "ratio": best["seconds"] / mine["seconds"]}
        result |= {"ours_env_steps": mine["env_steps"], "peer_env_steps": best["env_steps"]}
        result |= {"ratio_env_steps": best["env_steps"] / mine["env_steps"]}
        result |= {
            "ours_cpu_s": mine["cpu_s"],
            "peer_cpu_s": best["cpu_s"],
            "ratio_cpu_s": best["cpu_s"] / mine["cpu_s"],
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
