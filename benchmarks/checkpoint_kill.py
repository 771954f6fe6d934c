"""Kills a run at random moments while it saves asynchronously, and resumes it each time.

A process trains a small network, saves after every step, and is killed (SIGKILL) at a random moment after its first save. The next
process resumes from what the manager finds. After each kill, the weights that are loaded must be those of a run that was never
stopped, bit for bit, and at most the one save that was being written is lost. The peer does the same with one ``torch.save`` per
step to one file: a file that was torn cannot be resumed from.

    python benchmarks/checkpoint_kill.py [--kills 20] [--width 512]

``ours`` and ``peer`` are the kills after which the run could be resumed. The exit status is 1 if ours is not all of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from rlinf.checkpoints.checkpoint import load_checkpoint
from rlinf.checkpoints.checkpoint_manager import CheckpointManager
from rlinf.checkpoints.folders import resolve_checkpoint
from rlinf.errors import CheckpointError
from rlinf.manifest import Manifest

MANIFEST = Manifest({}, {}, {}, {}, {}, {"state": "none"}, "fp32", {}, None, policy_version=0, seed=0)


def build(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network that every process begins with, and its optimiser."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Take a step that depends on nothing but the weights, the optimiser and its number."""
    inputs = torch.randn(4, model[0].in_features, generator=torch.Generator().manual_seed(step))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(folder: Path, width: int, told: Connection) -> None:
    """Resume, and train and save until somebody kills this process."""
    model, optimizer = build(width)
    manager, step = CheckpointManager(folder, save_mode="async", max_keep=2, with_policy=False), 0
    if (folder / "checkpoints").is_dir() and manager.names():
        state = load_checkpoint(resolve_checkpoint(folder), model=model, optimizer=optimizer)
        step = state["step"]
    while True:
        train(model, optimizer, step)
        step += 1
        state = {"model": model, "optimizer": optimizer, "loop_state": {"step": step}}
        manager.save(f"step_{step}", **state, run_config={}, manifest=MANIFEST)
        told.send(step)


def run_peer(folder: Path, width: int, told: Connection) -> None:
    """Do the same with ``torch.save`` to one file."""
    model, optimizer = build(width)
    step, file = 0, folder / "state.pt"
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        train(model, optimizer, step)
        step += 1
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
        told.send(step)


def kill_once(program, folder: Path, width: int, delay_s: float) -> int:
    """Run a program, kill it ``delay_s`` after its first save, and return the last step whose save it has asked for."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "rlinf.checkpoints.checkpoint_manager"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=program, args=(folder, width, theirs))
    process.start()
    theirs.close()
    step = ours.recv()  # EOFError: it could not resume
    time.sleep(delay_s)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    try:
        while True:
            step = ours.recv()
    except EOFError:
        return step


def kills_survived(kills: int, width: int, seed: int = 0, longest_s: float = 0.5) -> dict[str, int]:
    """Kill runs of the manager, and return counts.

    Returns:
        ``resumed``: kills after which the newest whole checkpoint is right; ``torn``: those in the middle of a save; ``steps``.

    Raises:
        AssertionError: A checkpoint is wrong, or more than the save that was being written is lost.
    """
    draws, counts = random.Random(seed), {"resumed": 0, "torn": 0, "steps": 0}
    straight, optimizer = build(width)
    done = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for _ in range(kills):
            asked = kill_once(run, folder, width, draws.uniform(0, longest_s))
            counts["torn"] += any((folder / "checkpoints").glob(".*.tmp"))
            model, own = build(width)
            try:
                step = load_checkpoint(resolve_checkpoint(folder), model=model, optimizer=own)["step"]
            except CheckpointError:
                assert asked == 1, "more than one save was asked for, and there is no whole checkpoint"
                step = 0
            # A save waits for the one before, so all but the last that was asked for are whole; another may have begun since.
            assert asked - 1 <= step <= asked + 1, f"step {asked} was being saved, and {step} is the newest"
            assert step >= done, f"step {done} was whole before, and now {step} is the newest"
            while done < step:
                train(straight, optimizer, done)
                done += 1
            expected = straight.state_dict()
            assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
            counts["resumed"] += 1
            counts["steps"] = step
    return counts


def peer_survived(kills: int, width: int, seed: int = 0, longest_s: float = 0.5) -> int:
    """Return how many kills the peer can be resumed after; a torn file is deleted."""
    draws, survived = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "state.pt"
        for _ in range(kills):
            kill_once(run_peer, Path(place), width, draws.uniform(0, longest_s))
            try:
                torch.load(file)
                survived += 1
            except (RuntimeError, EOFError, OSError):
                file.unlink()
    return survived


def main() -> None:
    """Kill both, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()
    logging.getLogger("rlinf").setLevel(logging.WARNING)
    counts = kills_survived(arguments.kills, arguments.width)
    peer = peer_survived(arguments.kills, arguments.width)
    report = {"name": "checkpoint_kill", "ours": counts["resumed"], "peer": peer,
              "ratio": round(counts["resumed"] / max(1, peer), 2), "kills": arguments.kills, "width": arguments.width,
              "torn": counts["torn"], "steps": counts["steps"]}  # fmt: skip
    print(json.dumps(report))
    raise SystemExit(counts["resumed"] != arguments.kills)


if __name__ == "__main__":
    main()
