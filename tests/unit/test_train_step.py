"""The optimiser step that all trainers take."""

import pytest
import torch

from rlinf.errors import NonFiniteError
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.train_step import TrainStep

ROWS = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [-2.0, 1.0]])


def step_of(**settings) -> tuple[torch.nn.Parameter, TrainStep]:
    weight = torch.nn.Parameter(torch.tensor([0.5, -0.25]))
    return weight, TrainStep(MasterAdamW([weight], lr=0.1, weight_decay=0.0), 1e9, **settings)


def loss_of(weight, rows):
    share = (rows @ weight).square().sum() / len(ROWS)
    return share, {"loss": share.detach()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_add_up_to_the_minibatch(size):
    whole, step_of_whole = step_of()
    parts, step_of_parts = step_of()
    expected = step_of_whole.accumulate([ROWS], lambda rows: loss_of(whole, rows))
    found = step_of_parts.accumulate(ROWS.split(size), lambda rows: loss_of(parts, rows))
    torch.testing.assert_close(parts.grad, whole.grad)
    assert found == pytest.approx(expected)
    assert step_of_parts.apply(found["loss"]) == pytest.approx(step_of_whole.apply(expected["loss"]))
    torch.testing.assert_close(parts, whole)
    assert parts.grad is None and step_of_parts.num_steps == 1


def test_the_learning_rate_rises_over_the_warm_up_steps():
    weight, step = step_of(warmup_steps=4)
    rates = []
    for _ in range(6):
        step.apply(step.accumulate([ROWS], lambda rows: loss_of(weight, rows))["loss"])
        rates.append(step.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_a_learning_rate_that_is_set_counts_from_the_next_step_on():
    weight, step = step_of()
    step.set_learning_rate(0.5)
    before = weight.detach().clone()
    step.apply(step.accumulate([ROWS], lambda rows: loss_of(weight, rows))["loss"])
    assert (weight - before).abs().tolist() == pytest.approx([0.5, 0.5]), "Adam's first step is its rate"
    step.set_learning_rate(0.0)
    before = weight.detach().clone()
    step.apply(step.accumulate([ROWS], lambda rows: loss_of(weight, rows))["loss"])
    assert weight.equal(before)


def test_adam_adds_the_decay_to_the_gradient():
    for decoupled, reference in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        ours, theirs = (torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0])) for _ in range(2))
        one = MasterAdamW([ours], decoupled=decoupled, lr=0.1, weight_decay=0.5)
        other = reference([theirs], lr=0.1, weight_decay=0.5)
        for _ in range(3):
            for weight, optimizer in ((ours, one), (theirs, other)):
                weight.grad = weight.detach().square()
                optimizer.step()
        assert torch.allclose(ours, theirs, rtol=1e-6), reference
    assert not torch.allclose(ours, torch.tensor([1.0, -2.0, 3.0]))


@pytest.mark.parametrize(("loss", "gradient"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_what_is_not_finite_is_refused_and_changes_nothing(loss, gradient):
    weight, step = step_of()
    weight.grad = torch.tensor([gradient, 0.0])
    with pytest.raises(NonFiniteError, match="the step was not taken"):
        step.apply(loss)
    assert weight.tolist() == [0.5, -0.25] and step.num_steps == 0 and not step.optimizer.state
