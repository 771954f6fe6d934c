"""Lists of the splits' episodes, cycling through the tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError, did_you_mean
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
