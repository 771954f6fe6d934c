"""vLLM beside the trainer: a language model with and without CUDA graphs, and rollouts of OpenVLA with an engine that is killed."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_check.openvla import folder_words
from gpu_check.rows import GB, NEEDS_FULL_SIZE, NEEDS_GPU, Rows, Setting
from gpu_check.runs import children_of, command_of, rl_metrics, train_command, used_bytes
from gpu_check.tokens import THREE_BILLION, drawn_model, freed

FASTER = "times as many tokens per second with CUDA graphs"


class Speed(NamedTuple):
    """What an engine does: tokens per second, seconds to sleep and to wake, bytes freed, and whether a push changes answers."""

    tokens_per_s: float
    sleep_s: float
    wake_s: float
    freed: int
    changed: bool
    restored: bool


def g3_tokens(rows: Rows, setting: Setting) -> None:
    """Tokens per second of a 3B in vLLM with graphs and without, its sleep and its pushes."""
    source = drawn_model(setting, THREE_BILLION)
    found = {"eager": speed_of(setting, source, True)}
    if setting.is_gpu:
        found["with CUDA graphs"] = speed_of(setting, source, False)
    for name, speed in found.items():
        rows.state(f"tokens per second of vLLM, {name}", f"{speed.tokens_per_s:.0f}")
        rows.holds(f"a push changes the answers of vLLM, {name}", speed.changed, True)
        rows.holds(f"a push of the first weights restores them, {name}", speed.restored, True)
    sleeps = ("seconds until vLLM sleeps", "seconds until vLLM is awake", "GPU memory that a sleeping vLLM frees")
    if not setting.is_gpu:
        for what in ("a push changes the answers of vLLM, with CUDA graphs", *sleeps, FASTER):
            rows.not_measured(what, NEEDS_GPU)
        return
    graphs = found["with CUDA graphs"]
    rows.state(sleeps[0], f"{graphs.sleep_s:.2f}")
    rows.state(sleeps[1], f"{graphs.wake_s:.2f}")
    rows.state(sleeps[2], f"{graphs.freed / GB:.2f} GB")
    if setting.is_full:
        rows.at_least(FASTER, graphs.tokens_per_s / found["eager"].tokens_per_s, 2.0)


def speed_of(setting: Setting, source: Path, eager: bool) -> Speed:
    """Start an engine with a model of a folder, and measure it."""
    from rlinf.distributed import BatchedDataDict
    from rlinf.engines.weight_handle import WeightBuckets
    from rlinf.models import HuggingFacePolicy
    from rlinf.models.generation import VllmGeneration
    from rlinf.models.lora import MergedWeights

    freed(setting)
    count, prompt, answer = (4, 8, 8) if setting.tiny else (64, 32, 128)
    policy = HuggingFacePolicy(
        str(source), torch_dtype="bfloat16", device_map=setting.device if setting.is_gpu else None
    )
    engine = VllmGeneration(None, {
        "model_name": str(source), "max_new_tokens": answer, "eos_token_id": [],
        "vllm_cfg": {"enforce_eager": eager, "max_model_len": prompt + answer, "gpu_memory_utilization": 0.3, "dtype": "bfloat16"},
    })  # fmt: skip
    buckets = WeightBuckets()
    ids = torch.randint(3, 500, (count, prompt), generator=torch.Generator().manual_seed(0))
    batch = BatchedDataDict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def answers() -> torch.Tensor:
        return engine.generate(batch, greedy=True)["output_ids"]

    def push(version: int) -> None:
        engine.update_weights(MergedWeights(policy.model, version, buckets))

    try:
        engine.prepare_for_generation()
        push(1)
        first = answers()
        start = time.monotonic()
        answers()
        rate = count * answer / (time.monotonic() - start)
        sleep_s, wake_s, num_bytes = slept(engine, setting)
        negate_actor(policy.model)
        push(2)
        changed = not torch.equal(first, answers())
        negate_actor(policy.model)
        push(3)
        return Speed(rate, sleep_s, wake_s, num_bytes, changed, torch.equal(first, answers()))
    finally:
        engine.shutdown()
        buckets.close()


def slept(engine: Any, setting: Setting) -> tuple[float, float, int]:
    """Let an engine sleep and wake; return the seconds of both, and the bytes that are free meanwhile."""
    if not setting.is_gpu:
        return 0.0, 0.0, 0
    used, start = used_bytes(), time.monotonic()
    engine.worker.sleep()
    sleep_s, num_bytes = time.monotonic() - start, used - used_bytes()
    start = time.monotonic()
    engine.worker.engine.wake()
    return sleep_s, time.monotonic() - start, num_bytes


@torch.no_grad()
def negate_actor(model: torch.nn.Module) -> None:
    """Make the least likely token the most likely one."""
    next(tensor for name, tensor in model.named_parameters() if name.endswith("lm_head.weight")).neg_()


def vllm_words(setting: Setting) -> list[str]:
    """Return the overrides of a run whose rollouts are in vLLM."""
    return [*folder_words(setting, 3), "rollout.backend=vllm"]


def g3_rollouts(rows: Rows, setting: Setting) -> None:
    """Three iterations with rollouts in vLLM, the engine killed in the middle of the second rollout."""
    folder = setting.folder / "vllm"
    run = subprocess.Popen(train_command(setting, folder, vllm_words(setting)), cwd=setting.folder)
    killed = kill_engine_in_second_rollout(run, folder)
    if run.wait() != 0:
        raise RuntimeError(f"the run ended with status {run.returncode}")
    metrics = rl_metrics(folder)
    rows.holds("iterations with vLLM, an engine killed in the second rollout", len(metrics), 3)
    rows.holds("engines killed", killed, 1)
    rows.at_most("mean exp gap of vLLM and trainer", max(m["rollout/logprob_gap_exp_mean"] for m in metrics), 1.05)
    what = "seconds to wake the engine and push the weights"
    if setting.is_full:
        rows.at_most(what, statistics.median(m["time/sync_s"] for m in metrics[1:]), 2.0)
    else:
        rows.not_measured(what, NEEDS_FULL_SIZE)


def kill_engine_in_second_rollout(run: subprocess.Popen, folder: Path) -> int:
    """Kill the run's engine in the middle of its second rollout; return how many processes were killed."""
    while run.poll() is None:
        if (folder / "metrics.jsonl").is_file() and (logged := rl_metrics(folder)):
            time.sleep(logged[0]["time/sync_s"] + 0.4 * logged[0]["time/rollout_s"])
            engines = [pid for pid in children_of(run.pid) if "rlinf.engines.vllm_process" in command_of(pid)]
            for pid in engines[:1]:
                os.kill(pid, signal.SIGKILL)
            return len(engines[:1])
        time.sleep(0.05)
    return 0
