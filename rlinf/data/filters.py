"""Select a dataset's rows for behaviour cloning: all, successes, or human corrections."""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from rlinf.data.config import BAD, GOOD, SFTConfig
from rlinf.data.rows import BatchSource
from rlinf.data.stored import StoredDemonstrations
from rlinf.errors import ConfigError
from rlinf.types import Observation


@dataclass
class FilteredRows:
    """A ``BatchSource`` of the dataset rows ``index`` (int64 ``[K]``, possibly repeated), with optional prompt suffixes ``[K]``."""

    dataset: StoredDemonstrations
    index: np.ndarray
    suffixes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, index: np.ndarray) -> tuple[Observation, Tensor]:
        rows = self.dataset.rows(self.index[index])
        if self.suffixes is None:
            return rows
        return replace(rows[0], suffixes=self.suffixes[index].tolist()), rows[1]


def needs_outcomes(config: SFTConfig) -> bool:
    """Return whether filtering or labelling depends on successes or interventions."""
    return config.filter != "all" or config.intervention_weight > 1 or config.advantage_top_fraction is not None


def intervention_rows(dataset: StoredDemonstrations) -> np.ndarray:
    """Return bool ``[N]``: whether a human chose every action of the row's chunk, up to the end of the episode."""
    num_rows, by_human = len(dataset), dataset.outcomes.intervention
    if by_human is None:
        return np.zeros(num_rows, dtype=bool)
    # Using prefix sums: a chunk is an intervention if its number of human actions equals its length.
    before = np.concatenate([[0], np.cumsum(by_human)])
    ends = np.minimum(np.arange(num_rows) + dataset.chunk_len, dataset.last_rows + 1)
    return before[ends] - before[:-1] == ends - np.arange(num_rows)


def filtered_rows(dataset: StoredDemonstrations, config: SFTConfig, is_good: np.ndarray | None = None) -> BatchSource:
    """Apply ``sft.filter`` to a dataset that was opened with ``outcomes``; raise ConfigError if no row is left.

    Filtered cloning selects successful episodes. HG-DAgger (Kelly et al. 2019, arXiv:1810.02890, algorithm 1) selects rows
    in which the human acted. A row is an intervention if the human chose its complete chunk, up to the end of the
    episode: a policy must not learn its own actions from before a take-over, or from after the hand-back.
    ``sft.intervention_weight`` repeats these rows, which multiplies their weight in the loss. With labels (``is_good``, bool
    ``[N]``), each occurrence is tripled: two have the label and one does not.
    """
    if not needs_outcomes(config):
        return FilteredRows(dataset, np.flatnonzero(~dataset.unreadable)) if dataset.unreadable.any() else dataset
    outcomes, last_rows, num_rows = dataset.outcomes, dataset.last_rows, len(dataset)
    intervened, succeeded = intervention_rows(dataset), np.zeros(num_rows, dtype=bool)
    has_intervention = np.zeros(num_rows, dtype=bool)
    if outcomes.intervention is not None:
        has_intervention = np.isin(last_rows, last_rows[outcomes.intervention])
    if outcomes.success is not None:
        succeeded = np.isin(last_rows, last_rows[outcomes.success])
    selected = {
        "all": np.ones(num_rows, dtype=bool),
        "successes": succeeded,
        "interventions": intervened,
        "corrected": intervened | (succeeded & ~has_intervention),
    }[config.filter] & ~dataset.unreadable
    if not selected.any():
        raise ConfigError(
            f"{dataset.info.folder} has {num_rows} rows, but none passes sft.filter={config.filter} (successful episodes: "
            f"{len(np.unique(last_rows[succeeded]))}; intervention rows: {intervened.sum()}); expected at least one. "
            "Set sft.filter=all, or sft.dataset=<a different folder>"
        )
    index = np.flatnonzero(selected)
    index = np.repeat(index, np.where(intervened[index], config.intervention_weight, 1))
    if is_good is None:
        return FilteredRows(dataset, index)
    labels = np.where(is_good[index], GOOD, BAD)
    return FilteredRows(dataset, np.tile(index, 3), np.concatenate([labels, labels, np.full(len(index), "")]))
