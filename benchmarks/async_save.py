"""What a checkpoint costs the training: the extra time of the steps at and after a save, asynchronous next to synchronous.

One network trains in rounds of three stretches of equally many steps: plain, after a synchronous save, after an asynchronous one. A
stretch takes half as long again as writing does, so that the writing thread should end within it; where it does not, the wait for it
counts. The extra time of a save is that of the call, of this wait, and what the steps after it take longer than plain ones: for each step of a stretch, its median over the rounds minus the median plain
step, added up. Medians leave out what else the machine does, and a step that is slow after every save still counts.

    python benchmarks/async_save.py [--width 1536] [--layers 8] [--rows 32] [--rounds 7] [--threads 1]

``ours`` is the extra time in seconds of an asynchronous save, ``peer`` that of a synchronous one, ``ratio`` peer over ours;
``share_of_sync`` is ours over peer, of which less than 0.1 is required. ``copy_s`` is the call of the asynchronous save, for which the
training waits; the rest of ours is what the writing thread takes from the steps after it: little on a GPU, more on a CPU with few cores.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from rlinf.checkpoints.checkpoint_manager import SAVE_MODES, CheckpointManager
from rlinf.manifest import Manifest
from rlinf.optim.master_adamw import MasterAdamW

MANIFEST = Manifest({}, {}, {}, {}, {}, {"state": "none"}, "fp32", {}, None, policy_version=0, seed=0)
STRETCH = 1.5
"""Length of a stretch of steps in times of writing."""


class Run:
    """A network that trains, and a manager of each mode that saves it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, device: str) -> None:
        torch.manual_seed(0)
        width = arguments.width
        layers = [layer for _ in range(arguments.layers) for layer in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = MasterAdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(arguments.rows, width, device=device)
        self.managers = {
            mode: CheckpointManager(folder / mode, save_mode=mode, max_keep=1, with_policy=False) for mode in SAVE_MODES
        }

    @property
    def num_bytes(self) -> int:
        """Weights and moments."""
        return 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    def step(self) -> None:
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.inputs.is_cuda:
            torch.cuda.synchronize()

    def save(self, mode: str, number: int) -> None:
        self.managers[mode].save(
            f"step_{number}",
            model=self.model,
            optimizer=self.optimizer,
            loop_state={"step": number},
            run_config={},
            manifest=MANIFEST,
        )

    def stretch(self, num_steps: int) -> list[float]:
        """Return the seconds of each of so many steps."""
        return [timed(self.step) for _ in range(num_steps)]


def timed(work: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(
    run: Run, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[list[float]]], dict[str, list[float]], list[float]]:
    """Return the seconds of the calls, of the steps after them and of the wait after these, by mode and round; and of plain steps."""
    for mode in SAVE_MODES:  # the first one also allocates what the later ones use again
        run.save(mode, 0)
        run.managers[mode].wait()
    step = statistics.median(run.stretch(5))
    writing = timed(lambda: run.save("sync", 1))
    num_steps = math.ceil(STRETCH * writing / step)
    calls: dict[str, list[float]] = {mode: [] for mode in SAVE_MODES}
    after: dict[str, list[list[float]]] = {mode: [] for mode in SAVE_MODES}
    waits: dict[str, list[float]] = {mode: [] for mode in SAVE_MODES}
    plain: list[float] = []
    for number in range(2, rounds + 2):
        plain += run.stretch(num_steps)
        for mode in SAVE_MODES:
            calls[mode].append(timed(lambda mode=mode, number=number: run.save(mode, number)))
            after[mode].append(run.stretch(num_steps))
            waits[mode].append(timed(run.managers[mode].wait))
        shown = ", ".join(f"{mode} {found[-1]:.3f} s" for mode, found in calls.items())
        print(f"round {number - 1}: plain step {statistics.median(plain):.4f} s; calls: {shown}", flush=True)
    return calls, after, waits, plain


def main() -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="of a batch")
    parser.add_argument("--rounds", type=int, default=7, help="an odd number")
    parser.add_argument("--threads", type=int, default=1, help="of the training")
    parser.add_argument("--folder", help="where to write; else a temporary one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        run = Run(arguments, Path(place), device)
        calls, after, waits, plain = measure(run, arguments.rounds)
        for manager in run.managers.values():
            manager.close()
    step, call, slower = statistics.median(plain), {}, {}
    for mode in SAVE_MODES:
        call[mode] = statistics.median(calls[mode])
        slower[mode] = sum(statistics.median(steps) - step for steps in zip(*after[mode], strict=True))
    wait = {mode: statistics.median(waits[mode]) for mode in SAVE_MODES}
    peer, ours = (call[mode] + slower[mode] + wait[mode] for mode in SAVE_MODES)
    report = {
        "name": "async_save", "ours": round(ours, 4), "peer": round(peer, 4), "ratio": round(peer / ours, 2),
        "share_of_sync": round(ours / peer, 4), "copy_s": round(call["async"], 4), "sync_call_s": round(call["sync"], 4),
        "slower_steps_s": {mode: round(value, 4) for mode, value in slower.items()}, "step_s": round(step, 4),
        "wait_s": {mode: round(value, 4) for mode, value in wait.items()},
        "steps_of_a_stretch": len(after["sync"][0]), "megabytes": round(run.num_bytes / 1e6, 1), "device": device,
        **{name: getattr(arguments, name) for name in ("width", "layers", "rows", "rounds", "threads")},
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
