"""Losses against hand-computed numbers, and their independence of how a minibatch is cut."""

import math

import pytest
import torch
from rollout_batches import rollout_batch

from rlinf.algorithms.base import LossCounts
from rlinf.algorithms.config import GRPOConfig, PPOConfig, ReinforcePPConfig, RLOOConfig
from rlinf.algorithms.groups import GRPO, RLOO
from rlinf.algorithms.losses import (
    aggregate_logprobs,
    clipped_policy_loss,
    kl_penalty,
    truncated_importance_weights,
    value_loss,
)
from rlinf.algorithms.ppo import PPO
from rlinf.algorithms.reinforce_pp import ReinforcePP
from rlinf.types import ActionEvaluation, EpisodeSpec

YES = torch.tensor([True])


def policy_loss(ratio, advantage, **kwargs):
    total, metrics = clipped_policy_loss(
        torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), YES,
        kwargs.pop("low", 0.2), kwargs.pop("high", 0.2), **kwargs,
    )  # fmt: skip
    return total.item(), metrics["clip_fraction"].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [(1.1, 2.0, -2.2, 0), (1.5, 2.0, -2.4, 1), (0.5, 2.0, -1.0, 0), (1.5, -2.0, 3.0, 0), (0.5, -2.0, 1.6, 1)],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, clipped):
    assert policy_loss(ratio, advantage) == (pytest.approx(loss, rel=1e-5), clipped)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    assert policy_loss(10.0, -1.0, dual_clip=3.0)[0] == pytest.approx(3.0)
    assert policy_loss(10.0, -1.0)[0] == pytest.approx(10.0)
    assert policy_loss(1.1, 1.0, dual_clip=3.0)[0] == pytest.approx(-1.1)
    assert policy_loss(10.0, 0.5, dual_clip=3.0)[0] == pytest.approx(-0.6), "not the -3 x 0.5 of a negative advantage"


def test_truncated_importance_weights_by_hand():
    """Trainer probabilities 0.5, 0.2 and 0.4 of what the generator drew with 0.25, 0.4 and (masked) 0."""
    old, drawn = torch.tensor([0.5, 0.2, 0.4]).log(), torch.tensor([0.25, 0.4, 0.0]).log()
    weights = truncated_importance_weights(old, drawn, torch.tensor([True, True, False]), cap=1.5)
    assert weights.tolist() == pytest.approx([1.5, 0.5, 1.0])
    assert policy_loss(1.1, 2.0, weights=torch.tensor([0.5]))[0] == pytest.approx(-1.1)
    assert policy_loss(10.0, -1.0, dual_clip=3.0, weights=torch.tensor([1.5]))[0] == pytest.approx(4.5)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_kl_estimators_by_hand(estimator, value):
    assert kl_penalty(torch.tensor([0.5]), torch.zeros(1), YES, estimator).item() == pytest.approx(value)


def test_value_loss_plain_clipped_and_huber_by_hand():
    value, old, target = torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([4.0])
    assert value_loss(value, old, target, YES).item() == pytest.approx(0.5)
    assert value_loss(value, old, target, YES, clip_range=1.0).item() == pytest.approx(4.5)
    assert value_loss(torch.tensor([0.0]), old, target, YES, huber_delta=1.0).item() == pytest.approx(3.5)


def test_approximate_kl_is_that_of_the_valid_elements():
    """k3 of the ratios 2 and 0.5 is (2 - 1) - log 2 and (0.5 - 1) + log 2; the ratio 4 is masked."""
    ratios, mask = torch.tensor([2.0, 0.5, 4.0]), torch.tensor([True, True, False])
    for rows, expected in (((0, 2), 1 - math.log(2)), ((1, 2), math.log(2) - 0.5), ((0, 1, 2), 0.5)):
        index = torch.tensor(rows)
        _, metrics = clipped_policy_loss(
            ratios[index].log(), torch.zeros(len(rows)), torch.ones(len(rows)), mask[index], 0.2, 0.2
        )
        assert metrics["approx_kl"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss"),
    [
        (5.0, 2.0, 7.0, 8.0),  # clipped to 3: half of 4^2 is more than half of 2^2
        (-5.0, -2.0, -7.0, 8.0),  # clipped to -3
        (2.5, 2.0, 7.0, 10.125),  # within the range: half of 4.5^2
        (2.5, 2.0, 2.25, 0.03125),
        (5.0, 2.0, 2.5, 3.125),  # nearer to the target than the value is: the value's own loss
    ],
)
def test_clipped_value_loss_on_both_sides_of_the_old_value_by_hand(value, old, target, loss):
    """The row that is masked would add half of 100^2."""
    values, olds, targets = torch.tensor([value, 100.0]), torch.tensor([old, 0.0]), torch.tensor([target, 0.0])
    mask = torch.tensor([True, False])
    assert value_loss(values, olds, targets, mask, clip_range=1.0).item() == pytest.approx(loss)
    unclipped = 0.5 * (value - target) ** 2
    assert value_loss(values, olds, targets, mask).item() == pytest.approx(unclipped)


def test_masked_elements_add_nothing_even_when_they_are_not_finite():
    logprobs = torch.tensor([0.0, float("nan")], requires_grad=True)
    mask = torch.tensor([True, False])
    total, metrics = clipped_policy_loss(logprobs, torch.zeros(2), torch.ones(2), mask, 0.2, 0.2)
    total.backward()
    assert total.item() == -1.0
    assert logprobs.grad.tolist() == [-1.0, 0.0]
    assert metrics["approx_kl"].item() == 0.0


def test_levels_sum_what_was_executed():
    logprobs = torch.arange(6.0).reshape(1, 6)
    mask = torch.tensor([[True, True, False]])
    token, token_mask = aggregate_logprobs(logprobs, mask, "token")
    assert token.shape == (1, 3, 2) and token_mask.sum() == 4
    action, _ = aggregate_logprobs(logprobs, mask, "action")
    assert action.flatten().tolist() == [1.0, 5.0, 9.0]
    chunk, chunk_mask = aggregate_logprobs(logprobs, mask, "chunk")
    assert chunk.flatten().tolist() == [6.0] and chunk_mask.all()


def make_batch(num_steps=4, num_envs=6, num_actions=3, width=2, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    shape = (num_steps, num_envs)
    rows = num_steps * num_envs
    mask = torch.rand(*shape, generator=generator) < 0.8
    batch = rollout_batch(
        *shape,
        num_actions=num_actions,
        width=width,
        rollout_logprobs=normal(*shape, num_actions * width),
        action_rewards=normal(*shape, num_actions),
        action_mask=torch.rand(*shape, num_actions, generator=generator) < 0.9,
        loss_mask=mask,
        bootstrap_values=normal(*shape),
        group_ids=(torch.arange(num_envs) // 2).expand(shape),
        episode_ids=torch.arange(num_envs).expand(shape),
        values=normal(*shape),
        old_logprobs=normal(*shape, num_actions * width),
        ref_logprobs=torch.zeros(*shape, num_actions * width),
        specs={i: EpisodeSpec("t", 0, i // 2, 0) for i in range(num_envs)},
    )
    return batch, ActionEvaluation(normal(rows, num_actions * width), normal(rows, num_actions * width), normal(rows))


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize(
    "algorithm",
    [
        PPO(PPOConfig(critic_warmup_steps=0)),
        GRPO(GRPOConfig()),
        RLOO(RLOOConfig(kl_coef=0.1)),
        ReinforcePP(ReinforcePPConfig(kl_coef=0.1)),
    ],
)
def test_loss_and_metrics_do_not_depend_on_micro_batches(level, algorithm):
    batch, evaluation = make_batch()
    algorithm.config.logprob_level = level
    algorithm.config.entropy_coef = 0.1
    algorithm.compute_advantages(batch)
    flat = batch.flatten()
    counts = LossCounts.of(flat, algorithm.config)
    whole = algorithm.loss(flat, evaluation, counts, 0)
    parts = []
    for index in torch.arange(len(flat.loss_mask)).split(5):
        part = ActionEvaluation(*(tensor[index] for tensor in evaluation))
        parts.append(algorithm.loss(flat.select(index), part, counts, 0))
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss, atol=1e-6, rtol=1e-6)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(sum(part.metrics[name] for part in parts), value, atol=1e-6, rtol=1e-6)
    # Control: a mean per micro-batch, the usual mistake, gives another number.
    per_part = [
        algorithm.loss(flat.select(i), ActionEvaluation(*(t[i] for t in evaluation)), LossCounts.of(flat.select(i), algorithm.config), 0).loss
        for i in torch.arange(len(flat.loss_mask)).split(5)
    ]  # fmt: skip
    assert abs(sum(per_part) / len(per_part) - whole.loss) > 1e-4


def played(rewards, ref_logprobs=None, group_ids=None, ends=None):
    """A rollout of one action of one token a call: rewards ``[T][B]``, all drawn with log-probability -1."""
    rewards = torch.tensor(rewards).unsqueeze(-1)
    shape = rewards.shape[:2]
    ends = torch.full((shape[1],), shape[0] - 1) if ends is None else torch.tensor(ends)
    calls = torch.arange(shape[0])[:, None].expand(shape)
    groups = torch.arange(shape[1]) if group_ids is None else torch.tensor(group_ids)
    return rollout_batch(
        *shape,
        rollout_logprobs=torch.full((*shape, 1), -1.0),
        action_rewards=rewards,
        action_mask=(calls <= ends).unsqueeze(-1),
        loss_mask=calls <= ends,
        terminated=calls == ends,
        group_ids=groups.expand(shape),
        episode_ids=torch.arange(shape[1]).expand(shape),
        values=torch.zeros(shape),
        old_logprobs=torch.full((*shape, 1), -1.0),
        ref_logprobs=None if ref_logprobs is None else torch.tensor(ref_logprobs).unsqueeze(-1),
        specs={i: EpisodeSpec("t", 0, int(group), 0) for i, group in enumerate(groups)},
    )


def losses_of(algorithm, batch, ratios):
    """Loss and metrics of a whole rollout where action ``i`` (time-major) has ``ratios[i]`` times its old probability."""
    flat = batch.flatten()
    logprobs = flat.old_logprobs + torch.tensor(ratios).log().unsqueeze(-1)
    evaluation = ActionEvaluation(logprobs, torch.zeros_like(logprobs), torch.zeros(len(logprobs)))
    return algorithm.loss(flat, evaluation, LossCounts.of(flat, algorithm.config), 0)


def test_rloo_by_hand():
    """Returns 2, 0, 0, 0: advantages 2 and -2/3, over both calls; the third episode ends after the first call.

    Of 7 valid calls, at ratios of 1.5 (bounded by 1.3 where the advantage is positive) and 4 (bounded by 1.5 in dual clip)::

        (2 x -2 x 1.3 + 2/3 (1 + 1 + 1) + 2/3 (1.5 + 1)) / 7
    """
    batch = played([[0.5, 0, 0, 0], [1.5, 0, 9.0, 0]], group_ids=[3, 3, 3, 3], ends=[1, 1, 0, 1])
    algorithm = RLOO(RLOOConfig(clip_range_low=0.1, clip_range_high=0.3, dual_clip=1.5))
    metrics = algorithm.compute_advantages(batch)
    expected = torch.tensor([2, -2 / 3, -2 / 3, -2 / 3]).expand(2, 4)
    torch.testing.assert_close(batch.advantages[..., 0], expected)
    assert metrics == {"rollout/zero_variance_group_fraction": 0.0, "train/return_mean": 0.5}
    assert batch.loss_mask.tolist() == [[True] * 4, [True, True, False, True]]
    output = losses_of(algorithm, batch, [1.5, 1.0, 1.0, 4.0, 1.5, 1.0, 7.0, 1.0])
    assert output.loss.item() == pytest.approx((-2 * 2 * 1.3 + 2 / 3 * 3 + 2 / 3 * 2.5) / 7, rel=1e-5)
    assert output.metrics["clip_fraction"].item() == pytest.approx(2 / 7, rel=1e-5)
    low = losses_of(algorithm, batch, [1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # 0.9 x 2/3 in the place of 0.5 x 2/3
    assert low.loss.item() == pytest.approx((-4 + 2 / 3 * 4 + 2 / 3 * 0.9) / 7, rel=1e-5)


def test_reinforce_pp_by_hand():
    """KL (k1) 0.2, 0, -0.4 by call: rewards less half of it are -0.1 and 1 (first episode) and 0 and 0.2 (second).

    Returns-to-go 0.9, 1.0, 0.2, 0.2 have mean 0.575 and variance 0.5675 / 4.
    """
    reference = [[-1.2, -1.0], [-1.0, -0.6]]
    batch = played([[0.0, 0.0], [1.0, 0.0]], reference)
    algorithm = ReinforcePP(ReinforcePPConfig(kl_coef=0.5, clip_range_high=0.3))
    metrics = algorithm.compute_advantages(batch)
    torch.testing.assert_close(batch.returns, torch.tensor([[0.9, 0.2], [1.0, 0.2]]))
    std = (0.5675 / 4) ** 0.5
    expected = torch.tensor([[0.325, -0.375], [0.425, -0.375]]) / std
    torch.testing.assert_close(batch.advantages[..., 0], expected)
    assert metrics == {"train/advantage_mean": pytest.approx(0.575), "train/return_mean": pytest.approx(0.575)}
    output = losses_of(algorithm, batch, [1.5, 1.0, 1.0, 1.0])
    assert output.loss.item() == pytest.approx((-0.325 * 1.3 + 0.375 - 0.425 + 0.375) / std / 4, rel=1e-4)
    # The KL is of the policy as it is now, and is reported only: it was taken off the rewards.
    assert output.metrics["kl_to_reference"].item() == pytest.approx((math.log(1.5) + 0.2 + 0 + 0 - 0.4) / 4, rel=1e-5)
    discounted = played([[0.0, 0.0], [1.0, 0.0]], reference)
    ReinforcePP(ReinforcePPConfig(kl_coef=0.5, gamma=0.5)).compute_advantages(discounted)
    torch.testing.assert_close(discounted.returns, torch.tensor([[0.4, 0.1], [1.0, 0.2]]))


@pytest.mark.parametrize(("estimator", "kl"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_reinforce_pp_takes_every_kl_estimate_off_the_rewards(estimator, kl):
    batch = played([[3.0, 3.0], [1.0, 9.0]], [[-1.5, -1.0], [-1.5, -7.0]], ends=[1, 0])
    algorithm = ReinforcePP(ReinforcePPConfig(kl_coef=0.2, kl_estimator=estimator, normalize_advantages=False))
    algorithm.compute_advantages(batch)
    expected = torch.tensor([[4 - 2 * 0.2 * kl, 3.0], [1 - 0.2 * kl, 0.0]])  # nothing is paid after an end
    torch.testing.assert_close(batch.advantages[..., 0] * batch.loss_mask, expected)


def test_reinforce_pp_of_one_action_counts_what_follows_it_only():
    """Rewards 1, 2 inside a call and 4 after it, KL of both tokens of an action 0.1: what follows is 6.7, 5.8 and 3.9."""
    batch, _ = make_batch(num_steps=2, num_envs=1, num_actions=2)
    batch.loss_mask, batch.terminated = torch.ones(2, 1, dtype=torch.bool), torch.tensor([[False], [True]])
    batch.action_mask = torch.tensor([[[True, True]], [[True, False]]])
    batch.action_rewards = torch.tensor([[[1.0, 2.0]], [[4.0, 0.0]]])
    batch.ref_logprobs = batch.old_logprobs - 0.05
    config = ReinforcePPConfig(kl_coef=1.0, normalize_advantages=False, advantage_level="action")
    ReinforcePP(config).compute_advantages(batch)
    torch.testing.assert_close(batch.advantages[0, 0], torch.tensor([6.7, 5.8]))
    assert batch.advantages[1, 0, 0].item() == pytest.approx(3.9)
