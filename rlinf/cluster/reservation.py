"""Ray resources of a run: the cluster, a place for each rank and rollout worker, and checks that the machines match."""

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from rlinf.cluster.machine import CommandMachine
from rlinf.config.schema import RunConfig
from rlinf.distributed.child_process import failure_in
from rlinf.distributed.devices import visible_gpus
from rlinf.distributed.ray.cluster import OBJECT_STORE_BYTES, check_address, import_ray, initialise
from rlinf.distributed.ray.ranks import RankPlaces, placement_group, raise_failure
from rlinf.distributed.ray.watch import watched
from rlinf.errors import ConfigError
from rlinf.number_formats import format_bytes
from rlinf.preflight.memory import store_bytes
from rlinf.preflight.placement import (
    BY_RAY,
    COLOCATED,
    SPLIT,
    FreeCapacity,
    Node,
    Placement,
    has_rollout_workers,
    ranks_by_ray,
)

logger = logging.getLogger("rlinf")

SHARED_MEMORY = "/dev/shm"
LOOPBACK = "127.0.0.1"
CAPACITY_WARNING_S = 10.0
"""Seconds to wait before logging that the cluster has no free capacity."""


@dataclass(frozen=True)
class Reservation:
    """Reserved places in a Ray cluster, in the form passed to every rank."""

    address: str
    group: str | None  # ID of Ray's placement group with one bundle per rollout worker; None if ranks collect rollouts
    gpus_per_rollout_worker: int
    machine: CommandMachine
    ranks: str | None = None  # ID of the placement group with one bundle per rank started by Ray
    ranks_on_gpu: bool = False
    host: str = LOOPBACK  # the command's address for ranks started by Ray

    def join(self) -> None:
        """Connect this process to the cluster if it is not connected yet."""
        ray = import_ray(BY_RAY)
        if not ray.is_initialized():
            initialise(ray, self.address, log_to_driver=True)

    def rank_places(self, start_s: float, folders: Sequence[str | os.PathLike]) -> RankPlaces | None:
        """Return places for ranks, which check that ``folders`` exist and have ``start_s`` to start; None if Ray starts no ranks."""
        if self.ranks is None:
            return None
        check = partial(self.machine.check_for_rank, [os.path.abspath(folder) for folder in folders])
        return RankPlaces.of(self.ranks, self.host, start_s, None if self.host == LOOPBACK else check)

    def start(self, actor_class: type, number: int) -> Any:
        """Start an actor in a rollout worker's reserved place."""
        ray = import_ray(SPLIT)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(placement_group(self.group), placement_group_bundle_index=number)
        options = {
            "num_cpus": 1,
            "num_gpus": self.gpus_per_rollout_worker,
            "max_restarts": 0,
            "scheduling_strategy": place,
        }
        return ray.remote(**options)(actor_class).remote()

    def num_neighbours(self, number: int) -> int:
        """Return the number of rollout workers on the machine of worker ``number``, including itself."""
        from ray.util import placement_group_table

        nodes = placement_group_table(placement_group(self.group))["bundles_to_node_id"]
        return list(nodes.values()).count(nodes[number])

    def signal(self, node: str, pid: int, number: int) -> Any:
        """Send a signal to a process on a node, and return Ray's reference to the task that sends it."""
        ray = import_ray(SPLIT)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        remote = ray.remote(num_cpus=0, scheduling_strategy=there, max_retries=0)
        # Use a lambda: Ray tasks must be Python functions, so it does not accept `os.kill`.
        return remote(lambda: os.kill(pid, number)).remote()


@contextmanager
def reserved(config: RunConfig) -> Iterator[Reservation | None]:
    """Yield a run's ``reserved_places``, or None if Ray starts neither ranks nor rollout workers."""
    if not has_rollout_workers(config) and not ranks_by_ray(config):
        yield None
        return
    needed = store_bytes(config) if has_rollout_workers(config) else None
    fixes = f"model.is_lora=true, cluster.max_staleness=0, or {COLOCATED}"
    capacity = None if needed is None else FreeCapacity(needed, fixes)
    start_s = config.cluster.deadlines.start
    with reserved_places(partial(Placement.of, config), start_s, config.plugins, capacity) as reservation:
        yield reservation


def check_machine(placement_of: Callable[[Sequence[Node] | None], Placement], capacity: FreeCapacity | None) -> None:
    """Run those checks of ``reserved_places`` that do not start a cluster or connect to one."""
    import_ray(SPLIT)
    if check_address(SPLIT) is None:
        _gpus_of_rollout_workers(placement_of)
        if capacity is not None:
            _store_size(capacity)


@contextmanager
def reserved_places(
    placement_of: Callable[[Sequence[Node] | None], Placement],
    start_s: float,
    plugins: Sequence[str] = (),
    capacity: FreeCapacity | None = None,
) -> Iterator[Reservation]:
    """Reserve a place for each rollout worker and each rank started by Ray, and free them on exit.

    Raise ConfigError if no cluster is running at ``RAY_ADDRESS``, it has insufficient free capacity, or its machines differ.

    Args:
        placement_of: Returns the run's placement on the given machines (None if unknown), or raises an error if they are unsuitable.
        start_s: Seconds to wait for free capacity and for replies from the machines.
        capacity: Required object-store capacity of each machine with rollout workers, or None if unknown.
    """
    ray = import_ray(BY_RAY)
    with _connected(ray, placement_of, capacity) as has_other_machines, ExitStack() as stack:
        alive = [(node["NodeManagerHostname"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
        placement = placement_of([Node(host, has.get("CPU", 0.0), has.get("GPU", 0.0)) for host, has in alive])
        machine = CommandMachine.here(plugins, _gpus(placement)[: placement.gpus_of_ranks])

        ranks, workers, host = None, None, LOOPBACK
        if placement.by_ray:
            places = _places(ray, start_s, placement.rank_bundle, placement.num_ranks, "ranks", "PACK")
            ranks = stack.enter_context(places).id.hex()
            host = ray.util.get_node_ip_address() if has_other_machines else LOOPBACK
        if placement.num_rollout_workers:
            places = _places(ray, start_s, placement.bundle, placement.num_rollout_workers, "workers", "SPREAD")
            group = stack.enter_context(places)
            workers = group.id.hex()
            if has_other_machines:
                _compare_machines(ray, start_s, group, machine)
            _check_stores(ray, [group] if ranks is None else [group, placement_group(ranks)], capacity)
        address = ray.get_runtime_context().gcs_address
        yield Reservation(address, workers, placement.gpus_per_rollout_worker, machine, ranks, placement.on_gpu, host)


@contextmanager
def _places(
    ray: ModuleType, start_s: float, bundle: dict[str, float], count: int, noun: str, strategy: str
) -> Iterator[Any]:
    """Reserve places, wait until they are available, and free them on exit."""
    from ray.util import remove_placement_group

    group = ray.util.placement_group([bundle] * count, strategy=strategy)
    try:
        if not group.wait(CAPACITY_WARNING_S):
            logger.warning(
                "Other jobs are using the Ray cluster's CPUs or GPUs; waiting for free places for the %s.", noun
            )
            if not group.wait(start_s):
                raise ConfigError(
                    f"The Ray cluster has had no free places for {count} {noun} for {start_s:g} s; expected {bundle} for each. "
                    "End other jobs, or set a longer cluster.deadlines.start"
                )
        yield group
    finally:
        if ray.is_initialized():
            remove_placement_group(group)


@contextmanager
def _connected(
    ray: ModuleType, placement_of: Callable[[Sequence[Node] | None], Placement], capacity: FreeCapacity | None
) -> Iterator[bool]:
    """Connect to a cluster for the duration of the block, and yield whether it may contain other machines.

    Use the cluster to which this process is already connected, otherwise the cluster at ``RAY_ADDRESS``, otherwise a new cluster on
    this machine, which ends with this process.
    """
    if ray.is_initialized():
        yield True
        return
    address = check_address(BY_RAY)
    # Use /tmp instead of TMPDIR: this folder contains Ray's sockets, whose paths may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="rlinf-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            if address is None:
                _start(ray, placement_of, folder, capacity)
            else:
                initialise(ray, address, log_to_driver=True)
            with watched(ray):
                yield address is not None
        finally:
            ray.shutdown()


def _start(
    ray: ModuleType,
    placement_of: Callable[[Sequence[Node] | None], Placement],
    folder: str,
    capacity: FreeCapacity | None,
) -> None:
    """Start a cluster on this machine. Ranks not started by Ray use the first GPUs; Ray manages the remaining ones."""
    placement, gpus = placement_of(None), _gpus_of_rollout_workers(placement_of)
    former = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        store = {} if capacity is None else {"object_store_memory": _store_size(capacity)}  # or Ray's default
        counts = {"num_cpus": placement.cpus, "num_gpus": len(gpus)}
        initialise(ray, None, log_to_driver=True, **counts, **store, _temp_dir=folder)
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if former is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = former


def _gpus_of_rollout_workers(placement_of: Callable[[Sequence[Node] | None], Placement]) -> list[str]:
    """Return this machine's GPUs that ranks do not use; raise ConfigError if there are too few."""
    placement = placement_of(None)
    gpus = _gpus(placement)[placement.gpus_of_ranks :]
    placement_of([Node(socket.gethostname(), float(placement.cpus), float(len(gpus)))])
    return gpus


def _store_size(capacity: FreeCapacity) -> int:
    """Return the object store's size for a cluster on this machine; raise ConfigError if there is too little shared memory."""
    needed = capacity.num_bytes
    size = max(OBJECT_STORE_BYTES, needed)
    free = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else size
    if needed > free:
        raise ConfigError(
            f"Weights and rollouts of this run need {format_bytes(needed)} of shared memory, but {SHARED_MEMORY} has {format_bytes(free)} "
            f"free. Enlarge it (docker run --shm-size={needed}), or set {capacity.fixes}"
        )
    return min(size, free)


def _check_stores(ray: ModuleType, groups: Sequence[Any], capacity: FreeCapacity | None) -> None:
    """Raise ConfigError if the object store of a machine is too small for weights and rollouts.

    ``groups`` contains the placement group of rollout workers and, if Ray starts the ranks, the ranks' placement group.
    """
    # Without this check, Ray would spill objects to disk instead of failing, making every push and rollout slow.
    from ray.util import placement_group_table

    if capacity is None:
        return
    needed = capacity.num_bytes
    used = {node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()}
    if len(groups) == 1:
        used.add(ray.get_runtime_context().get_node_id())
    for node in ray.nodes():
        size = int(node["Resources"].get("object_store_memory", 0))
        if node["NodeID"] in used and size < needed:
            raise ConfigError(
                f"Ray's object store has {format_bytes(size)} on {node['NodeManagerHostname']}; expected {format_bytes(needed)} for the "
                f"weights and rollouts of this run. Start Ray there with `ray start --object-store-memory={needed}`, or set "
                f"{capacity.fixes}"
            )


def _gpus(placement: Placement) -> list[str]:
    """Return this machine's GPUs available to the run, or an empty list for a run on CPUs."""
    return visible_gpus(os.environ, torch.cuda.device_count()) if placement.on_gpu else []


def _compare_machines(ray: ModuleType, start_s: float, group: Any, machine: CommandMachine) -> None:
    """Raise ConfigError if any place is on a machine that differs from this one."""
    # Each rollout worker repeats this check. Run it here, too, before loading the model, which may take minutes.
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    checks = []
    for bundle, needs in enumerate(group.bundle_specs):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options = {"num_cpus": 1, "num_gpus": needs.get("GPU", 0), "scheduling_strategy": place, "max_retries": 0}
        checks.append(ray.remote(**options)(failure_in).remote(machine.check))
    try:
        failures = ray.get(checks, timeout=start_s)
    except ray.exceptions.RayError as error:
        raise ConfigError(
            f"A machine in the Ray cluster cannot report its rlinf version: {error}\nInstall the same version on all machines"
        ) from error
    raise_failure(failures)
