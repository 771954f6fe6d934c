"""The rows of a folder of episodes from which a policy learns: all, of successes, or a person's corrections."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from rlinf.data.config import BAD, GOOD, SFTConfig
from rlinf.data.rows import BatchSource
from rlinf.data.stored import StoredDemonstrations
from rlinf.errors import ConfigError
from rlinf.types import Observation


@dataclass
class ChosenRows:
    """Rows ``index`` (int64 ``[K]``) of a dataset, each as often as it occurs there, with their ``K`` suffixes (a ``BatchSource``)."""

    dataset: StoredDemonstrations
    index: np.ndarray
    suffixes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, index: np.ndarray) -> tuple[Observation, Tensor]:
        found = self.dataset.rows(self.index[index])
        if self.suffixes is None:
            return found
        return replace(found[0], suffixes=self.suffixes[index].tolist()), found[1]


def needs_outcomes(config: SFTConfig) -> bool:
    """Return whether the choice, or a label, depends on successes or interventions."""
    return config.filter != "all" or config.intervention_weight > 1 or config.advantage_top_fraction is not None


def rows_of_person(dataset: StoredDemonstrations) -> np.ndarray:
    """Return bool ``[N]``: all of the row's chunk is the person's, up to the end of the episode."""
    num_rows, acted = len(dataset), dataset.outcomes.intervention
    if acted is None:
        return np.zeros(num_rows, dtype=bool)
    before = np.concatenate([[0], np.cumsum(acted)])
    ends = np.minimum(np.arange(num_rows) + dataset.chunk_len, dataset.last_rows + 1)
    return before[ends] - before[:-1] == ends - np.arange(num_rows)


def chosen(dataset: StoredDemonstrations, config: SFTConfig, is_good: np.ndarray | None = None) -> BatchSource:
    """Return the rows of a dataset, opened with ``outcomes``, that ``sft.filter`` chooses; raise ConfigError if it chooses none.

    Filtered cloning keeps the episodes that reached the goal. HG-DAgger (Kelly et al. 2019, arXiv:1810.02890, algorithm 1)
    keeps the rows at which the person acted. A row counts as an intervention if all of its chunk is the person's, up to the
    end of the episode: a policy must not learn its own actions from before a take-over, or from after the hand-back.
    ``sft.intervention_weight`` repeats these rows, which multiplies their fraction of the loss. With labels (``is_good``, bool ``[N]``),
    each row occurs three times as often, every third time without its label.
    """
    if not needs_outcomes(config):
        return ChosenRows(dataset, np.flatnonzero(~dataset.unreadable)) if dataset.unreadable.any() else dataset
    outcomes, last_rows, num_rows = dataset.outcomes, dataset.last_rows, len(dataset)
    by_person, succeeded = rows_of_person(dataset), np.zeros(num_rows, dtype=bool)
    is_helped = np.zeros(num_rows, dtype=bool)
    if outcomes.intervention is not None:
        is_helped = np.isin(last_rows, last_rows[outcomes.intervention])
    if outcomes.success is not None:
        succeeded = np.isin(last_rows, last_rows[outcomes.success])
    kept = {
        "all": np.ones(num_rows, dtype=bool),
        "successes": succeeded,
        "interventions": by_person,
        "corrected": by_person | (succeeded & ~is_helped),
    }[config.filter] & ~dataset.unreadable
    if not kept.any():
        raise ConfigError(
            f"{dataset.info.folder} has {num_rows} rows, and sft.filter={config.filter} chooses none of them (successful episodes: "
            f"{len(np.unique(last_rows[succeeded]))}; rows of interventions: {by_person.sum()}); required: one or more. Set sft.filter=all, or "
            "sft.dataset=<another folder>"
        )
    index = np.flatnonzero(kept)
    index = np.repeat(index, np.where(by_person[index], config.intervention_weight, 1))
    if is_good is None:
        return ChosenRows(dataset, index)
    labels = np.where(is_good[index], GOOD, BAD)
    return ChosenRows(dataset, np.tile(index, 3), np.concatenate([labels, labels, np.full(len(index), "")]))
