"""Stress test that kills a run's rollout workers at random times, and compares the run with an undisturbed run.

A small policy is trained with two rollout workers for rollouts and evaluations. During the run, a random rollout worker is sent
SIGKILL ``--kills`` times, while being built, loading weights, collecting, evaluating or waiting. At the end, metrics and weights must
be bitwise identical to the undisturbed run's, each env group of each iteration must have been used for training exactly once, and no
processes or shared memory of the run may remain.

    python scripts/rollout_workers_kill.py [--kills 100] [--iterations 60] [--seed 0] [cluster.max_staleness=1 algorithm.tis_cap=2.0 ...]

The last line is a JSON object. The exit status is 1 if any values differ, or if processes or shared memory remain.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config

OVERRIDES = [
    "model=mlp", "env.tasks=[reach]", "env.cameras=[]", "rollout.num_envs=8", "rollout.num_chunks=256", "env.max_episode_steps=256",
    "trainer.minibatch_size=256", "model.micro_batch_size=256", "trainer.eval_every=5", "sft.max_steps=0", "evaluation.num_episodes=6",
    "evaluation.num_envs=4", "evaluation.num_videos_per_task=0", "evaluation.probe=false", "tracking.tensorboard=false",
    "tracking.progress=false", "cluster.num_threads=1", "cluster.start=ray", "cluster.placement=disaggregated", "cluster.num_rollout_workers=2",
]  # fmt: skip
MARK = "RLINF_ROLLOUT_WORKERS_KILL"
"""Environment variable that marks the processes of a run."""
SHORTEST_S, LONGEST_S = 0.005, 4.0
"""Bounds of the log-uniform delay before a kill. A new rollout worker needs a few seconds before its first rollout."""
LEFT_S = 60.0
"""Time allowed for a run's processes to end after the run, in seconds."""


def train_and_note(kills: int, words: list[str]) -> None:
    """Train, writing a line per iteration with the env groups and hashes of their log-probabilities.

    An iteration does not end until its fraction of the kills has been carried out.
    """
    from rlinf.commands.train import train
    from rlinf.training.rl_trainer import RLTrainer

    config = build_config(compose_config(words))
    score, folder = RLTrainer._score, Path(config.output_dir)

    def noted(self, batch):
        wanted = kills * (self.loop.state.step + 1) // config.trainer.max_steps
        while wanted and num_lines(folder / "killed") < wanted:
            time.sleep(0.01)
        with open(folder / "trained.jsonl", "a", encoding="utf-8") as file:
            logprobs = [
                hashlib.sha256(column.numpy().tobytes()).hexdigest() for column in batch.rollout_logprobs.unbind(1)
            ]
            print(json.dumps([self.loop.state.step, batch.group_ids[0].tolist(), logprobs]), file=file)
        score(self, batch)

    RLTrainer._score = noted
    train(config)


def num_lines(path: Path) -> int:
    """Return the number of lines in a file, or 0 if it does not exist."""
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def processes_of(mark: str) -> dict[int, str]:
    """Return the process IDs and titles of a run's processes, excluding zombies."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
    return found


def shared_memory_of(pids: list[int]) -> set[str]:
    """Return the shared-memory files mapped by processes."""
    files: set[str] = set()
    for pid in pids:
        try:
            files.update(re.findall(r"(/dev/shm/\S+)", Path(f"/proc/{pid}/maps").read_text()))
        except OSError:
            continue
    return files


class RunWithKills:
    """A run in a separate process.

    Args:
        folder: Output folder of the run.
        words: Overrides of the run.

    Attributes:
        killed: Number of killed rollout workers, by their activity at the time.
        left: Processes and shared-memory files that outlived the run.
        status: Exit status of the process.
        seconds: Duration of the run.
    """

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder, self.words, self.mark = folder, [*words, f"output_dir={folder}"], str(folder)
        self.killed: Counter[str] = Counter()
        self.left: list[str] = []
        self.status: int | None = None
        self.seconds = 0.0
        self._shared: set[str] = set()

    def run(self, kills: int, iterations: int, draws: random.Random) -> None:
        """Run to the end, killing rollout workers in the meantime."""
        self.folder.mkdir(parents=True)
        start = time.monotonic()
        command = [sys.executable, __file__, "--run", f"--kills={kills}", *self.words]
        with (
            open(self.folder.with_suffix(".log"), "wb") as log,
            subprocess.Popen(
                command, env=os.environ | {MARK: self.mark}, stdout=log, stderr=subprocess.STDOUT
            ) as process,
        ):
            try:
                while process.poll() is None:
                    count = self.killed.total()
                    if count < kills and num_lines(self.folder / "trained.jsonl") >= count * iterations // kills:
                        time.sleep(SHORTEST_S * (LONGEST_S / SHORTEST_S) ** draws.random())
                        self._kill(draws)
                    time.sleep(0.02)
            finally:
                process.kill()
        self.status, self.seconds = process.returncode, time.monotonic() - start
        deadline = time.monotonic() + LEFT_S
        while (left := processes_of(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.left = [*left.values(), *filter(os.path.exists, self._shared)]

    def _kill(self, draws: random.Random) -> None:
        processes = processes_of(self.mark)
        self._shared |= shared_memory_of(list(processes))
        workers = {pid: title for pid, title in processes.items() if title.startswith("ray::RolloutWorkerActor")}
        if not workers:
            return
        pid = draws.choice(sorted(workers))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.killed[workers[pid].removeprefix("ray::RolloutWorkerActor").strip(".:") or "idle"] += 1
        with open(self.folder / "killed", "a", encoding="utf-8") as file:
            print(workers[pid], file=file)

    def trained(self) -> list[list]:
        """Return, per iteration, its number, the env groups used for training, and hashes that identify their rollouts."""
        return [json.loads(line) for line in (self.folder / "trained.jsonl").read_text().splitlines()]

    def metrics(self) -> list[dict]:
        """Return the metrics, excluding those that differ between identical runs."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        left_out = ("time", "throughput", "memory")
        return [{name: value for name, value in line.items() if not name.startswith(left_out)} for line in lines]

    def weights(self, iterations: int) -> dict[str, torch.Tensor]:
        """Return the final weights."""
        return load_file(self.folder / "checkpoints" / f"rl_{iterations:06d}" / "model" / "model.safetensors")


def soak(folder: Path, kills: int, iterations: int, seed: int, words: list[str]) -> tuple[RunWithKills, RunWithKills]:
    """Run training twice, the second time with kills, and return both runs.

    Raises:
        RuntimeError: If a run fails.
    """
    words = [*OVERRIDES, f"trainer.max_steps={iterations}", f"cluster.max_restarts={2 * kills}", *words]
    runs = RunWithKills(folder / "alone", words), RunWithKills(folder / "disturbed", words)
    for run, number in zip(runs, (0, kills), strict=True):
        run.run(number, iterations, random.Random(seed))
        if run.status != 0:
            log = run.folder.with_suffix(".log").read_text()
            raise RuntimeError(f"The run '{run.folder.name}' ended with status {run.status}:\n{log[-8000:]}")
    return runs


def compare(alone: RunWithKills, disturbed: RunWithKills, kills: int, iterations: int) -> dict:
    """Return a report on the two runs. ``wrong`` lists failed checks, and should be empty."""
    blocks = [(step, block) for step, blocks, _ in disturbed.trained() for block in blocks]
    rollouts = [rollout for _, _, rollouts in disturbed.trained() for rollout in rollouts]
    weights, expected = disturbed.weights(iterations), alone.weights(iterations)
    same = weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
    checks = {
        "number of kills": disturbed.killed.total() == kills,
        "blocks trained on": len(set(blocks)) == len(blocks) == len(set(rollouts)) == 8 * iterations,
        "rollouts": disturbed.trained() == alone.trained(),
        "metrics": len(alone.metrics()) > iterations and disturbed.metrics() == alone.metrics(),
        "weights": same,
        "left": not alone.left + disturbed.left,
    }
    log = disturbed.folder.with_suffix(".log").read_text()
    return {
        "name": "rollout_workers_kill",
        "kills": disturbed.killed.total(),
        "during": dict(disturbed.killed),
        "replaced": log.count("A replacement will rerun the same env groups"),
        "iterations": iterations,
        "blocks_trained": len(blocks),
        "seconds": [round(alone.seconds, 1), round(disturbed.seconds, 1)],
        "left": alone.left + disturbed.left,
        "wrong": [name for name, holds in checks.items() if not holds],
    }


def main() -> None:
    """Run both and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        return train_and_note(arguments.kills, arguments.overrides)
    with tempfile.TemporaryDirectory() as folder:
        numbers = arguments.kills, arguments.iterations
        report = compare(*soak(Path(folder), *numbers, arguments.seed, arguments.overrides), *numbers)
    print(json.dumps(report))
    raise SystemExit(bool(report["wrong"]))


if __name__ == "__main__":
    main()
