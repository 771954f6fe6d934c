"""SAC and TD3 next to Stable-Baselines3: one set of rows, equal weights, equal noise, 100 updates."""

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from rlinf.algorithms.offpolicy_config import ActorConfig
from rlinf.models.actors.kinds import ScratchActor
from rlinf.offpolicy.algorithms import SAC, TD3
from rlinf.offpolicy.replay import Batch, ReplayBuffer

sb3 = pytest.importorskip("stable_baselines3", reason="needs stable-baselines3, which the extra dev installs")
from stable_baselines3.common import logger, policies  # noqa: E402
from stable_baselines3.common.type_aliases import ReplayBufferSamples  # noqa: E402

F, A, B, WIDTH, UPDATES = 3, 2, 32, 16, 100
GAMMA, TAU, RATE = 0.9, 0.05, 1e-3
HEAD = {
    "name": "scratch",
    "hidden_size": WIDTH,
    "layer_norm": False,
    "log_std_min": -20.0,
    "log_std_max": 2.0,
    "tanh_epsilon": 1e-6,
}
SHARED = {"gamma": GAMMA, "tau": TAU, "learning_rate": RATE, "batch_size": B}
THEIRS = {
    SAC: {
        "initial_alpha": 0.3,
        "target_entropy": -A,
        "entropy_in_target": True,
        "actor_q": "min",
        "critic_loss_weight": 0.5,
    },
    TD3: {"target_policy": True, "target_update_interval": 2, "actor_q": "first"},
}
"""Settings with which our update is theirs."""


class Spaces(gymnasium.Env):
    """An env of which only the spaces are read."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (F,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (A,), np.float32)


def recorded(
    seed: int = 0, num_envs: int = 2, num_steps: int = 60
) -> tuple[ReplayBuffer, "sb3.common.buffers.ReplayBuffer"]:
    """Return the same play in both libraries' buffers, with ends and time limits."""
    draw, envs = np.random.default_rng(seed), torch.arange(num_envs)
    sizes = {"feature_dim": F, "num_candidates": 1, "base_dim": 0, "output_dim": A, "chunk_len": 1}
    ours = ReplayBuffer(4 * num_envs * num_steps, num_envs, seed=0, **sizes)
    theirs = sb3.common.buffers.ReplayBuffer(
        num_envs * num_steps, Spaces.observation_space, Spaces.action_space, device="cpu", n_envs=num_envs
    )
    seen = draw.normal(size=(num_envs, F)).astype(np.float32)
    ours.observe(envs, torch.from_numpy(seen), torch.zeros(num_envs, 1, 0))
    for step in range(num_steps):
        actions = draw.uniform(-1, 1, (num_envs, A)).astype(np.float32)
        rewards = draw.normal(size=num_envs).astype(np.float32)
        last, fresh = (draw.normal(size=(num_envs, F)).astype(np.float32) for _ in range(2))
        terminated, cut = draw.random(num_envs) < 0.1, np.full(num_envs, step % 12 == 11)
        cut &= ~terminated
        done = terminated | cut
        theirs.add(seen, last, actions, rewards, done, [{"TimeLimit.truncated": bool(each)} for each in cut])
        ours.act(
            envs, torch.from_numpy(actions), torch.from_numpy(rewards)[:, None],
            torch.ones(num_envs, 1, dtype=torch.bool), torch.from_numpy(terminated),
        )  # fmt: skip
        if cut.any():
            rows = torch.from_numpy(np.flatnonzero(cut))
            ours.observe(rows, torch.from_numpy(last)[rows], torch.zeros(len(rows), 1, 0))
        seen = np.where(done[:, None], fresh, last)
        ours.observe(envs, torch.from_numpy(seen), torch.zeros(num_envs, 1, 0))
    return ours, theirs


def rows_of(batch: Batch) -> torch.Tensor:
    """Return every number of a transition, sorted by rows; a terminated one has no next observation."""
    following = batch.next_features * (batch.discounts > 0)[:, None]
    columns = [batch.features, batch.actions, batch.returns[:, None], batch.discounts[:, None], following]
    table = torch.cat(columns, 1)
    return table[table[:, 0].argsort()]


def all_rows(buffer: ReplayBuffer) -> Batch:
    return buffer.batch(buffer.transitions(), GAMMA)


def test_both_buffers_hold_the_same_transitions():
    ours, theirs = recorded()
    parts = [theirs._get_samples(np.array([step])) for step in range(theirs.size()) for _ in range(20)]
    batch = Batch(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("observations", "actions", "actions")),
        *(
            torch.cat([part.rewards[:, 0] for part in parts]),
            torch.cat([GAMMA * (1 - part.dones[:, 0]) for part in parts]),
        ),
        *(torch.cat([part.next_observations for part in parts]), torch.zeros(0)),
    )
    batch.base, batch.actions = batch.actions, batch.base  # they have no base
    wanted = torch.unique(rows_of(batch), dim=0)  # the env of each step is drawn, so that all rows come up
    found = torch.unique(rows_of(all_rows(ours)), dim=0)
    torch.testing.assert_close(found, wanted)
    assert len(found) == 120 and (found[:, 6] == 0).any()


def a_pair(kind: type, **changed):
    """Return our learner and their model, in float64 and with equal weights; ``changed`` are settings of ours."""
    actor_settings = HEAD | {name: changed.pop(name) for name in list(changed) if name in HEAD}
    config = kind.config_class(actor=ActorConfig(**actor_settings), **(SHARED | THEIRS[kind] | changed))
    learner = kind(config, ScratchActor(config.actor, F, 0, kind.noise_std(config), A).double(), seed=0)
    for module in (learner.critics, learner.targets):
        module.double()
    settings = {
        "learning_rate": RATE,
        "gamma": GAMMA,
        "tau": TAU,
        "batch_size": B,
        "buffer_size": 10,
        "device": "cpu",
        "seed": 3,
    }
    settings |= {"ent_coef": "auto_0.3"} if kind is SAC else {}
    model = getattr(sb3, kind.__name__)("MlpPolicy", Spaces(), policy_kwargs={"net_arch": [WIDTH, WIDTH]}, **settings)
    model.set_logger(logger.configure(None, []))
    model.policy.double()
    actor = learner.actor.network
    if kind is SAC:
        model.log_ent_coef = nn.Parameter(learner.log_alpha.detach().double())
        model.ent_coef_optimizer = torch.optim.Adam([model.log_ent_coef], RATE)
        learner.log_alpha.data = learner.log_alpha.data.double()
    else:
        learner.num_updates = 1  # their first update of the actor is the second one of the critics
    with torch.no_grad():
        for name, tensor in theirs_of(model).items():
            held = ours_of(learner)[name]
            held.copy_(tensor)
        learner.targets.load_state_dict(learner.critics.state_dict())
        if kind is TD3:
            learner.target_actor.network.load_state_dict(actor.state_dict())
    return learner, model


def ours_of(learner) -> dict[str, torch.Tensor]:
    found = {f"actor.{name}": each for name, each in learner.actor.network.named_parameters()}
    return found | {f"critics.{name}": each for name, each in learner.critics.named_parameters()}


def theirs_of(model, grad: bool = False) -> dict[str, torch.Tensor]:
    """Return their weights, or gradients, under our names and in our shapes."""

    def of(parameter: nn.Parameter) -> torch.Tensor:
        return parameter.grad if grad else parameter.detach()

    actor, critics, found = model.actor, [model.critic.qf0, model.critic.qf1], {}
    layers = [actor.latent_pi[0], actor.latent_pi[2]] if hasattr(actor, "latent_pi") else [actor.mu[0], actor.mu[2]]
    last = [actor.mu, actor.log_std] if hasattr(actor, "latent_pi") else [actor.mu[4]]
    for kind in ("weight", "bias"):
        for number, layer in enumerate(layers):
            found[f"actor.{2 * number}.{kind}"] = of(getattr(layer, kind))
        found[f"actor.4.{kind}"] = torch.cat([of(getattr(layer, kind)) for layer in last])
        found[f"critics.first.{kind}"] = torch.cat([of(getattr(critic[0], kind)) for critic in critics])
    for number in range(2):
        each = [critic[2 + 2 * number] for critic in critics]
        found[f"critics.weights.{number}"] = torch.stack([of(layer.weight).T for layer in each])
        found[f"critics.biases.{number}"] = torch.stack([of(layer.bias)[None] for layer in each])
    return found


def run_both(kind: type, monkeypatch, num_updates: int, **changed) -> dict[str, tuple]:
    """Make updates in both libraries; return losses, targets, gradients and weights: ours and theirs."""
    learner, model = a_pair(kind, **changed)
    whole, draw = all_rows(recorded()[0]), torch.Generator().manual_seed(5)
    ours, theirs, noises = {}, {}, []
    monkeypatch.setattr(policies, "preprocess_obs", lambda obs, *args, **kwargs: obs)  # it would cast to float32
    monkeypatch.setattr(torch.distributions.normal, "_standard_normal", lambda *args, **kwargs: noises.pop(0))
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, mean=0, std=1, **_: self.copy_(std * noises.pop(0)))
    mse = nn.functional.mse_loss
    monkeypatch.setattr(
        nn.functional, "mse_loss", lambda found, target: (theirs.update(target=target[:, 0]), mse(found, target))[1]
    )
    note_gradients(learner, model, ours, theirs)
    for number in range(num_updates):
        drawn = torch.randint(len(whole.returns), (B,), generator=draw)
        batch = Batch(*(tensor[drawn].double() for tensor in vars(whole).values()))
        samples = ReplayBufferSamples(
            batch.features, batch.actions, batch.next_features, (batch.discounts == 0).double()[:, None], batch.returns[:, None],
            torch.full((B, 1), GAMMA, dtype=torch.float64),
        )  # fmt: skip
        batch.discounts = GAMMA * (batch.discounts > 0)  # float64, as theirs
        monkeypatch.setattr(model.replay_buffer, "sample", lambda *args, samples=samples, **kwargs: samples)
        following = torch.Generator()
        following.set_state(learner.generator.get_state())
        after, now = (torch.randn(B, A, generator=following).double() for _ in range(2))
        noises[:] = [now, after] if kind is SAC else [after]
        target = learner.target
        learner.target = lambda batch, name=f"target {number}", target=target: ours.setdefault(name, target(batch))
        metrics = learner.update(batch)
        learner.target = target
        model.train(1, B)
        theirs[f"target {number}"] = theirs.pop("target")
        for name, key in (("critic_loss", "critic_loss"), ("policy_loss", "actor_loss"), ("alpha", "ent_coef")):
            if name in metrics:
                ours[f"{name} {number}"] = metrics[name]
                theirs[f"{name} {number}"] = torch.tensor(
                    float(model.logger.name_to_value[f"train/{key}"]), dtype=torch.float64
                )
        model.logger.name_to_value.clear()
        model.logger.name_to_count.clear()
    ours |= {f"weights {name}": each.detach() for name, each in ours_of(learner).items()}
    theirs |= {f"weights {name}": each for name, each in theirs_of(model).items()}
    assert ours.keys() == theirs.keys()
    return {name: (ours[name], theirs[name]) for name in ours}


def note_gradients(learner, model, ours: dict, theirs: dict) -> None:
    """Note the gradients of the first step of each optimiser."""
    parts = {"actor": ("actor", model.actor.optimizer), "critics": ("critics", model.critic.optimizer)}
    for part, (prefix, optimizer) in parts.items():
        step, their_step = learner.steps[part].step, optimizer.step

        def note(step=step, prefix=prefix):
            for name, parameter in ours_of(learner).items():
                if name.startswith(prefix):
                    ours.setdefault(f"gradient {name}", parameter.grad.clone())
            step()

        def note_theirs(*args, step=their_step, prefix=prefix, **kwargs):
            if f"gradient {prefix}.4.weight" in theirs or f"gradient {prefix}.weights.0" in theirs:
                return step()
            others = [p for p in model.policy.parameters() if p.grad is None]
            for parameter in others:
                parameter.grad = torch.zeros_like(parameter)
            found = theirs_of(model, grad=True)
            theirs.update({f"gradient {name}": each.clone() for name, each in found.items() if name.startswith(prefix)})
            for parameter in others:
                parameter.grad = None
            return step()

        learner.steps[part].step, optimizer.step = note, note_theirs


@pytest.mark.parametrize("kind", [SAC, TD3])
def test_losses_targets_gradients_and_weights_are_theirs(kind, monkeypatch):
    found = run_both(kind, monkeypatch, UPDATES)
    assert sum(name.startswith("gradient") for name in found) == 12 and f"target {UPDATES - 1}" in found
    for name, (ours, theirs) in found.items():
        limit = 1e-5 if name.startswith("weights") else 1e-6
        gap = (ours - theirs).abs().max() / theirs.abs().max()
        assert gap < limit, f"{name}: {gap}"


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        (SAC, {"tanh_epsilon": 0.0}), (SAC, {"entropy_in_target": False}), (SAC, {"target_entropy": None}),
        (SAC, {"actor_q": "mean"}), (SAC, {"critic_loss_weight": 1.0}), (SAC, {"log_std_max": -1.0}),
        (TD3, {"target_policy": False}), (TD3, {"target_update_interval": 1}), (TD3, {"actor_q": "mean"}),
    ],
)  # fmt: skip
def test_each_difference_by_choice_is_seen(kind, ours, monkeypatch):
    found = run_both(kind, monkeypatch, 20, **ours)
    gaps = [float((one - other).abs().max() / other.abs().max()) for one, other in found.values()]
    assert max(gaps) > 1e-6
