"""Where trainer ranks and players are, as a pure function of the configuration and of what the machines have."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import resolve_device
from rlinf.distributed.ray.cluster import check_address, import_ray
from rlinf.distributed.start import launch_context
from rlinf.distributed.sums import own_blocks
from rlinf.preflight.refuse import refuse

SPLIT = "cluster.placement=split"
COLOCATED = "cluster.placement=colocated cluster.start=auto cluster.num_players=null"
"""The overrides of a run without players."""

BY_RAY = "cluster.start=ray"

CPUS = 1
"""That Ray counts for a rank or a player. Its threads and simulators share the cores of its machine with the others there."""


def has_players(config: RunConfig) -> bool:
    """Return whether players of their own play the rollouts of a run."""
    return config.cluster.placement == "split" and config.trainer.max_steps > 0


def ranks_by_ray(config: RunConfig) -> bool:
    """Return whether Ray starts the ranks of a run. A single rank is the process of the command."""
    return config.cluster.start == "ray" and config.cluster.num_processes > 1


@dataclass(frozen=True)
class Node:
    """What Ray may give away of one machine."""

    name: str
    cpus: float
    gpus: float

    def room(self, gpus: int) -> int:
        """Return how many processes have room there that need a CPU and some GPUs each."""
        return int(min([self.cpus // CPUS, *([self.gpus // gpus] if gpus else [])]))

    def __str__(self) -> str:
        return f"{self.name} has {self.cpus:g} CPUs and {self.gpus:g} GPUs"


@dataclass(frozen=True)
class StoreRoom:
    """The room that a run with players needs in Ray's store of objects on each machine with players, for weights and rollouts."""

    num_bytes: int
    cures: str
    """Overrides of a run that needs less."""


@dataclass(frozen=True)
class Placement:
    """Which players there are, whose they are, and what Ray reserves for each of them and for each rank that it starts.

    Where there are fewer players than ranks, neighbouring ranks share one, which belongs to the first of them. Otherwise players and
    blocks are divided alike: player ``p`` belongs to rank ``p * num_ranks // num_players``, and plays the blocks
    that a rank of ``num_players`` would own, which are blocks of its rank.

    Attributes:
        num_ranks, num_players: Over all machines; 0 players: the ranks play.
        num_blocks: Over all ranks; 0: players own no blocks, and each takes the next one.
        gpus_per_player: As many as an engine is split over, else one; 0 on CPUs, where ranks have none either.
        by_ray: Ray starts the ranks.
        ranks_compute: Else they only read and write, and leave all GPUs to the players.
    """

    num_ranks: int
    num_players: int
    num_blocks: int
    gpus_per_player: int
    by_ray: bool = False
    ranks_compute: bool = True

    @classmethod
    def of(cls, config: RunConfig, nodes: Sequence[Node] | None = None) -> Placement:
        """Return the placement of a run on ``nodes``, the machines of the cluster; None: they are not known yet."""
        cluster, rollout, by_ray = config.cluster, config.rollout, ranks_by_ray(config)
        ranks, players = cluster.num_processes, 0
        if has_players(config):
            players = ranks if cluster.num_players is None else cluster.num_players
        if players % ranks:
            fix = f"cluster.num_players={max(1, math.ceil(players / ranks)) * ranks}"
            required = f"a multiple of cluster.num_processes={ranks}, so many for each rank"
            refuse(f"cluster.num_players={players}", required, fix)
        if players and rollout.num_envs % (players * rollout.group_size):
            share = players * rollout.group_size
            fix = f"rollout.num_envs={max(1, round(rollout.num_envs / share)) * share}"
            unit = f"cluster.num_players={players} x rollout.group_size={rollout.group_size}"
            required = f"a multiple of {unit}, because one player plays a group"
            refuse(f"rollout.num_envs={rollout.num_envs}", required, fix)
        if by_ray and nodes is not None:  # this machine may have no GPU
            on_gpu = cluster.device == "cuda" or (cluster.device == "auto" and any(node.gpus for node in nodes))
        else:
            on_gpu = resolve_device(cluster.device, 0 if by_ray else 1) == "cuda"
        gpus_per_player = rollout.vllm.tensor_parallel_size if players and rollout.backend == "vllm" else 1
        num_blocks = rollout.num_envs // rollout.group_size
        placement = cls(ranks, players, num_blocks, gpus_per_player if on_gpu else 0, by_ray)
        if nodes is not None:
            check = placement.check_nodes_of_ranks if by_ray else placement.check_nodes
            check(nodes, COLOCATED, "cluster.device=cpu")
        return placement

    @classmethod
    def of_evaluation(cls, config: RunConfig, nodes: Sequence[Node] | None = None) -> Placement:
        """Return the placement of an evaluation by players; see ``of``."""
        gpus_per_player = int(resolve_device(config.cluster.device, 1) == "cuda")
        placement = cls(1, config.cluster.num_players or 0, 0, gpus_per_player, ranks_compute=False)
        if nodes is not None:
            placement.check_nodes(nodes, "cluster.start=auto cluster.num_players=null", "cluster.device=cpu")
        return placement

    @property
    def gpus_of_ranks(self) -> int:
        """The first GPUs of this machine, which the ranks that Ray does not start have for themselves."""
        return self.num_ranks if self.on_gpu and self.ranks_compute and not self.by_ray else 0

    @property
    def on_gpu(self) -> bool:
        """Ranks and players have GPUs of their own."""
        return self.gpus_per_player > 0

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for each player."""
        return {"CPU": CPUS} | ({"GPU": self.gpus_per_player} if self.on_gpu else {})

    @property
    def rank_bundle(self) -> dict[str, float]:
        """What Ray reserves for each rank that it starts."""
        return {"CPU": CPUS} | ({"GPU": 1} if self.on_gpu else {})

    @property
    def cpus(self) -> int:
        """CPUs of all ranks and players that Ray starts."""
        return CPUS * (self.num_players + (self.num_ranks if self.by_ray else 0))

    def players_of(self, rank: int) -> range:
        """Return the players of a rank."""
        if self.is_shared:
            sharers = self.num_ranks // self.num_players
            return range(rank // sharers, rank // sharers + (rank % sharers == 0))
        return own_blocks(self.num_players, rank, self.num_ranks)

    @property
    def is_shared(self) -> bool:
        """A player belongs to several ranks."""
        return 0 < self.num_players < self.num_ranks

    def worker_threads(self, of_rank: int) -> int:
        """Return the worker threads of a player: its part of those with which a rank would play, ``of_rank``.

        So a player calls the policy with as many rows as the rank would, wherever players divide the threads.
        """
        return max(1, of_rank * self.num_ranks // self.num_players)

    def torch_threads(self, of_rank: int | None, of_machine: int) -> int:
        """Return the threads with which a player computes: its part of ``given_num_threads`` (``of_rank``).

        None: its share of the cores of its machine (``of_machine``).
        """
        return max(1, of_machine if of_rank is None else of_rank * self.num_ranks // self.num_players)

    def check_nodes(self, nodes: Sequence[Node], without_players: str, on_cpu: str) -> None:
        """Refuse machines without room for all players; the last two are overrides that need no players, or no GPUs."""
        fitting = sum(node.room(self.gpus_per_player) for node in nodes)
        if fitting >= self.num_players:
            return
        have = "; ".join(map(str, nodes))
        gpus = "a GPU" if self.gpus_per_player == 1 else f"{self.gpus_per_player} GPUs of one machine"
        need = f"a CPU and {gpus}" if self.on_gpu else "a CPU"
        possible = fitting // self.num_ranks * self.num_ranks
        while possible and self.num_blocks % possible:
            possible -= self.num_ranks
        if not self.num_blocks and not possible:  # ranks may share a player
            possible = max((few for few in range(1, fitting + 1) if self.num_ranks % few == 0), default=0)
        fix = f"cluster.num_players={possible}" if possible else without_players
        if self.on_gpu and not possible:
            fix += f", or {on_cpu}"
        refuse(f"cluster.num_players={self.num_players}, and of the Ray cluster {have}", f"{need} for each player", fix)

    def check_nodes_of_ranks(self, nodes: Sequence[Node], without_ray: str, on_cpu: str) -> None:
        """Refuse machines without room for all ranks and players, which Ray starts; see ``check_nodes``."""

        def fit(num_ranks: int, num_players: int) -> bool:
            """Return whether there is room for ranks, which take the first places, and for players in the rest."""
            room = 0
            for node in nodes:
                ranks = min(num_ranks, node.room(int(self.on_gpu)))
                num_ranks -= ranks
                rest = Node(node.name, node.cpus - ranks * CPUS, node.gpus - ranks * self.on_gpu)
                room += rest.room(self.gpus_per_player)
            return num_ranks == 0 and room >= num_players

        if fit(self.num_ranks, self.num_players):
            return
        split = self.num_players > 0
        found, need = f"cluster.num_processes={self.num_ranks}", "a CPU and a GPU" if self.on_gpu else "a CPU"
        who = "rank"
        if split:
            found, who = f"{found} cluster.num_players={self.num_players}", "rank and each player"
        fix = f"{without_ray}, or {on_cpu}" if self.on_gpu else without_ray
        for ranks in range(self.num_ranks, 1, -1):
            if self.num_blocks % ranks == 0 and fit(ranks, ranks * split):
                fix = f"cluster.num_processes={ranks}" + (f" cluster.num_players={ranks}" if split else "")
                break
        refuse(f"{found}, and of the Ray cluster {'; '.join(map(str, nodes))}", f"{need} for each {who}", fix)


def check_placement(config: RunConfig) -> None:
    """Check what a placement needs that can be known before there is a cluster."""
    cluster, place, learns = config.cluster, launch_context(os.environ), config.trainer.max_steps > 0
    if place is not None and (cluster.start == "ray" or cluster.placement == "split"):
        what, who = (BY_RAY, "ranks") if cluster.placement == "colocated" else (SPLIT, "ranks and players")
        found = f"{what} in a command that {place.launcher} has started {place.size} times"
        fix = f"{BY_RAY} cluster.num_processes={place.size} and start it once"
        refuse(found, f"one command, whose {who} Ray starts", fix)
    if cluster.placement == "colocated":
        if cluster.start == "ray" and cluster.num_processes == 1:
            found = f"{BY_RAY} with cluster.num_processes=1 and cluster.placement=colocated"
            required = "ranks or players for Ray to start" if learns else "ranks for Ray to start"
            refuse(found, required, f"cluster.start=auto, or {SPLIT}" if learns else "cluster.start=auto")
        if cluster.num_players is not None:
            found = f"cluster.num_players={cluster.num_players} with cluster.placement=colocated"
            fix = "cluster.num_players=null"
            refuse(found, "players of their own", f"{SPLIT} {BY_RAY}, or {fix}" if learns else fix)
    else:
        _check_players(config)
    if cluster.start == "ray":
        Placement.of(config)
        needed_by = BY_RAY if cluster.placement == "colocated" else SPLIT
        import_ray(needed_by)
        check_address(needed_by)


def _check_players(config: RunConfig) -> None:
    """Refuse settings that do not go with players."""
    cluster, rollout = config.cluster, config.rollout
    if config.trainer.max_steps == 0:
        refuse(f"{SPLIT} without RL (`rlinf sft`, trainer.max_steps=0)", "rollouts to play", COLOCATED)
    if cluster.start != "ray":
        refuse(f"{SPLIT} with cluster.start={cluster.start}", "Ray, which places the players", BY_RAY)
    if rollout.worker_processes:
        refuse(f"rollout.worker_processes={rollout.worker_processes} with {SPLIT}", "players as the processes that play",
               f"rollout.worker_processes=0 cluster.num_players={rollout.worker_processes * cluster.num_processes}")  # fmt: skip


def check_evaluation_players(config: RunConfig) -> None:
    """Check what an evaluation by players needs that can be known before there is a cluster."""
    cluster = config.cluster
    if cluster.num_players is None:
        if cluster.start == "ray":
            found = f"{BY_RAY} cluster.num_players=null in an evaluation"
            refuse(found, "players that play the episodes", "cluster.num_players=2 cluster.num_processes=1")
        return
    players = f"cluster.num_players={cluster.num_players}"
    place = launch_context(os.environ)
    if place is not None:
        found = f"{players} in a command that {place.launcher} has started {place.size} times"
        fix = f"{BY_RAY} cluster.num_processes=1 and start it once"
        refuse(found, "one command, which only reads and writes", fix)
    if cluster.start != "ray":
        refuse(f"{players} with cluster.start={cluster.start}", "Ray, which places the players", BY_RAY)
    if cluster.num_processes != 1:
        found = f"cluster.num_processes={cluster.num_processes} with {players}"
        refuse(found, "one rank, because the players play all episodes", "cluster.num_processes=1")
    import_ray(players)
    check_address(players)
