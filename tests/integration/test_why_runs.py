"""What is said of runs: of recorded ones of `benchmarks/why.py`, and of two that are run now."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from rlinf.report.why.findings import Diagnosis, Record, diagnose
from rlinf.report.why.rules import RULES, explain

ROOT = Path(__file__).parents[2]
RECORDED = [json.loads(line) for line in (ROOT / "tests" / "fixtures" / "why_runs.jsonl").read_text().splitlines()]


def diagnosis_of(run: dict) -> Diagnosis:
    lines = [
        {name: value for name, value in zip(run["names"], line, strict=True) if value is not None}
        for line in run["lines"]
    ]
    return diagnose(Record(lines, run["settings"]), RULES)


@pytest.mark.parametrize("run", RECORDED, ids=lambda one: one["name"])
def test_the_outcome_of_a_recorded_run_comes_first_and_its_fault_is_named_or_none(run):
    diagnosis = diagnosis_of(run)
    assert diagnosis.outcome.verdict == run["outcome"] and str(diagnosis).startswith("outcome: ")
    found, causes = diagnosis.findings, set(run["causes"] or ())
    keys = {word.partition("=")[0] for finding in found for word in finding.set.split()}
    assert keys <= causes
    named = keys | {finding.rule for finding in found}
    assert named & causes if causes else not found


def test_faults_and_healthy_runs_are_recorded():
    assert sum(run["causes"] is None for run in RECORDED) >= 8 and len(RECORDED) >= 30


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("why_benchmark", ROOT / "benchmarks" / "why.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("name", ["cloning diverges", "clone seed 0"])
def test_a_run_of_the_benchmark_is_named_or_left_alone_and_its_report_says_so(benchmark, tmp_path, name):
    case = next(one for one in (*benchmark.FAULTS, *benchmark.HEALTHY) if one.name == name)
    benchmark.run(case, tmp_path / "run")
    found = explain(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert str(found.outcome) in page
    if case.causes is None:
        assert found.findings == [] and "nothing else to say" in page
    else:
        (finding,) = found.findings
        assert finding.set.partition("=")[0] in case.causes and finding.text.split(";")[0] in page


def test_the_benchmark_counts_wrong_keys_and_accusations(benchmark):
    still = [{"step": n, "phase": "rl", "rollout/success_rate": 0.0, "rollout/num_episodes": 64.0} for n in range(9)]
    record, tally = Record(still, {"trainer": {"adam_eps": 10.0}}), benchmark.Tally()
    found = diagnose(record, RULES)
    said = [tally.add(record, found, causes, outcome) for causes, outcome in
            ((["trainer.adam_eps"], ["did_not_rise"]), (["algorithm.gamma"], ["rose"]), (None, ["did_not_rise"]))]  # fmt: skip
    assert said == ["named", "wrong key", "accused"]
    assert (tally.named, tally.wrong_keys, tally.accused, tally.outcomes, tally.right_outcomes) == (1, 1, 1, 3, 2)
