"""Which rows of a folder of episodes are good, by a value model: RECAP (Physical Intelligence 2025, pi*0.6, arXiv:2511.14759)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.data.config import SFTConfig
from rlinf.data.filters import rows_of_person
from rlinf.data.stored import StoredDemonstrations
from rlinf.errors import ConfigError
from rlinf.seeding import derive_seed

NUM_PARTS, NUM_BINS = 4, 51
HIDDEN_SIZE, DROPOUT, NUM_STEPS, BATCH_SIZE, LEARNING_RATE = 128, 0.5, 200, 64, 1e-3


def label_rows(dataset: StoredDemonstrations, features: Tensor, config: SFTConfig, seed: int) -> np.ndarray:
    """Return which rows are good, bool ``[N]``: ``sft.advantage_top_fraction`` of each instruction, and what a person did.

    The value model reads ``features``, float32 ``[N, F]``: what a policy sees in the rows. Raise ConfigError without enough episodes,
    or without a success or a good row.
    """
    success, last_rows, share = dataset.outcomes.success, dataset.last_rows, config.advantage_top_fraction
    if dataset.num_episodes < NUM_PARTS or not success.any():
        raise ConfigError(
            f"{dataset.info.folder} has {dataset.num_episodes} episodes, {len(np.unique(last_rows[success]))} of them with success; required "
            f"for sft.advantage_top_fraction={share}: {NUM_PARTS} episodes, one of them with success. Set sft.dataset=<more episodes>, or "
            "sft.advantage_top_fraction=null"
        )
    returns, longest = steps_to_success(success, last_rows)
    values = cross_fitted_values(features, returns, last_rows, seed)
    found = advantages(returns, values, last_rows, longest, config.advantage_steps)
    is_good = largest(found, dataset.task_ids, share) | rows_of_person(dataset)
    if not is_good.any():
        raise ConfigError(
            f"sft.advantage_top_fraction={share} labels no row as good; required: one. Set sft.advantage_top_fraction=0.3"
        )
    return is_good


def steps_to_success(success: np.ndarray, last_rows: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the return of each row, float32 ``[N]``, and the rows ``T`` of the longest episode.

    A return is -(actions until the first success) / T, 0 after it, and -1 in an episode without success (section IV-A).
    """
    ends, lengths = np.unique(last_rows, return_counts=True)
    returns, longest = np.full(len(success), -1.0, dtype=np.float32), int(lengths.max())
    for end, length in zip(ends, lengths, strict=True):
        own = np.arange(end + 1 - length, end + 1)
        if success[own].any():
            left = own[success[own]][0] + 1 - own
            returns[own] = -np.maximum(left, 0) / longest
    return returns, longest


def advantages(
    returns: np.ndarray, values: np.ndarray, last_rows: np.ndarray, longest: int, steps: int | None
) -> np.ndarray:
    """Return the return of each row minus its value, ``[N]``.

    Where the episode continues without success for ``steps`` more rows, their reward and the value after them take the return's place.
    """
    if steps is None:
        return returns - values
    later = np.arange(len(returns)) + steps
    goes_on = later <= last_rows
    later = np.minimum(later, last_rows)
    goes_on &= returns[later] < 0
    return np.where(goes_on, values[later] - steps / longest, returns) - values


def largest(found: np.ndarray, groups: np.ndarray, share: float) -> np.ndarray:
    """Return bool ``[N]``: the number is among the largest ``share`` of its group, rounded."""
    chosen = np.zeros(len(found), dtype=bool)
    for group in np.unique(groups):
        own = np.flatnonzero(groups == group)
        chosen[own[np.argsort(-found[own], kind="stable")][: round(share * len(own))]] = True
    return chosen


def cross_fitted_values(features: Tensor, returns: np.ndarray, last_rows: np.ndarray, seed: int) -> np.ndarray:
    """Return the value of each row, float32 ``[N]``, by a network that was trained on other episodes.

    A network gives a distribution over bins of [-1, 0] (equation 1), whose mean is the value.
    """
    features = (features - features.mean(0)) / (features.std(0) + 1e-6)
    target = torch.from_numpy(np.rint((returns + 1) * (NUM_BINS - 1)).astype(np.int64))
    episodes = np.random.default_rng(derive_seed(seed, "value parts")).permutation(np.unique(last_rows))
    bins, values = torch.linspace(-1, 0, NUM_BINS), np.zeros(len(returns), dtype=np.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "values"))
        for part in np.array_split(episodes, NUM_PARTS):
            is_mine = np.isin(last_rows, part)
            others = torch.from_numpy(np.flatnonzero(~is_mine))
            network = nn.Sequential(
                nn.Dropout(DROPOUT), nn.Linear(features.shape[1], HIDDEN_SIZE), nn.ReLU(), nn.Dropout(DROPOUT),
                nn.Linear(HIDDEN_SIZE, NUM_BINS),
            )  # fmt: skip
            optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
            for _ in range(NUM_STEPS):
                rows = others[torch.randint(len(others), (BATCH_SIZE,))]
                loss = nn.functional.cross_entropy(network(features[rows]), target[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                values[is_mine] = (network.eval()(features[torch.from_numpy(is_mine)]).softmax(1) @ bins).numpy()
    return values
