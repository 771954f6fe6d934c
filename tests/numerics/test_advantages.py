"""Advantage estimators against an O(T^2) reference and hand calculations."""

from __future__ import annotations

import pytest
import torch

from rlinf.algorithms.advantages import action_advantages, episode_returns, gae, group_advantages, masked_normalize


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


def test_truncation_bootstraps_and_termination_does_not():
    one, no, yes = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool)
    cut, _ = gae(one, 0 * one, no, yes, 10 * one, 0.5, 0.9)
    ended, _ = gae(one, 0 * one, yes, no, 10 * one, 0.5, 0.9)
    assert cut.item() == 6.0
    assert ended.item() == 1.0


def test_what_follows_an_episode_does_not_reach_into_it():
    rewards = torch.tensor([[1.0], [2.0], [100.0]])
    values = torch.zeros(3, 1)
    terminated = torch.tensor([[False], [True], [False]])
    advantages, _ = gae(rewards, values, terminated, torch.zeros_like(terminated), values, 1.0, 1.0)
    assert advantages.flatten().tolist() == [3.0, 2.0, 100.0]


def test_action_advantages_leave_out_what_was_already_paid():
    spread = action_advantages(torch.tensor([[6.0]]), torch.tensor([[[1.0, 2.0, 3.0]]]))
    assert spread.flatten().tolist() == [6.0, 5.0, 3.0]


def test_group_advantages_by_hand():
    returns = torch.tensor([1.0, 3.0, 5.0, 5.0])
    groups = torch.tensor([7, 7, 2, 2])
    advantages, varied = group_advantages(returns, groups, scale_by_std=True)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0, 0.0, 0.0]), atol=1e-5, rtol=0)
    assert varied.tolist() == [True, True, False, False]
    plain, _ = group_advantages(returns * 2, groups, scale_by_std=False)
    assert plain.tolist() == [-2.0, 2.0, 0.0, 0.0]


def test_group_advantages_do_not_mix_groups():
    torch.manual_seed(0)
    returns, groups = torch.randn(12), torch.arange(12) % 3
    together, _ = group_advantages(returns, groups, scale_by_std=True)
    for group in range(3):
        rows = groups == group
        alone, _ = group_advantages(returns[rows], groups[rows], scale_by_std=True)
        torch.testing.assert_close(together[rows], alone)


def test_masked_normalize_ignores_invalid_elements():
    values, mask = torch.tensor([1.0, 3.0, 1e9]), torch.tensor([True, True, False])
    assert masked_normalize(values, mask).tolist() == pytest.approx([-1.0, 1.0, 0.0])


def test_episode_returns_count_valid_steps_only():
    rewards, mask = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[True], [True], [False]])
    assert episode_returns(rewards, mask).item() == 3.0
