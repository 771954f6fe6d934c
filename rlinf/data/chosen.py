"""The rows of a folder of episodes from which a policy learns: all, of successes, or a person's corrections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rlinf.data.config import SFTConfig
from rlinf.data.rows import BatchSource
from rlinf.data.stored import StoredDemonstrations
from rlinf.errors import ConfigError
from rlinf.types import Observation


@dataclass
class ChosenRows:
    """Rows ``index`` (int64 ``[K]``) of a dataset, each as often as it occurs there (a ``BatchSource``)."""

    dataset: StoredDemonstrations
    index: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, index: np.ndarray) -> tuple[Observation, Tensor]:
        return self.dataset.rows(self.index[index])


def needs_outcomes(config: SFTConfig) -> bool:
    """Return whether the choice depends on successes or interventions."""
    return config.rows != "all" or config.intervention_weight > 1


def chosen(dataset: StoredDemonstrations, config: SFTConfig) -> BatchSource:
    """Return the rows of a dataset, opened with ``outcomes``, that ``sft.rows`` chooses; raise ConfigError if it chooses none.

    Filtered cloning keeps the episodes that reached the goal. HG-DAgger (Kelly et al. 2019, arXiv:1810.02890, algorithm 1)
    keeps the rows at which the person acted. A row counts as an intervention if all of its chunk is the person's, up to the
    end of the episode: a policy must not learn its own actions from before a take-over, or from after the hand-back.
    ``sft.intervention_weight`` repeats these rows, which multiplies their share of the loss.
    """
    if not needs_outcomes(config):
        return dataset
    outcomes, last_rows, num_rows = dataset.outcomes, dataset.last_rows, len(dataset)
    by_person, succeeded = np.zeros(num_rows, dtype=bool), np.zeros(num_rows, dtype=bool)
    is_helped = np.zeros(num_rows, dtype=bool)
    if outcomes.intervention is not None:
        before = np.concatenate([[0], np.cumsum(outcomes.intervention)])
        ends = np.minimum(np.arange(num_rows) + dataset.chunk_len, last_rows + 1)
        by_person = before[ends] - before[:-1] == ends - np.arange(num_rows)
        is_helped = np.isin(last_rows, last_rows[outcomes.intervention])
    if outcomes.success is not None:
        succeeded = np.isin(last_rows, last_rows[outcomes.success])
    kept = {
        "all": np.ones(num_rows, dtype=bool),
        "successes": succeeded,
        "interventions": by_person,
        "corrected": by_person | (succeeded & ~is_helped),
    }[config.rows]
    if not kept.any():
        raise ConfigError(
            f"{dataset.info.folder} has {num_rows} rows, and sft.rows={config.rows} chooses none of them (successful episodes: "
            f"{len(np.unique(last_rows[succeeded]))}; rows of interventions: {by_person.sum()}); required: one or more. Set sft.rows=all, or "
            "sft.dataset=<another folder>"
        )
    index = np.flatnonzero(kept)
    return ChosenRows(dataset, np.repeat(index, np.where(by_person[index], config.intervention_weight, 1)))
