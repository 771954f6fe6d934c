"""Statistics over a rollout against NumPy in float64; that ranks do not change a bit is in tests/integration/test_blocks.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.algorithms.statistics import explained_variance, masked_mean, masked_normalize

SHAPES = [(7,), (5, 7), (5, 7, 3), (5, 7, 3, 2)]


def drawn(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) + 3, torch.rand(shape, generator=generator) < 0.6


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mean_is_over_the_elements_in_the_mask(shape):
    values, mask = drawn(shape)
    assert masked_mean(values, mask) == pytest.approx(values.double().numpy()[mask.numpy()].mean(), rel=1e-14)
    spoilt = torch.where(mask, values, torch.nan)
    assert masked_mean(spoilt, mask) == masked_mean(values, mask), "what is left out need not be finite"
    assert masked_mean(values, torch.zeros_like(mask)) == 0.0
    assert masked_mean(values.bool(), mask) == 1.0


@pytest.mark.parametrize("shape", SHAPES)
def test_normalised_elements_are_those_of_numpy(shape):
    values, mask = drawn(shape)
    kept = values.double().numpy()[mask.numpy()]
    result = masked_normalize(torch.where(mask, values, torch.nan), mask, eps=0.25)
    assert result.dtype == torch.float32 and result.shape == shape and not result[~mask].any()
    np.testing.assert_allclose(result[mask], (kept - kept.mean()) / (kept.std() + 0.25), rtol=1e-6)


def test_a_number_that_is_not_finite_does_not_pass_for_equal_advantages():
    for bad in (torch.nan, torch.inf):
        result = masked_normalize(torch.tensor([1.0, 2.0, bad]), torch.ones(3, dtype=torch.bool))
        assert result.isnan().any(), "the loss then is not finite, and the step is refused"


def test_the_explained_variance_is_that_of_numpy():
    returns, mask = drawn((5, 7))
    values = returns + 0.5 * drawn((5, 7), seed=1)[0]
    kept, errors = (each.double().numpy()[mask.numpy()] for each in (returns, returns - values))
    expected = 1 - errors.var() / kept.var()
    assert 0 < expected < 1 and explained_variance(values, returns, mask) == pytest.approx(expected, rel=1e-5)
