"""Returns compared episode by episode: sign test, bootstrap and printed lines, by hand and by enumeration."""

import itertools
import json
import re

import numpy as np
import pytest

from rlinf.evaluation.compare import ReturnPairs, compare
from rlinf.evaluation.intervals import bootstrap_interval, mean_interval
from rlinf.evaluation.result import EvaluationResult
from rlinf.report.run_data import read_run
from rlinf.report.run_page import write_report
from rlinf.report.runs import read_runs, sweep_table, write_runs_report
from rlinf.types import EpisodeResult, EpisodeSpec


def result_of(returns, reports_success=False) -> EvaluationResult:
    rows = [
        EpisodeResult(EpisodeSpec("x", 0, i, 0), f"task {i % 2}", False, value, 4) for i, value in enumerate(returns)
    ]
    return EvaluationResult(rows, reports_success=reports_success)


A = [-900.0, -100.0, -500.0, -300.0, -700.0, -200.0]
B = [-890.0, -80.0, -500.0, -260.0, -705.0, -145.0]
"""Differences: 10, 20, 0, 40, -5, 55, of which the mean is 20; four of five that differ are higher in B."""


@pytest.mark.parametrize("values", [(0.0, 1.0), (3.0, -1.0, 8.0), (10.0, 20.0, 0.0, 40.0, -5.0)])
def test_the_bootstrap_equals_the_enumeration_of_all_samples(values):
    means = sorted(sum(sample) / len(values) for sample in itertools.product(values, repeat=len(values)))
    assert bootstrap_interval(values) == pytest.approx(
        np.quantile(means, (0.025, 0.975), method="inverted_cdf"), abs=0.03 * (max(values) - min(values))
    )
    assert bootstrap_interval(values) == bootstrap_interval(values), "the same at each call"
    assert bootstrap_interval(values[:1]) == (-np.inf, np.inf)


def test_returns_are_paired_by_episode_and_counted_by_hand():
    shuffled = result_of(B)
    shuffled.results.reverse()
    found = compare(result_of(A), shuffled).return_total
    assert sorted(found.differences) == [-5.0, 0.0, 10.0, 20.0, 40.0, 55.0] and found.difference == 20.0
    assert (found.higher_a, found.higher_b) == (1, 4)
    assert found.p_value == pytest.approx(2 * (1 + 5) / 2**5), (
        "of 5 coins at most one falls the other way; the tie is out"
    )
    assert ReturnPairs((1.0,) * 10, (2.0,) * 10).p_value == 2 / 2**10 and ReturnPairs((1.0,), (1.0,)).p_value == 1.0
    low, high = found.interval
    assert 0 < low < 20 < high
    (_, *of_a), (_, *of_b) = mean_interval(A), mean_interval(B)
    assert of_a[1] - of_b[0] > 10 * (high - low), "control: the intervals of each alone overlap widely"
    other = compare(result_of(A), result_of(B[::-1])).return_total
    assert other.interval[0] < 0 < other.interval[1], "control: other pairs tell nothing"


def test_a_task_without_success_is_compared_by_returns_alone(tmp_path):
    found = compare(result_of(A), result_of(B))
    table, data = found.table(), found.as_dict()
    assert "0/6" not in table and "percentage points" not in table and "McNemar" not in table
    assert "return b - a = +20 (95 %" in table and "higher in b in 4 and in a in 1 of 6 episodes, p = 0.375" in table
    assert data["total"] is None and data["per_task"] == {} and json.loads(json.dumps(data)) == data
    assert data["returns"]["per_task"]["task 0"]["difference"] == pytest.approx(5 / 3)  # 10, 0, -5
    told = compare(result_of(A, True), result_of(B, True))
    assert "0/6" in told.table() and "return b - a = +20" in told.table(), "control: a rate of 0 that was told"
    assert told.as_dict()["total"]["episodes"] == 6
    for tag, result in (("before_rl", result_of(A)), ("after_rl", result_of(B))):
        result.to_json(tmp_path / "eval" / tag / "result.json")
    page = write_report(tmp_path).read_text()
    assert read_run(tmp_path).gain["returns"]["total"]["higher_b"] == 4
    assert "4 had a higher return after RL and 1 before: p = 0.375 (sign test)" in page and "0.0%" not in page
    alone = compare(result_of(A[:1]), result_of(B[:1]))
    assert alone.as_dict()["returns"]["total"]["interval"] is None and "inf" not in alone.table()


def test_a_sweep_of_a_task_without_success_shows_returns_and_no_rate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, mean in enumerate((-9.0, -5.0)):
        folder = tmp_path / "sweep" / str(seed)
        result_of([mean, mean + 2]).to_json(folder / "eval" / "after_rl" / "result.json")
        (folder / "summary.json").write_text(json.dumps({"experiment": "mine", "seed": seed}))
        (folder / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "phase": "rl", "time_s": 1.0, "eval/return_mean": mean + 1}) + "\n"
        )
    table = sweep_table(sorted((tmp_path / "sweep").iterdir()))
    # m = -6, s = sqrt(8), t_1 = 12.7062: -6 +- 12.7062 * 2
    assert "-6 (95 % -31.41 to 19.41)" in table and "-8 (95 %" in table and "0.0%" not in table and "0/2" not in table
    page = write_runs_report(read_runs([tmp_path / "sweep"]), tmp_path / "runs.html").read_text()
    page = re.sub("<[^>]+>", " ", re.sub("(?s)<style.*?</style>", "", page))
    assert "-6 (95 % -31.41 to 19.41)" in page and "0.0%" not in page and "Return of evaluations" in page
    assert "Success of" not in page
