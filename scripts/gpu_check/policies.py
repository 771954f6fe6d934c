"""OpenVLA with adapters: a run of PPO, and its policy call and update by themselves."""

from __future__ import annotations

import copy
import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_check.openvla import configuration, folder_words
from gpu_check.rows import GB, NEEDS_FULL_SIZE, NEEDS_GPU, Rows, Setting
from gpu_check.runs import Watched, read_trace, rl_metrics, seconds_of, train, used_bytes

PROFILED = 1
"""The iteration that is recorded."""
NUM_ROWS = 16
SDPA = "_scaled_dot_product_"


def lora_words(setting: Setting) -> list[str]:
    """Return the overrides of three iterations, one of them recorded."""
    return [*folder_words(setting, 3), "trainer.save_mode=async", f"trainer.profile_steps=[{PROFILED},{PROFILED}]"]


def g1_openvla_lora(rows: Rows, setting: Setting) -> None:
    """OpenVLA with LoRA from a folder: the gate, its gap, memory, launches, and checkpoints of adapters alone."""
    watched = Watched(used_bytes if setting.is_gpu else lambda: 0)
    with watched:
        folder = train(setting, "openvla_lora", lora_words(setting))
    metrics = rl_metrics(folder)
    gaps = [each["rollout/logprob_gap_exp_mean"] for each in metrics]
    rows.holds("iterations of OpenVLA with LoRA", len(metrics), 3)
    rows.at_most("mean exp gap of rollout and trainer", max(gaps), 1.05)
    rows.state("maximum log-probability gap", f"{max(m['rollout/logprob_gap_max'] for m in metrics):.3g}")
    plain = [each for number, each in enumerate(metrics) if number not in (0, PROFILED)]
    rows.state("seconds of an iteration", f"{statistics.median(map(seconds_of, plain)):.1f}")
    rows.state("samples per second of an update", f"{plain[-1]['throughput/samples_per_s']:.1f}")
    checkpoint_rows(rows, setting, folder)
    trace_rows(rows, setting, folder)
    if not setting.is_full:
        rows.not_measured("peak GPU memory of the run", NEEDS_FULL_SIZE)
        return
    rows.at_most("peak GPU memory of the run", watched.highest / GB, 24, " GB")
    allocated = metrics[-1]["memory/cuda_gib"] * 2**30
    rows.at_most("peak GPU memory over torch's own peak allocation", watched.highest / allocated, 1.3)


def checkpoint_rows(rows: Rows, setting: Setting, folder: Path) -> None:
    """The checkpoint was written by a thread, holds no frozen weights, and the run continues from it."""
    newest = max((folder / "checkpoints").glob("[!.]*"), key=lambda path: path.stat().st_mtime)
    manifest = json.loads((newest / "manifest.json").read_text())
    rows.holds(
        "its checkpoint has the digest of the weights below the adapters", "base_sha256" in manifest["lora"], True
    )
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    below = sum(path.stat().st_size for path in setting.model.glob("*.safetensors"))
    if setting.is_full:
        rows.at_most("size of the checkpoint over the size of the model below", size / below, 0.15)
    else:
        rows.not_measured("size of the checkpoint over the size of the model below", NEEDS_FULL_SIZE)
    resumed = train(setting, "resumed", [f"resume={folder}", "trainer.max_steps=4"])
    rows.holds("iterations after resuming from adapters alone", len(rl_metrics(resumed)), 1)


def trace_rows(rows: Rows, setting: Setting, folder: Path) -> None:
    """What the recorded iteration launched, and how much of its time the GPU computed."""
    what = (
        "kernels of an iteration",
        "waits of the host in it",
        "copies to the host in it",
        "fraction of it in which the GPU computes",
    )
    if not setting.is_gpu:
        for each in what:
            rows.not_measured(each, NEEDS_GPU)
        return
    trace = read_trace(folder / "profile" / "trace_rank0.json.gz", f"rl step {PROFILED}")
    rows.state(what[0], trace.kernels)
    if not setting.is_full:
        for each in what[1:]:
            rows.not_measured(each, NEEDS_FULL_SIZE)
        return
    rows.at_most(what[1], trace.syncs, 1000)
    rows.at_most(what[2], trace.copies_to_host, 600)
    rows.at_least(what[3], trace.busy, 0.6)


def g5_policy_call(rows: Rows, setting: Setting) -> None:
    """One policy call and one update: time, CUDA graph, kernels of attention, waits of the host, and gaps between row counts."""
    from rlinf.envs import make_env

    config = configuration([*folder_words(setting, 1), f"cluster.device={setting.device}"])
    env = make_env(config.env, 2 * NUM_ROWS, auto_reset=False)
    observation, _ = env.reset(seed=0)
    env.close()
    model = built(config, setting)
    few = observation.select(slice(0, NUM_ROWS))
    attention_rows(rows, setting, model, few)
    gap_rows(rows, model, observation)
    sync_rows(rows, setting, config, model, few)
    time_rows(rows, setting, config, model.eval(), few)  # the last one, because it records graphs


def built(config: Any, setting: Setting) -> Any:
    """Return the policy of a configuration, ready to act."""
    from rlinf.models import build_policy

    return build_policy(config).to(setting.device).eval()


def time_rows(rows: Rows, setting: Setting, config: Any, model: Any, observation: Any) -> None:
    """Milliseconds of a call: with adapters, merged, and as a CUDA graph; and the fraction of preprocessing."""
    from rlinf.models.lora import merged_tensors

    inputs = model.preprocess(model.resize_images(observation))
    uniforms = torch.rand(NUM_ROWS, model.num_uniforms, device=setting.device)

    def seconds_of_calls(policy: Any) -> float:
        return median_seconds(lambda: policy.predict_action_batch(uniforms=uniforms, **inputs), setting)

    seconds = {"eager, with adapters": seconds_of_calls(model)}
    preprocessing = median_seconds(lambda: model.preprocess(model.resize_images(observation)), setting)
    plain = copy.deepcopy(config)
    plain.model.is_lora = False
    merged = built(plain, setting)
    held = merged.state_dict()
    with torch.no_grad():
        for name, tensor in merged_tensors(model):
            held[name].copy_(tensor)
    seconds["eager, merged"] = seconds_of_calls(merged)
    if setting.is_gpu:
        merged.use_cuda_graph()
        seconds["CUDA graph, merged"] = seconds_of_calls(merged)
    del merged, held
    if setting.is_gpu:
        torch.cuda.empty_cache()
        model.use_cuda_graph()
        seconds["CUDA graph, with adapters"] = seconds_of_calls(model)
    for name, each in seconds.items():
        rows.state(f"milliseconds per call with {NUM_ROWS} rows, {name}", f"{1e3 * each:.1f}")
    what, share = "speed-up by a CUDA graph, with adapters", preprocessing / seconds["eager, with adapters"]
    if not setting.is_full:
        rows.state("fraction of a call spent on preprocessing", f"{share:.1%}")
        rows.not_measured(what, "CUDA graphs need a GPU and the full size")
        return
    rows.at_least(what, seconds["eager, with adapters"] / seconds["CUDA graph, with adapters"], 1.2)
    rows.at_most("fraction of a call spent on preprocessing", share, 0.05)


def median_seconds(function: Callable[[], Any], setting: Setting) -> float:
    """Return the median time of a call; the first three are not counted."""
    taken = []
    for _ in range(13):
        start = time.perf_counter()
        function()
        if setting.is_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:])


def attention_rows(rows: Rows, setting: Setting, model: Any, observation: Any) -> None:
    """Which kernels compute attention, with prompts of one length and of several."""
    text, count = observation.instruction[0], len(observation.instruction)
    even = replace(observation, instruction=[text] * count)
    uneven = replace(observation, instruction=[text + " slowly" * (row % 2) for row in range(count)])
    for name, each, rejected in (("of one length", even, ("math", "efficient")), ("of two lengths", uneven, ("math",))):
        inputs = model.preprocess(model.resize_images(each))
        uniforms = torch.rand(len(each.instruction), model.num_uniforms, device=setting.device)
        with torch.profiler.profile() as profiler:
            model.predict_action_batch(uniforms=uniforms, **inputs)
        counts = Counter({
            event.key.partition(SDPA)[2]: event.count
            for event in profiler.key_averages()
            if SDPA in event.key and "backward" not in event.key
        })  # fmt: skip
        what = f"attention kernels, prompts {name}"
        rows.state(what, ", ".join(f"{kind} {count}" for kind, count in counts.most_common()) or "none")
        if setting.is_gpu:
            slow = sum(count for name, count in counts.items() if any(kind in name for kind in rejected))
            rows.holds(f"{what}: slow ones", slow, 0)
        else:
            rows.not_measured(f"{what}: slow ones", NEEDS_GPU)


@torch.no_grad()
def gap_rows(rows: Rows, model: Any, observation: Any) -> None:
    """Rollouts of 4, 8 and 16 rows against scoring of 8 and 32, and both against float32.

    Kernels round differently for each number of rows. Acting and scoring may differ as much as either differs from float32.
    """
    inputs = model.preprocess(model.resize_images(observation))
    total = len(observation.instruction)
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(total, model.num_uniforms, generator=generator).to(model.device)

    def cut(size: int) -> Iterator[tuple[slice, dict[str, Any]]]:
        for first in range(0, total, size):
            part = slice(first, first + size)
            yield part, {name: tensor[part] for name, tensor in inputs.items()}

    for played in (4, 8, 16):
        calls = [model.predict_action_batch(uniforms=uniforms[part], **some) for part, some in cut(played)]
        acted = torch.cat([model.rollout_logprobs(call) for call in calls])
        sequences = torch.cat([call.sequences for call in calls])
        for scored in (8, 32):
            parts = [model.evaluate_actions(some, sequences[part]).logprobs for part, some in cut(scored)]
            gap = float((torch.cat(parts) - acted).abs().exp().mean())
            rows.at_most(f"mean exp gap, {played} rows acting, {scored} rows scored", gap, 1.05)
    found = {"acting": acted, "scoring": torch.cat(parts)}
    exact = copy.deepcopy(model).float()
    parts = [exact.evaluate_actions(in_float32(some), sequences[part]).logprobs for part, some in cut(8)]
    errors = {name: float((each - torch.cat(parts)).abs().mean()) for name, each in found.items()}
    for name, error in errors.items():
        rows.state(f"mean difference of a log-probability to float32, {name}", f"{error:.2g}")
    between = float((found["acting"] - found["scoring"]).abs().mean())
    what = "difference of acting and scoring, over the larger of theirs to float32"
    # Two independent errors of this size differ by 1.4 of it.
    rows.at_most(what, between / max(*errors.values(), 1e-6), 1.5)


def in_float32(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs, with numbers of 16 bits as float32."""
    return {name: each.float() if each.is_floating_point() else each for name, each in inputs.items()}


def sync_rows(rows: Rows, setting: Setting, config: Any, model: Any, observation: Any) -> None:
    """Waits of the host in a policy call on inputs of the GPU, and in an update of behaviour cloning."""
    call, update = "host waits in a policy call", "host waits in an update with two micro-batches"
    from rlinf.training.train_worker import TrainWorker, sft_trainer_config

    size = NUM_ROWS // 2
    worker = TrainWorker(
        model, sft_trainer_config(config.trainer, config.sft), temperature=1.0, micro_batch_size=size,
        val_micro_batch_size=size, precision=config.model.precision,
    )  # fmt: skip
    actions = torch.zeros(NUM_ROWS, model.sft_chunk_len, model.action_dim)
    inputs = model.preprocess(model.resize_images(observation))
    uniforms = torch.rand(NUM_ROWS, model.num_uniforms, device=setting.device)
    found = {}
    for what, work in {
        call: lambda: model.eval().predict_action_batch(uniforms=uniforms, **inputs),
        update: lambda: worker.sft_update(observation, actions, NUM_ROWS, step=0),
    }.items():
        work()  # first calls choose kernels
        with counted_waits(setting) as found[what]:
            work()
    for what, limit in {call: 1, update: 20}.items():
        if not setting.is_gpu:
            rows.not_measured(what, NEEDS_GPU)
            continue
        rows.at_most(what, found[what].total(), limit)
        rows.state(
            f"{what}: where", ", ".join(f"{place} {count}" for place, count in found[what].most_common(5)) or "nowhere"
        )


@contextmanager
def counted_waits(setting: Setting) -> Iterator[Counter[str]]:
    """Count the calls that wait for the GPU inside, by file and line."""
    counts: Counter[str] = Counter()
    if not setting.is_gpu:
        yield counts
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts.update(
        f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}"
        for each in caught
        if "synchronizing CUDA operation" in str(each.message)
    )
