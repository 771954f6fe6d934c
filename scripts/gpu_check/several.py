"""Several GPUs: groups and meshes of ranks, bandwidth, ranks that must not share a GPU, and ranks that die or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from gpu_check.isolation import ranks_rows, shared_gpu_row
from gpu_check.rows import GB, NEEDS_GPU, Rows, Setting
from gpu_check.runs import largest_gap, rl_metrics, train
from gpu_check.training import TWO_STEPS

UNIT_NUMBERS = 202_383_360
"""Weights of one layer of a Llama of 7B: a unit that FSDP2 gathers."""
DEADLINE_S = 20.0
END_S = DEADLINE_S + 60
"""Seconds in which a run whose rank hangs has ended: its deadline, and the time for the stacks of all ranks."""
DATA = Path(__file__).resolve().parents[1] / "make_arithmetic_data.py"


def m1_recipe(rows: Rows, setting: Setting) -> None:
    """A recipe on all ranks, replicated and sharded, writes its checkpoints by a thread and resumes."""
    subprocess.run(
        [sys.executable, str(DATA), "arithmetic", "--train", "640", "--test", "20"], check=True, cwd=setting.folder
    )
    ranks = setting.num_gpus
    for name, sizes in {"replicas": (1, ranks), "shards": (ranks, 1)}.items():
        parallelism = [
            f"policy.parallelism.dp_shard_size={sizes[0]}",
            f"policy.parallelism.dp_replicate_size={sizes[1]}",
        ]
        words = [
            f"policy.device={'auto' if setting.is_gpu else 'cpu'}",
            "validation.enable=false",
            "train.ckpt.save_freq=2",
        ]
        words += [
            "train.ckpt.save_mode=async",
            f"train.output_dir={setting.folder / name}",
            "train.train_batch_per_replica=16",
        ]
        words += ["train.train_policy.mini_batch=16", "train.timestamp=run"]
        for steps in (2, 4):
            done = subprocess.run(
                [sys.executable, "-m", "rlinf", "launch", "--config", "arithmetic_sft", *parallelism, *words,
                 f"train.max_num_steps={steps}", f"train.resume={str(steps > 2).lower()}"],
                cwd=setting.folder,
            )  # fmt: skip
            what = f"status of a recipe on {ranks} {name}, {'resumed from' if steps > 2 else 'with'} asynchronous checkpoints"
            rows.holds(what, done.returncode, 0)


def hybrid_words(setting: Setting, size: int) -> list[str]:
    """Return the overrides of a run whose weights are sharded over ``size`` ranks."""
    shards = ["trainer.sharding=fsdp2", f"trainer.shard_size={size}", "trainer.save_mode=async"]
    return [*TWO_STEPS, *shards, f"cluster.num_processes={setting.num_gpus}"]


def m2_hybrid_shards(rows: Rows, setting: Setting) -> None:
    """Groups of ranks that hold replicas of shards (HSDP) train as replicas do."""
    ranks = setting.num_gpus
    size = max(1, ranks // 2)
    replicas = rl_metrics(
        train(setting, "replicas", [*TWO_STEPS, f"cluster.num_processes={ranks}", "trainer.sharding=replicate"])
    )
    gap = largest_gap(replicas, rl_metrics(train(setting, "hybrid", hybrid_words(setting, size))))
    rows.at_most(f"difference of the losses of {ranks} replicas and of shards over {size} of {ranks} ranks", gap, 1e-3)


def m3_bandwidth(rows: Rows, setting: Setting) -> None:
    """The bandwidth with which a unit of FSDP2 is gathered."""
    measured = in_ranks(setting, gather_units)
    what = f"GB/s of an all-gather of one layer of a 7B over {setting.num_gpus} ranks"
    if setting.is_full:
        rows.at_least(what, measured / GB, 50)
    else:
        rows.state(f"{what}, a smaller layer", f"{measured / GB:.2f}")


def gather_units(setting: Setting) -> None:
    """Time the gathers of a unit in bf16; rank 0 writes the bytes that a rank receives per second."""
    size, number = dist.get_world_size(), UNIT_NUMBERS if setting.is_full else 2**16
    number -= number % size
    own = torch.zeros(number // size, dtype=torch.bfloat16, device=setting.device)
    whole = own.new_empty(number)
    for count in (3, 10):  # the first ones open the connections
        finish(setting)
        start = time.monotonic()
        for _ in range(count):
            dist.all_gather_into_tensor(whole, own)
        finish(setting)
    rate = count * whole.nbytes * (size - 1) / size / (time.monotonic() - start)
    if dist.get_rank() == 0:
        (setting.folder / "rate.json").write_text(json.dumps(rate))


def finish(setting: Setting) -> None:
    """Wait for all ranks and for the GPU."""
    dist.barrier()
    if setting.is_gpu:
        torch.cuda.synchronize()


def in_ranks(setting: Setting, function: Callable[[Setting], None]) -> float:
    """Run a function on all ranks; return the number that its first rank has written."""
    from rlinf.distributed.launch import launch

    launch(function, setting, setting.num_gpus, setting.device)
    return json.loads((setting.folder / "rate.json").read_text())


def m4_own_gpus(rows: Rows, setting: Setting) -> None:
    """Ranks of torchrun have a GPU each, or are rejected."""
    ranks_rows(rows, setting, setting.num_gpus)
    if setting.is_gpu:
        shared_gpu_row(rows, setting)
    else:
        rows.not_measured("two ranks of torchrun on one GPU are rejected", NEEDS_GPU)


def m5_lost_ranks(rows: Rows, setting: Setting) -> None:
    """A killed rank, and one that never comes to an all-reduce, end the run on all ranks in time."""
    ended(rows, setting, "a rank is killed in an all-reduce", die_in_a_collective, "RankKilledError", DEADLINE_S)
    ended(rows, setting, "a rank never comes to an all-reduce", miss_a_collective, "DeadlineError", END_S)


def ended(
    rows: Rows, setting: Setting, what: str, function: Callable[[Setting], None], error: str, limit_s: float
) -> None:
    """State how a launch ends in which one rank fails, and after how many seconds."""
    from dataclasses import asdict

    from rlinf.distributed.config import DeadlinesConfig
    from rlinf.distributed.launch import launch

    deadlines, raised = asdict(DeadlinesConfig()) | {"update": DEADLINE_S}, "none"
    try:
        launch(function, setting, setting.num_gpus, setting.device, deadlines=deadlines)
    except Exception as caught:  # noqa: BLE001 - its kind is the result
        raised = type(caught).__name__
    seconds = time.time() - float((setting.folder / "failed_at").read_text())
    rows.holds(f"{what}: error of the run", raised, error)
    rows.at_most(f"{what}: seconds until the run has ended", seconds, limit_s)


def reduce_often(setting: Setting, fail: Callable[[], None]) -> None:
    """Add up over the ranks; the last rank fails after some rounds."""
    from rlinf.distributed.deadlines import deadline

    tensor = torch.ones(2**20, device=setting.device)
    with deadline("update"):
        for number in range(1000):
            if number == 10 and dist.get_rank() == dist.get_world_size() - 1:
                (setting.folder / "failed_at").write_text(str(time.time()))
                fail()
            dist.all_reduce(tensor)
            finish(setting)


def die_in_a_collective(setting: Setting) -> None:
    """The last rank is killed."""
    reduce_often(setting, lambda: os.kill(os.getpid(), signal.SIGKILL))


def miss_a_collective(setting: Setting) -> None:
    """The last rank sleeps while the others wait inside the all-reduce."""
    reduce_often(setting, lambda: time.sleep(600))
