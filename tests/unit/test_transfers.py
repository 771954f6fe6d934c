"""Numbers of several devices come to the host as they are."""

from __future__ import annotations

import torch

from rlinf.distributed.transfers import fetch, to_device


def test_numbers_come_in_their_order_without_rounding():
    numbers = [0.1, torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), torch.tensor(3), torch.tensor([True])]
    found = fetch([*numbers, torch.tensor(2.5, requires_grad=True), 2**24 + 1, torch.tensor(2**24 + 1)])
    assert found == [0.1, float(torch.tensor(0.1)), 0.1, 3.0, 1.0, 2.5, 2.0**24 + 1, 2.0**24 + 1]
    assert fetch([]) == []


def test_a_tensor_that_is_there_is_not_copied():
    tensor = torch.ones(2)
    assert to_device(tensor, "cpu") is tensor and to_device(tensor, "meta").is_meta
