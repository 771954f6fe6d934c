"""Advantage estimators against an O(T^2) reference and hand calculations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.algorithms.advantages import (
    action_advantages,
    episode_returns,
    gae,
    group_advantages,
    leave_one_out_advantages,
    masked_normalize,
)
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.envs.steps import SimulatorStep
from rlinf.types import Observation


def slow_gae(rewards, values, terminated, truncated, bootstrap, gamma, lam):
    """Sum of discounted one-step errors, written from the definition, one env and one start at a time."""
    num_steps, num_envs = rewards.shape
    advantages = torch.zeros_like(rewards)
    for b in range(num_envs):
        for start in range(num_steps):
            weight = 1.0
            for t in range(start, num_steps):
                if terminated[t, b]:
                    after = 0.0
                elif truncated[t, b] or t == num_steps - 1:
                    after = bootstrap[t, b]
                else:
                    after = values[t + 1, b]
                advantages[start, b] += weight * (rewards[t, b] + gamma * after - values[t, b])
                if terminated[t, b] or truncated[t, b]:
                    break
                weight *= gamma * lam
    return advantages


@pytest.mark.parametrize("seed", range(20))
def test_gae_equals_the_definition_on_random_episode_ends(seed):
    torch.manual_seed(seed)
    num_steps, num_envs = 1 + seed % 9, 1 + seed % 4
    rewards, values, bootstrap = torch.randn(3, num_steps, num_envs).unbind(0)
    ends = torch.rand(num_steps, num_envs)
    terminated, truncated = ends < 0.2, (ends >= 0.2) & (ends < 0.4)
    advantages, returns = gae(rewards, values, terminated, truncated, bootstrap, 0.9, 0.8)
    torch.testing.assert_close(advantages, slow_gae(rewards, values, terminated, truncated, bootstrap, 0.9, 0.8))
    torch.testing.assert_close(returns, advantages + values)


class Steady(VectorEnv):
    """A reward of 1 a step for ever; the simulator itself ends its episodes after 3 steps, in the way of ``end``."""

    suite, state_dim, end = "steady", 1, "truncated"

    def __init__(self, num_envs):
        super().__init__(EnvConfig(cameras=[], max_episode_steps=64), num_envs, True, [-1.0], [1.0])
        self.counts = np.zeros(num_envs, dtype=np.int64)

    @classmethod
    def all_task_names(cls, config):
        return ["one"]

    def _reset_env(self, index, spec):
        self.counts[index] = index  # so that the episodes of two envs end at different steps

    def _step_envs(self, ids, actions):
        self.counts[ids] += 1
        ends = {self.end: self.counts[ids] % 3 == 0}
        return SimulatorStep(np.ones(len(ids), np.float32), np.zeros(len(ids), bool), **ends)

    def _observe(self, ids):
        return Observation({}, self.counts[ids][:, None].astype(np.float32), ["go"] * len(ids))


@pytest.mark.parametrize(("end", "expected"), [("truncated", 10.0), ("terminated", None)])
def test_an_episode_that_the_env_cuts_is_worth_what_an_endless_one_is(end, expected):
    env = Steady(2)
    env.end = end
    env.reset()
    steps = [env.chunk_step(np.zeros((2, 1, 1))) for _ in range(8)]
    rewards = torch.tensor(np.stack([step.rewards[:, 0] for step in steps]))
    flags = [torch.tensor(np.stack([getattr(step, name) for step in steps])) for name in ("terminated", "truncated")]
    assert flags[0].any() == (end == "terminated") and flags[1].any() == (end == "truncated")
    values = torch.full((8, 2), 10.0)  # of an endless episode: 1 + 0.9 * 10
    bootstrap = torch.where(flags[1] | (torch.arange(8) == 7)[:, None], values, 0)
    advantages, returns = gae(rewards, values, *flags, bootstrap, 0.9, 0.8)
    torch.testing.assert_close(advantages, slow_gae(rewards, values, *flags, bootstrap, 0.9, 0.8))
    if expected is None:
        assert returns.min() == 1.0, "the control: the step of a termination is worth its reward alone"
    else:
        torch.testing.assert_close(returns, torch.full((8, 2), expected))


def test_action_advantages_leave_out_what_was_already_paid():
    spread = action_advantages(torch.tensor([[6.0, 10.0]]), torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]))
    assert spread.tolist() == [[[6.0, 5.0, 3.0], [10.0, 6.0, 1.0]]]


def test_group_advantages_by_hand():
    returns = torch.tensor([1.0, 3.0, 5.0, 5.0])
    groups = torch.tensor([7, 7, 2, 2])
    advantages, varied = group_advantages(returns, groups, scale_by_std=True)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0, 0.0, 0.0]), atol=1e-5, rtol=0)
    assert varied.tolist() == [True, True, False, False]
    plain, _ = group_advantages(returns * 2, groups, scale_by_std=False)
    assert plain.tolist() == [-2.0, 2.0, 0.0, 0.0]


def test_leave_one_out_advantages_by_hand():
    """1 - (3 + 8) / 2, 3 - (1 + 8) / 2 and 8 - (1 + 3) / 2; a group of two; one of equal returns; one of one episode."""
    returns = torch.tensor([1.0, 3.0, 8.0, 2.0, 5.0, 4.0, 4.0, 9.0])
    groups = torch.tensor([7, 7, 7, 2, 2, 0, 0, 5])
    advantages, varied = leave_one_out_advantages(returns, groups)
    assert advantages.tolist() == [-4.5, -1.5, 6.0, -3.0, 3.0, 0.0, 0.0, 0.0]
    assert varied.tolist() == [True] * 5 + [False] * 3


def slow_leave_one_out(returns, groups):
    """Written from the definition, one episode at a time."""
    values, ids = returns.tolist(), groups.tolist()
    result = []
    for i, (value, group) in enumerate(zip(values, ids, strict=True)):
        others = [other for j, other in enumerate(values) if j != i and ids[j] == group]
        result.append(value - sum(others) / len(others))
    return torch.tensor(result)


# Sixteenths up to 64: differences of returns are exact, and far larger than rounding.
returns_of_groups = st.integers(2, 6).flatmap(
    lambda size: st.lists(st.lists(st.integers(-1024, 1024), min_size=size, max_size=size), min_size=1, max_size=4)
)


@given(returns_of_groups, st.integers(-32, 32), st.sampled_from([0.25, 0.5, 2.0, 8.0]), st.randoms())
def test_leave_one_out_advantages_sum_to_zero_forget_a_shift_and_keep_a_scale(sixteenths, shift, scale, random):
    returns = torch.tensor(sixteenths).flatten() / 16
    groups = torch.arange(len(sixteenths)).repeat_interleave(len(sixteenths[0]))
    order = list(range(len(returns)))
    random.shuffle(order)
    returns, groups = returns[order], groups[order]
    advantages, varied = leave_one_out_advantages(returns, groups)
    torch.testing.assert_close(advantages, slow_leave_one_out(returns, groups), atol=1e-4, rtol=1e-5)
    sums = torch.zeros(len(sixteenths)).index_add(0, groups, advantages)
    torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-3, rtol=0)
    for group in groups.unique():
        rows = groups == group
        spread = returns[rows].max() - returns[rows].min()
        assert advantages[rows].abs().max() <= spread * (1 + 1e-6)
        assert bool(varied[rows].all()) == bool(varied[rows].any()) == bool(spread > 0)
    shifted, _ = leave_one_out_advantages(returns + shift, groups)
    torch.testing.assert_close(shifted, advantages, atol=1e-5, rtol=1e-5)
    scaled, _ = leave_one_out_advantages(returns * scale, groups)
    torch.testing.assert_close(scaled, advantages * scale, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("estimate", [leave_one_out_advantages, lambda r, g: group_advantages(r, g, True)])
def test_one_return_that_differs_from_all_others_gives_bounded_advantages(estimate):
    """[y, x, x, x]: the deviation of the others is 0. RLOO: y - x and (x - y) / 3; GRPO: sqrt(3) and -1 / sqrt(3)."""
    rloo = estimate is leave_one_out_advantages
    for y, x in ((1.0, 0.0), (0.0, 1.0), (101.0, 100.0), (1e4, 1e4 - 1)):
        advantages, varied = estimate(torch.tensor([y, x, x, x]), torch.zeros(4, dtype=torch.int64))
        first, others = (y - x, (x - y) / 3) if rloo else ((y - x) * 3**0.5, (x - y) / 3**0.5)
        assert advantages.tolist() == pytest.approx([first, others, others, others], rel=1e-5)
        assert varied.all()


@pytest.mark.parametrize("estimate", [leave_one_out_advantages, lambda r, g: group_advantages(r, g, True)])
@pytest.mark.parametrize("x", [0.1, 1.0, 100.0, 3000.0, -3000.0])
def test_returns_that_differ_by_rounding_are_equal(estimate, x):
    """The next float32 after x is no better than x, though GRPO would divide its deviation by itself."""
    x = torch.tensor(x)
    returns = torch.stack([torch.nextafter(x, torch.tensor(torch.inf)), x, x, x])
    assert returns[0] > returns[1]
    advantages, varied = estimate(returns, torch.zeros(4, dtype=torch.int64))
    assert advantages.tolist() == [0.0] * 4 and not varied.any()
    apart, varied = estimate(returns + torch.tensor([0.01 * x.abs(), 0, 0, 0]), torch.zeros(4, dtype=torch.int64))
    assert varied.all() and apart[0] > 0, "control: a hundredth is a difference"


def test_epsilon_is_added_to_the_deviation_and_bounds_what_counts_as_equal():
    """Returns 0 and 2 have deviation 1: with 0.5 added the advantages are -1 / 1.5 and 1 / 1.5; 1.5 makes them equal."""
    returns, group = torch.tensor([0.0, 2.0]), torch.zeros(2, dtype=torch.int64)
    advantages, varied = group_advantages(returns, group, scale_by_std=True, eps=0.5)
    assert advantages.tolist() == pytest.approx([-2 / 3, 2 / 3]) and varied.all()
    advantages, varied = group_advantages(returns, group, scale_by_std=True, eps=1.5)
    assert advantages.tolist() == [0.0, 0.0] and not varied.any()
    # Without any epsilon, returns of exactly 0 are equal still, and nothing is divided by 0.
    advantages, varied = group_advantages(torch.zeros(2), group, scale_by_std=True, eps=0.0)
    assert advantages.tolist() == [0.0, 0.0] and not varied.any()


def test_a_return_that_is_not_a_number_is_not_taken_for_equal_returns():
    returns = torch.tensor([float("nan"), 1.0, 0.0, 0.0])
    advantages, varied = group_advantages(returns, torch.tensor([0, 0, 1, 1]), scale_by_std=True)
    assert varied.tolist() == [True, True, False, False] and advantages[:2].isnan().all()


def test_equal_rewards_in_another_order_give_equal_returns():
    columns = torch.tensor([[1e8, 1e8], [-1e8, 1.0], [1.0, -1e8]])
    assert (columns[0] + columns[1] + columns[2]).tolist() == [1.0, 0.0], "control: float32 sums differ"
    assert episode_returns(columns, torch.ones_like(columns, dtype=torch.bool)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [0.1, 1.0, 100.0, -100.0])
def test_equal_advantages_are_not_normalised_to_their_rounding(value):
    values = torch.full((1000,), value)
    mask = torch.arange(1000) % 3 > 0
    assert masked_normalize(values, mask).tolist() == [0.0] * 1000
    values[1] = torch.nextafter(values[1], torch.tensor(torch.inf))
    assert masked_normalize(values, mask).tolist() == [0.0] * 1000
    values[1] = 2 * value
    assert masked_normalize(values, mask)[1].abs() > 1, "control"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_and_masked_ones_do_not_count(value):
    zeros, flags = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.bool)
    bad = zeros.clone()
    bad[1, 0] = value
    for index, name in ((0, "rewards"), (1, "values"), (4, "bootstrap_values")):
        arguments = [zeros, zeros, flags, flags, zeros]
        gae(*arguments, 0.9, 0.9)  # control
        arguments[index] = bad
        with pytest.raises(ValueError, match=f"^{name} of the rollout .* {value} at call 1 of env 0"):
            gae(*arguments, 0.9, 0.9)
    valid = ~flags
    with pytest.raises(ValueError, match=f"{value} at call 1 of env 0"):
        episode_returns(bad, valid)
    valid[1, 0] = False
    assert episode_returns(bad, valid).tolist() == [0.0, 0.0]
