"""How many steps a recipe takes, and the learning rate of each, by hand."""

import math

import pytest

from rlinf.errors import ConfigError
from rlinf.optim.schedule import learning_rate
from rlinf.options import from_mapping
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.plan import num_steps, steps_per_epoch


def recipe(epochs=1, batch_size=8, group_size=1, limit=None):
    method = {"type": "sft" if group_size == 1 else "grpo"}
    train = {"epoch": epochs, "train_batch_per_replica": batch_size, "max_num_steps": limit, "train_policy": method}
    return from_mapping(RecipeConfig, {"train": train, "rollout": {"n_generation": group_size}})


def test_steps_are_epochs_times_rows_by_batch():
    assert num_steps(recipe(), 1000) == 125
    assert num_steps(recipe(epochs=3, batch_size=7), 1000) == 428
    assert num_steps(recipe(epochs=2, batch_size=40, group_size=8), 100) == 40
    assert num_steps(recipe(limit=10), 1000) == 10
    with pytest.raises(ConfigError, match="3 rows.*train_batch_per_replica=8.*Set train.train_batch_per_replica=3"):
        num_steps(recipe(), 3)
    assert num_steps(recipe(), 8) == 1
    with pytest.raises(ConfigError, match="Set train.train_batch_per_replica=24,"):
        num_steps(recipe(epochs=2, batch_size=100, group_size=4), 3)


def test_steps_of_an_epoch_are_rows_by_batch():
    assert steps_per_epoch(recipe(batch_size=7), 1000) == 142
    assert steps_per_epoch(recipe(batch_size=40, group_size=8), 100) == 20
    assert steps_per_epoch(recipe(), 3) == 1


def test_learning_rates_by_hand():
    def rates(num_steps, **options):
        return [learning_rate(step, num_steps, 1.0, **options) for step in range(num_steps)]

    assert rates(4) == [1, 1, 1, 1]
    assert rates(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1]
    assert rates(4, warmup_steps=0.5) == [0.5, 1, 1, 1]
    assert rates(4, warmup_steps=1.0) == [0.25, 0.5, 0.75, 1], "a fraction of all steps"
    assert rates(4, warmup_steps=2.0) == [0.5, 1, 1, 1], "more than 1.0 counts steps"
    assert rates(2, warmup_steps=20) == [0.5, 1], "the warm-up ends with the run"
    assert rates(5, warmup_steps=1, decay="linear") == [1, 1, 0.75, 0.5, 0.25]
    assert rates(5, warmup_steps=1, decay="linear", min_factor=0.6) == [1, 1, 0.75, 0.6, 0.6]
    assert rates(4, decay="linear", decay_ratio=0.5) == [1, 1, 1, 0.5]
    assert rates(4, decay="cosine") == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert rates(4, decay="sqrt") == pytest.approx([1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)])
    assert rates(3, decay="none") == rates(3)
    assert rates(3, warmup_steps=1) == rates(3, warmup_steps=1 / 3), "an int counts steps, a float is a fraction"
