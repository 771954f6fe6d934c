"""The parity gate by hand: what it measures, and what it stops."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import ParityError
from rlinf.rollout.parity import accepted_gap, check_parity


def batch(rollout, trainer, executed=None, valid=None):
    """Two policy calls of one env, two actions of two tokens each."""
    return SimpleNamespace(
        rollout_logprobs=torch.tensor(rollout).view(2, 1, 4),
        old_logprobs=torch.tensor(trainer).view(2, 1, 4),
        action_mask=torch.ones(2, 1, 2, dtype=torch.bool) if executed is None else torch.tensor(executed).view(2, 1, 2),
        loss_mask=torch.ones(2, 1, dtype=torch.bool) if valid is None else torch.tensor(valid).view(2, 1),
        episode_ids=torch.tensor([[4], [9]]),
        specs={4: "episode four", 9: "episode nine"},
        observation=SimpleNamespace(instruction=["first", "second"]),
    )


ROLLOUT = [-1.0, -1.0, -2.0, -2.0, -1.0, -1.0, -3.0, -3.0]
TRAINER = [-1.0, -0.9, -2.2, -2.0, -1.0, -1.0, -3.0, -2.5]
GAPS = [0.0, 0.1, 0.2, 0.0, 0.0, 0.0, 0.0, 0.5]
RATIOS = [math.exp(0.1), math.exp(-0.2), 1.0, math.exp(0.5)]


def test_gaps_and_ratios_by_hand():
    metrics = check_parity(batch(ROLLOUT, TRAINER), step=0, max_gap=1.0)
    assert metrics == pytest.approx({
        "rollout/logprob_gap_mean": sum(GAPS) / 8,
        "rollout/logprob_gap_max": 0.5,
        "rollout/logprob_gap_exp_mean": sum(map(math.exp, GAPS)) / 8,
        "rollout/importance_ratio_mean": sum(RATIOS) / 4,
        "rollout/importance_ratio_max": math.exp(0.5),
    })  # fmt: skip


def test_actions_that_were_not_executed_or_do_not_count_are_left_out():
    only_first = check_parity(batch(ROLLOUT, TRAINER, executed=[True, False, True, True], valid=[True, False]), 0, 1.0)
    assert only_first == pytest.approx({
        "rollout/logprob_gap_mean": 0.05,
        "rollout/logprob_gap_max": 0.1,
        "rollout/logprob_gap_exp_mean": (1 + math.exp(0.1)) / 2,
        "rollout/importance_ratio_mean": math.exp(0.1),
        "rollout/importance_ratio_max": math.exp(0.1),
    })  # fmt: skip


def test_a_large_gap_stops_the_first_step_of_a_process_only_and_names_the_worst_sample():
    different = batch(ROLLOUT, TRAINER)
    with pytest.raises(
        ParityError,
        match=r"differ by 0.5 at step 0 .*at most 0.1.*call 1 of env 0, episode nine.*'second'.*parity_max_gap=1$",
    ):
        check_parity(different, step=0, max_gap=0.1)
    assert check_parity(different, step=1, max_gap=0.1)["rollout/logprob_gap_max"] == pytest.approx(0.5)
    with pytest.raises(ParityError, match="at step 3"):
        check_parity(different, step=3, max_gap=0.1, first_step=3)
    assert check_parity(different, step=0, max_gap=0.1, first_step=3)["rollout/logprob_gap_max"] == pytest.approx(0.5)


def test_in_16_bits_the_mean_counts_and_not_a_single_gap():
    rounded = [-1.0, -1.0, -2.0, -2.0, -1.0, -1.0, -3.0, -2.7]
    exp_mean = check_parity(batch(ROLLOUT, rounded), step=0, max_gap=None)["rollout/logprob_gap_exp_mean"]
    assert exp_mean == pytest.approx((7 + math.exp(0.3)) / 8) and exp_mean < 1.05
    with pytest.raises(ParityError, match=r"mean exp\|difference\| 1.12\); at most a mean exp\|difference\| of 1.05"):
        check_parity(batch(ROLLOUT, TRAINER), step=0, max_gap=None)
    check_parity(batch(ROLLOUT, TRAINER), step=1, max_gap=None)


@pytest.mark.parametrize(("overrides", "expected"), [
    ([], 1e-3),
    (["model.precision=bf16"], None),
    (["model.precision=bf16-mixed"], None),
    (["rollout.vllm.dtype=bfloat16"], None),
    (["rollout.vllm.dtype=bfloat16", "rollout.backend=torch"], 1e-3),
    (["model.precision=bf16", "trainer.parity_max_gap=0.2"], 0.2),
])  # fmt: skip
def test_the_limit_follows_from_the_number_formats_of_both_sides(overrides, expected):
    assert accepted_gap(build_config(compose_config(["experiment=quickstart_vllm", *overrides]))) == expected


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_log_probability_that_is_not_finite_stops_any_step(value):
    with pytest.raises(ParityError, match="call 0 of env 0, episode four.*or temperatures.$"):  # no limit would do
        check_parity(batch(ROLLOUT, [value, *TRAINER[1:]]), step=7, max_gap=1.0)
