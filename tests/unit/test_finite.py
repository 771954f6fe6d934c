"""Weights that are not finite, and replicas that differ, are found in any place; finite ones are not accused."""

from __future__ import annotations

import math

import pytest
import torch

from rlinf.distributed import transfers
from rlinf.errors import CheckpointError, NonFiniteError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PLACES = [0, 1, 2**15, 2**17 - 1]


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def way(request, monkeypatch):
    """Numbers of each tensor by which ``not_finite`` suspects it, on a CPU and on a GPU."""
    if request.param == "as on a GPU":
        monkeypatch.setattr(transfers, "_suspects", lambda tensors: torch._foreach_norm(tensors, ord=math.inf))
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_number_is_found_by_name_wherever_it_is(way, dtype, value):
    good = torch.linspace(-1, 1, 2**17).to(dtype)
    for place in PLACES:
        bad = good.clone()
        bad[place] = value
        bad_values = transfers.not_finite({"good": good, "bad": bad, "also good": good[:3]})
        assert list(bad_values) == ["bad"] and (
            bad_values["bad"] == value or math.isnan(value) and math.isnan(bad_values["bad"])
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_numbers_whose_sum_and_norm_overflow_are_finite(way, dtype):
    largest = torch.full((2**12,), torch.finfo(dtype).max, dtype=dtype)
    assert transfers.not_finite({"large": largest, "negative": -largest}) == {}
    assert not largest.sum().isfinite() and not torch._foreach_norm([largest])[0].isfinite(), "control"


def test_what_has_no_floating_point_numbers_is_left_out(way):
    tensors = {"ids": torch.arange(3), "mask": torch.ones(2).bool(), "empty": torch.zeros(0), "ok": torch.ones(2)}
    assert transfers.not_finite(tensors) == {}
    for reject in (transfers.check_finite, lambda tensors: transfers.check_loaded(tensors, "a.safetensors")):
        reject(tensors)
        with pytest.raises((NonFiniteError, CheckpointError), match="'bad' (contains|has) nan"):
            reject(tensors | {"bad": torch.tensor([1.0, math.nan])})


def test_pairs_that_differ_in_one_number_are_named():
    one = torch.linspace(-1, 1, 100)
    other = one.clone()
    other[37] = torch.nextafter(other[37], torch.tensor(2.0))
    spoilt = torch.tensor([1.0, math.nan])
    pairs = [
        ("equal", one, one.clone()),
        ("off", one, other),
        ("short", one, one[:99]),
        ("nan", spoilt, spoilt.clone()),
    ]
    assert transfers.different(iter(pairs)) == ["off", "short", "nan"]
    assert transfers.different(iter([])) == []
