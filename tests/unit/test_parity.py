"""The parity gate by hand: what it measures, and what it stops."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed.launch import launch
from rlinf.distributed.process_group import rank
from rlinf.errors import ParityError
from rlinf.preflight.derived import parity_gate
from rlinf.rollout.parity import ParityGate, check_parity


def batch(rollout, trainer, executed=None, valid=None, values=None):
    """Two policy calls of one env, two actions of two tokens each; ``values``: the rollout's and the trainer's, two each."""
    return SimpleNamespace(
        rollout_logprobs=torch.tensor(rollout).view(2, 1, 4),
        old_logprobs=torch.tensor(trainer).view(2, 1, 4),
        action_mask=torch.ones(2, 1, 2, dtype=torch.bool) if executed is None else torch.tensor(executed).view(2, 1, 2),
        loss_mask=torch.ones(2, 1, dtype=torch.bool) if valid is None else torch.tensor(valid).view(2, 1),
        episode_ids=torch.tensor([[4], [9]]),
        specs={4: "episode four", 9: "episode nine"},
        observation=SimpleNamespace(instruction=["first", "second"]),
        rollout_values=None if values is None else torch.tensor(values[0]).view(2, 1),
        values=None if values is None else torch.tensor(values[1]).view(2, 1),
    )


ROLLOUT = [-1.0, -1.0, -2.0, -2.0, -1.0, -1.0, -3.0, -3.0]
TRAINER = [-1.0, -0.9, -2.2, -2.0, -1.0, -1.0, -3.0, -2.5]
GAPS = [0.0, 0.1, 0.2, 0.0, 0.0, 0.0, 0.0, 0.5]
RATIOS = [math.exp(0.1), math.exp(-0.2), 1.0, math.exp(0.5)]


def test_gaps_and_ratios_by_hand():
    metrics, fault = check_parity(batch(ROLLOUT, TRAINER), step=0, max_gap=1.0)
    assert fault is None
    assert metrics == pytest.approx({
        "rollout/logprob_gap_mean": sum(GAPS) / 8,
        "rollout/logprob_gap_max": 0.5,
        "rollout/logprob_gap_exp_mean": sum(map(math.exp, GAPS)) / 8,
        "rollout/importance_ratio_mean": sum(RATIOS) / 4,
        "rollout/importance_ratio_max": math.exp(0.5),
    })  # fmt: skip


def check_on_ranks(folder):
    """The rollout has the high density on rank 0 and the trainer on rank 1, where the values are large too."""
    peaked, flat = [math.log(10.0)] + [0.0] * 7, [0.0] * 8
    if rank() == 0:
        own = batch(peaked, flat, values=([0.5, 0.0], [1.0, 0.0]))
    else:
        own = batch(flat, peaked, values=([0.0, 100.0], [0.0, 100.0]))
    torch.save(check_parity(own, 0, max_gap=1.0), folder / f"rank{rank()}.pt")


def test_limits_gaps_and_ratios_are_those_of_all_ranks(tmp_path):
    """By hand. On its own each rank has a density of 1 in one of the two, and so a limit below its gap of log 10."""
    launch(check_on_ranks, tmp_path, 2, "cpu")
    for number in range(2):
        metrics, fault = torch.load(tmp_path / f"rank{number}.pt")
        assert fault is None
        assert metrics == pytest.approx({
            "rollout/logprob_gap_mean": 2 * math.log(10) / 16,
            "rollout/logprob_gap_max": math.log(10),
            "rollout/logprob_gap_exp_mean": (10 + 10 + 14) / 16,
            "rollout/importance_ratio_mean": (0.1 + 10 + 6) / 8,
            "rollout/importance_ratio_max": 10.0,
            "rollout/value_gap_max": 0.5 / 100,
        })  # fmt: skip


def test_actions_that_were_not_executed_or_do_not_count_are_left_out():
    cut = batch(ROLLOUT, TRAINER, executed=[True, False, True, True], valid=[True, False])
    only_first, _ = check_parity(cut, 0, 1.0)
    assert only_first == pytest.approx({
        "rollout/logprob_gap_mean": 0.05,
        "rollout/logprob_gap_max": 0.1,
        "rollout/logprob_gap_exp_mean": (1 + math.exp(0.1)) / 2,
        "rollout/importance_ratio_mean": math.exp(0.1),
        "rollout/importance_ratio_max": math.exp(0.1),
    })  # fmt: skip


def test_a_gap_is_accepted_up_to_the_limit_and_the_sentence_names_the_worst_sample():
    different = batch(ROLLOUT, TRAINER)
    _, fault = check_parity(different, step=3, max_gap=0.1)
    assert re.search(
        r"log-probabilities differ by 0.5 at step 3 .*at most 0.1.*call 1 of env 0, episode nine.*'second'.*parity_max_gap=1$",
        fault,
    )
    assert check_parity(different, step=3, max_gap=0.5)[1] is None
    assert "at most 0.49" in check_parity(different, step=3, max_gap=0.49)[1]


def test_in_16_bits_the_mean_counts_and_not_a_single_gap():
    rounded = [-1.0, -1.0, -2.0, -2.0, -1.0, -1.0, -3.0, -2.7]
    metrics, fault = check_parity(batch(ROLLOUT, rounded), step=0, max_gap=None)
    exp_mean = metrics["rollout/logprob_gap_exp_mean"]
    assert exp_mean == pytest.approx((7 + math.exp(0.3)) / 8) and exp_mean < 1.05 and fault is None
    _, fault = check_parity(batch(ROLLOUT, TRAINER), step=0, max_gap=None)
    assert re.search(r"mean exp\|difference\| 1.12\); at most a mean exp\|difference\| of 1.05", fault)


def wide_batch(rollout, trainer, valid):
    """Two policy calls of three envs, of one action of one token each, without values."""
    shape = (2, 3)
    return SimpleNamespace(
        rollout_logprobs=torch.tensor(rollout).view(*shape, 1),
        old_logprobs=torch.tensor(trainer).view(*shape, 1),
        action_mask=torch.ones(*shape, 1, dtype=torch.bool),
        loss_mask=torch.tensor(valid).view(shape),
        episode_ids=torch.arange(6).view(shape),
        specs={number: f"episode {number}" for number in range(6)},
        observation=SimpleNamespace(instruction=[f"sentence {number}" for number in range(6)]),
        rollout_values=None,
        values=None,
    )


def test_the_worst_of_several_envs_is_named_with_its_numbers_rounded():
    trainer = [-1.0, -1.0, -1.1, -1.0, -1.98765, -1.0]
    _, fault = check_parity(wide_batch([-1.0] * 4 + [-1.23456, -1.0], trainer, [True] * 6), step=5, max_gap=0.2)
    assert re.search(
        r"differ by 0.753 at step 5.*call 1 of env 1, episode 4,.*'sentence 4', rollout \[-1.2346\], trainer \[-1.9877\]",
        fault,
    )


def test_one_valid_number_is_its_own_mean_and_none_is_no_gap():
    rollout, trainer = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], [-1.5, -2.5, -9.0, 3.0, -5.0, 6.0]
    metrics, _ = check_parity(wide_batch(rollout, trainer, [False, True] + [False] * 4), step=0, max_gap=1.0)
    assert metrics == pytest.approx({
        "rollout/logprob_gap_mean": 0.5, "rollout/logprob_gap_max": 0.5, "rollout/logprob_gap_exp_mean": math.exp(0.5),
        "rollout/importance_ratio_mean": math.exp(-0.5), "rollout/importance_ratio_max": math.exp(-0.5),
    })  # fmt: skip
    metrics, fault = check_parity(wide_batch(rollout, trainer, [False] * 6), step=0, max_gap=1e-6)
    assert fault is None and metrics == {
        "rollout/logprob_gap_mean": 0.0, "rollout/logprob_gap_max": 0.0, "rollout/logprob_gap_exp_mean": 0.0,
        "rollout/importance_ratio_mean": 1.0, "rollout/importance_ratio_max": 1.0,
    }  # fmt: skip


def test_what_does_not_count_makes_no_limit_wider():
    """A gap of 0.015 next to numbers that are not executed; a limit of 0.01 stays what it is."""
    rollout, trainer = [-1.0, 3.0, 3.0, 3.0, 3.0, 3.0], [-1.015, 3.0, 3.0, 3.0, 3.0, 3.0]
    one = [True] + [False] * 5
    assert check_parity(wide_batch(rollout, trainer, one), step=0, max_gap=0.01)[1] is not None
    assert check_parity(wide_batch(rollout, trainer, [True] * 6), step=0, max_gap=0.01)[1] is None, "control"


def test_the_mean_of_the_gaps_of_values_is_that_of_valid_calls():
    """Two calls whose values differ by 0.4 and 0.1. Both valid: the mean of exp 0.4 and exp 0.1. The first alone: exp 0.4."""
    values = ([0.5, 0.5], [0.9, 0.4])
    for valid, mean in ((None, (math.exp(0.4) + math.exp(0.1)) / 2), ([True, False], math.exp(0.4))):
        _, fault = check_parity(batch(ROLLOUT, ROLLOUT, valid=valid, values=values), step=0, max_gap=None)
        assert f"values differ by 0.4 at step 0 (mean exp|difference| {mean:.3g})" in fault
    nothing = batch(ROLLOUT, ROLLOUT, valid=[False, False], values=values)
    metrics, fault = check_parity(nothing, step=0, max_gap=None)
    assert metrics["rollout/value_gap_max"] == 0.0 and fault is None


@pytest.mark.parametrize(("values", "valid", "expected"), [
    (([0.5, -0.25], [0.5, -0.25]), None, 0.0),
    (([0.5, -0.25], [0.5, -0.05]), None, 0.2),  # all values are below 1
    (([0.5, -8.0], [0.5, -10.0]), None, 0.2),  # in fractions of the trainer's largest
    (([0.5, -8.0], [0.9, -10.0]), [True, False], 0.4),
])  # fmt: skip
def test_values_are_compared_in_shares_of_the_largest(values, valid, expected):
    metrics, fault = check_parity(batch(ROLLOUT, ROLLOUT, valid=valid, values=values), step=2, max_gap=0.1)
    assert metrics["rollout/value_gap_max"] == pytest.approx(expected, abs=1e-6)
    if expected == 0.0:
        assert fault is None
    else:
        assert "values differ by" in fault and "trainer.parity_max_gap=" in fault
    exp_mean = math.exp(expected) if valid else (1 + math.exp(expected)) / 2
    in_16_bits = check_parity(batch(ROLLOUT, ROLLOUT, valid=valid, values=values), step=2, max_gap=None)[1]
    assert (in_16_bits is not None) == (exp_mean > 1.05)


@pytest.mark.parametrize(("rollout", "trainer", "accepted"), [
    ([-4.0], [-4.015], False),  # probabilities: the limit is 0.01
    ([3.0], [2.985], True),  # a density of e^3 = 20: the limit is 0.2
    ([3.0], [2.9], True),
    ([3.0], [2.7], False),
    ([-4.0], [9.0], False),  # one side alone is so dense
])  # fmt: skip
def test_gaps_of_densities_count_in_shares_of_the_largest(rollout, trainer, accepted):
    rest = [-1.0] * 7
    _, fault = check_parity(batch(rollout + rest, trainer + rest), step=0, max_gap=0.01)
    assert (fault is None) == accepted


def test_log_probabilities_are_named_before_values():
    assert "log-probabilities" in check_parity(batch(ROLLOUT, TRAINER, values=([0.0, 0.0], [1.0, 1.0])), 0, 0.1)[1]


def test_in_float32_the_gate_stops_at_any_step():
    gate = ParityGate(0.1, always_stops=True)
    assert gate.check(batch(ROLLOUT, ROLLOUT), 0)["rollout/parity_exceeded"] == 0.0
    with pytest.raises(ParityError, match="at step 1 .*parity_max_gap=1$"):
        gate.check(batch(ROLLOUT, TRAINER), 1)
    gate.policy_was_updated()
    gate.check(batch(ROLLOUT, ROLLOUT), 2)
    with pytest.raises(ParityError, match="at step 9 .* They agreed until the weights were updated"):
        gate.check(batch(ROLLOUT, TRAINER), 9)


def test_in_16_bits_the_gate_stops_at_the_first_step_and_after_the_first_update_and_warns_once_later(caplog):
    def rounding_gate():
        return ParityGate(None, always_stops=False)

    with pytest.raises(ParityError, match="at step 4"):  # the first of this process, which continues with a run
        rounding_gate().check(batch(ROLLOUT, TRAINER), 4)
    gate = rounding_gate()
    gate.check(batch(ROLLOUT, ROLLOUT), 0)
    gate.policy_was_updated()
    with pytest.raises(ParityError, match="at step 1 .*agreed until"):
        gate.check(batch(ROLLOUT, TRAINER), 1)
    gate = rounding_gate()
    gate.check(batch(ROLLOUT, ROLLOUT), 0)  # the critic warms up: nothing was updated that these numbers show
    assert gate.check(batch(ROLLOUT, TRAINER), 1)["rollout/parity_exceeded"] == 1.0
    gate.policy_was_updated()
    gate.check(batch(ROLLOUT, ROLLOUT), 2)
    gate.policy_was_updated()
    for step in (3, 4):
        assert gate.check(batch(ROLLOUT, TRAINER), step)["rollout/parity_exceeded"] == 1.0
    assert gate.check(batch(ROLLOUT, ROLLOUT), 5)["rollout/parity_exceeded"] == 0.0
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "differ by 0.5 at step 1" in warnings[0] and "The run continues" in warnings[0]


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_log_probability_that_is_not_finite_stops_any_step(value):
    with pytest.raises(ParityError, match="call 0 of env 0, episode four.*or temperatures.$"):  # no limit would do
        check_parity(batch(ROLLOUT, [value, *TRAINER[1:]]), step=7, max_gap=1.0)
    with pytest.raises(ParityError, match="values differ by.*call 1 of env 0, episode nine.*or temperatures.$"):
        check_parity(batch(ROLLOUT, ROLLOUT, values=([0.0, value], [0.0, 0.0])), step=7, max_gap=1.0)


def test_a_gap_that_is_no_number_is_the_worst_of_all_ranks(monkeypatch):
    """NaN compares as false."""
    monkeypatch.setattr("rlinf.rollout.parity.gather_objects", lambda own: [(0.25, 0.25, "one of rank 0"), own])
    with pytest.raises(ParityError, match="differ by nan.*call 0 of env 0, episode four"):
        check_parity(batch(ROLLOUT, [float("nan"), *TRAINER[1:]]), step=0, max_gap=1.0)


@pytest.mark.parametrize(("max_gap", "kl", "stops"), [
    (1e-3, 9e-5, False), (1e-3, 2e-4, True), (1e-3, float("nan"), True), (0.2, 0.03, False), (0.2, 0.05, True), (None, 9.0, False),
])  # fmt: skip
def test_the_first_minibatch_of_an_iteration_has_not_moved_yet(max_gap, kl, stops):
    gate = ParityGate(max_gap, always_stops=max_gap is not None)
    gate.check_first_update({"loss": 1.0}, 3)
    if not stops:
        gate.check_first_update({"approx_kl": kl}, 3)
        return
    with pytest.raises(
        ParityError, match=rf"first minibatch of step 3 .*approx_kl is {kl:.3g}.*trainer.parity_max_gap="
    ):
        gate.check_first_update({"approx_kl": kl}, 3)


def test_an_approximate_kl_at_the_limit_is_accepted():
    gate = ParityGate(0.5, always_stops=True)
    gate.check_first_update({"approx_kl": 0.25}, 0)
    with pytest.raises(ParityError, match=r"approx_kl is 0.251; at most 0.25 .*parity_max_gap=0.71$"):
        gate.check_first_update({"approx_kl": 0.251}, 0)


@pytest.mark.parametrize(("overrides", "max_gap", "always"), [
    (["experiment=quickstart_vllm"], 1e-3, True),
    (["experiment=quickstart_vllm", "model.precision=bf16"], None, False),
    (["experiment=quickstart_vllm", "model.precision=bf16-mixed"], None, False),
    (["experiment=quickstart_vllm", "rollout.vllm.dtype=bfloat16"], None, False),
    (["experiment=quickstart_vllm", "rollout.vllm.dtype=bfloat16", "rollout.backend=torch"], 1e-3, True),
    (["experiment=quickstart_vllm", "model.precision=bf16", "trainer.parity_max_gap=0.2"], 0.2, False),
    (["model=mlp", "env=tabletop", "model.precision=bf16"], None, False),
])  # fmt: skip
def test_the_gate_follows_from_the_number_formats_of_both_sides(overrides, max_gap, always):
    gate = parity_gate(build_config(compose_config(overrides)))
    assert (gate.max_gap, gate.always_stops) == (max_gap, always)
