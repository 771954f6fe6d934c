"""What ``model.compile`` buys in the quickstart's update, and what it costs: samples per second and seconds of compilation.

``ours`` is ``TrainWorker.update`` with compiled blocks, ``peer`` the same without; the two alternate in one process, so a busy
machine slows both. ``pays_after_samples`` is how many samples of training the compilation takes to pay for itself; null: it does
not.

    python benchmarks/compile.py [--experiment quickstart] [--rounds 5] [overrides ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch._inductor.config as inductor
from update import rollout_to_train_on

from rlinf.commands.open_checkpoint import statistics_of_env
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed.process_group import set_num_threads
from rlinf.envs import make_env
from rlinf.models import build_policy
from rlinf.models.blocks import repeated_blocks, set_training_options
from rlinf.seeding import seed_everything


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--rounds", type=int, default=5)
    arguments, overrides = parser.parse_known_args()
    words = [f"experiment={arguments.experiment}", "algorithm.critic_warmup_steps=0", *overrides]
    config = build_config(compose_config(words))
    set_num_threads(1, 1)
    inductor.force_disable_caches = True  # kernels of former runs would make the compilation look short
    seed_everything(0)

    env = make_env(config.env, 1, auto_reset=False)
    model = build_policy(config, statistics_of_env(config, env))
    worker, algorithm, flat, minibatches = rollout_to_train_on(config, env, model)
    num_samples = len(flat.loss_mask)

    def update() -> float:
        start = time.perf_counter()
        for minibatch in minibatches:
            worker.update(flat, minibatch, algorithm, 0)
        return time.perf_counter() - start

    blocks = repeated_blocks(model) or list(model.children())
    start = time.perf_counter()
    metrics = {"peer": worker.update(flat, minibatches[0], algorithm, 0)}
    first = {"peer": time.perf_counter() - start}
    set_training_options(model, recomputed=False, compiled=True)
    compiled = [block.forward for block in blocks]
    start = time.perf_counter()
    metrics["ours"] = worker.update(flat, minibatches[0], algorithm, 0)
    first["ours"] = time.perf_counter() - start
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(arguments.rounds):
        for side in ("ours", "peer"):
            for block, forward in zip(blocks, compiled, strict=True):
                block.forward = forward
                if side == "peer":
                    del block.forward  # the class's own
            seconds[side].append(update())
    taken = {side: statistics.median(values) / num_samples for side, values in seconds.items()}
    compile_seconds, saved = first["ours"] - first["peer"], taken["peer"] - taken["ours"]
    result = {
        "name": f"compiled update of {arguments.experiment}", "ours": round(1 / taken["ours"], 1),
        "peer": round(1 / taken["peer"], 1), "ratio": round(taken["peer"] / taken["ours"], 3), "unit": "samples/s",
        "compile_seconds": round(compile_seconds, 1),
        "pays_after_samples": None if saved <= 0 else round(compile_seconds / saved),
        "grad_norm_gap": abs(metrics["ours"]["grad_norm"] / metrics["peer"]["grad_norm"] - 1),
        "sizes": {
            "parameters": sum(p.numel() for p in model.parameters()), "minibatch": config.trainer.minibatch_size,
            "micro_batch": config.model.micro_batch_size, "threads": torch.get_num_threads(), "rounds": arguments.rounds,
        },
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
