"""What is said of runs: of recorded ones of `benchmarks/why.py`, and of two that are run now."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from rlinf.evaluation.finding_rules import RULES, explain
from rlinf.evaluation.findings import Record, diagnose

ROOT = Path(__file__).parents[2]
RECORDED = [json.loads(line) for line in (ROOT / "tests" / "fixtures" / "why_runs.jsonl").read_text().splitlines()]


def said_of(run: dict) -> list[str]:
    lines = [
        {name: value for name, value in zip(run["names"], line, strict=True) if value is not None}
        for line in run["lines"]
    ]
    return [finding.rule for finding in diagnose(Record(lines, run["settings"]), RULES).findings]


@pytest.mark.parametrize("run", [one for one in RECORDED if one["rule"]], ids=lambda one: one["name"])
def test_the_fault_of_a_recorded_run_is_named(run):
    assert run["rule"] in said_of(run)


@pytest.mark.parametrize("run", [one for one in RECORDED if not one["rule"]], ids=lambda one: one["name"])
def test_a_healthy_recorded_run_is_not_accused(run):
    assert said_of(run) == []


def test_faults_and_healthy_runs_are_recorded():
    faults = {run["rule"] for run in RECORDED} - {None}
    assert len(faults) >= 12 and sum(run["rule"] is None for run in RECORDED) >= 4


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("why_benchmark", ROOT / "benchmarks" / "why.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("name", ["cloning_diverges", "clone seed 0"])
def test_a_run_of_the_benchmark_is_named_or_left_alone_and_its_report_says_so(benchmark, tmp_path, name):
    case = next(one for one in (*benchmark.FAULTS, *benchmark.HEALTHY) if one.name == name)
    benchmark.run(case, tmp_path / "run")
    found = explain(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    if case.rule is None:
        assert found.findings == [] and "rules found nothing in the metrics" in page
    else:
        (finding,) = found.findings
        assert finding.rule == case.rule and finding.text.split(";")[0] in page
