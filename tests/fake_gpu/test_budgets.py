"""Launches, copies, waits and memory of each model's work on a GPU, against the budgets of ``budgets.txt``.

A change that raises a number on purpose writes the table anew: ``python -m tests.fake_gpu.run --table >
tests/fake_gpu/budgets.txt``. One that lowers it should, too.
"""

import functools
from pathlib import Path

import pytest

from tests.fake_gpu.cases import CASES
from tests.fake_gpu.child import call
from tests.fake_gpu.run import COLUMNS, HEADROOM, columns_of

LINES = (Path(__file__).parent / "budgets.txt").read_text(encoding="utf-8").splitlines()
BUDGETS = {
    (case.strip(), phase.strip()): dict(zip(COLUMNS, map(int, numbers.split()), strict=True))
    for case, phase, numbers in (line.split("|") for line in LINES[1:])
}


@functools.cache
def counts_of(case):
    return call("tests.fake_gpu.runs:count", case=case)


def excess(counts, budget):
    """Return the columns above their budget, each with the places that have most of it."""
    places = counts["places"] | {"bookkeeping": counts["places"]["launches"], "peak_mb": counts["peak_at"]}
    found = columns_of(counts)
    return {name: (found[name], budget[name], places[name]) for name in COLUMNS if found[name] > budget[name]}


def test_every_case_has_its_budgets():
    assert list(BUDGETS) == [(name, phase) for name, case in CASES.items() for phase in case.phases]


@pytest.mark.parametrize(("case", "phase"), BUDGETS)
def test_work_stays_within_its_budget(case, phase):
    above = excess(counts_of(case)[phase], BUDGETS[case, phase])
    lines = [f"{column}: {found:,}, budget {budget:,}; {places}" for column, (found, budget, places) in above.items()]
    assert not above, "\n".join(lines)


@pytest.mark.parametrize(
    ("fault", "columns"),
    [
        ("reads a number", {"syncs"}),
        ("copies to the CPU", {"d2h"}),
        ("keeps gradients", {"peak_mb"}),
        ("steps one by one", {"bookkeeping"}),
    ],
)
def test_a_fault_of_an_update_is_noticed(fault, columns):
    counts = call("tests.fake_gpu.faults:count_with", fault=fault)
    assert columns <= set(excess(counts, BUDGETS["pi0, action expert", "update"]))


# -- what the design promises --------------------------------------------------------------------------------------------

MAY_WAIT = {"hf_vla": 2, "qwen2": 7, "actor": 2}
"""Numbers that are read. A VLM of transformers compares its image tokens with the images in each pass, and its ``generate`` asks after
each token whether a row continues, and waits until the numbers of special tokens are sent. The losses of critics and actor are looked at before their steps."""


def test_policy_calls_and_updates_wait_for_their_results_only():
    for (case, phase), budget in BUDGETS.items():
        may_wait = next((number for name, number in MAY_WAIT.items() if name in case), 0)
        if not case.startswith("qwen2") or phase == "generate":
            assert budget["syncs"] <= may_wait, (case, phase)
        else:
            assert budget["syncs"] == 0, (case, phase)
        assert budget["d2h"] <= 2 if phase in ("score", "generate") else budget["d2h"] <= 1, (case, phase)


def test_the_optimiser_launches_few_kernels():
    for (case, phase), budget in BUDGETS.items():
        assert budget["bookkeeping"] <= 60, (case, phase)


def test_oft_with_adapters_fits_a_card_of_24_gb():
    """18.4 GB: weights 15.3, masters 0.45, moments 0.9, float32 sums of gradients 0.45, activations 1.3."""
    assert BUDGETS["openvla_oft, 7.5 billion, LoRA", "update"]["peak_mb"] / HEADROOM["peak_mb"] <= 18_500
