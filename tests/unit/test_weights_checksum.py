"""The checksum of weights adds in float64, a part of a tensor at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.llm import token_policy


class Largest(TorchDispatchMode):
    """The most float64 numbers of a result."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64 and not func.is_view:
            self.num = max(self.num, out.numel())
        return out


def test_sums_are_those_of_a_float64_copy_without_making_one(monkeypatch):
    monkeypatch.setattr(token_policy, "SUM_CHUNK", 1000)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.Linear(30, 30)).bfloat16()
    with torch.no_grad():
        model[0].weight[0, :2] = torch.tensor([1e6, -1e6])  # sums in 16 or 32 bits would lose the rest
    with Largest() as largest:
        found = token_policy.weights_checksum(model)
    assert largest.num == 1000
    expected = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12) and found[2:] == expected[2:]
    with Largest() as control:
        model[0].weight.double().sum()
    assert control.num == 70 * 90, "control"
    with torch.no_grad():
        model[0].weight[89, 69] += 0.5
    assert token_policy.weights_checksum(model)[0] != found[0]
