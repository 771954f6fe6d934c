"""Denoising steps, densities and the supervised pair of flow policies, against formulas and simulation."""

import math

import pytest
import torch

from rlinf.models.embodiment.modules.flow import (
    denoising_times,
    gaussian_entropy,
    gaussian_logprobs,
    noisy_actions,
    step_moments,
    time_embedding,
    training_times,
)
from rlinf.models.embodiment.pi0.network import StdHead
from rlinf.models.sampling import standard_normal


def test_grid_begins_at_one_and_ends_at_zero():
    assert denoising_times(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_time_embedding_by_hand():
    embedding = time_embedding(torch.tensor([0.5]), 4)[0]
    phases = [2 * math.pi * 0.5 / 4e-3, 2 * math.pi * 0.5 / 4.0]
    expected = [math.sin(phase) for phase in phases] + [math.cos(phase) for phase in phases]
    assert embedding.dtype == torch.float64
    torch.testing.assert_close(embedding, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def moments(method, x, velocity, i, n=4, level=0.5, noise_std=None):
    times = denoising_times(n).double()
    return step_moments(method, x, velocity, times[i], times[i + 1], times[1], level, noise_std)


@pytest.mark.parametrize("i", [0, 1, 2, 3])
def test_ode_step_is_the_euler_step(i):
    x, velocity = torch.randn(2, 3, 2).double(), torch.randn(2, 3, 2).double()
    mean, std = moments("flow_ode", x, velocity, i)
    torch.testing.assert_close(mean, x - velocity / 4)
    assert std.shape == x.shape and not std.any()


@pytest.mark.parametrize("i", [0, 1, 3])
def test_sde_step_is_the_published_update(i):
    x, velocity, level, d = torch.randn(2, 3, 2).double(), torch.randn(2, 3, 2).double(), 0.7, 0.25
    t = 1.0 - i * d
    s = level * math.sqrt(t / (1.0 - (t if i else 0.75)))
    mean, std = moments("flow_sde", x, velocity, i, level=level)
    torch.testing.assert_close(mean, x - velocity * d - s**2 * d / (2 * t) * (x + (1 - t) * velocity))
    torch.testing.assert_close(std, torch.full_like(x, s * math.sqrt(d)))


def test_cps_step_keeps_the_share_of_noise():
    mean, std = moments("flow_cps", torch.ones(1, 1, 1).double(), torch.zeros(1, 1, 1).double(), 1, level=0.5)
    # with velocity 0, action and noise are both 1: the mean is 1 - 0.5 and the noise's share 0.5 turned by 45 degrees
    assert mean.item() == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert std.item() == pytest.approx(0.5 * math.sin(math.pi / 4))


def test_noise_step_has_the_given_deviation():
    x, velocity = torch.randn(2, 3, 2).double(), torch.randn(2, 3, 2).double()
    mean, std = moments("flow_noise", x, velocity, 2, noise_std=torch.full_like(x, 0.1))
    torch.testing.assert_close(mean, x - velocity / 4)
    assert (std == 0.1).all()


def simulate(method, drift=True, n=100, num_rows=40_000):
    """Denoise with the exact velocity of normal actions of mean 2 and deviation 0.5; returns mean and deviation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, generator=generator).double()
    times = denoising_times(n).double()
    for i in range(n):
        t = times[i]
        variance = (1 - t) ** 2 * 0.25 + t**2
        centred = x - (1 - t) * 2.0
        velocity = t / variance * centred - (2.0 + (1 - t) * 0.25 / variance * centred)  # E[noise - action | x]
        mean, std = step_moments(method, x, velocity, t, times[i + 1], times[1], 0.5)
        if not drift:
            mean = step_moments("flow_ode", x, velocity, t, times[i + 1], times[1], 0.5)[0]
        x = mean + std * torch.randn(num_rows, generator=generator)
    return x.mean().item(), x.std().item()


@pytest.mark.parametrize("method", ["flow_ode", "flow_sde"])
def test_exact_velocities_end_in_the_distribution_of_the_actions(method):
    mean, std = simulate(method)
    assert mean == pytest.approx(2.0, abs=0.02)
    assert std == pytest.approx(0.5, abs=0.02)


def test_control_noise_without_drift_ends_in_a_wider_one():
    assert simulate("flow_sde", drift=False)[1] > 0.54


def test_densities_and_entropies_are_those_of_the_normal_distribution():
    x, mean, std = torch.randn(5), torch.randn(5), torch.rand(5) + 0.1
    normal = torch.distributions.Normal(mean, std)
    torch.testing.assert_close(gaussian_logprobs(x, mean, std), normal.log_prob(x))
    torch.testing.assert_close(gaussian_entropy(std), normal.entropy())


def test_densities_and_entropies_pull_by_hand():
    x, mean, std = (torch.tensor(numbers, requires_grad=True) for numbers in ([1.0, 0.5], [0.2, 0.9], [0.5, 2.0]))
    by_x, by_mean, by_std = torch.autograd.grad(gaussian_logprobs(x, mean, std).sum(), (x, mean, std))
    error = (x - mean).detach()
    torch.testing.assert_close(by_mean, error / std.detach() ** 2)
    torch.testing.assert_close(by_x, -by_mean)
    torch.testing.assert_close(by_std, error**2 / std.detach() ** 3 - 1 / std.detach())
    torch.testing.assert_close(torch.autograd.grad(gaussian_entropy(std).sum(), std)[0], 1 / std.detach())


def test_a_step_without_noise_has_density_and_gradient_zero():
    mean = torch.ones(3, requires_grad=True)
    std = torch.tensor([0.0, 0.5, 0.0])
    logprobs = gaussian_logprobs(torch.zeros(3), mean, std)
    logprobs.sum().backward()
    assert logprobs[[0, 2]].tolist() == [0.0, 0.0] and logprobs[1] != 0.0
    assert mean.grad[[0, 2]].tolist() == [0.0, 0.0] and mean.grad[1] != 0.0
    assert gaussian_entropy(std)[[0, 2]].tolist() == [0.0, 0.0]


def test_normal_numbers_come_from_quantiles():
    numbers = standard_normal(torch.tensor([0.5, 0.8413447, 0.0227501]))
    torch.testing.assert_close(numbers, torch.tensor([0.0, 1.0, -2.0]), rtol=0, atol=1e-5)


def test_training_times_follow_the_beta_distribution():
    times = training_times(torch.tensor([0.125, 0.0, 1.0]))
    torch.testing.assert_close(times, torch.tensor([0.25 * 0.999 + 0.001, 0.001, 1.0]))
    uniforms = (torch.arange(100_000) + 0.5) / 100_000
    sampled = torch.distributions.Beta(1.5, 1.0)
    drawn = (training_times(uniforms).double() - 0.001) / 0.999
    assert drawn.mean().item() == pytest.approx(sampled.mean.item(), abs=1e-4)
    assert drawn.var().item() == pytest.approx(sampled.variance.item(), abs=1e-4)


def test_supervised_pair_is_a_straight_line_from_action_to_noise():
    actions, noise = torch.randn(2, 3), torch.randn(2, 3)
    for t in (0.0, 0.3, 1.0):
        x, velocity = noisy_actions(actions, noise, torch.tensor(t))
        torch.testing.assert_close(x - t * velocity, actions)
        torch.testing.assert_close(x + (1 - t) * velocity, noise)


def test_noise_head_stays_within_its_bounds():
    head = StdHead(4, [8], 2, (0.08, 0.16))
    with torch.no_grad():
        for layer in head.parameters():
            layer.mul_(50.0)
    std = head(torch.randn(64, 3, 4) * 10)
    assert std.shape == (64, 3, 2)
    assert std.min().item() == pytest.approx(0.08, rel=1e-3) and std.max().item() == pytest.approx(0.16, rel=1e-3)
