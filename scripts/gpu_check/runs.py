"""Runs of ``rlinf`` in processes: their words, their metrics, their processes, and the GPU memory that they take."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from gpu_check.rows import Setting

SMALL = [
    "rollout.num_envs=8", "rollout.num_chunks=16", "trainer.minibatch_size=16", "sft.max_steps=2", "sft.num_demonstrations=4",
    "evaluation.num_episodes=4",
]  # fmt: skip
"""A run of seconds."""
TIMED = ("time", "memory/", "throughput/")
"""First parts of metrics that differ between equal runs."""


def train_command(setting: Setting, folder: Path, words: list[str], start: list[str] | None = None) -> list[str]:
    """Return the command of a run without videos, progress or checkpoints by the clock (unless in ``words``); ``start``: its launcher."""
    quiet = ["tracking.progress=false", "evaluation.num_videos_per_task=0", "trainer.save_every_minutes=0"]
    place = [f"cluster.device={setting.device}", f"output_dir={folder}"]
    place += [] if setting.is_gpu else ["cluster.num_threads=1"]
    return [*(start or [sys.executable]), "-m", "rlinf", "train", *quiet, *words, *place]


def train(setting: Setting, name: str | Path, words: list[str], **popen: Any) -> Path:
    """Run ``rlinf train`` in a process, and return its folder; raise CalledProcessError if it fails."""
    folder = setting.folder / name  # or ``name``, if it is absolute
    subprocess.run(train_command(setting, folder, words), check=True, cwd=setting.folder, **popen)
    return folder


def torchrun(ranks: int) -> list[str]:
    """Return the launcher of so many ranks on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def rl_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each iteration of RL."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "rollout/logprob_gap_max" in line]


def seconds_of(metrics: dict[str, float]) -> float:
    """Return the seconds of an iteration."""
    return sum(metrics[f"time/{part}_s"] for part in ("sync", "rollout", "logprob", "update"))


def first_difference(first: list[dict[str, float]], second: list[dict[str, float]]) -> str:
    """Name the first metric in which two runs differ, with its iteration and the relative difference, or say ``none``."""
    if len(first) != len(second):
        return f"{len(first)} and {len(second)} iterations"
    for one, other in zip(first, second, strict=True):
        for name in sorted(one.keys() | other.keys()):
            a, b = one.get(name), other.get(name)
            if not name.startswith(TIMED) and a != b:
                size = abs(a - b) / max(abs(a), abs(b)) if isinstance(a, float) and isinstance(b, float) else 1.0
                return f"{name} of iteration {one['step']}, by {size:.1e}"
    return "none"


def largest_gap(first: list[dict[str, float]], second: list[dict[str, float]], name: str = "train/loss") -> float:
    """Return the largest difference of one metric between two runs."""
    return max(abs(one[name] - other[name]) for one, other in zip(first, second, strict=True))


# -- processes -----------------------------------------------------------------------------------------------------


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


# -- memory --------------------------------------------------------------------------------------------------------


def used_bytes() -> int:
    """Return the bytes of this GPU that are in use, by whatever process; it works in a container, too."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def used_mib_of_all() -> list[int] | None:
    """Return the used MiB of every GPU of the machine; None: the driver does not show them here."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        return [int(line) for line in lines]
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


class Watched:
    """Reads a number ten times a second while the block runs; ``highest`` is its largest excess over the number before."""

    def __init__(self, read: Callable[[], Any], join: Callable[[Any, Any], Any] = max) -> None:
        self.read, self.join = read, join
        self._end = threading.Event()

    def __enter__(self) -> Self:
        self.before = self.last = self.read()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.1):
            self.last = self.join(self.last, self.read())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.highest = self.last - self.before if isinstance(self.before, int) else self.last


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; return whether it came to hold in that time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


# -- traces --------------------------------------------------------------------------------------------------------

SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass
class Trace:
    """Counts of one recorded step: kernels, copies, waits of the host, and the fraction of its time in which the GPU computed."""

    kernels: int
    copies_to_host: int
    syncs: int
    busy: float


def read_trace(path: Path, step: str) -> Trace:
    """Read the part of a trace of ``torch.profiler`` that belongs to the annotation ``step``."""
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    span = next(event for event in events if event["name"] == step and event.get("cat") == "user_annotation")
    start, end = span["ts"], span["ts"] + span["dur"]
    inside = [event for event in events if start <= event["ts"] < end]
    on_gpu = [event for event in inside if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [event["name"] for event in inside if event.get("cat") == "cuda_runtime"]
    return Trace(
        kernels=sum(event["cat"] == "kernel" for event in on_gpu),
        copies_to_host=sum("DtoH" in event["name"] for event in on_gpu if event["cat"] == "gpu_memcpy"),
        syncs=sum(name in SYNCS for name in calls),
        busy=covered((event["ts"], event["ts"] + event["dur"]) for event in on_gpu) / (end - start),
    )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
