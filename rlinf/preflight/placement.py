"""Placement of trainer ranks and rollout workers, a pure function of the configuration and the machines' resources."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import rank_range, resolve_device
from rlinf.distributed.ray.cluster import check_address, import_ray
from rlinf.distributed.start import launch_context
from rlinf.errors import reject
from rlinf.options import require_values

SPLIT = "cluster.placement=disaggregated"
COLOCATED = "cluster.placement=colocated cluster.start=auto cluster.num_rollout_workers=null"
"""Overrides for a run without rollout workers."""

BY_RAY = "cluster.start=ray"
STARTED_BY_RAY = ("cluster.start", "ray", "Ray, which places the rollout workers")

CPUS = 1
"""CPUs that Ray reserves for a rank or a rollout worker; their threads and simulators share all cores of the machine."""


def has_rollout_workers(config: RunConfig) -> bool:
    """Return whether a run's rollouts are collected by separate rollout workers."""
    return config.cluster.placement == "disaggregated" and config.trainer.max_steps > 0


def ranks_by_ray(config: RunConfig) -> bool:
    """Return whether Ray starts a run's ranks; a single rank is always the command's own process."""
    return config.cluster.start == "ray" and config.cluster.num_processes > 1


@dataclass(frozen=True)
class Node:
    """Resources of one machine that Ray may allocate."""

    name: str
    cpus: float
    gpus: float

    def max_processes(self, gpus: int) -> int:
        """Return how many processes with one CPU and ``gpus`` GPUs each fit on the machine."""
        return int(min([self.cpus // CPUS, *([self.gpus // gpus] if gpus else [])]))

    def __str__(self) -> str:
        return f"{self.name} has {self.cpus:g} CPUs and {self.gpus:g} GPUs"


@dataclass(frozen=True)
class FreeCapacity:
    """Free capacity that Ray's object store needs on each machine with rollout workers, for weights and rollouts."""

    num_bytes: int
    fixes: str
    """Overrides for a run that needs less."""


@dataclass(frozen=True)
class Placement:
    """Rollout workers, their ranks, and the resources that Ray reserves for them and for the ranks that it starts.

    With fewer rollout workers than ranks, neighbouring ranks share one, which belongs to the first of them. Otherwise rollout worker
    ``p`` belongs to rank ``p * num_ranks // num_rollout_workers``, and runs only that rank's env groups.

    Attributes:
        num_ranks, num_rollout_workers: Totals over all machines; with 0 rollout workers, the ranks roll out.
        num_env_groups: Total over all ranks; 0 if groups are not assigned in advance and each rollout worker takes the next one.
        gpus_per_rollout_worker: Tensor-parallel size of an engine, otherwise 1; 0 on CPUs, where ranks use no GPU either.
        ranks_compute: False if ranks only read and write files, and leave all GPUs to the rollout workers.
    """

    num_ranks: int
    num_rollout_workers: int
    num_env_groups: int
    gpus_per_rollout_worker: int
    by_ray: bool = False
    ranks_compute: bool = True

    @classmethod
    def of(cls, config: RunConfig, nodes: Sequence[Node] | None = None) -> Placement:
        """Return the placement of a run on the machines ``nodes`` (None if not known yet)."""
        cluster, rollout, by_ray = config.cluster, config.rollout, ranks_by_ray(config)
        ranks, workers = cluster.num_processes, 0
        if has_rollout_workers(config):
            workers = ranks if cluster.num_rollout_workers is None else cluster.num_rollout_workers
        if workers % ranks:
            fix = f"cluster.num_rollout_workers={max(1, math.ceil(workers / ranks)) * ranks}"
            required = f"a multiple of cluster.num_processes={ranks}"
            reject(f"cluster.num_rollout_workers={workers}", required, fix)
        if workers and rollout.num_envs % (workers * rollout.group_size):
            unit = workers * rollout.group_size
            fix = f"rollout.num_envs={max(1, round(rollout.num_envs / unit)) * unit}"
            text = f"cluster.num_rollout_workers={workers} x rollout.group_size={rollout.group_size}"
            required = f"a multiple of {text}, because a group stays on one rollout worker"
            reject(f"rollout.num_envs={rollout.num_envs}", required, fix)
        # Look for GPUs on the cluster's machines, because the command's own machine may have none.
        if by_ray and nodes is not None:
            on_gpu = cluster.device == "cuda" or (cluster.device == "auto" and any(node.gpus for node in nodes))
        else:
            on_gpu = resolve_device(cluster.device, 0 if by_ray else 1) == "cuda"
        gpus_per_rollout_worker = rollout.vllm.tensor_parallel_size if workers and rollout.backend == "vllm" else 1
        num_env_groups = rollout.num_envs // rollout.group_size
        placement = cls(ranks, workers, num_env_groups, gpus_per_rollout_worker if on_gpu else 0, by_ray)
        if nodes is not None:
            placement.check_nodes(nodes, COLOCATED, "cluster.device=cpu")
        return placement

    @classmethod
    def of_evaluation(cls, config: RunConfig, nodes: Sequence[Node] | None = None) -> Placement:
        """Return the placement of an evaluation on rollout workers; see ``of``."""
        gpus_per_rollout_worker = int(resolve_device(config.cluster.device, 1) == "cuda")
        placement = cls(1, config.cluster.num_rollout_workers or 0, 0, gpus_per_rollout_worker, ranks_compute=False)
        if nodes is not None:
            placement.check_nodes(nodes, "cluster.start=auto cluster.num_rollout_workers=null", "cluster.device=cpu")
        return placement

    @property
    def gpus_of_ranks(self) -> int:
        """How many of this machine's first GPUs are reserved for ranks outside of Ray."""
        return self.num_ranks if self.on_gpu and self.ranks_compute and not self.by_ray else 0

    @property
    def on_gpu(self) -> bool:
        """Whether ranks and rollout workers have their own GPUs."""
        return self.gpus_per_rollout_worker > 0

    @property
    def bundle(self) -> dict[str, float]:
        """Resources that Ray reserves for each rollout worker."""
        return {"CPU": CPUS} | ({"GPU": self.gpus_per_rollout_worker} if self.on_gpu else {})

    @property
    def rank_bundle(self) -> dict[str, float]:
        """Resources that Ray reserves for each rank that it starts."""
        return {"CPU": CPUS} | ({"GPU": 1} if self.on_gpu else {})

    @property
    def cpus(self) -> int:
        """CPUs of all ranks and rollout workers that Ray starts."""
        return CPUS * (self.num_rollout_workers + (self.num_ranks if self.by_ray else 0))

    def rollout_workers_of(self, rank: int) -> range:
        """Return the rollout workers of a rank."""
        if self.is_shared:
            sharers = self.num_ranks // self.num_rollout_workers
            return range(rank // sharers, rank // sharers + (rank % sharers == 0))
        return rank_range(self.num_rollout_workers, rank, self.num_ranks)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share a rollout worker."""
        return 0 < self.num_rollout_workers < self.num_ranks

    def worker_threads(self, of_rank: int) -> int:
        """Return a rollout worker's number of worker threads, a part of the rank's, so that policy calls keep their batch size."""
        return max(1, of_rank * self.num_ranks // self.num_rollout_workers)

    def torch_threads(self, of_rank: int | None, of_machine: int) -> int:
        """Return a rollout worker's number of compute threads: its part of a rank's configured threads or of the machine's cores."""
        return max(1, of_machine if of_rank is None else of_rank * self.num_ranks // self.num_rollout_workers)

    def check_nodes(self, nodes: Sequence[Node], fallback: str, on_cpu: str) -> None:
        """Reject machines that lack capacity for all processes that Ray starts; the message suggests a smaller number or the last arguments."""
        ranks, workers = self.num_ranks if self.by_ray else 0, self.num_rollout_workers

        def fit(num_ranks: int, num_workers: int) -> bool:
            capacity = 0
            # Ray places the ranks first, so rollout workers use the remaining resources.
            for node in nodes:
                placed = min(num_ranks, node.max_processes(int(self.on_gpu)))
                num_ranks -= placed
                capacity += Node(node.name, node.cpus - placed * CPUS, node.gpus - placed * self.on_gpu).max_processes(
                    self.gpus_per_rollout_worker
                )
            return num_ranks == 0 and capacity >= num_workers

        def text(counts: tuple[int, int]) -> str:
            keys = ("cluster.num_processes", "cluster.num_rollout_workers")
            return " ".join(f"{key}={count}" for key, count in zip(keys, counts, strict=True) if count)

        if fit(ranks, workers):
            return
        if self.by_ray:
            smaller = [
                (count, count * (workers > 0)) for count in range(ranks, 1, -1) if self.num_env_groups % count == 0
            ]
        else:  # without env groups, several ranks may share a rollout worker
            counts = [n for n in range(workers, 0, -1) if n % self.num_ranks == 0 and self.num_env_groups % n == 0]
            counts += [n for n in range(self.num_ranks, 0, -1) if not self.num_env_groups and self.num_ranks % n == 0]
            smaller = [(0, count) for count in counts]
        fits = next((numbers for numbers in smaller if fit(*numbers)), None)
        fix = fallback if fits is None else text(fits)
        if fits is None and self.on_gpu:
            fix += f", or {on_cpu}"
        gpus = "a GPU" if self.gpus_per_rollout_worker == 1 else f"{self.gpus_per_rollout_worker} GPUs of one machine"
        roles = (("rank", ranks, "a GPU"), ("rollout worker", workers, gpus))
        needs = [f"a CPU{f' and {gpu}' if self.on_gpu else ''} for each {role}" for role, count, gpu in roles if count]
        have = "; ".join(map(str, nodes))
        reject(f"{text((ranks, workers))}, but in the Ray cluster {have}", " and ".join(needs), fix)


def check_placement(config: RunConfig) -> None:
    """Check those placement requirements that are known before the cluster exists."""
    cluster, place, learns = config.cluster, launch_context(os.environ), config.trainer.max_steps > 0
    if place is not None and (cluster.start == "ray" or cluster.placement == "disaggregated"):
        what, who = (BY_RAY, "ranks") if cluster.placement == "colocated" else (SPLIT, "ranks and rollout workers")
        actual = f"{what} in a command that {place.launcher} has started {place.size} times"
        fix = f"{BY_RAY} cluster.num_processes={place.size} and start it once"
        reject(actual, f"a single command, whose {who} are started by Ray", fix)
    if cluster.placement == "colocated":
        if cluster.start == "ray" and cluster.num_processes == 1:
            actual = f"{BY_RAY} with cluster.num_processes=1 and cluster.placement=colocated"
            required = "ranks or rollout workers for Ray to start" if learns else "ranks for Ray to start"
            reject(actual, required, f"cluster.start=auto, or {SPLIT}" if learns else "cluster.start=auto")
        workers = ("cluster.num_rollout_workers", None, "ranks that also roll out", *([f"{SPLIT} {BY_RAY}"] * learns))
        require_values(config, "cluster.placement=colocated", workers)
    else:
        _check_rollout_workers(config)
    if cluster.start == "ray":
        Placement.of(config)
        needed_by = BY_RAY if cluster.placement == "colocated" else SPLIT
        import_ray(needed_by)
        check_address(needed_by)


def _check_rollout_workers(config: RunConfig) -> None:
    """Reject settings that are incompatible with rollout workers."""
    if config.trainer.max_steps == 0:
        reject(f"{SPLIT} without RL (`rlinf sft`, trainer.max_steps=0)", "rollouts", COLOCATED)
    no_processes = ("rollout.worker_processes", 0, "rollout workers instead of rollout processes")
    require_values(config, SPLIT, STARTED_BY_RAY, no_processes)


def check_evaluation_workers(config: RunConfig) -> None:
    """Check those requirements of an evaluation on rollout workers that are known before the cluster exists."""
    cluster = config.cluster
    if cluster.num_rollout_workers is None:
        if cluster.start == "ray":
            actual = f"{BY_RAY} cluster.num_rollout_workers=null in an evaluation"
            reject(actual, "rollout workers", "cluster.num_rollout_workers=2 cluster.num_processes=1")
        return
    workers = f"cluster.num_rollout_workers={cluster.num_rollout_workers}"
    place = launch_context(os.environ)
    if place is not None:
        actual = f"{workers} in a command that {place.launcher} has started {place.size} times"
        fix = f"{BY_RAY} cluster.num_processes=1 and start it once"
        reject(actual, "a single command, because rollout workers run all episodes", fix)
    one_rank = ("cluster.num_processes", 1, "one rank, because the rollout workers run all episodes")
    no_baselines = ("evaluation.baselines", False, "no baselines, which rollout workers do not support")
    require_values(config, workers, STARTED_BY_RAY, one_rank, no_baselines)
    import_ray(workers)
    check_address(workers)
