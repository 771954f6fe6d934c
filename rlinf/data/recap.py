"""Label a dataset's rows by their advantage under a value model: RECAP (Physical Intelligence 2025, pi*0.6, arXiv:2511.14759)."""

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.data.config import SFTConfig
from rlinf.data.filters import intervention_rows
from rlinf.data.stored import StoredDemonstrations
from rlinf.errors import ConfigError
from rlinf.seeding import derive_seed

NUM_FOLDS, NUM_BINS = 4, 51
HIDDEN_SIZE, DROPOUT, NUM_STEPS, BATCH_SIZE, LEARNING_RATE = 128, 0.5, 200, 64, 1e-3


def label_rows(dataset: StoredDemonstrations, features: Tensor, config: SFTConfig, seed: int) -> np.ndarray:
    """Label interventions and the top ``sft.advantage_top_fraction`` of each instruction's rows as good, using ``features [N, F]``."""
    success, last_rows, fraction = dataset.outcomes.success, dataset.last_rows, config.advantage_top_fraction
    if dataset.num_episodes < NUM_FOLDS or not success.any():
        raise ConfigError(
            f"{dataset.info.folder} has {dataset.num_episodes} episodes, {len(np.unique(last_rows[success]))} of them successful; "
            f"required for sft.advantage_top_fraction={fraction}: {NUM_FOLDS} episodes, at least one of them successful. "
            "Set sft.dataset=<more episodes>, or sft.advantage_top_fraction=null"
        )
    returns, longest = steps_to_success(success, last_rows)
    values = cross_fitted_values(features, returns, last_rows, seed)
    scores = advantages(returns, values, last_rows, longest, config.advantage_steps)
    is_good = largest(scores, dataset.task_ids, fraction) | intervention_rows(dataset)
    if not is_good.any():
        raise ConfigError(
            f"sft.advantage_top_fraction={fraction} labels no row as good; expected at least one. Set sft.advantage_top_fraction=0.3"
        )
    return is_good


def steps_to_success(success: np.ndarray, last_rows: np.ndarray) -> tuple[np.ndarray, int]:
    """Return -(actions until success) / T per row, or -1 without success (section IV-A), and the longest episode's length ``T``."""
    ends, lengths = np.unique(last_rows, return_counts=True)
    returns, longest = np.full(len(success), -1.0, dtype=np.float32), int(lengths.max())
    for end, length in zip(ends, lengths, strict=True):
        rows = np.arange(end + 1 - length, end + 1)
        if success[rows].any():
            left = rows[success[rows]][0] + 1 - rows
            returns[rows] = -np.maximum(left, 0) / longest
    return returns, longest


def advantages(
    returns: np.ndarray, values: np.ndarray, last_rows: np.ndarray, longest: int, steps: int | None
) -> np.ndarray:
    """Return advantages (return minus value), ``[N]``; ``steps`` selects n-step returns, unless success or the end is earlier."""
    if steps is None:
        return returns - values
    later = np.arange(len(returns)) + steps
    continues = later <= last_rows
    later = np.minimum(later, last_rows)
    continues &= returns[later] < 0
    return np.where(continues, values[later] - steps / longest, returns) - values


def largest(scores: np.ndarray, groups: np.ndarray, fraction: float) -> np.ndarray:
    """Return bool ``[N]``: whether the score is in the top ``fraction`` of its group (rounded to a number of rows)."""
    selected = np.zeros(len(scores), dtype=bool)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        selected[rows[np.argsort(-scores[rows], kind="stable")][: round(fraction * len(rows))]] = True
    return selected


def cross_fitted_values(features: Tensor, returns: np.ndarray, last_rows: np.ndarray, seed: int) -> np.ndarray:
    """Return each row's value, float32 ``[N]``: the mean over bins of [-1, 0] (equation 1) from a network fitted to other episodes."""
    features = (features - features.mean(0)) / (features.std(0) + 1e-6)
    target = torch.from_numpy(np.rint((returns + 1) * (NUM_BINS - 1)).astype(np.int64))
    episodes = np.random.default_rng(derive_seed(seed, "value parts")).permutation(np.unique(last_rows))
    bins, values = torch.linspace(-1, 0, NUM_BINS), np.zeros(len(returns), dtype=np.float32)
    # Fork the generator, so that labels neither depend on earlier random numbers nor affect later ones.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "values"))
        for fold in np.array_split(episodes, NUM_FOLDS):
            held_out = np.isin(last_rows, fold)
            training_rows = torch.from_numpy(np.flatnonzero(~held_out))
            network = nn.Sequential(
                nn.Dropout(DROPOUT), nn.Linear(features.shape[1], HIDDEN_SIZE), nn.ReLU(), nn.Dropout(DROPOUT),
                nn.Linear(HIDDEN_SIZE, NUM_BINS),
            )  # fmt: skip
            optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
            for _ in range(NUM_STEPS):
                rows = training_rows[torch.randint(len(training_rows), (BATCH_SIZE,))]
                loss = nn.functional.cross_entropy(network(features[rows]), target[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                values[held_out] = (network.eval()(features[torch.from_numpy(held_out)]).softmax(1) @ bins).numpy()
    return values
