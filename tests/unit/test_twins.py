"""Perturbed episodes against their twins: pairs, random numbers, tables, the change between two policies, against hand counts."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from rlinf.evaluation.compare import compare
from rlinf.evaluation.evaluator import BatchedPolicy, EvaluationPlan, _select_videos, evaluate_policy
from rlinf.evaluation.intervals import difference_of_differences_interval, paired_difference_interval
from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.stopping import UntilNarrow
from rlinf.evaluation.twins import effect_table, effects
from rlinf.report.compare_folders import compare_folders
from rlinf.report.run_page import write_report
from rlinf.report.runs import read_runs, write_runs_report
from rlinf.types import EpisodeResult, EpisodeSpec
from tests.unit.test_evaluation import TASKS, BinPolicy, NumberLineEnv

KINDS = {"camera": 6, "noise": 4}
NAMES = ["plain_0", "plain_1", *(f"{kind}_{n}" for kind, count in KINDS.items() for n in range(count))]
TWINS = {name: (name.split("_")[0], f"plain_{int(name[-1]) % 2}") for name in NAMES[2:]}
SOLVED = ({"plain_0", "plain_1", "camera_0"}, {"plain_0", "plain_1", *NAMES[2:6], "noise_0"})


def result_of(solved: set[str], names=NAMES) -> EvaluationResult:
    rows = [
        EpisodeResult(EpisodeSpec("line", NAMES.index(name), 0, 0), name, name in solved, 0.0, 5, success_reported=True)
        for name in names
    ]
    result = EvaluationResult(rows, twins=TWINS)
    result.perturbations = effects(result)
    return result


def test_each_perturbed_episode_is_paired_with_its_own_task():
    result = result_of({"plain_0", "camera_0", "camera_1", "camera_3", "noise_2"})  # twins of 0, 2 and 4 are solved
    camera, noise, both = result.perturbations
    assert (camera["kind"], camera["episodes"], camera["successes_a"], camera["successes_b"]) == ("camera", 6, 3, 3)
    assert (camera["only_a"], camera["only_b"], camera["difference"]) == (2, 2, 0)
    assert (noise["only_a"], noise["only_b"], noise["difference"]) == (1, 0, -0.25)
    assert noise["interval"] == list(paired_difference_interval(1, 0, 1, 2))
    assert (both["kind"], both["episodes"], both["difference"]) == ("all kinds", 10, -0.1)
    assert list(result.per_task) == ["plain", "camera", "noise"] and result.per_task["plain"].count == "1/2"
    assert {row.split()[0]: row.split()[1] for row in effect_table(result.perturbations).splitlines()[1:3]} == {
        "camera": "6", "noise": "4",
    }  # fmt: skip
    assert len(_select_videos(result, 2)) == 6, "two per kind, not per variant"


def test_a_twin_that_was_not_run_gives_no_pair(tmp_path):
    result = result_of({"camera_0", "plain_0"}, NAMES[:1] + NAMES[2:])
    assert [row["episodes"] for row in result.perturbations] == [3, 2, 5]
    again = EvaluationResult.from_json(result.to_json(tmp_path / "result.json"))
    assert again.twins == TWINS and again.perturbations == result.perturbations == effects(again)
    assert effects(replace(result, twins={})) == [], "a control"


def test_a_perturbed_episode_has_the_random_numbers_of_its_twin():
    class TwinEnv(NumberLineEnv):
        def _start(self, spec):
            return -3.0

        def _observe(self):
            seen = super()._observe()
            return replace(seen, instruction=[""] * len(seen.instruction))

        def twin_of(self, config, task):
            return ("camera", TASKS[0]) if task == TASKS[1] else None

        def caveats(self, config):
            return ["half of the list"]

    specs = [EpisodeSpec("line", task, 0, 0) for task in range(2)]
    result = evaluate_policy(BinPolicy(), TwinEnv(2), specs, greedy=False)
    plain, perturbed = ((row.success, row.episode_return, row.num_env_steps) for row in result.results)
    assert plain == perturbed and result.perturbations[0]["difference"] == 0
    assert result.twins == {TASKS[1]: ("camera", TASKS[0])} and result.warnings[0] == "half of the list"
    alone = evaluate_policy(BinPolicy(), TwinEnv(1), specs[1:])
    assert alone.perturbations == [] and alone.warnings[1].startswith("1 perturbed episodes are not in the effects")
    assert len(result.warnings) == len(alone.warnings) - 2, "a control: no such warning, and no task is left out"
    policies = [BatchedPolicy(None, names, False, 1.0, 0) for names in (TwinEnv(2).stream_names, TASKS)]
    numbers = [[policy.start_episode(spec).random(3).tolist() for spec in specs] for policy in policies]
    assert [first == second for first, second in numbers] == [True, False], "a control: a task's own numbers"


def test_an_evaluation_may_end_before_every_variant_but_not_before_every_kind_of_each_task():
    plain = type("PlainEnv", (NumberLineEnv,), {"task_names": NAMES})
    perturbed = type("PerturbedEnv", (plain,), {"twin_of": lambda self, config, task: TWINS.get(task)})
    specs, plan = [EpisodeSpec("line", task, 0, 0) for task in range(12)], EvaluationPlan(stop=UntilNarrow(0.99))
    results = [evaluate_policy(BinPolicy(), env(3), specs, plan=plan) for env in (perturbed, plain)]
    assert [result.episodes for result in results] == [10, 12], "noise_1 is the tenth; a control: tasks without twins"
    assert not any("no episode" in warning for result in results for warning in result.warnings)


def test_the_change_between_two_policies_is_a_difference_of_differences():
    before, after = map(result_of, SOLVED)
    comparison = compare(before, after)
    camera, noise, both = comparison.changes
    assert (camera["a"], camera["b"], camera["difference"]) == pytest.approx((-5 / 6, -2 / 6, 3 / 6))
    assert (noise["a"], noise["b"], noise["difference"]) == (-1, -0.75, 0.25)
    assert (both["episodes"], both["difference"]) == (10, pytest.approx(0.4))
    assert camera["interval"][0] < 0.5 < camera["interval"][1]
    assert not compare(before, replace(after, stopping={"stop_when": 0.1, "num_planned": 12})).changes
    assert list(comparison.per_task) == ["plain", "camera", "noise"]
    assert json.loads(json.dumps(comparison.as_dict()))["changes"][1] == noise
    assert "Zou" in comparison.method and comparison.table().count("camera") == 2


def test_every_page_with_a_comparison_shows_effects_and_their_changes(tmp_path):
    for name, names in zip(("before_rl", "after_rl"), SOLVED, strict=True):
        for folder in (tmp_path / "run" / "eval" / name, tmp_path / name / "eval" / "after_rl"):
            result_of(names).to_json(folder / "result.json")
        (tmp_path / name / "summary.json").write_text(json.dumps({"experiment": name}))
    first, second = (tmp_path / "run" / "eval" / name for name in ("before_rl", "after_rl"))
    own = write_report(tmp_path / "run").read_text()
    comparison = compare_folders(first, second, ["conditions"])
    assert json.loads((second / "compare.json").read_text())["changes"] == comparison.changes
    several = write_runs_report(read_runs([tmp_path / "before_rl", tmp_path / "after_rl"]), tmp_path / "runs.html")
    for page, count in ((own, 2), ((second / "report.html").read_text(), 2), (several.read_text(), 1)):
        cells = [re.sub(r"<svg.*?</svg>|<[^>]+>|\s+", " ", row, flags=re.DOTALL).split() for row in page.split("<tr>")]
        rows = [row for row in cells if row[:2] == ["camera", "(6)"]]
        assert len(rows) == count
        assert count == 1 or rows[0][2:7] == ["100.0%", "6/6", "66.7%", "4/6", "-33.3"], "the effect in b"
        assert rows[-1][2:5] == ["-83.3", "-33.3", "+50.0"], "effect in a, in b, and its change"


def test_the_interval_of_a_difference_of_differences_is_the_formula_s_and_covers():
    first = np.array([[1, 1], [1, 0], [1, 1], [1, 0]] * 5)
    second = np.array([[1, 1], [1, 1], [1, 0], [1, 0]] * 5)  # differences uncorrelated with the first's
    low, high = paired_difference_interval(10, 0, 10, 0)
    interval = difference_of_differences_interval(first, second)
    side = np.hypot(-0.5 - low, high + 0.5)
    np.testing.assert_allclose(interval, (-side, side), atol=1e-12)
    same = difference_of_differences_interval(first, first)
    np.testing.assert_allclose(
        np.diff(same) ** 2, np.diff(interval) ** 2 - 4 * 20 / 24 * 2 * (-0.5 - low) * (high + 0.5)
    )
    generator, hits = np.random.default_rng(0), 0
    for _ in range(400):
        shared, alone = generator.random((40, 1)), generator.random((40, 4))
        solved = (np.where(generator.random((40, 4)) < 0.5, shared, alone) < (0.9, 0.4, 0.95, 0.7)).astype(int)
        low, high = difference_of_differences_interval(solved[:, :2], solved[:, 2:])
        hits += low <= 0.25 <= high
    assert 0.93 <= hits / 400 <= 0.99
