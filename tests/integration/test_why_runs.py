"""What is said of runs: of recorded ones of `benchmarks/why.py`, and of two that are run now."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from rlinf.report.why.findings import Diagnosis, Record
from rlinf.report.why.rules import diagnose, explain

ROOT = Path(__file__).parents[2]
RECORDED = [
    json.loads(line)
    for name in ("why_runs.jsonl", "why_new_runs.jsonl")  # some thresholds were chosen on each of them
    for line in (ROOT / "tests" / "fixtures" / name).read_text().splitlines()
]


def diagnosis_of(run: dict) -> Diagnosis:
    lines = [
        {name: value for name, value in zip(run["names"], line, strict=True) if value is not None}
        for line in run["lines"]
    ]
    return diagnose(Record(lines, run["settings"]))


def names_its_cause(run: dict) -> bool:
    findings = diagnosis_of(run).findings
    keys = {word.partition("=")[0] for finding in findings for word in finding.set.split()}
    assert keys <= set(run["causes"] or ()), "a key that is not at fault"
    return bool((keys | {finding.rule for finding in findings}) & set(run["causes"] or ()))


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: run["name"])
def test_the_outcome_of_a_recorded_run_is_right_and_no_wrong_cause_is_named(run):
    diagnosis = diagnosis_of(run)
    assert diagnosis.outcome.verdict == run["outcome"] and str(diagnosis).startswith("outcome: ")
    is_named = names_its_cause(run)
    assert run["causes"] or not diagnosis.findings, "nothing is wrong, or nothing shows it"
    assert run["causes"] or not is_named


def test_most_faults_are_named():
    faulty = [run for run in RECORDED if run["causes"]]
    silent = {run["name"] for run in faulty if not names_its_cause(run)}
    # Noise in rewards or observations, closed clip ranges, a small actor and a critic of a wrong rate have no physical threshold.
    assert len(faulty) - len(silent) == 30 and len(silent) == 9, silent
    assert sum(run["causes"] is None for run in RECORDED) >= 18


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
        assert found.findings == [] and "no problem found" in page
    else:
        (finding,) = found.findings
        assert finding.set.partition("=")[0] in case.causes and finding.text.split(";")[0] in page


def test_the_benchmark_counts_wrong_keys_and_accusations(benchmark):
    still = [
        {"step": n, "phase": "rl", "rollout/success_rate": 0.0, "rollout/num_episodes": 64.0, "train/kl_to_reference": 0.0}
        for n in range(9)
    ]  # fmt: skip
    record, tally = Record(still, {"algorithm": {"kl_coef": 1000.0}}), benchmark.Tally()
    found = diagnose(record)
    said = [tally.add(record, found, causes, outcome) for causes, outcome in
            ((["algorithm.kl_coef"], ["did_not_rise"]), (["algorithm.gamma"], ["rose"]), (None, ["did_not_rise"]))]  # fmt: skip
    assert said == ["named", "wrong key", "accused"]
    assert (tally.named, tally.wrong_keys, tally.accused, tally.outcomes, tally.right_outcomes) == (1, 1, 1, 3, 2)
