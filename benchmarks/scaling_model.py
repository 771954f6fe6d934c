"""Prediction of the iteration time on more GPUs than were measured, and a check of the model on this machine.

Without arguments, one worker is measured with two numbers of envs, and the times of 2 and 4 workers are predicted from these and
compared with what they take: workers are rollout processes (``rollout.worker_processes``), or ranks (``cluster.num_processes``).
Envs and losses sleep as long as heavy ones compute, so that the cores of this machine do not limit; what sleeps is the same for
all numbers of workers. Rank 0's clock is used. It takes about seven minutes. The last line is one JSON object: ``ours`` is the largest relative error of an
iteration, ``peer`` the largest that is accepted.

    python benchmarks/scaling_model.py
    python benchmarks/scaling_model.py --example
    python benchmarks/scaling_model.py --oft
    python benchmarks/scaling_model.py --runs outputs/half outputs/whole [--gpus-per-node 8 --gpu-link 400e9 --node-link 400e9]

``--runs`` takes folders of runs. Runs of a single process with different ``rollout.num_envs`` give the model. All
remaining runs (more ranks, processes or rollout workers) are compared with its predictions, so a small cluster can check the model before a
large one is rented. Then it prints a table for 1 to 1024 GPUs with as many envs on each GPU as the largest run of one process had.
``--example`` prints this table for a 7B policy, from estimates. ``--oft`` prints where they come from, with every assumption: samples
per second of OpenVLA-OFT 7B with LoRA on 8 H100, from FLOPs and launches, with and without three changes.

Every function of the model is arithmetic on numbers that a short run has measured. A phase is a line: seconds that do not depend on the
rows of a GPU, and seconds for each row. Links are bandwidths: collectives of ``n`` members move ``(n - 1) / n`` of their bytes into each
member (all-gather), twice that for an all-reduce (Thakur et al. 2005, "Optimization of collective communication operations in
MPICH", section 4). GPUs of one machine share its link to the others.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.checkpoints.folders import read_saved_config, resolve_checkpoint
from rlinf.commands.train import train
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.preflight.validation import validate
from rlinf.tracking import read_metrics

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
PLACEMENTS = ("colocated", "disaggregated", "async")
"""Trainers also roll out; rollout workers use separate GPUs; they also roll out while the trainers train."""
PHASES = {"rollout": "time/rollout_s", "score": "time/logprob_s", "update": "time/update_s", "push": "time/sync_s"}
"""Name of a phase to its metric."""
ACCEPTED = 0.15
ENVS, CHUNKS = 16, 4


@dataclass(frozen=True)
class Line:
    """Seconds of a phase: ``fixed_s + row_s * rows``."""

    fixed_s: float
    row_s: float

    def seconds(self, rows: float) -> float:
        """Return the seconds of a GPU with ``rows`` samples."""
        return self.fixed_s + self.row_s * rows

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Line:
        """Return the line through measured (rows, seconds); more than two points: of least squares. Neither part is negative."""
        rows, seconds = zip(*points, strict=True)
        if len(set(rows)) == 1:
            return cls(0.0, statistics.fmean(seconds) / rows[0])
        slope, intercept = statistics.linear_regression(rows, seconds)
        if slope < 0:
            return cls(statistics.fmean(seconds), 0.0)
        if intercept < 0:
            return cls(0.0, statistics.linear_regression(rows, seconds, proportional=True).slope)
        return cls(intercept, slope)


@dataclass(frozen=True)
class Machine:
    """One machine of the cluster; all are alike.

    Attributes:
        gpus: Number of GPUs.
        gpu_link: Bytes per second into a GPU from the others of its machine.
        node_link: Bytes per second into the machine from the others, for all of its GPUs together.
        memory: Bytes of main memory.
        latency_s: Seconds of a hop of a collective.
    """

    gpus: int = 8
    gpu_link: float = 400e9
    node_link: float = 400e9
    memory: float = 2e12
    latency_s: float = 20e-6

    def gather_s(self, num_bytes: float, gpus: int) -> float:
        """Return the seconds of an all-gather: each of ``gpus`` GPUs holds an equal fraction of ``num_bytes`` and gets the rest."""
        if gpus == 1 or not num_bytes:
            return 0.0
        inside, machines = min(gpus, self.gpus), math.ceil(gpus / self.gpus)
        within = num_bytes * (inside - 1) / inside / self.gpu_link
        between = num_bytes * (machines - 1) / machines / self.node_link
        return max(within, between) + self.latency_s * math.log2(gpus)

    def reduce_s(self, num_bytes: float, gpus: int) -> float:
        """Return the seconds of an all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather_s(num_bytes, gpus)

    def link_of_a_gpu(self, gpus: int) -> float:
        """Return the bytes per second into one of ``gpus`` GPUs from GPUs that may be on other machines."""
        return self.gpu_link if gpus <= self.gpus else min(self.gpu_link, self.node_link / self.gpus)


@dataclass(frozen=True)
class Workload:
    """One iteration, over all GPUs.

    Attributes:
        samples: Policy calls.
        env_groups: Groups of envs, which are not divided between GPUs.
        rollout, score, update: Seconds of a GPU by its samples.
        steps: Optimiser steps.
        sample_bytes: Of the images and everything else of a sample.
        gradient_bytes: Added up over trainers in each optimiser step.
        pushed_bytes: Of the weights that rollout workers get; 0 where the rollout worker is the trained model.
        gathered_bytes: Of sharded weights that a trainer gathers for each of its samples; 0: replicated.
        spread: Standard deviation of the time of a GPU's rollout, in fractions of its mean.
        gathers_samples: Every trainer holds the samples of all: what this project does not do, for comparison.
    """

    samples: float
    env_groups: int
    rollout: Line
    score: Line
    update: Line
    steps: int = 1
    sample_bytes: float = 0.0
    gradient_bytes: float = 0.0
    pushed_bytes: float = 0.0
    gathered_bytes: float = 0.0
    spread: float = 0.0
    gathers_samples: bool = False

    def times(self, factor: float) -> Workload:
        """Return the iteration of ``factor`` times as many envs."""
        return replace(self, samples=self.samples * factor, env_groups=round(self.env_groups * factor))


@dataclass(frozen=True)
class Iteration:
    """A predicted iteration.

    Attributes:
        trainers, workers: GPUs that train and GPUs that roll out; the same GPUs if colocated.
        seconds: Of the iteration.
        busy_s: Resource to the seconds for which it is busy.
        memory: Bytes of samples in the main memory of a machine.
        limit: The busiest resource, or the one that does not suffice at all.
    """

    trainers: int
    workers: int
    seconds: float
    busy_s: Mapping[str, float]
    memory: float
    limit: str


def slowest_of(num: int, spread: float) -> float:
    """Return how much longer the slowest of ``num`` takes than the mean: about ``1 + spread * sqrt(2 ln num)``, for normal times."""
    return 1 + spread * math.sqrt(2 * math.log(num))


def predict(work: Workload, machine: Machine, placement: str, trainers: int, workers: int) -> Iteration:
    """Predict an iteration.

    Args:
        work: Of all GPUs.
        machine: Each machine.
        placement: One of ``PLACEMENTS``.
        trainers, rollout workers: GPUs of each kind; colocated: the same number, and the same GPUs.
    """
    colocated = placement == "colocated"
    gpus = trainers if colocated else trainers + workers
    mine, played = work.samples / trainers, work.samples / workers
    mean_s = work.rollout.seconds(played)
    busy = {
        "workers": work.rollout.row_s * played,
        "fixed part of a rollout": work.rollout.fixed_s,
        "waiting for the slowest rollout worker": mean_s * (slowest_of(workers, work.spread) - 1),
        "trainers": work.score.seconds(mine) + work.update.seconds(mine),
        "adding up gradients": work.steps * machine.reduce_s(work.gradient_bytes, trainers),
        "gathering sharded weights": machine.gather_s(work.gathered_bytes * mine, trainers),
        "pushing weights": machine.gather_s(work.pushed_bytes, trainers),
        "moving samples": 0.0,
    }
    held = work.samples if work.gathers_samples else mine
    if work.gathers_samples:
        busy["moving samples"] = machine.gather_s(work.samples * work.sample_bytes, trainers)
    if not colocated:
        link = machine.link_of_a_gpu(gpus)
        busy["pushing weights"] += work.pushed_bytes * math.ceil(workers / trainers) / link
        busy["moving samples"] += mine * work.sample_bytes / link
    plays = ("workers", "fixed part of a rollout", "waiting for the slowest rollout worker", "moving samples")
    playing_s = sum(busy[name] for name in plays)
    training_s = sum(busy[name] for name in ("trainers", "adding up gradients", "gathering sharded weights"))
    both_s = max(playing_s, training_s) if placement == "async" else playing_s + training_s
    memory = min(trainers, machine.gpus) * held * work.sample_bytes
    limit = max(busy, key=lambda name: busy[name])
    if workers > work.env_groups or trainers > work.env_groups:
        limit = "too few env groups"
    elif memory > machine.memory:
        limit = "main memory"
    return Iteration(trainers, workers, both_s + busy["pushing weights"], busy, memory, limit)


def best(work: Workload, machine: Machine, placement: str, gpus: int) -> Iteration:
    """Predict an iteration on ``gpus`` GPUs, divided so that it takes least time; each trainer has equally many rollout workers."""
    if placement == "colocated":
        return predict(work, machine, placement, gpus, gpus)
    if gpus < 2:
        raise ValueError(f"placement '{placement}' on {gpus} GPU; expected at least 2")
    counts = [count for count in range(1, gpus) if gpus % count == 0]
    found = [predict(work, machine, placement, count, gpus - count) for count in counts]
    return min(found, key=lambda each: (each.limit == "too few env groups", each.seconds))


def evaluation_fraction(evaluation_s: float, evaluators: int, every: int, iteration_s: float) -> float:
    """Return the part of a run that evaluations take.

    Args:
        evaluation_s: Of one evaluation on one GPU.
        evaluators: GPUs that share it.
        every: Iterations between two evaluations.
        iteration_s: Of an iteration.
    """
    own_s = evaluation_s / evaluators
    return own_s / (own_s + every * iteration_s)


def measured(lines: Sequence[Mapping[str, Any]], skip: int = 1) -> dict[str, float]:
    """Return the median seconds of each phase in the lines of a run's metrics.jsonl, without its first ``skip`` iterations.

    Raises:
        ValueError: There are not more iterations.
    """
    iterations = [line for line in lines if PHASES["rollout"] in line][skip:]
    if not iterations:
        raise ValueError(f"metrics of no iteration of RL after the first {skip}; expected at least one")
    return {name: statistics.median(line[metric] for line in iterations) for name, metric in PHASES.items()}


EXAMPLE = Workload(
    samples=128 * 64, env_groups=128, steps=32, sample_bytes=256 * 256 * 3, spread=0.05,
    rollout=Line(fixed_s=60.0, row_s=0.014), score=Line(0.0, 0.010), update=Line(0.0, 0.040),
    gradient_bytes=0.45e9,
)  # fmt: skip
"""OpenVLA-OFT with LoRA of rank 32 and 128 episodes of LIBERO-10 on each GPU: estimates from the size of the model, not measured."""
EXAMPLE_SPLIT = replace(EXAMPLE, pushed_bytes=0.45e9)


@dataclass(frozen=True)
class Roofline:
    """OpenVLA-OFT 7B with LoRA on one H100, from the size of the model; nothing of it is measured."""

    parameters: float = 7.5e9
    """Weights that a token meets."""
    tokens: float = 350.0
    """Of one sample: 256 of an image, a prompt of about 35, 56 of 8 actions, and padding."""
    flops_per_s: float = 450e12
    """Of matrix multiplications in bfloat16 that a GPU reaches in practice, of 990e12 on paper."""
    scoring_loss: float = 1.2
    """Time of a pass of 8 rows without gradients, over its ideal: kernels between the multiplications."""
    update_loss: float = 1.14
    """The same of a pass with gradients."""
    rollout_loss: float = 1.2
    """The same of a call of a rollout with 64 rows."""
    launch_s: float = 6e-6
    """Of one kernel, by the processor."""
    launches: float = 4955.0
    """Of a policy call: a count of a run on a GPU that is not there."""
    rows: float = 64.0
    """Of a policy call: 128 envs of a GPU in two threads."""
    copies_wait: float = 3.0
    """Copies to the host by which a thread waits for the other one's kernels, beyond the one that it needs."""
    reduce_s: float = 3e-3
    """Of adding up 0.45 GB of float32 gradients over 8 GPUs, for each optimiser step."""
    step_rows: float = 56.0
    """Rows of an optimiser step on a GPU."""
    checked: float = 1 / 64
    """Fraction of the samples that the trainer scores for the parity gate, where rollouts give the old log-probabilities."""

    @property
    def forward_s(self) -> float:
        """Seconds of a forward pass of one sample, at best."""
        return 2 * self.parameters * self.tokens / self.flops_per_s

    def phases(self, *, recomputes: bool, scores_all: bool, waits: bool) -> dict[str, float]:
        """Return seconds of a sample by phase. With LoRA, a backward pass costs a forward pass: frozen weights have no gradient."""
        launched = self.launches * self.launch_s / self.rows
        return {
            "rollout": self.forward_s * self.rollout_loss + launched * (1 + self.copies_wait * waits),
            "score": self.forward_s * self.scoring_loss * (1.0 if scores_all else self.checked),
            "update": self.forward_s * self.update_loss * (3 if recomputes else 2) + self.reduce_s / self.step_rows,
        }


def oft(gpus: int = 8) -> float:
    """Print assumptions and samples per second before and after the changes, each of them alone and all; return the factor of all."""
    model, seconds = Roofline(), {}
    for name, value in asdict(model).items():
        print(f"{name:>14} {value:.6g}")
    print(f"{'forward_s':>14} {model.forward_s:.4g}\n")
    before = {"recomputes": True, "scores_all": True, "waits": True}
    cases = {"commit 50d27ae": before} | {f"without {name}": before | {name: False} for name in before}
    cases["with none of them"] = dict.fromkeys(before, False)
    print(f"{'design':>20} {'rollout':>8} {'score':>8} {'update':>8} {'ms a sample':>12} {'samples/s':>10}")
    for name, switches in cases.items():
        phases = model.phases(**switches)
        seconds[name] = sum(phases.values())
        parts = " ".join(f"{1e3 * part:8.1f}" for part in phases.values())
        print(f"{name:>20} {parts} {1e3 * seconds[name]:12.1f} {gpus / seconds[name]:10.0f}")
    return seconds["commit 50d27ae"] / seconds["with none of them"]


def phases_of(workers: int, ranks: int, envs: int, sleep_s: float, iterations: int) -> dict[str, float]:
    """Return the median seconds of the phases of a short run, and of its iterations."""
    with tempfile.TemporaryDirectory() as folder:
        plugins = f"plugins=[{FIXTURES / 'slow_tabletop.py'},{FIXTURES / 'padded.py'}]"
        words = [
            "model=mlp", plugins, "env=tabletop", "env.name=slow_tabletop", "env.cameras=[]", "env.tasks=[push]",
            f"env.sleep_s={sleep_s}", f"env.max_episode_steps={CHUNKS}", "algorithm=ppo", "algorithm.name=padded",
            f"algorithm.sleep_s={sleep_s}", "algorithm.update_epochs=1", f"rollout.num_envs={envs}",
            f"rollout.num_chunks={CHUNKS}", f"rollout.worker_processes={workers}", f"rollout.pipeline_stages={'null' if workers else 1}",
            f"trainer.minibatch_size={envs * CHUNKS}", f"trainer.max_steps={iterations + 1}", "sft.max_steps=0",
            "evaluation.num_episodes=4", "evaluation.num_envs=4", "evaluation.probe=false", "evaluation.num_videos_per_task=0",
            f"cluster.num_processes={ranks}", "cluster.num_threads=1", "cluster.device=cpu", "tracking.progress=false",
            f"output_dir={folder}/run",
        ]  # fmt: skip
        config = build_config(compose_config(words))
        validate(config)
        with contextlib.redirect_stdout(io.StringIO()):
            train(config)
        return measured(read_metrics(Path(folder) / "run"))


def check(sleep_s: float, iterations: int) -> dict:
    """Measure, predict and compare; return the last line."""
    points = {envs * CHUNKS: phases_of(0, 1, envs, sleep_s, iterations) for envs in (ENVS // 4, ENVS)}
    lines = {name: Line.through([(rows, found[name]) for rows, found in points.items()]) for name in PHASES}
    print(json.dumps({"lines": {name: [round(line.fixed_s, 4), round(line.row_s, 5)] for name, line in lines.items()}}))
    rows = ENVS * CHUNKS
    work = Workload(rows, ENVS, lines["rollout"], lines["score"], lines["update"])
    errors = {}
    for kind, workers, ranks in [("one", 0, 1)] + [(kind, count if kind == "processes" else 0, count if kind == "ranks" else 1)
                                                  for kind in ("processes", "ranks") for count in (2, 4)]:  # fmt: skip
        count = max(workers, ranks)
        predicted = predict(work, Machine(), "colocated", ranks, count)
        found = points[rows] if count == 1 else phases_of(workers, ranks, ENVS, sleep_s, iterations)
        seconds = sum(found.values())
        errors[f"{kind} {count}"] = predicted.seconds / seconds - 1
        print(json.dumps({"workers": kind, "count": count, "predicted_s": round(predicted.seconds, 3),
                          "measured_s": round(seconds, 3), "error": round(errors[f"{kind} {count}"], 4),
                          "phases_s": {name: round(value, 3) for name, value in found.items()}}), flush=True)  # fmt: skip
    worst = max(map(abs, errors.values()))
    return {"name": "scaling_model", "ours": round(worst, 4), "peer": ACCEPTED, "ratio": round(ACCEPTED / worst, 2),
            "sizes": {"envs": ENVS, "chunks": CHUNKS, "sleep_s": sleep_s, "iterations": iterations}}  # fmt: skip


def table(work: Workload, machine: Machine, pushed_bytes: float) -> None:
    """Print an iteration on 1 to 1024 GPUs, with as many envs on each, and what limits it at 8, 64 and 1024."""
    print(f"{'GPUs':>5} {'placement':>10} {'trainers':>8} {'workers':>8} {'seconds':>9} {'samples/s':>10}  limit")
    for gpus in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        for placement in PLACEMENTS:
            if placement != "colocated" and gpus == 1:
                continue
            own = work if placement == "colocated" else replace(work, pushed_bytes=max(work.pushed_bytes, pushed_bytes))
            found = best(own.times(gpus), machine, placement, gpus)
            rate = own.samples * gpus / found.seconds
            print(f"{gpus:>5} {placement:>10} {found.trainers:>8} {found.workers:>8} {found.seconds:>9.1f} {rate:>10.0f}  "
                  f"{found.limit} ({found.busy_s.get(found.limit, 0) / found.seconds:.0%} of the time)")  # fmt: skip


class Recorded:
    """A run: who trained and played, how much, and the median seconds of the phases."""

    def __init__(self, folder: Path) -> None:
        config = read_saved_config(resolve_checkpoint(folder))
        rollout, cluster, env = config["rollout"], config["cluster"], config["env"]
        self.name, self.ranks = folder.name, cluster["num_processes"]
        self.workers = self.ranks * max(1, rollout["worker_processes"])
        self.placement = cluster["placement"]
        if self.placement == "disaggregated":
            self.workers = cluster["num_rollout_workers"] or self.ranks
        if cluster["max_staleness"]:
            self.placement = "async"
        self.rows = rollout["num_envs"] * rollout["num_chunks"]
        self.env_groups = rollout["num_envs"] // rollout["group_size"]
        self.steps = max(1, self.rows // config["trainer"]["minibatch_size"]) * config["algorithm"]["update_epochs"]
        self.sample_bytes = len(env.get("cameras") or ()) * env.get("image_size", 0) ** 2 * 3
        self.phases = measured(read_metrics(folder))

    @property
    def of_one_process(self) -> bool:
        """Return whether one process trained and played, so that the run gives the model."""
        return self.ranks == self.workers == 1 and self.placement == "colocated"


def workload_of(runs: list[Recorded]) -> Workload:
    """Return the workload of a GPU from runs of one process that differ in their number of envs."""
    lines = {name: Line.through([(run.rows, run.phases[name]) for run in runs]) for name in PHASES}
    largest = max(runs, key=lambda run: run.rows)
    return Workload(
        largest.rows, largest.env_groups, lines["rollout"], lines["score"], lines["update"], steps=largest.steps,
        sample_bytes=largest.sample_bytes,
    )  # fmt: skip


def compare(runs: list[Recorded], work: Workload, machine: Machine) -> None:
    """Print what the model predicts for each run, next to what was measured."""
    for run in runs:
        recorded = replace(work, samples=run.rows, env_groups=run.env_groups, steps=run.steps)
        predicted, seconds = predict(recorded, machine, run.placement, run.ranks, run.workers), sum(run.phases.values())
        line = {"run": run.name, "placement": run.placement, "ranks": run.ranks, "workers": run.workers,
                "predicted_s": round(predicted.seconds, 3), "measured_s": round(seconds, 3),
                "error": round(predicted.seconds / seconds - 1, 4)}  # fmt: skip
        print(json.dumps(line))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, nargs="+", help="folders of runs, some of one process")
    parser.add_argument("--example", action="store_true", help="a 7B policy, estimated")
    parser.add_argument("--oft", action="store_true", help="the estimate of a 7B policy, with its assumptions")
    parser.add_argument("--gradient-bytes", type=float, default=0.0, help="of --runs: 4 for each trained parameter")
    parser.add_argument(
        "--pushed-bytes",
        type=float,
        default=0.0,
        help="of --runs with rollout workers: 2 for each trained parameter in 16 bits",
    )
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu-link", type=float, default=400e9, help="bytes per second into a GPU within a machine")
    parser.add_argument("--node-link", type=float, default=400e9, help="bytes per second into a machine")
    parser.add_argument("--memory", type=float, default=2e12, help="bytes of main memory of a machine")
    parser.add_argument("--sleep-s", type=float, default=0.2, help="of a row, in the check on this machine")
    parser.add_argument("--iterations", type=int, default=2)
    args = parser.parse_args()
    machine = Machine(args.gpus_per_node, args.gpu_link, args.node_link, args.memory)
    if args.oft:
        print(f"\n{oft():.2f} times as many samples")
    elif args.example:
        table(EXAMPLE, machine, EXAMPLE_SPLIT.pushed_bytes)
    elif args.runs:
        runs = [Recorded(folder) for folder in args.runs]
        single = [run for run in runs if run.of_one_process]
        if not single:
            parser.error(
                "--runs has no run of one process that trains and rolls out; expected one or two, with different rollout.num_envs"
            )
        work = replace(workload_of(single), gradient_bytes=args.gradient_bytes)
        compare(runs, replace(work, pushed_bytes=args.pushed_bytes), machine)
        table(work, machine, args.pushed_bytes)
    else:
        sys.path.append(str(FIXTURES))  # ranks and processes inherit it
        print(json.dumps(check(args.sleep_s, args.iterations)))


if __name__ == "__main__":
    main()
