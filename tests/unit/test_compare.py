"""Paired comparison of successes and of returns, against published numbers and enumeration; what cannot be compared is rejected."""

import itertools
import json
import math
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from rlinf.cli import EXIT_USER_ERROR, main
from rlinf.errors import CheckpointError, ConfigError, ManifestMismatchError
from rlinf.evaluation.compare import Pairs, ReturnPairs, compare, mcnemar_exact
from rlinf.evaluation.intervals import bootstrap_interval, mean_interval, paired_difference_interval
from rlinf.evaluation.result import EvaluationResult
from rlinf.manifest import Manifest
from rlinf.report.compare_folders import compare_folders
from rlinf.report.run_data import read_run
from rlinf.report.run_page import write_report
from rlinf.types import EpisodeResult, EpisodeSpec

TASKS = ("reach", "push")


def result_of(successes: list[bool], tasks: tuple[str, ...] = TASKS) -> EvaluationResult:
    """Episodes round robin over the tasks."""
    rows = []
    for number, success in enumerate(successes):
        init_state, task = divmod(number, len(tasks))
        spec = EpisodeSpec("tabletop", task, 1_000_000_000 + init_state, 1)
        rows.append(EpisodeResult(spec, tasks[task], success, float(success), 5))
    return EvaluationResult(rows)


def manifest(**changes) -> Manifest:
    values = dict(
        versions={"transformers": "5.19.0", "torch": "2.13.0"}, model={"class": "A"}, normalization={}, preprocessing={},
        actions={}, lora={"state": "none"}, precision="fp32", env={"name": "tabletop", "image_size": 64},
        renderer="egl", policy_version=1, seed=0, simulators={"mujoco": "3.3.0"},
    )  # fmt: skip
    return Manifest(**(values | changes))


def written(folder, result: EvaluationResult, about: Manifest | None):
    result.to_json(folder / "result.json")
    if about is not None:
        about.save(folder)
    return folder


A = [True, True, False, False, True, False, True, False]
B = [True, True, True, True, True, False, False, True]
"""Episode by episode: 3 both, 1 only A, 3 only B, 1 neither."""


@pytest.mark.parametrize(
    ("only_a", "only_b", "p_value"),
    # 1 against 7 (Bentur et al. 2009) and 6 against 16 (Cavo et al. 2012): the worked examples of Fagerland, Lydersen and
    # Laake 2014 (Stat Med 33:2850); the others by hand: 2 (1 + 5 + 10) / 2^5, 2 / 2^10, and no difference at all.
    [
        (1, 7, 0.0703),
        (6, 16, 0.0525),
        (2, 3, 1.0),
        (0, 10, 2 / 1024),
        (0, 0, 1.0),
        (4, 4, 1.0),
        # Many pairs: the normal distribution with the correction for continuity.
        (4800, 5200, math.erfc(399 / math.sqrt(20_000))),
    ],
)
def test_mcnemar_equals_published_values(only_a, only_b, p_value):
    assert mcnemar_exact(only_a, only_b) == pytest.approx(p_value, abs=6e-5)
    assert mcnemar_exact(only_b, only_a) == mcnemar_exact(only_a, only_b)


def test_mcnemar_equals_the_enumeration_of_all_outcomes():
    """Every way in which ``n`` fair coins can fall that is at least as one-sided as what was seen."""
    for only_a, only_b in itertools.product(range(6), range(6)):
        count = only_a + only_b
        seen = abs(only_a - only_b)
        outcomes = itertools.product((0, 1), repeat=count)
        extreme = sum(abs(count - 2 * sum(outcome)) >= seen for outcome in outcomes)
        assert mcnemar_exact(only_a, only_b) == Fraction(extreme, 2**count)


@pytest.mark.parametrize(
    ("cells", "low", "high"),
    # Bentur et al. 2009 as in Fagerland, Lydersen and Laake 2014, and Newcombe's own example.
    [((1, 1, 7, 12), -0.507, -0.026), ((36, 12, 2, 0), 0.0569, 0.3404), ((0, 0, 0, 0), -1.0, 1.0)],
)
def test_interval_of_the_paired_difference_equals_published_values(cells, low, high):
    assert paired_difference_interval(*cells) == pytest.approx((low, high), abs=6e-4)


@pytest.mark.parametrize("shares", [(0.5, 0.2, 0.1, 0.2), (0.05, 0.3, 0.02, 0.63), (0.8, 0.1, 0.05, 0.05)])
def test_interval_of_the_paired_difference_covers_the_truth_in_about_95_percent_of_all_samples(shares):
    """Summed over every table of 20 episodes with its multinomial probability."""
    trials, covered, total = 20, 0.0, 0.0
    for cells in itertools.product(range(trials + 1), repeat=3):
        table = (*cells, trials - sum(cells))
        if table[3] < 0:
            continue
        orders = math.factorial(trials) / math.prod(map(math.factorial, table))
        probability = orders * math.prod(share**count for share, count in zip(shares, table, strict=True))
        low, high = paired_difference_interval(*table)
        covered += probability * (low <= shares[1] - shares[2] <= high)
        total += probability
    assert total == pytest.approx(1.0) and 0.93 <= covered <= 0.99


def test_pairs_are_counted_by_task_and_in_all():
    found = compare(result_of(A), result_of(B))
    assert found.per_task == {"reach": Pairs(2, 1, 1, 0), "push": Pairs(1, 0, 2, 1)}
    assert found.total == Pairs(3, 1, 3, 1)
    assert (found.total.a.successes, found.total.b.successes, found.total.difference) == (4, 6, 0.25)
    assert found.total.p_value == mcnemar_exact(1, 3)
    low, high = found.total.interval
    assert low < 0.25 < high and (low, high) == paired_difference_interval(3, 3, 1, 1)
    assert compare(result_of(B), result_of(A)).total.difference == -0.25
    assert compare(result_of(A), result_of([*B[:5], True, *B[6:]])).total == Pairs(3, 1, 4, 0), "one more episode"


def test_pairing_goes_by_episode_and_name_of_the_task_and_not_by_position():
    shuffled = result_of(B)
    shuffled.results.reverse()
    per_task = compare(result_of(A), result_of(B)).per_task
    assert compare(result_of(A), shuffled).per_task == per_task
    assert compare(result_of(A), result_of(B[::-1])).per_task != per_task, "a control"
    found = compare(result_of(A), result_of(A, tasks=("push", "reach")))
    assert found.num_unpaired == 0 and found.total.only_a + found.total.only_b > 0


def test_other_lists_are_refused_with_the_number_in_common():
    words = r"8 episodes and the second 6, 6 of them in common.*allow_mismatch=\[episodes\]"
    with pytest.raises(ConfigError, match=words):
        compare(result_of(A), result_of(B[:6]))
    found = compare(result_of(A), result_of(B[:6]), ["episodes"])
    assert found.total.episodes == 6 and found.num_unpaired == 2
    with pytest.raises(ConfigError, match="none in common"):
        compare(result_of(A), result_of(B, tasks=("lift", "pour")), ["episodes"])
    twice = EvaluationResult([*result_of(A).results, result_of(A).results[0]])
    with pytest.raises(ConfigError, match="second result has 9 rows for 8 episodes"):
        compare(result_of(A), twice)


@pytest.mark.parametrize(
    ("first", "second", "rejected"),
    [({}, {"greedy": False}, "greedy"), ({"greedy": False}, {"greedy": False, "temperature": 0.5}, "temperature"),
     ({"greedy": False}, {"greedy": False, "seed": 1}, "seed"), ({}, {"temperature": 0.5, "seed": 1}, None)],
)  # fmt: skip
def test_actions_that_were_drawn_in_another_way_are_refused(tmp_path, first, second, rejected):
    """Temperature and seed only where actions are sampled."""
    results = [replace(result_of(A), **first), replace(result_of(B), **second)]
    a, b = (written(tmp_path / name, result, manifest()) for name, result in zip("ab", results, strict=True))
    if rejected is None:
        assert compare(*results).mismatches == compare_folders(a, b).mismatches == []
        return
    for comparing in (lambda *allow: compare(*results, *allow), lambda *allow: compare_folders(a, b, *allow)):
        with pytest.raises(ManifestMismatchError, match=rf"  {rejected}: saved .*\n.*allow_mismatch=\[{rejected}\]"):
            comparing()
        assert [text.partition(":")[0] for text in comparing([rejected]).mismatches] == [rejected]


def test_folders_are_compared_and_the_page_shows_it(tmp_path):
    a = written(tmp_path / "a", result_of(A), manifest())
    b = written(tmp_path / "b", result_of(B), manifest(model={"class": "B"}, precision="bf16", policy_version=9))
    found = compare_folders(a, b / "result.json")
    data = json.loads((b / "compare.json").read_text())
    assert data["total"] == found.total.as_dict() and data["per_task"]["push"]["only_b"] == 2 and data["a"] == str(a)
    page = re.sub(r"<[^>]+>", " ", (b / "report.html").read_text())
    low, high = found.total.interval
    assert "Paired comparison" in page and "Newcombe" in page
    assert f"+25.0 ({100 * low:+.1f} to {100 * high:+.1f})" in page
    with pytest.raises(ConfigError, match="are the same evaluation.*Run rlinf evaluate --compare"):
        compare_folders(a, a / "result.json")
    assert not (a / "report.html").exists() and not (a / "compare.json").exists()


def test_the_command_takes_two_folders_and_no_other_key(tmp_path, capsys):
    a, b = (str(written(tmp_path / name, result_of(rows), manifest())) for name, rows in (("a", A), ("b", B)))
    for words in ([a], [a, b, "seed=3"]):
        assert main(["evaluate", "--compare", *words]) == EXIT_USER_ERROR
        assert "expected two folders of evaluations" in capsys.readouterr().err
    assert main(["evaluate", "--compare", a, b]) == 0
    assert re.search(r"^total +4/8 +6/8 +\+25\.0 +1 +3 +0\.625$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"env": {"name": "tabletop", "image_size": 96}}, "env.image_size"), ({"simulators": {"mujoco": "3.3.3"}}, "simulators.mujoco"),
     ({"renderer": "osmesa"}, "renderer"), ({"versions": {"transformers": "5.20.0", "torch": "2.13.0"}}, "versions.transformers")],
)  # fmt: skip
def test_other_worlds_are_refused_and_can_be_allowed(tmp_path, changes, field):
    a = written(tmp_path / "a", result_of(A), manifest())
    b = written(tmp_path / "b", result_of(B), manifest(**changes))
    with pytest.raises(ManifestMismatchError, match=rf"two evaluations.*\n  {field}.*\n.*allow_mismatch=\[{field}\]"):
        compare_folders(a, b)
    assert not (b / "compare.json").exists()
    found = compare_folders(a, b, [field])
    assert [text.partition(":")[0] for text in found.mismatches] == [field]
    with pytest.raises(ConfigError, match="env.imagesize"):
        compare_folders(a, b, ["env.imagesize"])


def test_folders_without_result_or_manifest_say_what_to_type(tmp_path):
    a = written(tmp_path / "a", result_of(A), manifest())
    written(tmp_path / "broken_off" / "eval" / "step_000010", result_of(B), None)
    with pytest.raises(CheckpointError, match="contains no result.json.*eval/step_000010"):
        compare_folders(a, tmp_path / "broken_off")
    bare = written(tmp_path / "run" / "eval" / "after_rl", result_of(B), None)
    with pytest.raises(CheckpointError, match=r"after_rl has no manifest.json.*allow_mismatch=\[conditions\]"):
        compare_folders(a, bare)
    assert "are unknown" in compare_folders(a, bare, ["conditions"]).mismatches[0]


def test_a_run_is_compared_by_the_evaluation_with_which_it_ended(tmp_path):
    for tag, outcomes in (("before_rl", A), ("after_sft", A), ("after_rl", B)):
        written(tmp_path / "second" / "eval" / tag, result_of(outcomes), manifest())
    written(tmp_path / "cloned" / "eval" / "after_sft", result_of(A), manifest())
    (tmp_path / "latest").symlink_to("second")
    found = compare_folders(tmp_path / "cloned", tmp_path / "latest")
    assert found.total == Pairs(3, 1, 3, 1)
    assert (found.a, found.b) == (str(tmp_path / "cloned/eval/after_sft"), str(tmp_path / "second/eval/after_rl"))


def returns_of(returns, reports_success=False) -> EvaluationResult:
    rows = [
        EpisodeResult(EpisodeSpec("x", 0, i, 0), f"task {i % 2}", False, value, 4) for i, value in enumerate(returns)
    ]
    return EvaluationResult(rows, reports_success=reports_success)


RETURNS_A = [-900.0, -100.0, -500.0, -300.0, -700.0, -200.0]
RETURNS_B = [-890.0, -80.0, -500.0, -260.0, -705.0, -145.0]
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
    shuffled = returns_of(RETURNS_B)
    shuffled.results.reverse()
    found = compare(returns_of(RETURNS_A), shuffled).return_total
    assert sorted(found.differences) == [-5.0, 0.0, 10.0, 20.0, 40.0, 55.0] and found.difference == 20.0
    assert (found.higher_a, found.higher_b) == (1, 4)
    assert found.p_value == pytest.approx(2 * (1 + 5) / 2**5), "at most one of 5 coins; the tie is out"
    assert ReturnPairs((1.0,) * 10, (2.0,) * 10).p_value == 2 / 2**10 and ReturnPairs((1.0,), (1.0,)).p_value == 1.0
    low, high = found.interval
    assert 0 < low < 20 < high
    (_, *of_a), (_, *of_b) = mean_interval(RETURNS_A), mean_interval(RETURNS_B)
    assert of_a[1] - of_b[0] > 10 * (high - low), "control: the intervals of each alone overlap widely"
    other = compare(returns_of(RETURNS_A), returns_of(RETURNS_B[::-1])).return_total
    assert other.interval[0] < 0 < other.interval[1], "control: other pairs tell nothing"


def test_a_task_without_success_is_compared_by_returns_alone(tmp_path):
    comparison = compare(returns_of(RETURNS_A), returns_of(RETURNS_B))
    table, data = comparison.table(), comparison.as_dict()
    assert "0/6" not in table and "percentage points" not in table and "McNemar" not in table
    assert "return b - a = +20 (95 %" in table and "higher in b in 4 and in a in 1 of 6 episodes, p = 0.375" in table
    assert data["total"] is None and data["per_task"] == {} and json.loads(json.dumps(data)) == data
    assert data["returns"]["per_task"]["task 0"]["difference"] == pytest.approx(5 / 3)  # 10, 0, -5
    with_success = compare(returns_of(RETURNS_A, True), returns_of(RETURNS_B, True))
    assert "0/6" in with_success.table() and "return b - a = +20" in with_success.table()
    assert with_success.as_dict()["total"]["episodes"] == 6
    for tag, result in (("before_rl", returns_of(RETURNS_A)), ("after_rl", returns_of(RETURNS_B))):
        result.to_json(tmp_path / "eval" / tag / "result.json")
    page = write_report(tmp_path).read_text()
    assert read_run(tmp_path).gain["returns"]["total"]["higher_b"] == 4
    assert "4 had a higher return after RL and 1 before: p = 0.375 (sign test)" in page and "0.0%" not in page
    alone = compare(returns_of(RETURNS_A[:1]), returns_of(RETURNS_B[:1]))
    assert alone.as_dict()["returns"]["total"]["interval"] is None and "inf" not in alone.table()
