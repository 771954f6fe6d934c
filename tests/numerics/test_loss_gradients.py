"""Gradients of the losses by hand: a term whose gradient is lost has the same value, and teaches nothing."""

import math

import pytest
import torch
from rollout_batches import rollout_batch
from torch import Tensor

from rlinf.algorithms import DPOLossFn, GRPOLossFn, NLLLossFn
from rlinf.algorithms.base import Algorithm, LossCounts
from rlinf.algorithms.config import AlgorithmConfig, PPOConfig
from rlinf.algorithms.losses import clipped_policy_loss, kl_penalty, value_loss
from rlinf.algorithms.ppo import PPO
from rlinf.distributed import BatchedDataDict
from rlinf.types import ActionEvaluation, RolloutBatch

KL_SLOPES = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: 1.0 - math.exp(-d)}
"""Derivatives of the estimators by ``d``, the log-probability of the policy minus that of the reference."""


def slope(loss, *inputs: Tensor) -> list[Tensor]:
    return [
        torch.zeros_like(x) if g is None else g
        for x, g in zip(inputs, torch.autograd.grad(loss, inputs, allow_unused=True), strict=True)
    ]


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected"),
    [
        (1.1, 2.0, None, -2.0 * 1.1), (0.5, 2.0, None, -2.0 * 0.5), (1.3, 2.0, None, 0.0),
        (0.9, -2.0, None, 2.0 * 0.9), (1.3, -2.0, None, 2.0 * 1.3), (0.7, -2.0, None, 0.0),
        (2.9, -2.0, 3.0, 2.0 * 2.9), (3.1, -2.0, 3.0, 0.0),
    ],
)  # fmt: skip
def test_the_surrogate_pulls_with_the_ratio_until_it_is_clipped(ratio, advantage, dual_clip, expected):
    logprobs, old = torch.tensor([math.log(ratio), 5.0], requires_grad=True), torch.zeros(2)
    mask, weights = torch.tensor([True, False]), torch.tensor([1.5, 1.0])
    loss, metrics = clipped_policy_loss(logprobs, old, torch.full((2,), advantage), mask, 0.2, 0.2, dual_clip, weights)
    torch.testing.assert_close(slope(loss, logprobs)[0], torch.tensor([1.5 * expected, 0.0]))
    assert not any(each.requires_grad for each in metrics.values())


@pytest.mark.parametrize("estimator", KL_SLOPES)
def test_the_kl_penalty_pulls_towards_the_reference(estimator):
    logprobs, reference = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True), torch.tensor([-1.5, -0.75, 0.0])
    mask = torch.tensor([True, True, False])
    found = slope(kl_penalty(logprobs, reference, mask, estimator, torch.tensor([2.0, 3.0, 1.0])), logprobs)[0]
    expected = [2 * KL_SLOPES[estimator](0.5), 3 * KL_SLOPES[estimator](-1.25), 0.0]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, -3.0, 2.0]),
        ({"huber_delta": 1.0}, [0.5, -1.0, 1.0]),
        # The first and the third are held at 0.7 and 0.2, which counts only where the loss is larger there.
        ({"clip_range": 0.2}, [0.5, -3.0, 2.0]),
        ({"clip_range": 0.2, "returns": [3.0, 3.0, 2.0]}, [0.0, -3.0, 0.0]),
    ],
)
def test_the_value_loss_pulls_with_the_error(settings, expected):
    values, old = torch.tensor([1.0, 0.0, 1.0, 7.0], requires_grad=True), torch.tensor([0.5, 0.0, 0.0, 0.0])
    returns = torch.tensor([*settings.pop("returns", [0.5, 3.0, -1.0]), 0.0])
    mask = torch.tensor([True, True, True, False])
    found = slope(value_loss(values, old, returns, mask, **settings), values)[0]
    torch.testing.assert_close(found, torch.tensor([*expected, 0.0]))


class Plain(Algorithm):
    """Adds nothing to what every algorithm has."""

    def compute_advantages(self, batch):
        return {}


def minibatch() -> RolloutBatch:
    """Two calls of two actions of one token; the second action of the second call is not executed."""
    return rollout_batch(
        2,
        rollout_logprobs=torch.full((2, 2), -1.0),
        num_actions=2,
        action_mask=torch.tensor([[True, True], [True, False]]),
        values=torch.zeros(2),
        returns=torch.tensor([2.0, -1.0]),
        advantages=torch.tensor([[2.0, -1.0], [3.0, 9.0]]),
        old_logprobs=torch.full((2, 2), -1.0),
        ref_logprobs=torch.full((2, 2), -1.5),
    )


def evaluation() -> ActionEvaluation:
    """Ratios of 1.1; the deviation of the reference is ``log 1.1 + 0.5``."""
    numbers = torch.full((2, 2), -1.0 + math.log(1.1)), torch.full((2, 2), 0.7), torch.tensor([0.5, 0.5])
    return ActionEvaluation(*(each.requires_grad_() for each in numbers))


@pytest.mark.parametrize("estimator", KL_SLOPES)
def test_surrogate_entropy_and_kl_penalty_of_action_policies_all_pull(estimator):
    """Three executed actions share the mean."""
    config = AlgorithmConfig(entropy_coef=0.3, kl_coef=0.2, kl_estimator=estimator)
    batch, scored = minibatch(), evaluation()
    output = Plain(config).loss(batch, scored, LossCounts.of(batch, config), 0)
    by_logprob, by_entropy = slope(output.loss, scored.logprobs, scored.entropy)
    kl = 0.2 * KL_SLOPES[estimator](math.log(1.1) + 0.5)
    expected = torch.tensor([[-2.0 * 1.1 + kl, 1.0 * 1.1 + kl], [-3.0 * 1.1 + kl, 0.0]]) / 3
    torch.testing.assert_close(by_logprob, expected)
    torch.testing.assert_close(by_entropy, -0.3 * batch.action_mask.float() / 3)


def test_a_penalty_that_the_rewards_have_does_not_pull_twice():
    config = AlgorithmConfig(kl_coef=0.2, kl_estimator="k1")
    algorithm, batch, scored = Plain(config), minibatch(), evaluation()
    algorithm.penalizes_rewards = True
    output = algorithm.loss(batch, scored, LossCounts.of(batch, config), 0)
    expected = torch.tensor([[-2.2, 1.1], [-3.3, 0.0]]) / 3
    torch.testing.assert_close(slope(output.loss, scored.logprobs)[0], expected)


@pytest.mark.parametrize("step", [0, 1])
def test_policy_and_value_losses_of_ppo_both_pull_the_first_after_the_warm_up(step):
    config = PPOConfig(value_coef=0.25, critic_warmup_steps=1, entropy_coef=0.3)
    batch, scored = minibatch(), evaluation()
    output = PPO(config).loss(batch, scored, LossCounts.of(batch, config), step)
    by_logprob, by_entropy, by_value = slope(output.loss, scored.logprobs, scored.entropy, scored.values)
    torch.testing.assert_close(by_value, 0.25 * torch.tensor([0.5 - 2.0, 0.5 + 1.0]) / 2)
    torch.testing.assert_close(by_logprob, step * torch.tensor([[-2.2, 1.1], [-3.3, 0.0]]) / 3)
    torch.testing.assert_close(by_entropy, step * -0.3 * batch.action_mask.float() / 3)


def rows(lengths: list[int], **more: Tensor) -> BatchedDataDict:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return BatchedDataDict({"input_ids": mask, "attention_mask": mask, **more})


def slope_of(loss, logprobs: Tensor, data: BatchedDataDict) -> Tensor:
    logprobs = logprobs.clone().requires_grad_()
    return slope(loss.from_logprobs(logprobs, data, loss.counts(data)).loss, logprobs)[0]


def test_every_trained_token_pulls_equally_in_likelihood():
    found = slope_of(NLLLossFn(), torch.full((2, 3), -2.0), rows([3, 2]))
    torch.testing.assert_close(found, torch.tensor([[0.0, -1.0, -1.0], [0.0, -1.0, 0.0]]) / 3)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_pulls_the_chosen_row_up_and_the_rejected_one_down_by_as_much(smoothing):
    """Margins of 0.5 (1 - (-1)) = 1 and of 0.5 (-3): each token of a row pulls alike, and half as strongly as in one pair."""
    loss = DPOLossFn(beta=0.5, label_smoothing=smoothing)
    logprobs = torch.tensor([[0.0, -1.0, -1.0], [0.0, -2.0, 0.0], [0.0, -4.0, 0.0], [0.0, -1.0, 0.0]])
    reference = torch.tensor([[0.0, -1.5, -1.5], [0.0, -1.0, 0.0], [0.0, -2.0, 0.0], [0.0, -2.0, 0.0]])
    data = rows([3, 2, 2, 2], reference_logprobs=reference)

    def pull(margin: float) -> float:
        right, wrong = 1 / (1 + math.exp(-margin)), 1 / (1 + math.exp(margin))
        return 0.5 * (-(1 - smoothing) * wrong + smoothing * right) / 2

    first, second = pull(1.0), pull(-1.5)
    expected = torch.tensor([[0.0, first, first], [0.0, -first, 0.0], [0.0, second, 0.0], [0.0, -second, 0.0]])
    torch.testing.assert_close(slope_of(loss, logprobs, data), expected)


@pytest.mark.parametrize("estimator", KL_SLOPES)
@pytest.mark.parametrize(
    ("level", "shares"),
    [("token", [1 / 3, 1 / 3, 1 / 3]), ("sequence", [1 / 4, 1 / 4, 1 / 2]), ("sequence_sum", [1 / 2] * 3)],
)
def test_surrogate_and_kl_penalty_of_token_policies_both_pull(estimator, level, shares):
    """Rows of two tokens and of one with advantages 2 and -1; ratios of 1.1."""
    loss = GRPOLossFn(kl_coef=0.4, kl_estimator=estimator, loss_level=level)
    old = torch.tensor([[0.0, -1.0, -1.0], [0.0, -1.0, 0.0]])
    logprobs = torch.where(old < 0, old + math.log(1.1), 0.0)
    more = {"old_logprobs": old, "reference_logprobs": old - 0.5, "advantages": torch.tensor([2.0, -1.0])}
    found = slope_of(loss, logprobs, rows([3, 2], **more))
    kl = 0.4 * KL_SLOPES[estimator](math.log(1.1) + 0.5)
    expected = [share * (pull + kl) for share, pull in zip(shares, (-2.2, -2.2, 1.1), strict=True)]
    torch.testing.assert_close(found, torch.tensor([[0.0, *expected[:2]], [0.0, expected[2], 0.0]]))


def test_a_ratio_of_the_sequence_pulls_each_of_its_tokens_by_its_part():
    """The mean of the log-ratios log 1.3 and log 1 / 1.1 of a row; the loss is the mean over two rows."""
    loss = GRPOLossFn(ratio_level="sequence", loss_level="sequence", clip_range_low=9.0, clip_range_high=9.0)
    old = torch.tensor([[0.0, -1.0, -1.0], [0.0, -1.0, 0.0]])
    logprobs = old + torch.tensor([[0.0, math.log(1.3), -math.log(1.1)], [0.0, math.log(1.2), 0.0]])
    found = slope_of(loss, logprobs, rows([3, 2], old_logprobs=old, advantages=torch.tensor([2.0, -1.0])))
    first = -2.0 * math.sqrt(1.3 / 1.1) / 2
    torch.testing.assert_close(found, torch.tensor([[0.0, first / 2, first / 2], [0.0, 1.2 / 2, 0.0]]))
