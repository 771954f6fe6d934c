"""How many steps a recipe takes, and the learning rate of each, by hand."""

import math

import pytest

from rlinf.errors import ConfigError
from rlinf.optim.schedule import learning_rate
from rlinf.recipes.plan import count_steps, count_steps_per_epoch


def test_steps_are_epochs_times_rows_by_batch():
    assert count_steps(1000, epochs=1, batch_size=8) == 125
    assert count_steps(1000, epochs=3, batch_size=7) == 428
    assert count_steps(100, epochs=2, batch_size=40, rows_per_sample=8) == 40
    assert count_steps(1000, epochs=1, batch_size=8, limit=10) == 10
    with pytest.raises(ConfigError, match="3 rows.*train_batch_per_replica=8.*Set train.train_batch_per_replica=3"):
        count_steps(3, epochs=1, batch_size=8)
    assert count_steps(8, epochs=1, batch_size=8) == 1
    with pytest.raises(ConfigError, match="Set train.train_batch_per_replica=24,"):
        count_steps(3, epochs=2, batch_size=100, rows_per_sample=4)


def test_steps_of_an_epoch_are_rows_by_batch():
    assert count_steps_per_epoch(1000, batch_size=7) == 142
    assert count_steps_per_epoch(100, batch_size=40, rows_per_sample=8) == 20
    assert count_steps_per_epoch(3, batch_size=8) == 1


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
