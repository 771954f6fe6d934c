"""Decoupled PPO (Hilton et al. 2021, section 3): the policy that played and the one around which ratios are clipped are two."""

import math

import pytest
import torch
from rollout_batches import rollout_batch

from rlinf.algorithms import ALGORITHMS
from rlinf.algorithms.base import LossCounts
from rlinf.types import ActionEvaluation

ROWS, ACTIONS, DIM, LOW, HIGH, CAP = 40, 3, 2, 0.2, 0.3, 1.5


def minibatch(executed, **logprobs):
    """Rows of ``ACTIONS`` actions of ``DIM`` tokens; log-probabilities [N, A] of the three policies, advantages [N, C]."""
    rows = len(executed)
    return rollout_batch(
        rows, num_actions=ACTIONS, width=DIM, action_mask=executed, values=torch.zeros(rows), returns=torch.zeros(rows), **logprobs
    )  # fmt: skip


def loss_of(name, level, batch, present):
    """The loss of the package without its value loss, which is 0 here, and its gradient with respect to ``present``."""
    config = ALGORITHMS.get(name).config_class(
        logprob_level=level, clip_range_low=LOW, clip_range_high=HIGH, tis_cap=CAP, **({"critic_warmup_steps": 0} if name == "ppo" else {})
    )  # fmt: skip
    present = present.clone().requires_grad_()
    evaluation = ActionEvaluation(present, torch.zeros_like(present), torch.zeros(len(present)))
    loss = ALGORITHMS.get(name)(config).loss(batch, evaluation, LossCounts.of(batch, config), 0).loss
    loss.backward()
    return loss.item(), present.grad


def units(level):
    """Columns of each unit, and the action whose advantage it has."""
    if level == "token":
        return [([column], column // DIM) for column in range(ACTIONS * DIM)]
    if level == "action":
        return [(list(range(c * DIM, (c + 1) * DIM)), c) for c in range(ACTIONS)]
    return [(list(range(ACTIONS * DIM)), 0)]


def slow(level, batch, present, coupled=False):
    """Loss and gradient one unit after the other, in Python's floats: min(prox / behaviour, cap) min(r A, clip(r) A)."""
    behaviour, proximal = batch.rollout_logprobs.tolist(), batch.old_logprobs.tolist()
    executed, advantages, total, count = batch.action_mask.tolist(), batch.advantages.tolist(), 0.0, 0
    gradient = [[0.0] * (ACTIONS * DIM) for _ in executed]
    for row, numbers in enumerate(present.tolist()):
        for columns, action in units(level):
            columns = [column for column in columns if executed[row][column // DIM]]
            if not columns:
                continue
            count += 1
            now, then, played = (
                sum(each[column] for column in columns) for each in (numbers, proximal[row], behaviour[row])
            )
            weight = 1.0 if coupled else min(math.exp(then - played), CAP)
            ratio, advantage = math.exp(now - (played if coupled else then)), advantages[row][action]
            unclipped, clipped = ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage
            total -= weight * min(unclipped, clipped)
            if unclipped <= clipped:
                for column in columns:
                    gradient[row][column] -= weight * unclipped
    return total / count, torch.tensor(gradient) / count


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "reinforce_pp"])
def test_loss_and_gradient_are_those_of_a_slow_implementation(name, level):
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, ACTIONS * DIM)
    behaviour = -1 - torch.rand(shape, generator=generator)
    proximal = behaviour + 0.3 * torch.randn(shape, generator=generator)
    present = proximal + 0.2 * torch.randn(shape, generator=generator)
    advantages = torch.randn(ROWS, ACTIONS, generator=generator)
    if level == "chunk":
        advantages = advantages[:, :1].expand(ROWS, ACTIONS)
    executed = torch.rand(ROWS, ACTIONS, generator=generator) < 0.8
    batch = minibatch(executed, rollout_logprobs=behaviour, old_logprobs=proximal, advantages=advantages)
    loss, gradient = loss_of(name, level, batch, present)
    expected, slope = slow(level, batch, present)
    assert loss == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(gradient, slope, atol=1e-6, rtol=1e-4)
    other, steep = slow(level, batch, present, coupled=True)  # control: PPO with one old policy
    assert abs(loss - other) > 1e-2 and (gradient - steep).abs().max() > 1e-3


def test_one_action_by_hand():
    """Probabilities 0.5 when it played, 0.6 before the update, 0.66 now; advantage 2: 0.6 / 0.5 x 0.66 / 0.6 x 2 = 2.64.

    At 0.9 the ratio 1.5 is clipped at 1.3, so there is no gradient; at 0.2 the weight is 3, of which the cap leaves 1.5.
    """
    zeros = [0.0] * (ACTIONS * DIM - 1)
    executed = torch.tensor([[True, False, False]])
    for played, before, now, loss, slope in (
        (0.5, 0.6, 0.66, -2.64, -2.64), (0.5, 0.6, 0.9, -1.2 * 1.3 * 2, 0.0), (0.2, 0.6, 0.66, -1.5 * 1.1 * 2, -3.3),
    ):  # fmt: skip
        behaviour, proximal, present = (torch.tensor([[math.log(p), *zeros]]) for p in (played, before, now))
        advantages = torch.full((1, ACTIONS), 2.0)
        batch = minibatch(executed, rollout_logprobs=behaviour, old_logprobs=proximal, advantages=advantages)
        found, gradient = loss_of("ppo", "action", batch, present)
        assert found == pytest.approx(loss, rel=1e-5) and gradient[0, 0].item() == pytest.approx(slope, rel=1e-5)
