"""Which episodes are played: a pure function of seed, iteration, group and position, so nothing needs to be saved."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec


class EpisodeSampler:
    """Chooses training episodes, tasks in equal shares.

    Args:
        specs: Training split, tasks in round-robin order.
        num_tasks: Length of one round.
        num_groups: Groups of envs in an iteration, over all ranks.
        group_size: Environments that share each episode.
        seed: Seed of the run.
        init_states: ``random``, ``ordered`` or ``fixed``, see ``spec``.
    """

    def __init__(
        self, specs: Sequence[EpisodeSpec], num_tasks: int, *, num_groups: int, group_size: int = 1, seed: int = 0,
        init_states: str = "random",
    ) -> None:  # fmt: skip
        self.specs = specs
        self.num_tasks = num_tasks
        self.num_groups = num_groups
        self.group_size = group_size
        self.seed = seed
        self.init_states = init_states

    def group_of(self, env_id: int) -> int:
        """Return the group of an env (global index)."""
        return env_id // self.group_size

    def spec(self, step: int, env_id: int, position: int, attempt: int = 0) -> EpisodeSpec:
        """Return an episode.

        ``random``: group ``g`` plays task ``(g + position) mod num_tasks`` from an initial state drawn uniformly.
        ``ordered``: the split in its order; first episodes go ``num_groups`` further with every iteration. A further episode of
        the same env is the one that the next iteration begins with.
        ``fixed``: as ``ordered``, but each iteration begins at the first one again.

        Args:
            step: Iteration.
            env_id: Global index of the env.
            position: Number of the episode within the iteration.
            attempt: Number of the rollout within the iteration (dynamic sampling takes several).
        """
        group = self.group_of(env_id)
        if self.init_states == "random":
            rounds = len(self.specs) // self.num_tasks
            draw = derive_seed(self.seed, "episode", step, group, position, attempt) % rounds
            return self.specs[draw * self.num_tasks + (group + position) % self.num_tasks]
        laps = position + attempt + (step if self.init_states == "ordered" else 0)
        return self.specs[(laps * self.num_groups + group) % len(self.specs)]
