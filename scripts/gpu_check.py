"""What only a GPU can show, each number with its threshold. ``scripts/gpu_check.sh`` starts it.

Every check runs in a process of its own, so that one that fails or hangs leaves the others alone, and the table is written again
after each of them. The exit status is 0 if no number misses its threshold and no check fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
LIMIT_S = {"G1": 330, "G2": 110, "G3": 280, "G4": 240, "G5": 150, "G6": 270, "G7": 120}
"""Seconds of each check; together 25 minutes."""

OPENVLA_LORA_BYTES = 21e9
"""GPU memory of OpenVLA with LoRA of rank 32: 15.1 GB of weights, adapters with masters, gradients and moments, activations."""


@dataclass
class Row:
    """One number of the table.

    Attributes:
        check: G1 to G7.
        what: What was measured.
        value: The number as text.
        required: The threshold as text; empty: stated only.
        passed: None: it was stated only, or could not be measured here (``value`` says why).
    """

    check: str
    what: str
    value: str
    required: str = ""
    passed: bool | None = None


@dataclass
class Setting:
    """Where a check runs."""

    device: str
    tiny: bool
    folder: Path

    @property
    def is_gpu(self) -> bool:
        """Whether a GPU is measured."""
        return self.device == "cuda"


def at_most(check: str, what: str, value: float, limit: float, unit: str = "") -> Row:
    """Return a row whose number must not exceed ``limit``."""
    return Row(check, what, f"{value:.4g}{unit}", f"at most {limit:.4g}{unit}", bool(value <= limit))


def at_least(check: str, what: str, value: float, limit: float, unit: str = "") -> Row:
    """Return a row whose number must reach ``limit``."""
    return Row(check, what, f"{value:.4g}{unit}", f"at least {limit:.4g}{unit}", bool(value >= limit))


def holds(check: str, what: str, value: object, required: object) -> Row:
    """Return a row whose value must equal ``required``."""
    return Row(check, what, str(value), str(required), value == required)


def not_measured(check: str, what: str, why: str) -> Row:
    """Return a row that says why there is no number."""
    return Row(check, what, f"not measured: {why}")


# -- runs ----------------------------------------------------------------------------------------------------------


def train(setting: Setting, name: str, words: list[str], **popen: Any) -> Path:
    """Run ``rlinf train`` in a process, and return its folder; raise CalledProcessError if it fails."""
    folder = setting.folder / name
    command = train_command(setting, folder, words)
    subprocess.run(command, check=True, cwd=setting.folder, **popen)
    return folder


def train_command(setting: Setting, folder: Path, words: list[str]) -> list[str]:
    """Return the command of a run without pictures, tables of progress or checkpoints on the way."""
    quiet = ["tracking.progress=false", "evaluation.num_videos_per_task=0", "trainer.save_every_minutes=0"]
    place = [f"cluster.device={setting.device}", f"output_dir={folder}"]
    place += [] if setting.is_gpu else ["cluster.num_threads=1"]
    return [sys.executable, "-m", "rlinf", "train", *words, *quiet, *place]


def rl_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each iteration of RL."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "rollout/logprob_gap_max" in line]


def openvla_words(setting: Setting, num_steps: int) -> list[str]:
    """Return the overrides of OpenVLA with LoRA and random weights: 7B, or a tiny one that decodes token by token as well."""
    common = [f"trainer.max_steps={num_steps}", "evaluation.num_episodes=4", "sft.max_steps=0", "trainer.max_keep=1"]
    if setting.tiny:
        adapters = ["model.is_lora=true", "model.lora.rank=4", "env.tasks=[reach]"]
        small = ["rollout.num_envs=8", "rollout.num_chunks=16", "trainer.minibatch_size=16"]
        return ["experiment=quickstart_vllm", "rollout.backend=torch", *adapters, *small, *common]
    return ["experiment=openvla_tabletop_lora", *common]


# -- the checks ----------------------------------------------------------------------------------------------------


def g1_openvla_lora(setting: Setting) -> list[Row]:
    """Three iterations of OpenVLA with LoRA: the gate, its gap, and the memory."""
    metrics = rl_metrics(train(setting, "openvla_lora", openvla_words(setting, 3)))
    gap = max(each["rollout/logprob_gap_exp_mean"] for each in metrics)
    rows = [
        holds("G1", "iterations of OpenVLA with LoRA", len(metrics), 3),
        at_most("G1", "mean exp gap of rollout and trainer", gap, 1.05),
        Row("G1", "largest gap of a log-probability", f"{max(m['rollout/logprob_gap_max'] for m in metrics):.3g}"),
        Row("G1", "seconds of an iteration", f"{statistics.median(seconds_of(m) for m in metrics):.1f}"),
    ]
    if not setting.is_gpu or setting.tiny:
        return [*rows, not_measured("G1", "peak GPU memory against the estimate", "needs the full size on a GPU")]
    peak = metrics[-1]["memory/cuda_gib"] * GIB
    return [*rows, at_most("G1", "peak GPU memory over the estimate of 21 GB", peak / OPENVLA_LORA_BYTES, 1.1)]


def seconds_of(metrics: dict[str, float]) -> float:
    """Return the seconds of an iteration."""
    return sum(metrics[f"time/{part}_s"] for part in ("sync", "rollout", "logprob", "update"))


def g2_isolation(setting: Setting) -> list[Row]:
    """A rank of torchrun computes and renders on its own GPU; a simulation on the GPU resets quickly and frees its memory."""
    words = ["experiment=quickstart", "trainer.max_steps=1", "sft.max_steps=2", "sft.num_demonstrations=4"]
    words += ["rollout.num_envs=8", "rollout.num_chunks=16", "trainer.minibatch_size=16", "evaluation.num_episodes=4"]
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    before, seen = compute_apps(), set()
    watching = threading.Event()

    def watch() -> None:
        while not watching.wait(0.2):
            seen.update(uuid for pid, uuid in compute_apps() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        train(setting, "isolation", words, env=os.environ | launcher)
    finally:
        watching.set()
        watcher.join()
    rows = [holds("G2", "iterations as a rank of torchrun", len(rl_metrics(setting.folder / "isolation")), 1)]
    if setting.is_gpu:
        rows.append(holds("G2", "GPUs with a process of the run", len(seen), 1))
    else:
        rows.append(not_measured("G2", "GPUs with a process of the run", "needs a GPU"))
    return [*rows, *maniskill_rows(setting)]


def compute_apps() -> set[tuple[str, str]]:
    """Return process id and GPU of each process that computes on a GPU."""
    command = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        return set()
    return {tuple(part.strip() for part in line.split(",")[:2]) for line in lines if "," in line}


def maniskill_rows(setting: Setting) -> list[Row]:
    """256 rows of ManiSkill on the GPU."""
    what = "seconds to reset 256 rows of maniskill_gpu"
    if not setting.is_gpu or importlib.util.find_spec("mani_skill") is None:
        return [not_measured("G2", what, "needs a GPU and the extra maniskill")]
    from rlinf.api import make_env

    env = make_env("maniskill_gpu", 256, auto_reset=False)
    env.reset(seed=0)
    start = time.monotonic()
    env.reset(seed=1)
    taken, used = time.monotonic() - start, torch.cuda.mem_get_info()[0]
    env.offload()
    freed = torch.cuda.mem_get_info()[0] - used
    env.reset(seed=2)
    held = torch.cuda.mem_get_info()[0]
    env.close()
    total = torch.cuda.mem_get_info()[0] - held
    share = freed / total if total > 0 else 0.0
    return [at_most("G2", what, taken, 0.5), at_least("G2", "share of its memory that offload returns", share, 0.9)]


def g3_vllm(setting: Setting) -> list[Row]:
    """Rollouts in vLLM beside the trainer: the gap, two syncs, and an engine that is killed in the middle of a rollout."""
    if importlib.util.find_spec("vllm") is None:
        return [not_measured("G3", "rollouts in vLLM", "needs the extra vllm")]
    words = [*openvla_words(setting, 3), "rollout.backend=vllm"]
    folder = setting.folder / "vllm"
    run = subprocess.Popen(train_command(setting, folder, words), cwd=setting.folder)
    killed = kill_engine_after_first_iteration(run, folder)
    if run.wait() != 0:
        raise RuntimeError(f"the run ended with status {run.returncode}")
    metrics = rl_metrics(folder)
    rows = [
        holds("G3", "iterations with vLLM, an engine killed after the first", len(metrics), 3),
        holds("G3", "engines killed", killed, 1),
        at_most(
            "G3", "mean exp gap of vLLM and trainer", max(m["rollout/logprob_gap_exp_mean"] for m in metrics), 1.05
        ),
    ]
    slowest = statistics.median(m["time/sync_s"] for m in metrics[1:])
    if not setting.is_gpu or setting.tiny:
        return [*rows, not_measured("G3", "seconds of a weight push", "needs the full size on a GPU")]
    return [*rows, at_most("G3", "seconds of a weight push", slowest, 1.0)]


def kill_engine_after_first_iteration(run: subprocess.Popen, folder: Path) -> int:
    """Kill the run's engine once its first iteration is logged; return how many processes were killed."""
    while run.poll() is None:
        if (folder / "metrics.jsonl").is_file() and rl_metrics(folder):
            engines = [pid for pid in children_of(run.pid) if "rlinf.engines.vllm_process" in command_of(pid)]
            for pid in engines[:1]:
                os.kill(pid, signal.SIGKILL)
            return len(engines[:1])
        time.sleep(0.05)
    return 0


def children_of(pid: int) -> list[int]:
    """Return all processes below a process (Linux)."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children_of(child)]
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except FileNotFoundError:
        return ""


def g4_token_policy(setting: Setting) -> list[Row]:
    """A step of ``HuggingFacePolicy`` on 8 x 2048 tokens: LoRA of a 7B, and a 3B in full."""
    seven = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    three = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
    cases = [("7B, LoRA", seven | {"num_key_value_heads": 4}, {"lora": {}}, 60.0)]
    cases += [("3B, in full", three | {"num_key_value_heads": 2}, {}, 90.0)]
    rows = []
    if setting.tiny:
        cases = [(f"tiny in place of {name}", *rest) for name, *rest in cases]
    for name, sizes, arguments, limit_gib in cases:
        rows += token_step(setting, name, sizes, arguments, limit_gib)
    return rows


def token_step(setting: Setting, name: str, sizes: dict[str, int], arguments: dict, limit_gib: float) -> list[Row]:
    """Take one step of negative log-likelihood on random tokens, and state its memory."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlinf.algorithms import NLLLossFn
    from rlinf.distributed import BatchedDataDict
    from rlinf.models import HuggingFacePolicy

    length, vocabulary = (32, 512) if setting.tiny else (2048, 152064)
    if setting.tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes["num_key_value_heads"] = 2
    with torch.device(setting.device):
        config = Qwen2Config(**sizes, vocab_size=vocabulary, dtype="bfloat16", tie_word_embeddings=False)
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    source = setting.folder / "token_model"
    model.save_pretrained(source)
    del model
    if setting.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    policy = HuggingFacePolicy(
        str(source), torch_dtype="bfloat16", micro_batch_size=1, gradient_checkpointing=True, device_map=setting.device, **arguments
    )  # fmt: skip
    ids = torch.randint(0, vocabulary, (8, length), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_mask": torch.ones(8, length)}
    start = time.monotonic()
    metrics = policy.train(BatchedDataDict(data), NLLLossFn())
    rows = [
        holds("G4", f"{name}: the loss is finite", bool(torch.isfinite(torch.tensor(metrics["loss"]))), True),
        Row("G4", f"{name}: seconds of a step of 8 x {length} tokens", f"{time.monotonic() - start:.2f}"),
    ]
    del policy
    if not setting.is_gpu or setting.tiny:
        return [*rows, not_measured("G4", f"{name}: peak GPU memory", "needs the full size on a GPU")]
    return [*rows, at_most("G4", f"{name}: peak GPU memory", metrics["memory/cuda_gib"], limit_gib, " GiB")]


def g5_decoding(setting: Setting) -> list[Row]:
    """Decoding of 16 rows: with adapters, merged, and as a CUDA graph; and the share of preprocessing in a policy call."""
    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config
    from rlinf.envs import make_env
    from rlinf.models import build_policy
    from rlinf.models.lora import merged_tensors

    words = [*openvla_words(setting, 1), f"cluster.device={setting.device}"]
    config = build_config(compose_config(words))
    env = make_env(config.env, 16, auto_reset=False)
    observation, _ = env.reset(seed=0)
    statistics_of_env = {"norm_stats": {config.env.name: env.action_statistics()}}
    adapted = build_policy(config, statistics_of_env).to(setting.device).eval()
    inputs = adapted.preprocess(adapted.resize_images(observation))
    uniforms = torch.rand(16, adapted.num_uniforms, device=setting.device)

    def seconds_of_calls(model: Any) -> float:
        return median_seconds(lambda: model.predict_action_batch(uniforms=uniforms, **inputs), setting)

    seconds = {"eager, with adapters": seconds_of_calls(adapted)}
    preprocessing = median_seconds(lambda: adapted.preprocess(adapted.resize_images(observation)), setting)
    config.model.is_lora = False
    merged = build_policy(config, statistics_of_env).to(setting.device).eval()
    held = merged.state_dict()
    with torch.no_grad():
        for name, tensor in merged_tensors(adapted):
            held[name].copy_(tensor)
    seconds["eager, merged"] = seconds_of_calls(merged)
    if setting.is_gpu:
        del merged, held
        torch.cuda.empty_cache()
        adapted.use_cuda_graph()
        seconds["CUDA graph, with adapters"] = seconds_of_calls(adapted)
    env.close()
    rows = [
        Row("G5", f"milliseconds of a call of 16 rows, {name}", f"{1e3 * each:.1f}") for name, each in seconds.items()
    ]
    fastest = seconds["eager, with adapters"] / min(seconds.values())
    what, share = "times as fast as eager with adapters", preprocessing / seconds["eager, with adapters"]
    if not setting.is_gpu or setting.tiny:
        rows.append(Row("G5", "share of preprocessing in a call", f"{share:.1%}"))
        return [*rows, not_measured("G5", what, "CUDA graphs need a GPU and the full size")]
    return [*rows, at_least("G5", what, fastest, 2.5), at_most("G5", "share of preprocessing in a call", share, 0.05)]


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


def g6_bf16_learns(setting: Setting) -> list[Row]:
    """PPO in bf16 reaches the success of float32."""
    size = ["model.init_config.text_config.hidden_size=512", "model.init_config.text_config.intermediate_size=1408"]
    size += ["model.init_config.text_config.num_hidden_layers=16", "model.hidden_size=512"]
    steps = ["sft.max_steps=1000", "trainer.max_steps=30", "evaluation.num_episodes=200"]
    if setting.tiny:
        size, steps = [], ["sft.max_steps=2", "sft.num_demonstrations=8", "trainer.max_steps=1", "rollout.num_envs=8"]
        steps += ["rollout.num_chunks=16", "trainer.minibatch_size=16", "evaluation.num_episodes=8"]
    found = {}
    for precision in ("fp32", "bf16"):
        words = ["experiment=quickstart", f"model.precision={precision}", *size, *steps]
        summary = json.loads((train(setting, precision, words) / "summary.json").read_text())
        found[precision] = summary["success_after_rl"]
    rows = [Row("G6", f"success in {name}", f"{each['success_rate']:.1%}") for name, each in found.items()]
    if setting.tiny:
        return [*rows, not_measured("G6", "success in bf16 against float32", "needs the whole training")]
    lowest, reached = found["fp32"]["interval"][0], found["bf16"]["interval"][1]
    return [*rows, at_least("G6", "upper end of bf16's interval, against the lower end of float32's", reached, lowest)]


def g7_fsdp2(setting: Setting) -> list[Row]:
    """FSDP2 on one rank equals the replicated engine, and its checkpoint resumes."""
    words = ["experiment=quickstart", "sft.max_steps=2", "sft.num_demonstrations=8", "evaluation.num_episodes=4"]
    words += [
        "rollout.num_envs=8",
        "rollout.num_chunks=16",
        "trainer.minibatch_size=16",
        "algorithm.critic_warmup_steps=0",
    ]
    losses = {}
    for sharding in ("replicate", "fsdp2"):
        folder = train(setting, sharding, [*words, f"trainer.sharding={sharding}", "trainer.max_steps=2"])
        losses[sharding] = [each["train/loss"] for each in rl_metrics(folder)]
    gap = max(abs(a - b) for a, b in zip(losses["replicate"], losses["fsdp2"], strict=True))
    resumed = train(setting, "resumed", [f"resume={setting.folder / 'fsdp2'}", "trainer.max_steps=3"])
    return [
        at_most("G7", "difference of the losses of FSDP2 and of replication", gap, 1e-3),
        holds("G7", "iterations after a resume of the FSDP2 checkpoint", len(rl_metrics(resumed)), 1),
    ]


CHECKS: dict[str, Callable[[Setting], list[Row]]] = {
    "G1": g1_openvla_lora, "G2": g2_isolation, "G3": g3_vllm, "G4": g4_token_policy, "G5": g5_decoding, "G6": g6_bf16_learns,
    "G7": g7_fsdp2,
}  # fmt: skip


# -- the table -----------------------------------------------------------------------------------------------------


def run_check(name: str, arguments: argparse.Namespace, folder: Path) -> tuple[list[Row], str]:
    """Run one check in a process; return its rows, and what it printed if it failed."""
    answer = folder / "rows.json"
    command = [sys.executable, __file__, "--device", arguments.device, "--child", name, "--output", str(answer)]
    command += ["--tiny"] if arguments.tiny else []
    log = folder / "log.txt"
    with open(log, "wb") as file:
        process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, start_new_session=True)
        try:
            status = process.wait(LIMIT_S[name])
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status == 0:
        return [Row(**row) for row in json.loads(answer.read_text())], ""
    ended = f"took longer than {LIMIT_S[name]} s" if status is None else f"ended with status {status}"
    return [Row(name, CHECKS[name].__doc__.splitlines()[0], ended, "a result", False)], log.read_text()[-3000:]


def table(rows: list[Row], arguments: argparse.Namespace, seconds: float) -> str:
    """Return the page."""
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU ({platform.machine()})"
    size = "tiny models: this shows that the checks run, not what a GPU does" if arguments.tiny else "full size"
    words = {True: "yes", False: "**no**", None: ""}
    lines = [
        "# What a GPU shows",
        "",
        f"Written by `bash scripts/gpu_check.sh{' --device cpu' * (arguments.device == 'cpu')}{' --tiny' * arguments.tiny}`, from "
        f"random weights: {machine}, torch {torch.__version__}, {size}, {seconds / 60:.1f} minutes.",
        "",
        "| check | what | measured | required | holds |",
        "|---|---|---|---|---|",
        *(f"| {row.check} | {row.what} | {row.value} | {row.required} | {words[row.passed]} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file under a temporary name, and rename it."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(text)
    os.replace(partial, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--only", nargs="+", default=list(CHECKS), choices=CHECKS, metavar="G")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "gpu_results.md")
    parser.add_argument("--child", choices=CHECKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no GPU. Add --device cpu --tiny")
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu needs --tiny: at full size the checks would take days")
    if arguments.child:
        rows = CHECKS[arguments.child](Setting(arguments.device, arguments.tiny, Path.cwd()))
        write(arguments.output, json.dumps([asdict(row) for row in rows]))
        return 0
    start, rows = time.monotonic(), []
    for name in arguments.only:
        with tempfile.TemporaryDirectory(prefix=f"rlinf-{name}-") as folder:
            found, log = run_check(name, arguments, Path(folder))
        rows += found
        for row in found:
            verdict = {True: "holds", False: "MISSED", None: ""}[row.passed]
            print(f"{row.check} {row.what}: {row.value}  [{row.required}] {verdict}", flush=True)
        if log:
            print(log, file=sys.stderr, flush=True)
        write(arguments.output, table(rows, arguments, time.monotonic() - start))
    return int(any(row.passed is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
