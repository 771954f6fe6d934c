"""The table of benchmarks/metaworld_table.py: every task has one group, and rates, means and the difference agree with hand calculations."""

import importlib.util
from pathlib import Path

import pytest

from rlinf.envs.metaworld.env import INSTRUCTIONS
from rlinf.evaluation.result import EvaluationResult
from rlinf.types import EpisodeResult, EpisodeSpec


@pytest.fixture(scope="module")
def table():
    path = Path(__file__).parents[2] / "benchmarks" / "metaworld_table.py"
    spec = importlib.util.spec_from_file_location("metaworld_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(solved) -> EvaluationResult:
    """Return two episodes of each task, of which ``solved(task)`` succeed."""
    tasks = enumerate(INSTRUCTIONS)
    return EvaluationResult([
        EpisodeResult(EpisodeSpec("metaworld", number, state, 0), task, state < solved(task), 0.0, 9)
        for number, task in tasks for state in range(2)
    ])  # fmt: skip


def test_groups_divide_the_tasks_as_published(table):
    names = [f"{task}-v3" for tasks in table.GROUPS.values() for task in tasks.split()]
    assert sorted(names) == sorted(INSTRUCTIONS)
    assert [len(tasks.split()) for tasks in table.GROUPS.values()] == [28, 11, 6, 5]


def test_rates_means_and_difference_by_hand(table):
    before = result(lambda task: 1 if table.group_of(task) == "easy" else 0)
    after = result(lambda task: {"easy": 2, "very hard": 1}.get(table.group_of(task), 0))
    assert table.rates(before) == {
        "easy": (28, 56),
        "medium": (0, 22),
        "hard": (0, 12),
        "very hard": (0, 10),
        "all": (28, 100),
    }
    lines = table.table([before, after]).splitlines()
    assert "| 12.5 | 37.5 |" in lines[7]  # (50 + 0 + 0 + 0) / 4 and (100 + 0 + 0 + 50) / 4; over the tasks 28 and 61
    assert lines[6].split("|")[3:5] == [" 28.0 (20.1 - 37.5) ", " 61.0 (51.2 - 70.0) "]
    assert lines[-1].startswith("after - before = +33.0 points")
    rows = table.task_table([before, after]).splitlines()
    assert (
        len(rows) == 2 + 50
        and "| easy | reach | 2 | 1 | 2 |" in rows
        and rows[-1] == "| very hard | pick-place-wall | 2 | 0 | 1 |"
    )


def test_bars_are_drawn(table, tmp_path):
    table.draw([result(lambda task: 1)], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 10_000
