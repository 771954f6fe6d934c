"""Measures the speed of a quickstart PPO update as a fraction of the machine's matrix-multiplication speed.

``ours`` is the samples per second of ``TrainWorker.update`` (forward, loss, backward, clipping, AdamW) over a complete rollout.
``peer`` is the speed if the machine only performed the same number of multiplications at its measured matmul speed, which is the
best over the sizes of the model's largest layers and a large square, with the same dtype and threads. Their ratio is the update's
model FLOPs utilisation.

    python benchmarks/update.py [--rounds 5] [overrides ...]

On CPUs with bfloat16 instructions, ``model.precision=bf16-mixed model.attn_implementation=eager`` is the fastest (docs/gpu.md).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from rlinf.algorithms import ALGORITHMS
from rlinf.algorithms.base import Algorithm
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.distributed.process_group import set_num_threads
from rlinf.envs import make_env
from rlinf.envs.base import VectorEnv
from rlinf.envs.episodes import EpisodeSampler
from rlinf.models import build_policy
from rlinf.models.embodiment.base import ActionModel
from rlinf.rollout.collector import RolloutCollector
from rlinf.seeding import seed_everything
from rlinf.training.train_worker import Minibatch, MinibatchPlan, TrainWorker
from rlinf.types import RolloutBatch


def matmul_flops_per_s(rows: int, inner: int, columns: int, dtype: torch.dtype, rounds: int = 20) -> float:
    """Return the best measured FLOP/s of ``[rows, inner] @ [inner, columns]``."""
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return 2 * rows * inner * columns / best


def rollout_to_train_on(
    config: RunConfig, env: VectorEnv, model: ActionModel
) -> tuple[TrainWorker, Algorithm, RolloutBatch, list[Minibatch]]:
    """Collect a rollout, and return a worker that does not change weights and its training data. Closes ``env``."""
    still = replace(config.trainer, learning_rate=0.0, value_learning_rate=0.0)
    worker = TrainWorker(
        model, still, temperature=1.0, micro_batch_size=config.model.micro_batch_size,
        val_micro_batch_size=config.model.val_micro_batch_size, precision=config.model.precision,
    )  # fmt: skip
    sampler = EpisodeSampler(env.episode_specs("train"), len(env.task_names), num_groups=config.rollout.num_envs)
    collector = RolloutCollector(
        lambda count: make_env(config.env, count, auto_reset=True), sampler, num_envs=config.rollout.num_envs,
        num_chunks=config.rollout.num_chunks, temperature=1.0, autocast=worker.autocast,
    )  # fmt: skip
    algorithm = ALGORITHMS.get("ppo")(config.algorithm)
    batch = collector.collect(model.eval(), 0, 0, needs_values=True)
    collector.close(), env.close()
    batch.old_logprobs, batch.values = worker.evaluate(batch)
    algorithm.compute_advantages(batch)
    plan = MinibatchPlan(batch.loss_mask, collector.env_groups, config.trainer.minibatch_size, seed=0)
    return worker, algorithm, batch.flatten(), list(plan.epoch(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments, overrides = parser.parse_known_args()
    config = build_config(compose_config(["experiment=quickstart", "algorithm.critic_warmup_steps=0", *overrides]))
    set_num_threads(None, 1)
    seed_everything(0)

    env = make_env(config.env, 1, auto_reset=False)
    model = build_policy(config, {"norm_stats": {config.env.name: env.action_statistics()}})
    worker, algorithm, flat, minibatches = rollout_to_train_on(config, env, model)

    def update() -> None:
        for minibatch in minibatches:
            worker.update(flat, minibatch, algorithm, step=0)

    with FlopCounterMode(display=False) as counter:
        update()
    flops_per_sample = counter.get_total_flops() / len(flat.loss_mask)
    update()
    seconds = []
    for _ in range(arguments.rounds):
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    ours = len(flat.loss_mask) / statistics.median(seconds)

    dtype = torch.float32 if config.model.precision == "fp32" else torch.bfloat16
    rows = config.trainer.minibatch_size
    tower = model.vision_backbone.featurizer
    patches, (width, patch_dim) = tower.spec.grid_size**2, tower.patch_embed.stem.weight.shape
    sizes = {
        (rows * patches, patch_dim, width),
        (rows * patches, tower.spec.embed_dim, tower.spec.mlp_dim),
        (1024, 1024, 1024),
    }
    speeds = {size: matmul_flops_per_s(*size, dtype) for size in sorted(sizes)}
    for size, speed in speeds.items():
        print(f"matmul {' x '.join(map(str, size)):>20}: {speed / 1e9:7.0f} GFLOP/s")
    peak = max(speeds.values())
    print(
        f"update: {ours:.0f} samples/s, {flops_per_sample / 1e6:.1f} MFLOP a sample, {ours * flops_per_sample / 1e9:.0f} GFLOP/s"
    )
    result = {
        "name": "update", "ours": round(ours, 1), "peer": round(peak / flops_per_sample, 1),
        "ratio": round(ours * flops_per_sample / peak, 3), "unit": "samples/s",
        "mflop_per_sample": round(flops_per_sample / 1e6, 2), "matmul_peak_gflops": round(peak / 1e9, 1),
        "sizes": {
            "precision": config.model.precision, "minibatch_size": rows, "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in model.parameters()),
        },
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
