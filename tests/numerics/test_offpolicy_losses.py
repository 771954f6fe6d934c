"""SAC and TD3 of an actor, next to hand calculations and slow implementations."""

import copy
import json
import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rlinf.algorithms.offpolicy_config import ActorConfig, SACConfig, TD3Config
from rlinf.errors import NonFiniteError
from rlinf.models.actors.base import Critics, squashed_logprobs
from rlinf.models.actors.kinds import ACTORS, DirectActor, DSRLActor, EXPOActor, ResidualActor, RLTActor
from rlinf.offpolicy.algorithms import SAC, TD3
from rlinf.offpolicy.replay import Batch

F, A, B = 3, 2, 16


def a_batch(seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=draw) * 2 - 1

    returns, discounts = numbers(B), (numbers(B) > 0) * 0.9
    return Batch(numbers(B, F), numbers(B, 1, A), numbers(B, A), returns, discounts, numbers(B, F), numbers(B, 1, A))


def a_learner(kind: type, seed: int = 0, deviation: float = 0.3, width: int = 8, scale: float = 0.5, **settings):
    """Return a learner whose actor is no longer the frozen policy: its weights are shifted by noise of this deviation."""
    config = kind.config_class(actor=ActorConfig(hidden_size=width, scale=scale), **settings)
    torch.manual_seed(seed)
    actor = ResidualActor(config.actor, F, A, kind.noise_std(config))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter += deviation * torch.randn_like(parameter)
    return kind(config, actor, seed=1)


def test_critics_are_networks_that_share_nothing():
    torch.manual_seed(0)
    critics = Critics(ActorConfig(hidden_size=8, num_layers=2), F + 2 * A, num_critics=3)
    for gain, shift in zip(critics.gains, critics.shifts, strict=True):
        nn.init.normal_(gain), nn.init.normal_(shift)
    batch = a_batch()
    found = critics(batch.features, batch.base[:, 0], batch.actions)
    gradients = torch.autograd.grad(found.square().sum(), list(critics.parameters()))
    slow = 0.0
    for number in range(3):
        x = torch.cat([batch.features, batch.base[:, 0], batch.actions], 1)
        rows = slice(8 * number, 8 * number + 8)
        x = nn.functional.linear(x, critics.first.weight[rows], critics.first.bias[rows])
        for layer in range(2):
            mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
            x = (x - mean) / (variance + 1e-5).sqrt() * critics.gains[layer][number] + critics.shifts[layer][number]
            x = torch.relu(x) @ critics.weights[layer][number] + critics.biases[layer][number]
        torch.testing.assert_close(found[number], x[:, 0], rtol=1e-5, atol=1e-6)
        slow = slow + x.square().sum()
    expected = torch.autograd.grad(slow, list(critics.parameters()))
    assert all(gradient.abs().max() > 1e-3 for gradient in expected)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


def test_critics_compute_in_float32_also_under_autocast():
    torch.manual_seed(0)
    critics, batch = Critics(ActorConfig(hidden_size=64), F + 2 * A, num_critics=2), a_batch()
    options = torch.rand(B, 8, A) * 2 - 1
    wanted = critics.option_values(batch.features, batch.base, options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16  # the control: it is on
        found, chosen = (
            critics.option_values(batch.features, batch.base, options),
            critics.best_option(batch.features, batch.base, options)[1],
        )
    assert torch.equal(found, wanted) and torch.equal(chosen, wanted.mean(0).argmax(1))


def test_the_density_of_a_squashed_gaussian_is_that_of_torch_and_integrates_to_one():
    noise, log_std, mean = torch.randn(50, A), torch.rand(50, A) - 1, torch.randn(50, A)
    u = mean + log_std.exp() * noise
    transformed = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean.double(), log_std.double().exp()), torch.distributions.TanhTransform()
    )
    wanted = transformed.log_prob(torch.tanh(u.double())).sum(1)
    torch.testing.assert_close(squashed_logprobs(u, noise, log_std).double(), wanted, rtol=1e-3, atol=1e-3)
    r = torch.linspace(-0.99999, 0.99999, 200_001, dtype=torch.float64)[:, None]
    sigma, u = math.log(0.6), torch.atanh(r)
    density = squashed_logprobs(u, (u - 0.4) / 0.6, torch.full_like(u, sigma)).exp()
    assert torch.trapezoid(density, r[:, 0]).item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("size", [3.0, 12.0, 60.0])
def test_the_density_at_the_bounds_is_exact_where_the_textbook_formula_is_not(size):
    u = torch.tensor([[size], [-size]], requires_grad=True)
    log_std, noise = torch.zeros_like(u), torch.full_like(u, 0.5)
    wanted = -0.125 - 0.5 * math.log(2 * math.pi) - 2 * math.log(2) + 2 * size + 2 * math.log1p(math.exp(-2 * size))
    found = squashed_logprobs(u, noise, log_std)
    assert found.tolist() == pytest.approx([wanted, wanted], rel=1e-6)
    assert torch.autograd.grad(found.sum(), u)[0].flatten().tolist() == pytest.approx(
        [2 * math.tanh(size), -2 * math.tanh(size)]
    )
    with_epsilon = squashed_logprobs(u.detach(), noise, log_std, 1e-6)
    assert (abs(float(with_epsilon[0]) - wanted) > 1e-2) == (size > 3)  # the control


def test_the_target_of_sac_is_the_return_and_the_smallest_of_the_critics_without_entropy():
    learner, batch = a_learner(SAC, num_critics=4, num_target_critics=2), a_batch()
    state = learner.generator.get_state()
    found = learner.target(batch)
    learner.generator.set_state(state)
    noise = torch.randn(B, A, generator=learner.generator)
    chosen = torch.randperm(4, generator=learner.generator)[:2]
    out = learner.actor.network(torch.cat([batch.next_features, batch.next_base[:, 0]], 1))
    r = torch.tanh(out[:, :A] + out[:, A:].clamp(-5, 1).exp() * noise)
    actions = (batch.next_base[:, 0] + 0.5 * r).clamp(-1, 1)
    values = learner.targets(batch.next_features, batch.next_base[:, 0], actions)[chosen]
    torch.testing.assert_close(found, batch.returns + batch.discounts * values.min(0).values)
    assert torch.equal(found[batch.discounts == 0], batch.returns[batch.discounts == 0])  # a terminated episode


def test_the_target_of_td3_has_clipped_noise_around_the_mode():
    learner, batch = a_learner(TD3, target_noise_std=3.0, target_noise_clip=0.1), a_batch()
    mode = torch.tanh(learner.actor.network(torch.cat([batch.next_features, batch.next_base[:, 0]], 1)))
    found = learner.next_actions(batch)[0][:, 0]
    lowest, highest = (batch.next_base[:, 0] + 0.5 * (mode + each).clamp(-1, 1) for each in (-0.1, 0.1))
    lowest, highest = lowest.clamp(-1, 1) - 1e-6, highest.clamp(-1, 1) + 1e-6
    assert ((found >= lowest) & (found <= highest)).all()
    still = a_learner(TD3, target_noise_std=0.0).next_actions(batch)[0][:, 0]
    torch.testing.assert_close(still, (batch.next_base[:, 0] + 0.5 * mode).clamp(-1, 1))


def test_an_update_of_sac_by_hand():
    learner, batch = a_learner(SAC, learning_rate=1e-3), a_batch()
    slow, state = copy.deepcopy((learner.actor, learner.critics, learner.targets)), learner.generator.get_state()
    metrics = learner.update(batch)
    actor, critics, targets = slow
    generator = torch.Generator()
    generator.set_state(state)

    def act(features, base):
        mean, log_std = actor.network(torch.cat([features, base[:, 0]], 1)).chunk(2, 1)
        log_std, noise = log_std.clamp(-5, 1), torch.randn(B, A, generator=generator)
        normal = torch.distributions.Normal(mean, log_std.exp())
        u = mean + log_std.exp() * noise
        logprob = (normal.log_prob(u) - torch.log(1 - torch.tanh(u) ** 2)).sum(1)
        return (base[:, 0] + 0.5 * torch.tanh(u)).clamp(-1, 1), logprob

    def adam(module):
        return torch.optim.Adam(module.parameters(), lr=1e-3)

    with torch.no_grad():
        actions, _ = act(batch.next_features, batch.next_base)
        after = targets(batch.next_features, batch.next_base[:, 0], actions).min(0).values
        target = batch.returns + batch.discounts * after
    optimizer = adam(critics)
    values = critics(batch.features, batch.base[:, 0], batch.actions)
    loss = ((values[0] - target) ** 2).mean() + ((values[1] - target) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer = adam(actor)
    actions, logprob = act(batch.features, batch.base)
    value = critics(batch.features, batch.base[:, 0], actions).mean(0)
    (0.05 * logprob - value).mean().backward()
    optimizer.step()
    assert float(metrics["critic_loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    for mine, theirs in ((learner.actor, actor), (learner.critics, critics)):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)
    for before, now, live in zip(targets.parameters(), learner.targets.parameters(), critics.parameters(), strict=True):
        torch.testing.assert_close(now, before + 0.01 * (live - before), rtol=1e-3, atol=1e-6)
    # Adam's first step is the learning rate, up for an entropy below the target and down for one above it.
    step = 1e-3 if float(metrics["entropy"]) < -0.5 * A else -1e-3
    assert float(learner.log_alpha.detach()) == pytest.approx(math.log(0.05) + step, abs=1e-5)


def test_values_of_own_transitions_and_of_demonstrations_are_told_apart_also_where_one_is_all():
    for num_offline, names in ((0, []), (2, ["q_mean_offline", "q_mean_online"]), (None, ["q_mean_offline"])):
        learner, batch = a_learner(SAC), a_batch()
        metrics = learner.update(batch, len(batch.returns) if num_offline is None else num_offline)
        assert sorted(name for name in metrics if name.startswith("q_mean_")) == names
        assert num_offline is not None or metrics["q_mean_offline"] == metrics["q_mean"]


def test_the_head_waits_for_the_critics():
    learner = a_learner(SAC, critic_only_updates=2)
    before = copy.deepcopy(learner.actor.state_dict())
    for number in range(3):
        metrics = learner.update(a_batch(number))
        moved = any(not torch.equal(before[name], tensor) for name, tensor in learner.actor.state_dict().items())
        assert moved == ("policy_loss" in metrics) == (number == 2)
    delayed = a_learner(TD3, policy_delay=3)
    assert ["policy_loss" in delayed.update(a_batch(n)) for n in range(5)] == [True, False, False, True, False]


@pytest.mark.parametrize("kind", [SAC, TD3])
def test_a_restored_learner_goes_on_bit_for_bit(kind):
    learner = a_learner(kind)
    for number in range(3):
        learner.update(a_batch(number))
    actor = copy.deepcopy(learner.actor.state_dict())
    state = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    other = a_learner(kind, seed=5)
    other.actor.load_state_dict(actor)
    other.load_state_dict(state)
    for each in (learner, other):
        for number in range(3, 6):
            each.update(a_batch(number))
    for name, tensor in learner.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    for name, tensor in learner.actor.state_dict().items():
        assert torch.equal(tensor, other.actor.state_dict()[name]), name


def test_a_loss_that_is_not_finite_takes_no_step():
    learner, batch = a_learner(SAC), a_batch()
    before = copy.deepcopy(learner.critics.state_dict())
    batch.returns[3] = float("nan")
    with pytest.raises(NonFiniteError, match="The loss of the critics is nan at update 0"):
        learner.update(batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.critics.state_dict().items())


@pytest.mark.parametrize(("kind", "scale", "learns"), [(SAC, 1.0, True), (TD3, 1.0, True), (SAC, 0.1, False)])
def test_a_head_learns_the_correction_that_pays_if_its_scale_reaches_it(kind, scale, learns):
    """A bandit: the reward is higher the closer the action is to the base action + 0.6 in its first number."""
    learner = a_learner(kind, deviation=0.0, width=32, scale=scale, learning_rate=3e-3)
    draw = torch.Generator().manual_seed(0)
    features, base = torch.zeros(256, F), torch.rand(256, 1, A, generator=draw) * 0.4 - 0.4
    for _ in range(300):
        actions = (base[:, 0] + scale * (2 * torch.rand(256, A, generator=draw) - 1)).clamp(-1, 1)
        rewards = 1 - (actions[:, 0] - base[:, 0, 0] - 0.6).abs()
        learner.update(Batch(features, base, actions, rewards, torch.zeros(256), features, base))
    found = (learner.actor.compose(base, learner.actor.mode(features, base)) - base[:, 0])[:, 0].mean().item()
    assert (abs(found - 0.6) < 0.25) == learns


def test_the_edit_head_offers_the_chunks_and_their_corrections_and_the_target_takes_the_best():
    config = SACConfig(actor=ActorConfig(name="expo", hidden_size=8, scale=0.5, num_candidates=3), num_critics=2)
    torch.manual_seed(0)
    actor = EXPOActor(config.actor, F, A)
    with torch.no_grad():
        actor.network[-1].weight.normal_()
    learner, batch = SAC(config, actor, seed=1), a_batch()
    batch.base, batch.next_base = torch.rand(B, 3, A) * 2 - 1, torch.rand(B, 3, A) * 2 - 1
    noise = torch.randn(B, 3 * A)
    options = actor.options(batch.features, batch.base, noise)
    assert torch.equal(options[:, :3], batch.base)
    for number in range(3):
        one = batch.base[:, number : number + 1]
        r, _ = actor.sample(batch.features, one, noise[:, A * number : A * number + A])
        torch.testing.assert_close(options[:, 3 + number], (one[:, 0] + 0.5 * r).clamp(-1, 1))
    best, chosen = learner.critics.best_option(batch.features, batch.base, options)
    for row in range(B):

        def value(action, row=row):
            return (
                learner.critics(batch.features[row : row + 1], batch.base[row : row + 1, 0], action[None]).mean().item()
            )

        values = [value(action) for action in options[row]]
        assert values[chosen[row]] == pytest.approx(max(values), abs=1e-6)
        assert torch.equal(best[row], options[row, chosen[row]])
    state = learner.generator.get_state()
    found = learner.target(batch)
    learner.generator.set_state(state)
    after = actor.options(batch.next_features, batch.next_base, torch.randn(B, 3 * A, generator=learner.generator))
    values = torch.stack(
        [learner.targets(batch.next_features, batch.next_base[:, 0], after[:, k]) for k in range(6)], -1
    )
    torch.testing.assert_close(found, batch.returns + batch.discounts * values.min(0).values.max(1).values)
    learner.update(batch)


def test_the_direct_head_reads_the_features_alone():
    actor = DirectActor(ActorConfig(name="direct", hidden_size=8), F, A)
    with torch.no_grad():
        actor.network[-1].weight.normal_()
    features, one, other = torch.randn(4, F), torch.rand(4, 1, A), torch.rand(4, 1, A)
    assert torch.equal(actor.options(features, one), actor.options(features, other))
    assert not torch.equal(actor.options(features, one), actor.options(features + 1, one))


def test_the_chunk_head_pays_for_what_it_changes_and_learns_to_act_without_the_reference():
    settings = ActorConfig(name="rlt", hidden_size=8, scale=0.5, reference_dropout=0.25, reference_weight=0.3)
    torch.manual_seed(0)
    config, batch = TD3Config(actor=settings), a_batch()
    actor = RLTActor(settings, F, A, config.noise_std)
    assert torch.equal(actor.options(batch.features, batch.base)[:, 0], batch.base[:, 0])  # starts as the frozen policy
    with torch.no_grad():
        actor.network[-1].weight.normal_()
    learner = TD3(config, actor, seed=1)
    state = learner.generator.get_state()
    loss, _ = learner.actor_loss(batch)
    learner.generator.set_state(state)
    kept = torch.rand(B, generator=learner.generator) >= 0.25
    assert 0 < kept.sum() < B
    total = 0.0
    for row in range(B):
        b, features = batch.base[row : row + 1, 0], batch.features[row : row + 1]
        seen = b if kept[row] else torch.zeros_like(b)
        a = (seen + 0.5 * torch.tanh(actor.network(torch.cat([features, seen], 1)))).clamp(-1, 1)
        value = learner.critics(features, b, a).mean()  # the critics see what the loss asks about: the true reference
        total = total - value + 0.3 * ((a - b) ** 2).sum()
    torch.testing.assert_close(loss, total / B)
    everything = RLTActor(replace(settings, reference_dropout=0.0), F, A, config.noise_std)
    assert torch.equal(everything.base_for_loss(batch.base, torch.Generator()), batch.base)


@pytest.mark.parametrize("kind", [SAC, TD3])
def test_a_penalty_keeps_the_chunk_near_the_reference(kind):
    found = {}
    for weight in (0.0, 10.0):
        settings = ActorConfig(name="rlt", hidden_size=16, reference_weight=weight)
        config, draw = kind.config_class(actor=settings, learning_rate=3e-3), torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        actor = RLTActor(settings, F, A, kind.noise_std(config))
        learner, features, base = kind(config, actor, seed=1), torch.zeros(64, F), torch.zeros(64, 1, A)
        for _ in range(150):
            actions = 2 * torch.rand(64, A, generator=draw) - 1
            rewards = 1 - (actions[:, 0] - 0.6).abs()
            learner.update(Batch(features, base, actions, rewards, torch.zeros(64), features, base))
        found[weight] = actor.options(features, base)[0, 0, 0].item()
    assert found[0.0] > 0.3 and abs(found[10.0]) < 0.1


def test_noise_is_valued_as_it_is_and_may_have_another_width_than_a_chunk():
    settings = ActorConfig(name="dsrl", hidden_size=8)
    actor = DSRLActor(settings, F, A, output_dim=5)
    r = torch.rand(B, 5) * 2 - 1
    assert actor.compose(torch.rand(B, 1, A), r) is r and actor.critic_input_dim == F + A + 5
    learner, batch = SAC(SACConfig(actor=settings), actor, seed=1), a_batch()
    batch.actions = r
    assert learner.target_entropy == -2.5 and learner.next_actions(batch)[0].shape == (B, 1, 5)
    assert not learner.next_actions(batch)[0].isnan().any() and torch.equal(
        actor.options(batch.features, batch.base), torch.zeros(B, 1, 5)
    )
    learner.update(batch)


@pytest.mark.parametrize("name", list(ACTORS))
@pytest.mark.parametrize("kind", [SAC, TD3])
def test_the_gradient_reaches_every_weight_of_a_head(kind, name):
    config = kind.config_class(actor=ActorConfig(name=name, hidden_size=8, num_candidates=1))
    torch.manual_seed(0)
    learner = kind(config, ACTORS.get(name)(config.actor, F, A, kind.noise_std(config)), seed=1)
    for number in range(4):  # the last layer starts at 0, the others follow it; TD3 trains the actor every second time
        learner.update(a_batch(number))
    moments = learner.steps["actor"].optimizer.state  # a step forgets the gradients themselves
    for key, parameter in learner.actor.named_parameters():
        assert moments[parameter]["exp_avg"].abs().sum() > 0, key
    r = learner.actor.mode(a_batch().features, a_batch().base)
    assert (r.abs() < 1).all() and (r != 0).any()


def test_settings_of_both_are_those_of_the_dataclasses():
    assert SAC.config_class is SACConfig and TD3.config_class is TD3Config
    assert TD3.noise_std(TD3Config(noise_std=0.3)) == 0.3 and SAC.noise_std(SACConfig()) is None


def test_the_benchmark_of_an_update_prints_its_numbers(monkeypatch, capsys):
    arguments = ["offpolicy_update.py", "--updates", "2", "--critics", "3", "--hidden-size", "8", "--batch-size", "16"]
    monkeypatch.setattr(sys, "argv", arguments)
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "offpolicy_update.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["name"] == "offpolicy_update" and found["ours"] > 0 and found["peer"] > 0
    assert found["ratio"] == pytest.approx(found["peer"] / found["ours"])
    assert found["sizes"] == {
        "updates": 2,
        "critics": 3,
        "hidden_size": 8,
        "batch_size": 16,
        "threads": 1,
        "sb3_steps": 0,
        "rounds": 3,
    }
