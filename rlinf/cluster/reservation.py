"""The machines of a run with players: a Ray cluster, a place in it for each player, and the proof that all machines are alike."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rlinf.config.plugins import load_plugins
from rlinf.config.schema import RunConfig
from rlinf.distributed.devices import visible_gpus
from rlinf.distributed.start import refuse_differences, what_ranks_share
from rlinf.errors import ConfigError
from rlinf.files import sha256_of
from rlinf.preflight.placement import Node, Placement

logger = logging.getLogger("rlinf")

ADDRESS = "RAY_ADDRESS"
ROOM_S = 10.0
"""Seconds after which the log says that the cluster has no room."""
REACH_S = 10.0
"""Seconds in which the address of a cluster must answer."""


@dataclass(frozen=True)
class Reservation:
    """A place for each player of a run in a Ray cluster. Every rank gets it.

    Attributes:
        address: Of the cluster.
        group: Id of Ray's placement group, with one bundle for each player.
        on_gpu: A bundle has a GPU.
    """

    address: str
    group: str
    on_gpu: bool

    def join(self) -> None:
        """Connect this process to the cluster, unless it is."""
        import ray

        if not ray.is_initialized():
            _connect(address=self.address)

    def start(self, actor_class: type, number: int) -> Any:
        """Start an actor in the place of a player."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group(), placement_group_bundle_index=number)
        options = {"num_cpus": 1, "num_gpus": int(self.on_gpu), "max_restarts": 0, "scheduling_strategy": place}
        return ray.remote(**options)(actor_class).remote()

    def num_neighbours(self, number: int) -> int:
        """Return how many players have their place on the machine of a player, itself included."""
        from ray.util import placement_group_table

        nodes = placement_group_table(self._group())["bundles_to_node_id"]
        return list(nodes.values()).count(nodes[number])

    def signal(self, node: str, pid: int, number: int) -> Any:
        """Send a signal to a process of a machine; return a reference to the end of that."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(num_cpus=0, scheduling_strategy=there, max_retries=0)(_send_signal).remote(pid, number)

    def _group(self) -> Any:
        from ray import PlacementGroupID
        from ray.util.placement_group import PlacementGroup

        return PlacementGroup(PlacementGroupID(bytes.fromhex(self.group)))


def _send_signal(pid: int, number: int) -> None:
    os.kill(pid, number)  # which Ray cannot make a task of, because it is not a Python function


@contextmanager
def reserved(config: RunConfig) -> Iterator[Reservation | None]:
    """Reserve a place for each player of a run, and free all places at the end; None where there are none.

    Raises:
        ConfigError: There is no cluster at ``RAY_ADDRESS``, it has no room, or its machines differ.
    """
    if config.cluster.placement == "colocated" or config.trainer.max_steps == 0:
        yield None
        return
    address = os.environ.get(ADDRESS, "local")
    with _local_cluster(config) if address == "local" else _existing_cluster(address):
        import ray
        from ray.util import remove_placement_group

        placement = Placement.of(config, _nodes())
        group = ray.util.placement_group([placement.bundle] * placement.num_players, strategy="SPREAD")
        try:
            if not group.wait(ROOM_S):
                logger.warning(
                    "Other jobs of the Ray cluster take its CPUs or GPUs; waiting until there is room for the players."
                )
                limit = config.cluster.deadlines.start
                if not group.wait(limit):
                    raise ConfigError(
                        f"The Ray cluster has had no room for {placement.num_players} players for {limit:g} s; required: {placement.bundle} "
                        "for each. End other jobs, or set a longer cluster.deadlines.start"
                    )
            found = Reservation(ray.get_runtime_context().gcs_address, group.id.hex(), placement.on_gpu)
            if address != "local":
                _compare_machines(config, group)
            yield found
        finally:
            if ray.is_initialized():
                remove_placement_group(group)


@contextmanager
def _existing_cluster(address: str) -> Iterator[None]:
    """Connect to the cluster at an address for the block, unless this process is connected to one."""
    import ray

    if ray.is_initialized():
        yield
        return
    cure = f"Set {ADDRESS}=<host>:<port> of a cluster that runs, or unset {ADDRESS} to start one on this machine"
    host, _, port = address.rpartition(":")
    if "://" in address or (address != "auto" and not (host and port.isdigit())):
        raise ConfigError(
            f"{ADDRESS} is '{address}'; required: the host and port of a cluster of which this machine is a part. {cure}"
        )
    try:
        if host:
            socket.create_connection((host, int(port)), REACH_S).close()
        _connect(address=address)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"There is no Ray cluster for this process at {ADDRESS}={address} ({error}). {cure}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _local_cluster(config: RunConfig) -> Iterator[None]:
    """Start a cluster on this machine for the block. It ends with this process, however that ends.

    Ranks have the first GPUs, players the others.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    placement, gpus = Placement.of(config), []
    if placement.on_gpu:
        gpus = visible_gpus(os.environ, torch.cuda.device_count())[placement.num_ranks :]
    Placement.of(config, [Node(socket.gethostname(), float(placement.num_players), float(len(gpus)))])
    former = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Ray's sockets lie there, and a path of a socket has at most 107 letters.
    with tempfile.TemporaryDirectory(prefix="rlinf-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        try:
            _connect(
                address="local",
                num_cpus=placement.num_players,
                num_gpus=len(gpus),
                include_dashboard=False,
                _temp_dir=folder,
            )
        finally:
            del os.environ["CUDA_VISIBLE_DEVICES"]
            if former is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = former
        try:
            yield
        finally:
            ray.shutdown()


def _connect(**arguments: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray  # reads the variable

    ray.init(logging_level=logging.WARNING, **arguments)


def _nodes() -> list[Node]:
    """Return the machines of the cluster, with what Ray may give away of each."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        Node(node["NodeManagerHostname"], *(node["Resources"].get(key, 0.0) for key in ("CPU", "GPU")))
        for node in alive
    ]


def facts(plugins: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return this machine's name, and what all machines of a run must have in common."""
    own = {f"plugin {path} (sha256)": sha256_of(path) for path in load_plugins(plugins) if path.endswith(".py")}
    return socket.gethostname(), what_ranks_share([]) | own


def _compare_machines(config: RunConfig, group: Any) -> None:
    """Refuse machines whose code or packages differ from those of this one, before a model is loaded."""
    import ray
    from ray.util import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    places = {node: bundle for bundle, node in placement_group_table(group)["bundles_to_node_id"].items()}
    asked = []
    for bundle in sorted(places.values()):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        asked.append(ray.remote(num_cpus=1, scheduling_strategy=place, max_retries=0)(facts).remote(config.plugins))
    try:
        found = ray.get(asked, timeout=config.cluster.deadlines.start)
    except ray.exceptions.RayError as error:
        raise ConfigError(
            f"A machine of the Ray cluster cannot tell its version of rlinf: {error}\nInstall the same rlinf on all machines"
        ) from error
    refuse_differences([facts(config.plugins), *found], "machine")
