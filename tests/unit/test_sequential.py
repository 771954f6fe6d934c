"""A comparison that ends when it has decided: e-values by hand, error rates by enumeration, and the decision of the list's order."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from thread_ranks import on_threads

from rlinf.errors import ConfigError
from rlinf.evaluation import sequential
from rlinf.evaluation.compare import compare, mcnemar_exact
from rlinf.evaluation.evaluator import EvaluationPlan, evaluate_policy
from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.stopping import UntilDecided, UntilNarrow, episode_of
from rlinf.report.page import pages
from tests.unit.test_compare import A, B, result_of
from tests.unit.test_evaluation import BinPolicy, NumberLineEnv, specs_of


@pytest.mark.parametrize(
    ("wins", "differing", "value"), [(0, 0, 1), (1, 1, 1), (2, 2, 8 / 7), (1, 2, 6 / 7), (0, 2, 8 / 7)]
)
def test_e_values_equal_those_by_hand(wins, differing, value):
    """2^2 B(5, 3) / B(3, 3) = 4 (1/105) / (1/30), and 2^2 B(4, 4) / B(3, 3) = 4 (1/140) / (1/30)."""
    assert math.exp(sequential.log_e_value(wins, differing)) == pytest.approx(value)


@pytest.mark.parametrize("level", [1.1, 2.5, 5.0])
def test_the_probability_to_reach_a_level_equals_the_enumeration_of_all_sequences(level):
    sequences = itertools.product((1, -1), repeat=10)
    reached = sum(max(sequential.log_e_values(signs)) >= math.log(level) - 1e-12 for signs in sequences)
    assert sequential.crossing_probability(math.log(level), 10) == pytest.approx(reached / 2**10)
    assert reached / 2**10 <= 1 / level, "Ville's inequality"


@pytest.mark.parametrize("num_episodes", [20, 200, 700])
def test_the_threshold_spends_five_percent_and_not_more(num_episodes):
    threshold = sequential.log_threshold(num_episodes)
    assert sequential.crossing_probability(threshold, num_episodes) <= 0.05
    assert sequential.crossing_probability(threshold - 0.05, num_episodes) > 0.05, "a lower one would not do"
    assert math.exp(threshold) < 20, "Ville's threshold"


def test_equally_good_policies_are_seldom_told_apart_whenever_it_is_looked_and_mcnemar_is_wrong():
    generator, num_runs, num_episodes = np.random.default_rng(0), 400, 150
    threshold = sequential.log_threshold(num_episodes)
    reached = read_naively = 0
    for _ in range(num_runs):
        outcomes = generator.random((2, num_episodes)) < generator.beta(
            2, 1, num_episodes
        )  # episodes differ in difficulty
        signs = (outcomes[1].astype(int) - outcomes[0]).tolist()
        reached += max(sequential.log_e_values(signs)) >= threshold
        losses, wins = np.cumsum(np.array(signs) < 0), np.cumsum(np.array(signs) > 0)
        pairs = set(zip(losses.tolist(), wins.tolist(), strict=True))
        read_naively += any(mcnemar_exact(*pair) <= 0.05 for pair in pairs)
    assert reached / num_runs <= 0.05
    assert read_naively / num_runs > 0.1, "a control: a p-value of a fixed list may not be read again and again"


def test_the_p_value_never_grows_and_is_at_the_level_where_the_test_decides():
    generator = np.random.default_rng(1)
    signs = generator.choice([-1, 0, 1], size=100, p=[0.1, 0.5, 0.4]).tolist()
    decided = sequential.decided_at(signs, 100)
    values = [sequential.sequential_p_value(signs[:count], 100) for count in range(0, 101, 4)]
    assert values[0] == 1.0 and values == sorted(values, reverse=True)
    assert 10 < decided < 100
    before, after = (sequential.sequential_p_value(signs[:count], 100) for count in (decided - 1, decided))
    assert after <= 0.05 < before
    assert sequential.decided_at([-sign for sign in signs], 100) == decided, "two-sided"
    assert sequential.decided_at(signs[: decided - 1], 100) is None


def test_confidence_sequences_are_where_the_mixture_says_on_a_grid():
    """The definition, on a grid of fractions instead of by equations."""
    for successes, episodes in ((0, 6), (3, 8), (20, 25)):
        grid = np.linspace(1e-4, 1 - 1e-4, 20_001)
        likelihood = np.exp(successes * np.log(grid) + (episodes - successes) * np.log(1 - grid))
        average = likelihood / np.sqrt(grid * (1 - grid)) / np.pi
        mixture = average.sum() * (grid[1] - grid[0])
        inside = grid[mixture < 20 * grid**successes * (1 - grid) ** (episodes - successes)]
        found = sequential.rate_confidence_sequence(successes, episodes)
        assert found == pytest.approx((inside[0], inside[-1]), abs=2e-3)
    for only_a, only_b, same in ((1, 5, 14), (4, 0, 6), (9, 9, 2)):
        least = sequential._log_mixture(only_a, only_b, same) - math.log(20)
        a, b = np.meshgrid(np.linspace(1e-6, 1 - 1e-6, 801), np.linspace(1e-6, 1 - 1e-6, 801))
        rest = np.where(a + b < 1, 1 - a - b, np.nan)
        likely = only_a * np.log(a) + only_b * np.log(b) + same * np.log(rest) >= least
        found = sequential.difference_confidence_sequence(only_a, only_b, same)
        assert found == pytest.approx(((b - a)[likely].min(), (b - a)[likely].max()), abs=5e-3)
    assert sequential.rate_confidence_sequence(0, 0) == (0, 1)
    assert sequential.difference_confidence_sequence(0, 0, 0) == (-1, 1)


def played(num_envs: int, stop, policy=None, **options) -> EvaluationResult:
    plan = EvaluationPlan(stop=stop, **options)
    return evaluate_policy(policy or BinPolicy(), NumberLineEnv(num_envs), specs_of(40), plan=plan)


@pytest.fixture(scope="module")
def whole() -> EvaluationResult:
    return played(40, None)


def rule_that_ends(whole: EvaluationResult, count: int) -> UntilDecided:
    """A baseline that failed wherever the policy succeeds, as often as decides after ``count`` episodes, and is equal elsewhere."""
    worse = {episode_of(one): False for one in whole.results[:count]}
    rule = UntilDecided({episode_of(one): bool(one.success) for one in whole.results} | worse, 40)
    assert 5 < rule.stop_at(whole.results) < count
    return rule


@pytest.mark.parametrize("rule", ["decided", "narrow"])
def test_an_evaluation_that_ends_early_is_the_beginning_of_the_whole_one(whole, rule):
    stop = rule_that_ends(whole, 30) if rule == "decided" else UntilNarrow(0.6)
    expected = whole.results[: stop.stop_at(whole.results)]
    assert 1 < len(expected) < 35 and stop.stop_at(expected[:-1]) is None
    for num_envs, look_every in ((1, None), (7, None), (16, 5), (40, None)):
        assert played(num_envs, stop, look_every=look_every).results == expected
    later = played(7, stop, known=whole.results[20:] + whole.results[1:4])
    assert later.results == expected, "what is known from an earlier process does not move the end"
    assert played(7, UntilNarrow(0.01)).results == whole.results


def test_no_task_is_left_out_by_an_end():
    class AtOnce:
        def stop_at(self, results):
            return 1

    specs = sorted(specs_of(20), key=lambda spec: spec.task_id)
    for num_envs in (1, 4, 16):
        found = evaluate_policy(BinPolicy(), NumberLineEnv(num_envs), specs, plan=EvaluationPlan(stop=AtOnce()))
        assert [one.spec for one in found.results] == specs[:11] and found.warnings == []
    assert len(played(1, AtOnce()).results) == 2, "tasks that take turns"


def test_an_end_does_not_depend_on_the_ranks(whole):
    stop = rule_that_ends(whole, 30)
    policies = [BinPolicy() for _ in range(3)]  # not by the threads, which share torch's generator
    expected = whole.results[: stop.stop_at(whole.results)]
    found = on_threads(3, lambda ranks: played(1 + ranks.rank, stop, policies[ranks.rank], look_every=6, ranks=ranks))
    assert [one.results for one in found] == [expected] * 3


def test_a_comparison_with_an_evaluation_that_could_end_early_uses_the_test_that_may_be_read_at_any_moment(tmp_path):
    better = replace(result_of([True] * 11), stopping={"stop_when": "decided", "num_planned": 20})
    better.to_json(tmp_path / "result.json")
    better = EvaluationResult.from_json(tmp_path / "result.json")
    found = compare(result_of([False] * 20), better)
    assert found.total.episodes == 11 and found.num_unpaired == 9
    assert found.total.p_value == sequential.crossing_probability(sequential.log_e_value(11, 11), 20)
    assert found.total.p_value > mcnemar_exact(0, 11) and found.total.interval[0] < 1
    text = found.table()
    assert "Decided after 11 of 20 episodes: b is better." in text
    assert "p (sequential)" in text and "McNemar" not in text
    data = json.loads(json.dumps(found.as_dict()))
    assert data["total"]["p_value"] == found.total.p_value
    shown = pages().get_template("parts.html").module.comparison(data)
    assert "p (sequential)" in shown and "Robbins" in shown
    assert compare(better, result_of([False] * 20)).total.p_value == found.total.p_value, "the other way round"
    undecided = compare(result_of(A), replace(result_of(B), stopping={"stop_when": "decided", "num_planned": 8}))
    assert "Not decided after 8 of 8 episodes." in undecided.table()
    shorter = replace(result_of([False] * 7), stopping={"stop_when": 0.9, "num_planned": 40})
    both = [compare(shorter, better).total, compare(better, shorter).total]
    assert [one.episodes for one in both] == [7, 7] and [one.num_planned for one in both] == [40, 40], "in either order"
    assert both[0].p_value == both[1].p_value == sequential.sequential_p_value([1] * 7, 40)
    with pytest.raises(ConfigError, match="11 of them in common"):
        compare(result_of([False] * 20), replace(better, stopping=None))
