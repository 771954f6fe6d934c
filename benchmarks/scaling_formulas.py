"""A performance model: how long an iteration takes on more GPUs than were measured, and what limits it there.

Every function is arithmetic on numbers that a short run has measured. A phase is a line: seconds that do not depend on the rows
of a GPU, and seconds for each row. Links are bandwidths: collectives of ``n`` members move ``(n - 1) / n`` of their bytes into each
member (all-gather), twice that for an all-reduce (Thakur et al. 2005, "Optimization of collective communication operations in
MPICH", section 4). GPUs of one machine share its link to the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

PLACEMENTS = ("colocated", "split", "async")
"""Trainers play too; players have GPUs of their own; they also play while trainers train."""
PHASES = {"rollout": "time/rollout_s", "score": "time/logprob_s", "update": "time/update_s", "push": "time/sync_s"}
"""Name of a phase to its metric."""


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
        """Return the seconds in which all of ``gpus`` GPUs get ``num_bytes`` of which each has an equal share."""
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
        blocks: Groups of envs, which are not divided between GPUs.
        rollout, score, update: Seconds of a GPU by its samples.
        steps: Optimiser steps.
        sample_bytes: Of the images and everything else of a sample.
        gradient_bytes: Added up over trainers in each optimiser step.
        pushed_bytes: Of the weights that players get; 0 where the player is the trained model.
        gathered_bytes: Of sharded weights that a trainer gathers for each of its samples; 0: replicated.
        spread: Standard deviation of the time of a GPU's rollout, in shares of its mean.
        gathers_samples: Every trainer holds the samples of all: what this project does not do, for comparison.
    """

    samples: float
    blocks: int
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
        return replace(self, samples=self.samples * factor, blocks=round(self.blocks * factor))


@dataclass(frozen=True)
class Iteration:
    """A predicted iteration.

    Attributes:
        trainers, players: GPUs that train and that play; the same ones where colocated.
        seconds: Of the iteration.
        busy_s: Resource to the seconds for which it is busy.
        memory: Bytes of samples in the main memory of a machine.
        limit: The resource that is busiest; or what is not enough at all.
    """

    trainers: int
    players: int
    seconds: float
    busy_s: Mapping[str, float]
    memory: float
    limit: str


def slowest_of(num: int, spread: float) -> float:
    """Return how much longer the slowest of ``num`` takes than the mean: about ``1 + spread * sqrt(2 ln num)``, for normal times."""
    return 1 + spread * math.sqrt(2 * math.log(num))


def predict(work: Workload, machine: Machine, placement: str, trainers: int, players: int) -> Iteration:
    """Predict an iteration.

    Args:
        work: Of all GPUs.
        machine: Each machine.
        placement: One of ``PLACEMENTS``.
        trainers, players: GPUs of each kind; colocated: the same number, and the same GPUs.
    """
    colocated = placement == "colocated"
    gpus = trainers if colocated else trainers + players
    mine, played = work.samples / trainers, work.samples / players
    mean_s = work.rollout.seconds(played)
    busy = {
        "players": work.rollout.row_s * played,
        "fixed part of a rollout": work.rollout.fixed_s,
        "waiting for the slowest player": mean_s * (slowest_of(players, work.spread) - 1),
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
        busy["pushing weights"] += work.pushed_bytes * math.ceil(players / trainers) / link
        busy["moving samples"] += mine * work.sample_bytes / link
    plays = ("players", "fixed part of a rollout", "waiting for the slowest player", "moving samples")
    playing_s = sum(busy[name] for name in plays)
    training_s = sum(busy[name] for name in ("trainers", "adding up gradients", "gathering sharded weights"))
    both_s = max(playing_s, training_s) if placement == "async" else playing_s + training_s
    memory = min(trainers, machine.gpus) * held * work.sample_bytes
    limit = max(busy, key=lambda name: busy[name])
    if players > work.blocks or trainers > work.blocks:
        limit = "too few blocks of envs"
    elif memory > machine.memory:
        limit = "main memory"
    return Iteration(trainers, players, both_s + busy["pushing weights"], busy, memory, limit)


def best(work: Workload, machine: Machine, placement: str, gpus: int) -> Iteration:
    """Predict an iteration on ``gpus`` GPUs, divided so that it takes least time; each trainer has equally many players."""
    if placement == "colocated":
        return predict(work, machine, placement, gpus, gpus)
    if gpus < 2:
        raise ValueError(f"placement '{placement}' on {gpus} GPU; required: at least 2")
    counts = [count for count in range(1, gpus) if gpus % count == 0]
    found = [predict(work, machine, placement, count, gpus - count) for count in counts]
    return min(found, key=lambda each: (each.limit == "too few blocks of envs", each.seconds))


def evaluation_share(evaluation_s: float, evaluators: int, every: int, iteration_s: float) -> float:
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
        raise ValueError(f"metrics of no iteration of RL after the first {skip}; required: at least one")
    return {name: statistics.median(line[metric] for line in iterations) for name, metric in PHASES.items()}
