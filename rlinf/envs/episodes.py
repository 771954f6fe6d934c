"""Lists of the splits' episodes, cycling through the tasks, and the choice of training episodes.

The choice is a pure function of seed, iteration, group and position, so that no state needs saving.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError, did_you_mean
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec

EVAL_INIT_STATE_OFFSET = 1_000_000_000
"""First ``init_state_id`` of the evaluation split, for envs that draw initial states by number."""

SPLITS = ("train", "eval")


@dataclass(frozen=True)
class EpisodeList(Sequence[EpisodeSpec]):
    """A split's episodes, round robin over tasks. Init state ids start at ``first_init_state_id``; all have the same ``seed``."""

    suite: str
    num_tasks: int
    num_init_states: int
    first_init_state_id: int
    seed: int

    def __len__(self) -> int:
        return self.num_tasks * self.num_init_states

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= position < len(self):
            raise IndexError(f"Episode {index} is out of range for a split of {len(self)} episodes.")
        init_state, task = divmod(position, self.num_tasks)
        return EpisodeSpec(self.suite, task, self.first_init_state_id + init_state, self.seed)


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ConfigError(f"Unknown split '{split}'.{did_you_mean(split, SPLITS)}")


def drawn_episodes(suite: str, num_tasks: int, config: EnvConfig, split: str) -> EpisodeList:
    """Return a split's episodes for a suite that draws initial states by number."""
    check_split(split)
    if config.num_train_init_states > EVAL_INIT_STATE_OFFSET:
        raise ConfigError(
            f"env.num_train_init_states={config.num_train_init_states} overlaps the evaluation split. "
            f"Set env.num_train_init_states={EVAL_INIT_STATE_OFFSET} or less."
        )
    if split == "train":
        return EpisodeList(suite, num_tasks, config.num_train_init_states, 0, seed=0)
    return EpisodeList(suite, num_tasks, config.num_eval_init_states, EVAL_INIT_STATE_OFFSET, seed=1)


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
