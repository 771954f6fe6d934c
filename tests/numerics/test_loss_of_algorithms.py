"""What every algorithm shares, and what PPO adds to it, on a minibatch small enough for a hand calculation."""

import math

import pytest
import torch
from rollout_batches import rollout_batch

from rlinf.algorithms.base import Algorithm, LossCounts, spread_over_actions
from rlinf.algorithms.config import AlgorithmConfig, PPOConfig
from rlinf.algorithms.ppo import PPO
from rlinf.types import ActionEvaluation


class Plain(Algorithm):
    """Adds nothing to what every algorithm has."""

    def compute_advantages(self, batch):
        batch.advantages = spread_over_actions(batch.rewards, batch.action_rewards.shape[-1])
        return {}


def rollout():
    """Two calls of three envs, of two actions of two tokens; the last call of env 2 is not part of an episode.

    Env 0 executes one action in its first call only. Everything that is not executed is not finite.
    """
    executed = torch.ones(2, 3, 2, dtype=torch.bool)
    executed[0, 0, 1] = False
    valid = torch.tensor([[True, True, True], [True, True, False]])
    kept = (executed & valid.unsqueeze(-1)).repeat_interleave(2, -1)
    return rollout_batch(
        2,
        3,
        rollout_logprobs=torch.where(kept, -1.0, torch.nan),
        action_rewards=torch.tensor([[[1.0, 0.0], [1.0, 2.0], [0.5, 0.5]], [[0.0, 2.0], [4.0, 0.0], [0.0, 0.0]]]),
        action_mask=executed,
        loss_mask=valid,
        terminated=torch.tensor([[False, False, True], [False, True, False]]),
        truncated=torch.tensor([[False, False, False], [True, False, False]]),
        bootstrap_values=torch.tensor([[0.0, 0.0, 0.0], [4.0, 0.0, 0.0]]),
        values=torch.tensor([[1.0, 2.0, 0.0], [3.0, 1.0, 0.0]]),
        old_logprobs=torch.where(kept, -1.0, torch.nan),
        ref_logprobs=torch.where(kept, -1.25, torch.nan),
    )


def scored(batch, ratio=1.0, entropy=0.5, values=0.0):
    """Score a flattened minibatch with a policy that gives each token ``ratio`` times its old probability."""
    kept = (batch.action_mask & batch.loss_mask.unsqueeze(-1)).repeat_interleave(2, -1)
    numbers = (batch.old_logprobs + math.log(ratio), torch.where(kept, entropy, torch.nan), torch.full((6,), values))
    return ActionEvaluation(*(tensor.requires_grad_() for tensor in numbers))


@pytest.mark.parametrize(("level", "units"), [("token", 18), ("action", 9), ("chunk", 5)])
def test_counts_are_those_of_executed_actions_of_valid_calls(level, units):
    batch = rollout().flatten()
    assert LossCounts.of(batch, AlgorithmConfig(logprob_level=level, entropy_level="action")) == LossCounts(units, 9, 5)
    assert LossCounts.of(batch, AlgorithmConfig(logprob_level="action", entropy_level=level)) == LossCounts(9, units, 5)


def test_what_an_algorithm_does_unless_it_says_otherwise():
    algorithm = Plain(AlgorithmConfig())
    assert not algorithm.needs_reference and algorithm.max_resamples == 0 and not algorithm.policy_is_frozen(0)
    assert not (algorithm.needs_values or algorithm.needs_groups)
    assert not (algorithm.needs_full_episodes or algorithm.penalizes_rewards)
    uninformative = algorithm.uninformative_envs(rollout())
    assert uninformative.dtype == torch.bool and uninformative.tolist() == [False] * 3
    assert Plain(AlgorithmConfig(kl_coef=0.5)).needs_reference


def minibatch(config, **fields):
    """Return the algorithm, its flattened rollout with an advantage of 2 in every first action and -1 in every second."""
    batch = rollout().flatten()
    batch.advantages = torch.tensor([2.0, -1.0]).expand(6, 2)
    for name, value in fields.items():
        setattr(batch, name, value)
    return Plain(config), batch, LossCounts.of(batch, config)


def test_loss_of_actions_by_hand():
    """Five first actions at advantage 2 and four second ones at -1, of two tokens of ratio 1.05 each: 1.1025.

    Entropy of a token 0.5; the reference gives a token ``exp(-0.25)`` times the old probability.
    """
    config = AlgorithmConfig(entropy_coef=0.1, kl_coef=0.2, kl_estimator="k1")
    algorithm, batch, counts = minibatch(config)
    output = algorithm.loss(batch, scored(batch, 1.05), counts, 0)
    policy_loss, kl = -1.1025 * (5 * 2 - 4 * 1) / 9, 2 * (math.log(1.05) + 0.25)
    found = {name: value.item() for name, value in output.metrics.items()}
    assert found == pytest.approx(
        {
            "policy_loss": policy_loss, "entropy": 0.5, "kl_to_reference": kl,
            "loss": policy_loss - 0.1 * 0.5 + 0.2 * kl, "approx_kl": 1.1025 - 1 - 2 * math.log(1.05),
            "clip_fraction": 0.0, "outside_fraction": 0.0,
        },
        rel=1e-4,
    )  # fmt: skip
    assert output.loss.item() == pytest.approx(found["loss"])
    assert output.loss.requires_grad and not any(value.requires_grad for value in output.metrics.values())


def test_loss_of_chunks_takes_one_advantage_for_each_call():
    """A chunk has a ratio of four tokens, the first call of env 0 of two; the five advantages are 1, 2, 3, 4, 5."""
    config = AlgorithmConfig(logprob_level="chunk", clip_range_high=9.0)
    advantages = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, torch.nan])[:, None].expand(6, 2)
    algorithm, batch, counts = minibatch(config, advantages=advantages)
    output = algorithm.loss(batch, scored(batch, 1.1), counts, 0)
    assert output.loss.item() == pytest.approx(-(1 * 1.1**2 + (2 + 3 + 4 + 5) * 1.1**4) / 5, rel=1e-5)
    assert "kl_to_reference" not in output.metrics


def test_loss_is_weighted_where_the_cap_of_the_weights_is_set():
    """The generator gave each action half the probability that the trainer gives it; weights are at most 1.5."""
    drawn = rollout().flatten().old_logprobs - math.log(2) / 2
    for cap, weight in ((None, 1.0), (1.5, 1.5), (9.0, 2.0)):
        algorithm, batch, counts = minibatch(AlgorithmConfig(tis_cap=cap), rollout_logprobs=drawn)
        assert algorithm.loss(batch, scored(batch), counts, 0).loss.item() == pytest.approx(-weight * 6 / 9, rel=1e-5)


def test_advantages_spread_over_actions_can_be_written_one_at_a_time():
    spread = spread_over_actions(torch.tensor([[1.0, 2.0]]), 3)
    spread[0, 1, 2] = 9.0
    assert spread.tolist() == [[[1.0, 1.0, 1.0], [2.0, 2.0, 9.0]]]


# With gamma 0.5 and lambda 0, errors of one step: 1 + 0.5 x 3 - 1, 3 + 0.5 x 1 - 2, 1 - 0; 2 + 0.5 x 4 - 3 and 4 - 1.
ADVANTAGES = [[1.5, 1.5, 1.0], [1.0, 3.0, 0.0]]
RETURNS = [2.5, 3.5, 1.0, 4.0, 4.0]


def test_ppo_advantages_of_chunks_by_hand():
    batch = rollout()
    algorithm = PPO(PPOConfig(gamma=0.5, gae_lambda=0.0, normalize_advantages=False))
    metrics = algorithm.compute_advantages(batch)
    expected = torch.tensor(ADVANTAGES)
    assert torch.equal(batch.advantages, expected.unsqueeze(-1).expand(2, 3, 2))
    assert torch.equal(batch.returns, expected + batch.values)
    # Executed: one action of the first call, two of each other. Errors of the values are the advantages, of mean 1.6.
    variance = sum((x - 1.6) ** 2 for x in (1.5, 1.5, 1.0, 1.0, 3.0)) / 5
    of_returns = sum((x - 3.0) ** 2 for x in RETURNS) / 5
    assert metrics == {
        "train/advantage_mean": pytest.approx((1.5 + 2 * (1.5 + 1.0 + 1.0 + 3.0)) / 9),
        "train/return_mean": pytest.approx(15 / 5),
        "train/explained_variance": pytest.approx(1 - variance / of_returns),
    }
    assert algorithm.needs_values and not algorithm.needs_groups


def test_ppo_advantages_of_actions_leave_out_what_the_call_had_paid():
    batch = rollout()
    config = PPOConfig(gamma=0.5, gae_lambda=0.0, normalize_advantages=False, advantage_level="action")
    PPO(config).compute_advantages(batch)
    paid = torch.tensor([[1.0, 1.0, 0.5], [0.0, 4.0, 0.0]])
    expected = torch.tensor(ADVANTAGES)
    assert torch.equal(batch.advantages, torch.stack([expected, expected - paid], -1))


def test_ppo_normalises_over_executed_actions_of_valid_calls():
    batch = rollout()
    PPO(PPOConfig(gamma=0.5, gae_lambda=0.0)).compute_advantages(batch)
    kept = torch.tensor([1.5] * 3 + [1.0] * 4 + [3.0] * 2)
    normal = (torch.tensor(ADVANTAGES) - kept.mean()) / kept.std(unbiased=False)
    expected = normal.unsqueeze(-1) * (batch.action_mask & batch.loss_mask.unsqueeze(-1))
    torch.testing.assert_close(batch.advantages, expected)


def test_ppo_adds_the_value_loss_and_freezes_the_policy_for_the_first_steps():
    """Values of 1 against the returns: half the squares of 1.5, 2.5, 0, 3 and 3 in five calls."""
    batch = rollout().flatten()
    batch.advantages, batch.returns = torch.tensor([2.0, -1.0]).expand(6, 2), torch.tensor([*RETURNS, torch.nan])
    algorithm = PPO(PPOConfig(value_coef=0.25, critic_warmup_steps=2))
    counts = LossCounts.of(batch, algorithm.config)
    critic = 0.5 * (1.5**2 + 2.5**2 + 0 + 3**2 + 3**2) / 5
    for step, policy in ((0, 0.0), (1, 0.0), (2, -6 / 9), (3, -6 / 9)):
        evaluation = scored(batch, values=1.0)
        output = algorithm.loss(batch, evaluation, counts, step)
        assert output.metrics["value_loss"].item() == pytest.approx(critic)
        assert output.metrics["policy_loss"].item() == pytest.approx(-6 / 9)
        assert output.loss.item() == output.metrics["loss"].item() == pytest.approx(policy + 0.25 * critic)
        assert not any(value.requires_grad for value in output.metrics.values())
        output.loss.backward()
        assert (evaluation.logprobs.grad is None) == (step < 2)
