"""Compares PPO, SAC and TD3 from scratch with Stable-Baselines3 for equal tasks, settings, seeds, env steps and evaluation episodes.

    python benchmarks/golden.py --tasks hopper,halfcheetah --algorithms sac,td3 --seeds 0,1,2 --steps 200000 --out /tmp/golden

Our run is ``rlinf train experiment=gymnasium_<task>_<algorithm> algorithm.preset=sb3``. Settings for Stable-Baselines3 are from
the same composed configuration. Each run is a single-threaded process. Its policy is evaluated greedily before training and after
every ``trainer.eval_every`` iterations, on the same 20 episodes for both libraries; this time is excluded.

Finished runs are stored as JSON files in ``--out`` and not repeated. ``--record`` adds them to docs/golden_runs.json, whose rows are
also shown in the table. ``--only table`` does not start runs. Several commands with different seeds can use the same folder.

The table has interquartile means over the seeds, with 95 % intervals of 10,000 stratified bootstrap samples (Agarwal et al. 2021,
"Deep reinforcement learning at the edge of the statistical precipice"). In the last line, returns R are normalised
as (R - S) / (P - S), with S before training and P the final mean of Stable-Baselines3. ``ratio`` is ours / peer; above 1, ours is better.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "golden_runs.json"
TASKS = ("hopper", "walker2d", "halfcheetah", "inverted_pendulum", "pendulum")
ALGORITHMS = ("ppo", "sac", "td3")
LIBRARIES = ("ours", "sb3")
NUM_EPISODES, NUM_BOOTSTRAPS = 20, 10_000
KEY = ("task", "algorithm", "library", "seed", "steps")
CLEANRL, TIANSHOU, ZOO = "CleanRL, v4, 1 M", "Tianshou, v3, 1 M, best", "SB3 zoo, tuned"
PUBLISHED = {
    ("halfcheetah", "ppo"): f"1443 ± 46 ({CLEANRL})",
    ("walker2d", "ppo"): f"2288 ± 572 ({CLEANRL})",
    ("hopper", "ppo"): f"2383 ± 272 ({CLEANRL})",
    ("inverted_pendulum", "ppo"): f"963 ± 22 ({CLEANRL})",
    ("pendulum", "ppo"): f"-172 ± 104 ({ZOO}, 100 k)",
    ("halfcheetah", "sac"): f"9635 ± 1424 ({CLEANRL})",
    ("walker2d", "sac"): f"3591 ± 911 ({CLEANRL})",
    ("hopper", "sac"): f"2310 ± 343 ({CLEANRL})",
    ("inverted_pendulum", "sac"): f"909 ± 56 ({CLEANRL})",
    ("pendulum", "sac"): f"-157 ± 89 ({ZOO}, 20 k)",
    ("halfcheetah", "td3"): f"10201 ± 773 ({TIANSHOU})",
    ("walker2d", "td3"): f"3982 ± 275 ({TIANSHOU})",
    ("hopper", "td3"): f"3472 ± 117 ({TIANSHOU})",
    ("pendulum", "td3"): f"-152 ({ZOO}, 20 k)",
}
"""Mean final returns of others; Tianshou's are the best averages over training."""

Row = dict[str, Any]


def overrides_of(task: str, algorithm: str, seed: int, steps: int) -> list[str]:
    """Return the overrides of a run of ours; ``steps`` are rounded up to whole iterations."""
    chosen = [f"experiment=gymnasium_{task}_{algorithm}", "algorithm.preset=sb3", f"seed={seed}"]
    chosen += [
        f"evaluation.num_episodes={NUM_EPISODES}",
        f"evaluation.num_envs={NUM_EPISODES}",
        "evaluation.probe=false",
    ]
    chosen += ["cluster.num_threads=1", "trainer.save_every_minutes=0", "tracking.tensorboard=false"]
    rollout = configured(chosen).rollout
    return [*chosen, f"trainer.max_steps={-(-steps // (rollout.num_envs * rollout.num_chunks))}"]


def configured(overrides: Sequence[str]) -> Any:
    """Return the ``RunConfig`` of overrides."""
    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config

    return build_config(compose_config(overrides))


def run_ours(overrides: list[str]) -> Row:
    """Train in a separate process; return the curve and training time in seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        command = [
            sys.executable,
            "-m",
            "rlinf",
            "train",
            *overrides,
            f"output_dir={folder}",
            "tracking.progress=false",
        ]
        subprocess.run(command, check=True, cwd=scratch, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [
        [line["rollout/env_steps_total"], line["eval/return_mean"]] for line in lines if "eval/return_mean" in line
    ]
    seconds = sum(line.get("time/cpu_s", 0.0) for line in lines)
    return {"curve": curve, "wall_s": lines[-1]["time/total_s"], "cpu_s": seconds}


def ppo_settings(config: Any) -> Row:
    """Return our configuration's settings under the names used by Stable-Baselines3."""
    algorithm, trainer, rollout, model = config.algorithm, config.trainer, config.rollout, config.model.init_config
    steps = rollout.num_envs * rollout.num_chunks

    def scheduled(value: float, decay: str) -> Callable[[float], float]:
        # Theirs is asked after the rollout and ours before, so that their last update would have a rate of 0.
        return lambda left: value * min(1.0, left + steps / (steps * trainer.max_steps) if decay == "linear" else 1.0)

    from torch import nn

    return {
        "n_steps": rollout.num_chunks, "batch_size": trainer.minibatch_size, "n_epochs": algorithm.update_epochs,
        "gamma": algorithm.gamma, "gae_lambda": algorithm.gae_lambda, "ent_coef": algorithm.entropy_coef,
        "learning_rate": scheduled(trainer.learning_rate, trainer.lr_decay),
        "clip_range": scheduled(algorithm.clip_range_high, algorithm.clip_decay),
        "vf_coef": algorithm.value_coef / 2, "max_grad_norm": trainer.max_grad_norm,
        "policy_kwargs": {
            "net_arch": list(model["hidden_sizes"]), "log_std_init": model["initial_log_std"], "activation_fn": nn.Tanh,
        },
    }  # fmt: skip


def replay_settings(config: Any) -> Row:
    """Return the settings common to SAC and TD3."""
    algorithm = config.algorithm
    if algorithm.utd_ratio != 1:
        raise SystemExit(f"algorithm.utd_ratio={algorithm.utd_ratio}; required of this comparison: 1")
    return {
        "learning_rate": algorithm.learning_rate, "buffer_size": algorithm.replay_capacity, "gamma": algorithm.gamma,
        "learning_starts": algorithm.learning_starts, "batch_size": algorithm.batch_size, "tau": algorithm.tau,
        "train_freq": 1, "gradient_steps": -1,
        "policy_kwargs": {"net_arch": [algorithm.actor.hidden_size] * algorithm.actor.num_layers},
    }  # fmt: skip


def sac_settings(config: Any) -> Row:
    algorithm = config.algorithm
    alpha = f"auto_{algorithm.initial_alpha}"
    return replay_settings(config) | {"ent_coef": alpha, "target_entropy": algorithm.target_entropy}


def td3_settings(config: Any) -> Row:
    from stable_baselines3.common.noise import NormalActionNoise, VectorizedActionNoise

    algorithm, size = config.algorithm, config.model.action_token_len
    noise = NormalActionNoise(np.zeros(size), np.full(size, algorithm.noise_std))
    return replay_settings(config) | {
        "policy_delay": algorithm.policy_delay, "target_policy_noise": algorithm.target_noise_std,
        "target_noise_clip": algorithm.target_noise_clip,
        "action_noise": noise if config.rollout.num_envs == 1 else VectorizedActionNoise(noise, config.rollout.num_envs),
    }  # fmt: skip


SETTINGS = {"ppo": ppo_settings, "sac": sac_settings, "td3": td3_settings}


def run_sb3(overrides: list[str]) -> Row:
    """Train Stable-Baselines3 in this process with the settings of our configuration; return what ``run_ours`` does."""
    import gymnasium
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    from rlinf.envs import make_env
    from rlinf.evaluation.evaluator import episode_list, evaluate_policy

    torch.set_num_threads(1)
    config = configured(overrides)
    if config.env.reward_scale != 1:
        raise SystemExit(f"env.reward_scale={config.env.reward_scale}; required of this comparison: 1")
    rollout, model_config = config.rollout, config.model.init_config

    def single() -> gymnasium.Env:
        return gymnasium.wrappers.RescaleAction(gymnasium.make(config.env.id, **config.env.kwargs), -1.0, 1.0)

    envs: Any = DummyVecEnv([single] * rollout.num_envs)
    wanted = (model_config.get("normalize_state", False), getattr(config.algorithm, "scale_rewards", False))
    if any(wanted):
        envs = VecNormalize(envs, norm_obs=wanted[0], norm_reward=wanted[1], gamma=config.algorithm.gamma)
    held_out = make_env(config.env, NUM_EPISODES, auto_reset=False)
    specs = episode_list(held_out, "eval", NUM_EPISODES)
    steps = rollout.num_envs * rollout.num_chunks
    interval = steps * config.trainer.eval_every

    class Evaluate(BaseCallback):
        """Evaluates after updates, with the clocks stopped."""

        curve: list[list[float]]

        def _on_training_start(self) -> None:
            self.curve, self.wall, self.cpu = [], 0.0, 0.0
            self.since = (time.perf_counter(), time.process_time())

        def _on_rollout_start(self) -> None:
            if self.model.num_timesteps % interval == 0 and len(self.curve) * interval == self.model.num_timesteps:
                self.evaluate()

        def _on_step(self) -> bool:
            return True

        def _on_training_end(self) -> None:
            self.evaluate()

        def evaluate(self) -> None:
            self.wall += time.perf_counter() - self.since[0]
            self.cpu += time.process_time() - self.since[1]
            results = evaluate_policy(self.act, held_out, specs, seed=config.seed).results
            self.curve.append([self.model.num_timesteps, float(np.mean([one.episode_return for one in results]))])
            self.since = (time.perf_counter(), time.process_time())

        def act(self, observation: Any) -> np.ndarray:
            state = envs.normalize_obs(observation.state) if wanted[0] else observation.state
            actions, _ = self.model.predict(state, deterministic=True)
            low, high = held_out.action_low, held_out.action_high
            return low + (actions + 1) / 2 * (high - low)

    kind = getattr(stable_baselines3, config.algorithm.name.upper())
    model = kind("MlpPolicy", envs, seed=config.seed, device="cpu", **SETTINGS[config.algorithm.name](config))
    callback = Evaluate()
    model.learn(steps * config.trainer.max_steps, callback)
    return {"curve": callback.curve, "wall_s": callback.wall, "cpu_s": callback.cpu}


def run(row: Row, path: Path) -> None:
    """Carry out one run and write its row."""
    overrides = overrides_of(*(row[name] for name in ("task", "algorithm", "seed", "steps")))
    found = {"ours": run_ours, "sb3": run_sb3}[row["library"]](overrides)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    curve = [[int(step), round(value, 2)] for step, value in found["curve"]]
    seconds = {name: round(found[name], 1) for name in ("wall_s", "cpu_s")}
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps({**row, "curve": curve, **seconds, "commit": commit}))
    partial.replace(path)


def start(row: Row, path: Path) -> None:
    """Run in a single-threaded process and print the outcome."""
    path.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, str(Path(__file__).resolve())]
    subprocess.run([*command, "--run", json.dumps(row), "--out", str(path)], check=True, env=env)
    done = json.loads(path.read_text())
    print(f"{path.stem}: {done['curve'][-1][1]:.1f} after {done['cpu_s']:.0f} s of a processor", flush=True)


def path_of(row: Row, folder: Path) -> Path:
    return folder / ("_".join(str(row[name]) for name in KEY) + ".json")


def rows_in(folder: Path | None) -> list[Row]:
    """Return recorded rows and rows from a folder, which take precedence."""
    found = json.loads(RECORD.read_text()) if RECORD.is_file() else []
    found += [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))] if folder else []
    return sorted(
        {tuple(row[name] for name in KEY): row for row in found}.values(), key=lambda row: [row[k] for k in KEY]
    )


def record(rows: list[Row]) -> None:
    """Write all rows, one per line."""
    RECORD.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis, excluding the largest and smallest quarter of values (rounded down)."""
    cut = values.shape[-1] // 4
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)


def with_interval(strata: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float, float]:
    """Return the interquartile mean of all numbers, and its 95 % interval: each stratum (the seeds of a task) is drawn from again."""
    draw, parts = np.random.default_rng(seed), [np.asarray(each) for each in strata]
    again = [part[draw.integers(len(part), size=(NUM_BOOTSTRAPS, len(part)))] for part in parts]
    low, high = np.percentile(interquartile_mean(np.concatenate(again, 1)), [2.5, 97.5])
    return float(interquartile_mean(np.concatenate(parts))), float(low), float(high)


def final(row: Row) -> float:
    return row["curve"][-1][1]


def area(row: Row) -> float:
    """Return the mean return over evaluations, excluding the one before training."""
    return float(np.mean([value for _, value in row["curve"][1:]]))


def groups_of(rows: list[Row]) -> dict[tuple, dict[str, list[Row]]]:
    """Return the rows by (task, algorithm, steps) and library."""
    found: dict[tuple, dict[str, list[Row]]] = {}
    for row in rows:
        group = found.setdefault((row["task"], row["algorithm"], row["steps"]), {name: [] for name in LIBRARIES})
        group[row["library"]].append(row)
    return found


def table(rows: list[Row]) -> str:
    """Return a Markdown table of all groups."""
    lines = [
        "| task, algorithm, env steps | library, seeds | final return | area under the curve | wall s | processor s | published |",
        "|---|---|---|---|---|---|---|",
    ]
    for (task, algorithm, steps), group in groups_of(rows).items():
        for library, runs in group.items():
            if runs:
                numbers = [
                    "{:.0f} ({:.0f} to {:.0f})".format(*with_interval([[f(r) for r in runs]])) for f in (final, area)
                ]
                numbers += [f"{np.mean([row[name] for row in runs]):.0f}" for name in ("wall_s", "cpu_s")]
                name = f"{task}, {algorithm}, {steps:,}"
                lines.append(
                    f"| {name} | {library}, {len(runs)} | {' | '.join(numbers)} | {PUBLISHED.get((task, algorithm), '')} |"
                )
    return "\n".join(lines)


def verdict(rows: list[Row]) -> Row:
    """Return both libraries' interquartile mean of normalised final returns over the groups that both have run."""
    scores: dict[str, list[list[float]]] = {name: [] for name in LIBRARIES}
    for group in groups_of(rows).values():
        if all(group.values()):
            before = np.mean([row["curve"][0][1] for runs in group.values() for row in runs])
            reached = np.mean([final(row) for row in group["sb3"]])
            for library, runs in group.items():
                scores[library].append([(final(row) - before) / (reached - before) for row in runs])
    if not scores["sb3"]:
        return {"ours": None, "peer": None, "ratio": None}
    (ours, *interval), (peer, *theirs) = (with_interval(scores[name]) for name in LIBRARIES)
    return {
        "ours": round(ours, 3), "peer": round(peer, 3), "ratio": round(ours / peer, 3),
        "ours_interval": np.round(interval, 3).tolist(), "peer_interval": np.round(theirs, 3).tolist(),
    }  # fmt: skip


def draw(rows: list[Row], path: Path) -> None:
    """Plot the curves of all groups, with mean and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = groups_of(rows)
    columns = min(3, len(groups))
    shape = (-(-len(groups) // columns), columns)
    figure, axes = pyplot.subplots(*shape, figsize=(4.5 * shape[1], 3.2 * shape[0]), squeeze=False)
    for axis in axes.flat[len(groups) :]:
        axis.remove()
    for axis, ((task, algorithm, _), group) in zip(axes.flat, groups.items(), strict=False):
        for library, color in zip(LIBRARIES, ("tab:blue", "tab:orange"), strict=True):
            curves = [row["curve"] for row in group[library]]
            if curves:
                shared = [list(points) for points in zip(*curves, strict=False)]
                steps = [points[0][0] for points in shared]
                values = np.array([[value for _, value in points] for points in shared])
                axis.plot(steps, values.mean(1), color=color, label=f"{library}, {len(curves)} seeds")
                axis.fill_between(steps, values.min(1), values.max(1), color=color, alpha=0.2)
        axis.set(title=f"{task}, {algorithm}", xlabel="env steps", ylabel="return")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="hopper", help=", ".join(TASKS))
    parser.add_argument("--algorithms", default="sac", help=", ".join(ALGORITHMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=200_000, help="env steps per run")
    parser.add_argument("--out", type=Path, default=Path("outputs/golden"), help="folder for finished runs")
    parser.add_argument("--only", choices=[*LIBRARIES, "table"], help="run only one library, or only make the table")
    parser.add_argument("--record", action="store_true", help=f"add the finished runs to {RECORD.relative_to(ROOT)}")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(json.loads(arguments.run), arguments.out)
        return
    tasks, algorithms = arguments.tasks.split(","), arguments.algorithms.split(",")
    for name, known in (*((task, TASKS) for task in tasks), *((one, ALGORITHMS) for one in algorithms)):
        if name not in known:
            parser.error(f"'{name}' is not one of {', '.join(known)}")
    libraries = [name for name in LIBRARIES if arguments.only in (None, name)]
    have = {tuple(row[name] for name in KEY) for row in rows_in(arguments.out)}
    for seed in map(int, arguments.seeds.split(",")):
        for task in tasks:
            for algorithm in algorithms:
                for library in libraries:
                    values = (task, algorithm, library, seed, arguments.steps)
                    row = dict(zip(KEY, values, strict=True))
                    if values not in have:
                        start(row, path_of(row, arguments.out))
    rows = rows_in(arguments.out)
    if arguments.record:
        record(rows)
    print(table(rows))
    if rows:
        arguments.out.mkdir(parents=True, exist_ok=True)
        draw(rows, arguments.out / "golden.png")
    sizes = {
        "tasks": tasks,
        "algorithms": algorithms,
        "seeds": arguments.seeds,
        "steps": arguments.steps,
        "runs": len(rows),
    }
    print(json.dumps({"name": "golden", **verdict(rows), "sizes": sizes}))


if __name__ == "__main__":
    main()
