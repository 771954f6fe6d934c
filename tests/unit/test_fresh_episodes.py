"""The episodes on which the chosen checkpoint is evaluated again, and the bias without them."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from rlinf.errors import ConfigError
from rlinf.evaluation.config import EvaluationConfig

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from winners_curse import P, expected_maximum, simulated_runs, theory


def test_fresh_episodes_follow_those_of_the_run():
    def fresh(num_available, end=0, **settings):
        return list(EvaluationConfig(**settings).fresh_episodes(num_available, end))

    assert fresh(20, num_episodes=3, first_episode=4) == [7, 8, 9], "as many as the run's evaluations"
    assert fresh(9, num_episodes=3, first_episode=4) == [7, 8], "as many as are left"
    assert fresh(20, 9, num_episodes=3, first_episode=4) == [9, 10, 11], "after those before the run was resumed"
    assert fresh(7, num_episodes=3, first_episode=4) == fresh(20, num_episodes=None) == []
    assert fresh(20, num_episodes=3, num_fresh_episodes=5) == [3, 4, 5, 6, 7]
    assert fresh(20, num_episodes=3, num_fresh_episodes=0) == []
    with pytest.raises(ConfigError, match="num_fresh_episodes=5.*at most 4.*num_fresh_episodes=4"):
        fresh(7, num_episodes=3, num_fresh_episodes=5)


def test_the_best_of_equal_checkpoints_is_too_high_and_its_fresh_number_is_not():
    """2,000 runs without learning, whose checkpoints are chosen by the project's own function."""
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi))
    assert expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi))
    count, episodes, num_runs = 13, 200, 2000
    errors = simulated_runs(num_runs, count, episodes, np.random.default_rng(0)) - P
    chosen, fresh = errors.mean(axis=0)
    standard_error = math.sqrt(P * (1 - P) / episodes / num_runs)
    assert abs(fresh) < 2 * standard_error
    assert chosen == pytest.approx(theory(count, episodes), rel=0.05) and chosen > 50 * standard_error
