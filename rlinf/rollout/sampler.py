"""Which episodes are played: a pure function of seed, iteration, group and position, so nothing needs to be saved."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec


class EpisodeSampler:
    """Draws training episodes, tasks in equal shares.

    Args:
        specs: Training split, tasks in round-robin order.
        num_tasks: Length of one round.
        group_size: Environments that share each episode.
        seed: Seed of the run.
    """

    def __init__(self, specs: Sequence[EpisodeSpec], num_tasks: int, group_size: int, seed: int) -> None:
        self.specs = specs
        self.num_tasks = num_tasks
        self.group_size = group_size
        self.seed = seed

    def group_of(self, env_id: int) -> int:
        """Return the group of an env (global index)."""
        return env_id // self.group_size

    def spec(self, step: int, env_id: int, position: int) -> EpisodeSpec:
        """Return the ``position``-th episode of env ``env_id`` (global index) in iteration ``step``.

        Group ``g`` plays task ``(g + position) mod num_tasks``, with an initial state drawn uniformly.
        """
        group = self.group_of(env_id)
        rounds = len(self.specs) // self.num_tasks
        draw = derive_seed(self.seed, "episode", step, group, position) % rounds
        return self.specs[draw * self.num_tasks + (group + position) % self.num_tasks]
