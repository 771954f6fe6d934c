"""Gradients of hundreds of tensors take a few kernels, with the bits of one kernel for each of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.optim import master_adamw
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.train_step import TrainStep

NUM_TENSORS = 950
"""About as many as the adapters of a 7B have."""


class Kernels(TorchDispatchMode):
    """Counts operations; allocations and views launch no kernel."""

    def __enter__(self):
        self.counts = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in ("detach", "empty_like", "_local_scalar_dense"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def make(dtype=torch.bfloat16, num=NUM_TENSORS):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 2, generator=generator).to(dtype)) for _ in range(num)]
    optimizer = MasterAdamW(parameters, lr=1e-3, weight_decay=0.01)
    return parameters, TrainStep(optimizer, 0.5, parts=(optimizer.masters[:-4], optimizer.masters[-4:]))


def give_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if number % 7 == seed % 7 else gradient  # a tensor may get none


def one_by_one(optimizer):
    """The loop whose sums these are."""
    for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
        if master is not parameter and parameter.grad is not None:
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None


def test_a_step_of_950_tensors_takes_at_most_60_kernels():
    parameters, step = make()
    counts = {}
    for name, gather in (("ours", step.optimizer.gather_gradients), ("loop", lambda: one_by_one(step.optimizer))):
        for _ in range(2):  # the first step makes the state of the optimiser
            with Kernels() as kernels:
                for seed in (1, 2):
                    give = [torch.ones_like(parameter) for parameter in parameters]
                    kernels.counts.clear() if seed == 1 else kernels.counts.subtract(ones_like=len(give))
                    for parameter, gradient in zip(parameters, give, strict=True):
                        parameter.grad = gradient
                    gather()
                step.apply(1.0)
        counts[name] = sum(kernels.counts.values())
    assert counts["ours"] <= 60, counts
    assert counts["loop"] > NUM_TENSORS, "control"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("at_once", [2**28, 100])
def test_the_bits_are_those_of_a_loop(dtype, at_once, monkeypatch):
    monkeypatch.setattr(master_adamw, "CHUNK_BYTES", at_once)
    (ours, step), (theirs, other) = make(dtype, 40), make(dtype, 40)
    monkeypatch.setattr(other.optimizer, "gather_gradients", lambda: one_by_one(other.optimizer))
    for seed in range(6):
        norms = []
        for parameters, each in ((ours, step), (theirs, other)):
            give_gradients(parameters, seed)
            each.optimizer.gather_gradients()
            if dtype != torch.float32:
                give_gradients(parameters, seed + 100)
                each.optimizer.gather_gradients()
                assert all(parameter.grad is None for parameter in parameters)
            norms.append(each.apply(1.0))
        assert norms[0] == norms[1] > 0.5, "and it was clipped"
    for one, same in zip(step.optimizer.masters + ours, other.optimizer.masters + theirs, strict=True):
        assert torch.equal(one, same)
    assert not torch.equal(ours[0], make(dtype, 40)[0][0]), "control: they have moved"


def test_a_step_asks_for_its_numbers_once():
    parameters, step = make(num=4)
    asked = []

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_local_scalar_dense" in func._schema.name:
                asked.append(func)
            return func(*args, **(kwargs or {}))

    def loss_of(part):
        loss = sum((parameter * part).sum() for parameter in parameters).float()
        return loss, {"loss": loss.detach(), "largest": loss.detach().abs()}

    with pytest.MonkeyPatch.context() as patch, Asks():
        fetched = []
        plain = torch.Tensor.tolist
        patch.setattr(torch.Tensor, "tolist", lambda tensor: fetched.append(tensor.numel()) or plain(tensor))
        totals = step.accumulate([1.0, 2.0, 3.0], loss_of)
        norm = step.apply(totals["loss"])
    assert fetched == [2 * 3 + 1 + 1] and len(asked) == 0, (
        "three losses, three largest, the norm of all and of the first part"
    )
    weights = sum(float(parameter.sum()) for parameter in make(num=4)[0])
    assert totals["loss"] == pytest.approx(6 * weights, rel=1e-2) and norm > 0
    step.optimizer.masters[0].grad = torch.ones_like(step.optimizer.masters[0])
    assert step.apply(1.0) == pytest.approx(6**0.5), "gradients that were not accumulated are measured"
