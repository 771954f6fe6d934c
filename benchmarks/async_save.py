"""What a checkpoint costs the training: the extra time of the steps around a save, asynchronous next to synchronous.

A network trains three times in each round: without saves, with synchronous ones, with asynchronous ones, every ``--every`` steps.
The extra time of a save is the time of all steps of such a run minus that without saves, divided by the saves. It holds the copy of
the tensors and how much the writing thread slows the steps after it down; the last save is ``--every`` steps before the end.

    python benchmarks/async_save.py [--width 1024] [--layers 8] [--every 40] [--saves 3] [--rounds 5] [--threads 1]

``ours`` is the median extra time in seconds of an asynchronous save, ``peer`` that of a synchronous one, ``ratio`` peer over ours.
``share_of_step`` is ours over a step's time, and ``share_of_sync`` ours over peer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from rlinf.checkpoints.checkpoint_manager import CheckpointManager
from rlinf.manifest import Manifest
from rlinf.optim.master_adamw import MasterAdamW

MANIFEST = Manifest({}, {}, {}, {}, {}, {"state": "none"}, "fp32", {}, None, policy_version=0, seed=0)


def run(arguments: argparse.Namespace, mode: str | None, folder: Path, device: str) -> float:
    """Train with saves of a mode (None: without any), and return the seconds of all steps."""
    torch.manual_seed(0)
    width = arguments.width
    layers = [layer for _ in range(arguments.layers) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = MasterAdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(arguments.rows, width, device=device)
    manager = CheckpointManager(folder, save_mode=mode or "sync", max_keep=1, with_policy=False)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    def save(number: int) -> None:
        manager.save(
            f"step_{number}",
            model=model,
            optimizer=optimizer,
            loop_state={"step": number},
            run_config={},
            manifest=MANIFEST,
        )

    for _ in range(3):
        step()
    if mode is not None:
        save(0)  # the first one also allocates what the later ones use again
        manager.wait()
    start = time.perf_counter()
    for number in range(1, arguments.saves + 1):
        if mode is not None:
            save(number)
        for _ in range(arguments.every):
            step()
    seconds = time.perf_counter() - start
    manager.close()
    return seconds


def main() -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256, help="of a batch")
    parser.add_argument("--every", type=int, default=40, help="steps between saves")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the training")
    parser.add_argument("--folder", help="where to write; else a temporary one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    extra: dict[str, list[float]] = {"sync": [], "async": []}
    steps = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
            plain = run(arguments, None, Path(place), device)
            steps.append(plain / arguments.saves / arguments.every)
            for mode, found in extra.items():
                found.append((run(arguments, mode, Path(place) / mode, device) - plain) / arguments.saves)
        shown = ", ".join(f"{mode} {found[-1]:.3f} s" for mode, found in extra.items())
        print(f"round {number}: step {steps[-1]:.4f} s; extra of a save: {shown}", flush=True)
    ours, peer = statistics.median(extra["async"]), statistics.median(extra["sync"])
    report = {
        "name": "async_save", "ours": round(ours, 4), "peer": round(peer, 4), "ratio": round(peer / max(ours, 1e-9), 2),
        "share_of_sync": round(ours / peer, 4), "share_of_step": round(ours / statistics.median(steps), 3), "device": device,
        "megabytes": round(3 * 4 * arguments.layers * (arguments.width**2 + arguments.width) / 1e6, 1),
        "ours_all": [round(value, 4) for value in extra["async"]], "peer_all": [round(value, 4) for value in extra["sync"]],
        **{name: getattr(arguments, name) for name in ("width", "layers", "rows", "every", "saves", "rounds", "threads")},
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
