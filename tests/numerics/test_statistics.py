"""Statistics over a rollout against NumPy in float64; that ranks do not change a bit is in tests/integration/test_env_groups.py."""

import threading

import numpy as np
import pytest
import torch
from rollout_batches import rollout_batch
from thread_ranks import on_threads

from rlinf.algorithms.advantages import explained_variance, masked_mean, masked_normalize
from rlinf.algorithms.config import PPOConfig
from rlinf.algorithms.ppo import PPO

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
    one = torch.zeros_like(mask)
    one.view(-1)[3] = True
    assert masked_mean(values, one) == values.view(-1)[3].item()


@pytest.mark.parametrize("shape", SHAPES)
def test_an_env_contributes_one_row(monkeypatch, shape):
    rows = []
    monkeypatch.setattr("rlinf.algorithms.advantages.sum_env_groups", lambda own: (rows.append(own), own.sum(0))[1])
    values, mask = drawn(shape)
    masked_mean(values, mask)
    kept = torch.where(mask, values, 0.0).double()
    others = [axis for axis in range(len(shape)) if axis != min(1, len(shape) - 1)]
    expected = torch.stack([kept.sum(others), mask.double().sum(others)], 1) if others else torch.stack([kept, mask], 1)
    torch.testing.assert_close(rows, [expected])


@pytest.mark.parametrize("shape", SHAPES)
def test_normalised_elements_are_those_of_numpy(shape):
    values, mask = drawn(shape)
    kept = values.double().numpy()[mask.numpy()]
    result = masked_normalize(torch.where(mask, values, torch.nan), mask, eps=0.25)
    assert result.dtype == torch.float32 and result.shape == shape and not result[~mask].any()
    np.testing.assert_allclose(result[mask], (kept - kept.mean()) / (kept.std() + 0.25), rtol=1e-6)


def test_small_advantages_are_not_taken_for_rounding_of_what_is_left_out():
    result = masked_normalize(torch.tensor([1e-8, -1e-8, 5.0]), torch.tensor([True, True, False]), eps=0.0)
    assert result.tolist() == pytest.approx([1.0, -1.0, 0.0])


def test_returns_that_do_not_vary_have_no_explained_variance():
    mask = torch.ones(2, 2, dtype=torch.bool)
    assert explained_variance(torch.zeros(2, 2), torch.full((2, 2), 3.0), mask) == 0.0
    values, returns = torch.randn(2, 2, 2)
    assert explained_variance(values, returns, torch.zeros_like(mask)) == 0.0, "no element is valid"
    assert masked_normalize(torch.zeros(2, 2), mask, eps=0.0).tolist() == [[0.0, 0.0]] * 2


def test_a_number_that_is_not_finite_does_not_pass_for_equal_advantages():
    for bad in (torch.nan, torch.inf):
        result = masked_normalize(torch.tensor([1.0, 2.0, bad]), torch.ones(3, dtype=torch.bool))
        assert result.isnan().any(), "the loss then is not finite, and the step is rejected"


def test_the_explained_variance_is_that_of_numpy():
    returns, mask = drawn((5, 7))
    values = returns + 0.5 * drawn((5, 7), seed=1)[0]
    kept, errors = (each.double().numpy()[mask.numpy()] for each in (returns, returns - values))
    expected = 1 - errors.var() / kept.var()
    assert 0 < expected < 1 and explained_variance(values, returns, mask) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ends", [(12,), (6, 12), (2, 12), (0, 12), (1, 5, 12)])
def test_a_minibatch_is_normalised_over_all_ranks(monkeypatch, ends):
    """Ranks have any number of its rows, also none: ``ends`` are their last ones."""
    generator, local = torch.Generator().manual_seed(0), threading.local()
    advantages, mask = torch.randn(12, 3, generator=generator) * 5 + 2, torch.rand(12, 3, generator=generator) < 0.7
    algorithm = PPO(PPOConfig(normalize_over="minibatch"))

    def normalised(group):
        local.group = group
        rows = slice((0, *ends)[group.rank], ends[group.rank])
        fields = {"advantages": advantages[rows], "action_mask": mask[rows]}
        own = rollout_batch(len(advantages[rows]), num_actions=3, **fields)
        return algorithm.of_minibatch(own).advantages

    def gathered(own):
        return torch.cat(local.group.gather(lambda: own)).cumsum(0)[-1]

    kept = advantages.double().numpy()[mask.numpy()]
    expected = (kept - kept.mean()) / kept.std(ddof=1)
    monkeypatch.setattr("rlinf.algorithms.advantages.sum_env_groups", gathered)
    found = torch.cat(on_threads(len(ends), normalised))[mask]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr("rlinf.algorithms.advantages.sum_env_groups", lambda own: own.cumsum(0)[-1])
    alone = torch.cat(on_threads(len(ends), normalised))[mask]
    is_one = len(set(ends) - {0}) == 1
    assert np.allclose(alone, expected, atol=1e-6) == is_one, "control: ranks that do not tell each other"
