"""Where trainer ranks and players are, as a pure function of the configuration and of what the machines have."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import resolve_device
from rlinf.distributed.ray_cluster import check_address, import_ray
from rlinf.distributed.start import place_of
from rlinf.distributed.sums import own_blocks
from rlinf.preflight.refuse import refuse

SPLIT = "cluster.placement=split"
COLOCATED = "cluster.placement=colocated cluster.start=auto cluster.num_players=null"
"""The overrides of a run without players."""

CPUS_PER_PLAYER = 1
"""That Ray counts for a player. Its threads and simulators share the cores of its machine with the other players there."""


@dataclass(frozen=True)
class Node:
    """What Ray may give away of one machine."""

    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Placement:
    """Which players there are, whose they are and what each of them needs.

    Players and blocks are divided alike: player ``p`` belongs to rank ``p * num_ranks // num_players``, and plays the blocks
    that a rank of ``num_players`` would own, which are blocks of its rank.

    Attributes:
        num_ranks, num_players: Over all machines; a multiple of one another.
        num_blocks: Over all ranks; 0: players take what is next, and own none.
        gpus_per_player: 0 on CPUs.
    """

    num_ranks: int
    num_players: int
    num_blocks: int
    gpus_per_player: int

    @classmethod
    def of(cls, config: RunConfig, nodes: Sequence[Node] | None = None) -> Placement:
        """Return the placement of a run whose players are split off.

        Args:
            config: Of the run.
            nodes: The machines of the cluster; None: they are not known yet.

        Raises:
            ConfigError: Players, ranks, envs and machines do not fit each other.
        """
        cluster, rollout = config.cluster, config.rollout
        ranks = cluster.num_processes
        players = ranks if cluster.num_players is None else cluster.num_players
        if players % ranks:
            fix = f"cluster.num_players={max(1, math.ceil(players / ranks)) * ranks}"
            refuse(
                f"cluster.num_players={players}",
                f"a multiple of cluster.num_processes={ranks}, so many for each rank",
                fix,
            )
        if rollout.num_envs % (players * rollout.group_size):
            share = players * rollout.group_size
            fix = f"rollout.num_envs={max(1, round(rollout.num_envs / share)) * share}"
            unit = f"cluster.num_players={players} x rollout.group_size={rollout.group_size}"
            refuse(
                f"rollout.num_envs={rollout.num_envs}", f"a multiple of {unit}, because one player plays a group", fix
            )
        gpus_per_player = int(resolve_device(cluster.device, 1) == "cuda")
        placement = cls(ranks, players, rollout.num_envs // rollout.group_size, gpus_per_player)
        if nodes is not None:
            placement.check_nodes(nodes, COLOCATED, "cluster.device=cpu")
        return placement

    @property
    def on_gpu(self) -> bool:
        """Players have GPUs of their own."""
        return self.gpus_per_player > 0

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for each player."""
        return {"CPU": CPUS_PER_PLAYER} | ({"GPU": self.gpus_per_player} if self.on_gpu else {})

    def players_of(self, rank: int) -> range:
        """Return the players of a rank."""
        return own_blocks(self.num_players, rank, self.num_ranks)

    def blocks_of(self, player: int) -> range:
        """Return the blocks of a player."""
        return own_blocks(self.num_blocks, player, self.num_players)

    def worker_threads(self, of_rank: int) -> int:
        """Return the worker threads of a player: its part of those with which a rank would play, ``of_rank``.

        So a player calls the policy with as many rows as the rank would, wherever players divide the threads.
        """
        return max(1, of_rank * self.num_ranks // self.num_players)

    def torch_threads(self, of_rank: int | None, of_machine: int) -> int:
        """Return the threads with which a player computes.

        Args:
            of_rank: ``cluster.num_threads``, of which a player has the part that its rank leaves it; None: the next one counts.
            of_machine: The player's share of the cores of its machine.
        """
        return max(1, of_machine if of_rank is None else of_rank * self.num_ranks // self.num_players)

    def check_nodes(self, nodes: Sequence[Node], without_players: str, on_cpu: str) -> None:
        """Refuse machines without room for all players.

        Args:
            nodes: The machines.
            without_players: Overrides of a run without players.
            on_cpu: The override with which players need no GPUs.
        """

        def room(node: Node) -> int:
            return int(
                min([node.cpus // CPUS_PER_PLAYER, *([node.gpus // self.gpus_per_player] if self.on_gpu else [])])
            )

        fitting = sum(map(room, nodes))
        if fitting >= self.num_players:
            return
        have = "; ".join(f"{node.name} has {node.cpus:g} CPUs and {node.gpus:g} GPUs" for node in nodes)
        gpus = "a GPU" if self.gpus_per_player == 1 else f"{self.gpus_per_player} GPUs of one machine"
        need = f"a CPU and {gpus}" if self.on_gpu else "a CPU"
        possible = fitting // self.num_ranks * self.num_ranks
        while possible and self.num_blocks % possible:
            possible -= self.num_ranks
        fix = f"cluster.num_players={possible}" if possible else without_players
        if self.on_gpu and not possible:
            fix += f", or {on_cpu}"
        refuse(f"cluster.num_players={self.num_players}, and of the Ray cluster {have}", f"{need} for each player", fix)


def check_placement(config: RunConfig) -> None:
    """Check what a placement needs that can be known before there is a cluster."""
    cluster, rollout = config.cluster, config.rollout
    if cluster.placement == "colocated":
        if cluster.start == "ray":
            refuse("cluster.start=ray with cluster.placement=colocated", "players to place", "cluster.placement=split")
        if cluster.num_players is not None:
            found = f"cluster.num_players={cluster.num_players} with cluster.placement=colocated"
            refuse(
                found, "players of their own", "cluster.placement=split cluster.start=ray, or cluster.num_players=null"
            )
        return
    if cluster.start != "ray":
        refuse(f"{SPLIT} with cluster.start={cluster.start}", "Ray, which places the players", "cluster.start=ray")
    if config.trainer.max_steps == 0:
        refuse(f"{SPLIT} with trainer.max_steps=0", "rollouts to play", COLOCATED)
    place = place_of(os.environ)
    if place is not None:
        found = f"{SPLIT} in a command that {place.launcher} has started {place.size} times"
        refuse(
            found,
            "one command, whose ranks are on its machine",
            f"cluster.num_processes={place.size} and start it once",
        )
    if rollout.worker_processes:
        refuse(f"rollout.worker_processes={rollout.worker_processes} with {SPLIT}", "players as the processes that play",
               f"rollout.worker_processes=0 cluster.num_players={rollout.worker_processes * cluster.num_processes}")  # fmt: skip
    if rollout.backend != "torch":
        refuse(
            f"rollout.backend={rollout.backend} with {SPLIT}",
            "players that run the policy in torch",
            "rollout.backend=torch",
        )
    Placement.of(config)
    import_ray(SPLIT)
    check_address(SPLIT)
