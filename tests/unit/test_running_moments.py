"""Running normalisation of states and rewards: against NumPy over all rows, and against Stable-Baselines3's ``VecNormalize``."""

import copy
import math
import threading
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from run_results import run_config
from thread_ranks import on_threads

from rlinf.algorithms import running_moments
from rlinf.algorithms.running_moments import FIRST_COUNT, RunningMoments, discounted_sums
from rlinf.commands.open_checkpoint import open_checkpoint
from rlinf.commands.train import build
from rlinf.errors import ConfigError, ManifestMismatchError, ParityError
from rlinf.models import get_model
from rlinf.models.config import LoraConfig, ModelConfig
from rlinf.optim.reference import Reference
from rlinf.preflight.conditions import build_manifest
from rlinf.preflight.validation import validate
from rlinf.types import Observation

MLP = {"state_dim": 5, "hidden_sizes": [16, 8]}
CNN = {**MLP, "image_size": 36, "feature_dim": 8}
RUN = [
    "model=mlp", "env=tabletop", "env.tasks=[reach]", "env.cameras=[]", "env.max_episode_steps=8", "rollout.num_envs=4",
    "rollout.num_chunks=8", "trainer.minibatch_size=16", "evaluation.num_episodes=2", "evaluation.num_envs=2",
    "evaluation.num_videos_per_task=0", "evaluation.probe=false", "tracking.tensorboard=false", "tracking.progress=false",
    "cluster.num_threads=1", "trainer.max_steps=2", "model.init_config.normalize_state=true",
]  # fmt: skip


def recorded(seed=0, num_steps=40, num_envs=3, width=2, offset=0.0):
    generator = np.random.default_rng(seed)
    return torch.from_numpy(
        generator.normal(offset, [0.1, 30.0][:width], (num_steps, num_envs, width)).astype(np.float32)
    )


def of_numpy(rows):
    """Return mean and variance of all rows and of ``FIRST_COUNT`` rows of mean 0 and variance 1, in two passes."""
    total = FIRST_COUNT + len(rows)
    mean = rows.sum(0) / total
    return mean, (FIRST_COUNT * (1 + mean**2) + ((rows - mean) ** 2).sum(0)) / total


@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_moments_of_several_rollouts_are_those_of_all_their_rows(offset):
    moments, rows = RunningMoments(2), []
    for seed in range(3):
        values = recorded(seed, offset=offset)
        mask = torch.rand(values.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.7
        moments.update(torch.where(mask.unsqueeze(-1), values, torch.nan), mask)  # what is left out need not be finite
        rows.append(values[mask].double().numpy())
    mean, var = of_numpy(np.concatenate(rows))
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(moments.var, var, rtol=1e-9)
    assert moments.count.item() == pytest.approx(FIRST_COUNT + sum(map(len, rows)))
    before = copy.deepcopy(moments.state_dict())
    moments.update(values, torch.zeros_like(mask))
    assert all(torch.equal(tensor, before[name]) for name, tensor in moments.state_dict().items()), "no row, no change"
    moments.update(values, torch.ones_like(mask))
    assert not np.allclose(moments.var, var, rtol=1e-9), "control"


def test_ranks_that_share_the_envs_have_the_bits_of_one(monkeypatch):
    values, mask, local = recorded(num_envs=4), torch.rand(40, 4) < 0.7, threading.local()

    def moments_of(group):
        local.group, moments = group, RunningMoments(2)
        columns = slice(4 // group.count * group.rank, 4 // group.count * (group.rank + 1))
        for _ in range(2):
            moments.update(values[:, columns], mask[:, columns])
        return moments.state_dict()

    def gathered(own):
        return torch.cat(local.group.gather(lambda: own)).cumsum(0)[-1]

    monkeypatch.setattr(running_moments, "sum_env_groups", gathered)
    found = [moments for ranks in (1, 2, 4) for moments in on_threads(ranks, moments_of)]
    assert all(torch.equal(each[name], found[0][name]) for each in found for name in each)
    monkeypatch.setattr(running_moments, "sum_env_groups", lambda own: own.cumsum(0)[-1])
    first, second = on_threads(2, moments_of)
    assert not torch.equal(first["mean"], second["mean"]), "control: ranks that do not tell each other"


class Recorded(gymnasium.Env):
    """An env that plays recorded observations, rewards and ends."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, observations, rewards, ends):
        self.observations, self.rewards, self.ends, self.t = observations, rewards, ends, 0

    def reset(self, seed=None, options=None):
        return self.observations[self.t], {}

    def step(self, action):
        self.t += 1
        return self.observations[self.t], self.rewards[self.t - 1], bool(self.ends[self.t - 1]), False, {}


def played_by_sb3(observations, rewards, ends, gamma):
    """Return ``VecNormalize`` after a rollout, and the moments of the states that a policy has read in it."""
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    num_steps, num_envs = rewards.shape
    last = np.concatenate([observations, observations[-1:]])
    envs = [lambda b=b: Recorded(last[:, b], rewards[:, b], ends[:, b]) for b in range(num_envs)]
    env = vec_env.VecNormalize(vec_env.DummyVecEnv(envs), gamma=gamma)
    env.reset()
    for _ in range(num_steps):
        read = copy.deepcopy(env.obs_rms)
        env.step(np.zeros((num_envs, 1)))
    return env, read


def test_states_and_returns_have_the_moments_of_vec_normalize():
    observations, gamma = recorded(3).numpy(), 0.9
    generator = np.random.default_rng(1)
    rewards, ends = generator.normal(1, 5, (40, 3)).astype(np.float32), generator.random((40, 3)) < 0.15
    env, read = played_by_sb3(observations, rewards, ends, gamma)
    mask, states = torch.ones(40, 3, dtype=torch.bool), RunningMoments(2)
    states.update(torch.from_numpy(observations), mask)
    np.testing.assert_allclose(states.mean, read.mean, rtol=1e-6)  # SB3 has means of float32 rows
    np.testing.assert_allclose(states.var, read.var, rtol=1e-5)
    assert states.count.item() == pytest.approx(read.count)
    env.obs_rms = read
    rows = np.float32([[0.3, -5.0], [100.0, 7.0]])
    np.testing.assert_allclose(states.normalize(torch.from_numpy(rows)), env.normalize_obs(rows), rtol=1e-5)
    assert states.normalize(torch.tensor([[100.0, -1e6]])).tolist() == [[10.0, -10.0]], "cut at 10"

    ids = torch.from_numpy(np.concatenate([np.zeros((1, 3)), ends[:-1]]).cumsum(0))
    returns = RunningMoments(1)
    returns.update(discounted_sums(torch.from_numpy(rewards), ids, gamma).unsqueeze(-1), mask)
    np.testing.assert_allclose(returns.var, env.ret_rms.var, rtol=1e-5)
    np.testing.assert_allclose(rewards / returns.std.numpy(), env.normalize_reward(rewards), rtol=1e-5)
    without = discounted_sums(torch.from_numpy(rewards), torch.zeros_like(ids), gamma)
    assert not np.isclose(without.var(correction=0), env.ret_rms.var, rtol=1e-2), "control: sums that no end resets"


def test_discounted_sums_are_those_of_each_episode():
    rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    ids = torch.tensor([[0, 1], [0, 2], [0, 2]])
    assert discounted_sums(rewards, ids, 0.5).tolist() == [[1.0, 2.0], [3.5, 4.0], [6.75, 8.0]]


def policy(kind, **config):
    torch.manual_seed(0)
    section = {"model_type": kind, "action_token_len": 2, "init_config": {**{"mlp": MLP, "cnn": CNN}[kind], **config}}
    return get_model(section).eval()


def seen(rows, state):
    image = np.random.default_rng(0).integers(0, 255, (rows, 36, 36, 3)).astype(np.uint8)
    return Observation({"front": image}, state, ["reach it"] * rows)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_a_policy_acts_on_normalised_states_wherever_it_computes(kind):
    state = np.random.default_rng(0).normal(40, 9, (6, 5)).astype(np.float32)
    normal, plain = policy(kind, normalize_state=True), policy(kind)
    for other in (copy.deepcopy(normal), plain):  # a new policy reads raw states below the cut
        near = other.preprocess(seen(6, state / 10))
        assert torch.equal(other.predict_values(**near), plain.predict_values(**near))
    normal.input_moments.update(torch.from_numpy(state).unsqueeze(1), torch.ones(6, 1, dtype=torch.bool))
    before = copy.deepcopy(normal.input_moments.state_dict())
    mean, var = of_numpy(state.astype(np.float64))
    hand = np.float32((state - mean) / np.sqrt(var + 1e-8))
    inputs, by_hand = normal.preprocess(seen(6, state)), plain.preprocess(seen(6, hand))
    acted, expected = (p.predict_action_batch(do_sample=False, **i) for p, i in ((normal, inputs), (plain, by_hand)))
    normal.train()
    scored, wanted = (p.evaluate_actions(i, acted.sequences) for p, i in ((normal, inputs), (plain, by_hand)))
    actions = torch.zeros(6, 1, 2)
    losses, cloned = (p.sft_loss(i, actions) for p, i in ((normal, inputs), (plain, by_hand)))
    near = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close((tuple(acted), tuple(scored), losses), (tuple(expected), tuple(wanted), cloned), **near)
    raw = plain.evaluate_actions(plain.preprocess(seen(6, state)), acted.sequences)
    assert (raw.values - wanted.values).abs().max() > 1e-2, "control"
    after = normal.input_moments.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "acting and learning count nothing"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_folder_keeps_the_moments_in_float64(tmp_path, precision):
    model = policy("mlp", normalize_state=True)
    model.input_moments.merge(torch.full((5,), 1 / 3), torch.full((5,), 7.0), 1e9)
    model.save_pretrained(tmp_path)
    read = get_model(ModelConfig(model_type="mlp", model_path=str(tmp_path), precision=precision))
    assert all(torch.equal(read.state_dict()[name], t) for name, t in model.state_dict().items() if "moments" in name)
    assert read.input_moments.mean.dtype == torch.float64 and read.input_moments.mean[0] != 0


def test_adapters_bring_the_moments_with_them(tmp_path):
    lora = pytest.importorskip("rlinf.models.lora")
    settings, base = LoraConfig(rank=2, alpha=2), policy("mlp", normalize_state=True)
    trained = lora.apply_lora(copy.deepcopy(base), settings)
    trained.input_moments.merge(torch.ones(5), torch.ones(5), 3.0)
    lora.save_adapter(trained, tmp_path)
    read = lora.apply_lora(base, settings, str(tmp_path))
    assert torch.equal(read.input_moments.mean, trained.input_moments.mean) and read.input_moments.mean[0] != 0


def test_the_policy_of_a_former_moment_has_the_moments_of_then():
    model = policy("mlp", normalize_state=True)
    former = Reference(model)
    model.input_moments.merge(torch.ones(5), torch.ones(5), 3.0)
    now = model.input_moments.mean.clone()
    with former.in_place():
        assert not model.input_moments.mean.any()
    assert torch.equal(model.input_moments.mean, now) and now.all()


def test_moments_are_counted_after_the_update_and_scored_as_played(tmp_path, monkeypatch):
    run = build(run_config(tmp_path, *RUN, "algorithm.scale_rewards=true"))
    trainer, taken, scales = run.rl, [], []
    collect, moments = trainer.rollouts.collect, trainer.model.input_moments
    advantages = trainer.algorithm.compute_advantages

    def noted(*arguments):
        taken.append((moments.count.item(), collect(*arguments)))
        raw = taken[-1][1].action_rewards.clone()
        scales.append(raw)
        return taken[-1][1]

    def checked(batch):
        assert moments.count.item() == taken[-1][0], "they stay until the rollout has been learnt from"
        (std,) = trainer.return_moments.std.tolist()
        torch.testing.assert_close(batch.action_rewards, (scales[-1] / std).clamp(-10, 10))
        return advantages(batch)

    monkeypatch.setattr(trainer.rollouts, "collect", noted)
    monkeypatch.setattr(trainer.algorithm, "compute_advantages", checked)
    run.execute()
    rows = [batch.observation.state[batch.loss_mask.flatten().numpy()] for _, batch in taken]
    assert [count for count, _ in taken] == [pytest.approx(FIRST_COUNT), pytest.approx(FIRST_COUNT + len(rows[0]))]
    mean, var = of_numpy(np.concatenate(rows).astype(np.float64))
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(moments.var, var, rtol=1e-7, atol=1e-12)
    manifest = build_manifest(trainer.parts.config, trainer.model, policy_version=0)
    assert manifest.normalization["state"] == {"name": "tabletop", "state": "full"}
    # a new run in another env is rejected, unless the difference is accepted by name
    other = run_config(tmp_path / "other", *RUN, "env.state=proprio")
    other = replace(other, model=replace(other.model, init_config={}))
    found = tmp_path / "checkpoints" / "rl_000002"
    with pytest.raises(
        ManifestMismatchError, match=r"normalization\.state\.state: saved \"full\", present \"proprio\""
    ):
        open_checkpoint(found, other, ["env", "precision", "lora", "renderer"])
    opened = open_checkpoint(found, other, ["env", "normalization"])
    assert torch.equal(opened.policy.input_moments.mean, moments.mean)


def test_a_rollout_that_was_played_ahead_is_compared_at_the_moments_of_then(tmp_path):
    ahead = ["rollout.worker_processes=1", "cluster.max_staleness=1", "algorithm.tis_cap=2.0", "trainer.max_steps=3"]
    run = build(run_config(tmp_path, *RUN, *ahead, "algorithm.critic_warmup_steps=0"))
    run.execute()  # the gate stops it otherwise
    assert run.rl.model.input_moments.count.item() == pytest.approx(3 * 32 + FIRST_COUNT)


def test_control_moments_that_change_before_a_rollout_is_scored_are_seen_by_the_gate(tmp_path, monkeypatch):
    run = build(run_config(tmp_path, *RUN, "algorithm.critic_warmup_steps=0"))
    collect = run.rl.rollouts.collect

    def too_early(*arguments):
        batch = collect(*arguments)
        run.rl._count_states(batch, batch.loss_mask, 1)
        return batch

    monkeypatch.setattr(run.rl.rollouts, "collect", too_early)
    with pytest.raises(ParityError):
        run.execute()


@pytest.mark.parametrize(
    "words, named",
    [
        (["model=cnn", "env.cameras=[front]"], "state_dim=0"),
        (["model=openvla_tiny", "env.cameras=[front]"], "normalize_state"),
        (["sft.max_steps=5"], "sft.max_steps=5"),
        (["algorithm=sac"], "algorithm.name=sac"),
        (["model.init_config.activation=gelu"], "activation=tanh"),
    ],
)
def test_a_state_that_cannot_be_normalised_is_refused_by_name(tmp_path, words, named):
    with pytest.raises(ConfigError, match=named):
        validate(run_config(tmp_path, *RUN, *words))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_policy_of_stable_baselines3_can_be_configured(activation):
    torch_layers = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}
    common = pytest.importorskip("stable_baselines3.common.policies")
    box = gymnasium.spaces.Box(-1, 1, (5,), np.float32)
    actions = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    theirs = common.ActorCriticPolicy(box, actions, lambda _: 3e-4, activation_fn=torch_layers[activation])
    ours = policy("mlp", hidden_sizes=[64, 64], initial_log_std=0.0, value_gain=1.0, activation=activation)
    towers = theirs.mlp_extractor
    pairs = [
        (ours.policy, [*towers.policy_net, theirs.action_net]),
        (ours.value_head, [*towers.value_net, theirs.value_net]),
    ]
    for own, other in pairs:
        assert [type(layer) for layer in own] == [type(layer) for layer in other]
        for mine, layer in zip(own, other, strict=True):
            if isinstance(layer, torch.nn.Linear):  # orthogonal matrices have equal singular values, which are the gain
                gains = [torch.linalg.svdvals(each.weight.detach()) for each in (mine, layer)]
                torch.testing.assert_close(*gains)
                assert mine.weight.shape == layer.weight.shape and not mine.bias.any() and not layer.bias.any()
                mine.load_state_dict(layer.state_dict())
    assert torch.equal(ours.log_std, theirs.log_std)
    state = torch.randn(4, 5)
    values, logprobs, entropy = theirs.evaluate_actions(state, torch.zeros(4, 2))
    found = ours.evaluate_actions({"state": state}, torch.zeros(4, 2))
    torch.testing.assert_close(
        (found.values, found.logprobs.sum(1), found.entropy.sum(1)), (values.flatten(), logprobs, entropy)
    )
    default = torch.linalg.svdvals(policy("mlp").value_head[-1].weight.detach())
    torch.testing.assert_close(default, torch.tensor([math.sqrt(2)])), "as before"
