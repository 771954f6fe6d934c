"""Choose training episodes as a pure function of seed, iteration, group and position, so that no state needs saving."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec


@dataclass
class EpisodeSampler:
    """Choose training episodes, in equal numbers per task.

    ``specs`` is the training split, with ``num_tasks`` tasks in round-robin order. Each iteration has ``num_groups`` groups
    across all ranks; the ``group_size`` envs of a group run the same episodes. See ``spec`` for ``init_states``.
    """

    specs: Sequence[EpisodeSpec]
    num_tasks: int
    _: KW_ONLY
    num_groups: int
    group_size: int = 1
    seed: int = 0
    init_states: str = "random"

    def spec(self, step: int, env_id: int, position: int, attempt: int = 0) -> EpisodeSpec:
        """Return episode ``position`` of an env (global index) in iteration ``step`` and rollout ``attempt``.

        ``random``: group ``g`` runs task ``(g + position) mod num_tasks`` from a uniformly drawn initial state. ``ordered``: use the
        split's order, starting each iteration ``num_groups`` episodes later, so that an env's second episode is its first one in
        the next iteration. ``fixed``: like ``ordered``, but each iteration starts at the first episode.
        """
        group = env_id // self.group_size
        if self.init_states == "random":
            rounds = len(self.specs) // self.num_tasks
            draw = derive_seed(self.seed, "episode", step, group, position, attempt) % rounds
            return self.specs[draw * self.num_tasks + (group + position) % self.num_tasks]
        laps = position + attempt + (step if self.init_states == "ordered" else 0)
        return self.specs[(laps * self.num_groups + group) % len(self.specs)]
