"""PPO next to Stable-Baselines3: one recorded rollout, equal weights, 100 updates, in float64."""

import gymnasium
import numpy as np
import pytest
import torch

from rlinf.algorithms.config import PPOConfig
from rlinf.algorithms.ppo import PPO
from rlinf.config.presets import PRESETS
from rlinf.config.training import TrainerConfig
from rlinf.models.embodiment.mlp_action_model import MLPConfig, MLPForRLActionPrediction
from rlinf.training.train_worker import Minibatch, MinibatchPlan, TrainWorker
from rlinf.types import Observation, RolloutBatch

sb3 = pytest.importorskip("stable_baselines3", reason="needs stable-baselines3, which the extra dev installs")
from stable_baselines3.common import logger, policies  # noqa: E402

F, A, B, T, WIDTH, EPOCHS, MINIBATCH = 5, 2, 4, 40, 16, 20, 32
UPDATES = EPOCHS * T * B // MINIBATCH
OTHERS = {
    "trainer.learning_rate": 3e-3,
    "trainer.value_learning_rate": 3e-3,
    "trainer.minibatch_size": MINIBATCH,
    "algorithm.update_epochs": EPOCHS,
    "algorithm.entropy_coef": 0.02,
}
"""Numbers that both get; with this rate, ratios leave the clip range, and gradients are clipped."""


class Spaces(gymnasium.Env):
    """An env of which only the spaces are read."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (F,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (A,), np.float32)


def section(values: dict, name: str) -> dict:
    return {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}


def policy() -> MLPForRLActionPrediction:
    statistics = {name: [end] * A for name, end in (("q01", -1.0), ("q99", 1.0), ("min", -1.0), ("max", 1.0))}
    torch.manual_seed(0)
    stats = {"any": {"action": statistics | {"mask": [True] * A}}}
    config = MLPConfig(state_dim=F, hidden_sizes=[WIDTH, WIDTH], initial_log_std=-0.3, norm_stats=stats)
    return MLPForRLActionPrediction(config, action_dim=A).double()


def recorded(model: MLPForRLActionPrediction) -> tuple[RolloutBatch, dict[str, np.ndarray]]:
    """Return a rollout with terminations and truncations, and the values that Stable-Baselines3 is told of it."""
    draw = np.random.default_rng(1)
    # Numbers that float32 holds: their buffer gives actions as such.
    seen, final = draw.normal(size=(2, T + 1, B, F)).astype(np.float32).astype(np.float64)
    actions, rewards = draw.normal(size=(T, B, A)).astype(np.float32), draw.normal(size=(T, B)) + 1
    terminated = draw.random((T, B)) < 0.06
    truncated = (draw.random((T, B)) < 0.06) & ~terminated
    terminated[-1], truncated[-1] = [True, False, False, False], [False, True, False, False]

    def values_of(states: np.ndarray) -> torch.Tensor:
        return model.evaluate_actions({"state": torch.from_numpy(states.reshape(-1, F))}, torch.zeros(1, A)).values

    with torch.no_grad():
        tokens = torch.from_numpy(actions).flatten(0, 1).double()
        scored = model.evaluate_actions({"state": torch.from_numpy(seen[:-1].reshape(-1, F))}, tokens)
        of_final, following = values_of(final[1:]).view(T, B), values_of(seen[-1])
    bootstrap = torch.where(torch.from_numpy(truncated), of_final, 0.0)
    bootstrap[-1] = torch.where(torch.from_numpy(terminated[-1] | truncated[-1]), bootstrap[-1], following)
    yes = torch.ones(T, B, dtype=torch.bool)
    zeros = torch.zeros(T, B, dtype=torch.int64)
    batch = RolloutBatch(
        observation=Observation({}, seen[:-1].reshape(-1, F), [""] * T * B), action_tokens=tokens.view(T, B, A),
        rollout_logprobs=scored.logprobs.view(T, B, A), action_rewards=torch.from_numpy(rewards).unsqueeze(-1),
        action_mask=yes.unsqueeze(-1), loss_mask=yes, terminated=torch.from_numpy(terminated),
        truncated=torch.from_numpy(truncated), bootstrap_values=bootstrap, group_ids=zeros, episode_ids=zeros,
        policy_version=zeros,
    )  # fmt: skip
    batch.old_logprobs, batch.values = batch.rollout_logprobs, scored.values.view(T, B)
    told = {"seen": seen[:-1], "actions": actions, "rewards": rewards + 0.99 * np.where(truncated, of_final, 0.0)}
    return batch, told | {"done": terminated | truncated, "following": following.numpy()}


def their_model(told: dict, batch: RolloutBatch, ours: MLPForRLActionPrediction, clip_range: float):
    """Return their PPO with our weights and the recorded rollout."""
    settings = OTHERS | {"trainer.max_grad_norm": 0.5}
    model = sb3.PPO(
        "MlpPolicy", sb3.common.vec_env.DummyVecEnv([Spaces] * B), n_steps=T, batch_size=MINIBATCH, n_epochs=1,
        learning_rate=settings["trainer.learning_rate"], ent_coef=settings["algorithm.entropy_coef"], device="cpu",
        clip_range=clip_range, policy_kwargs={"net_arch": [WIDTH, WIDTH]},
    )  # fmt: skip
    model.set_logger(logger.configure(None, []))
    model.policy.double()
    with torch.no_grad():
        for name, parameter in theirs_of(model.policy).items():
            parameter.copy_(dict(ours.named_parameters())[name])
    buffer = model.rollout_buffer
    buffer.reset()
    # Also where episodes start: their gamma * lambda would be rounded to float32 by that array.
    for name in ("observations", "rewards", "values", "log_probs", "advantages", "returns", "episode_starts"):
        setattr(buffer, name, getattr(buffer, name).astype(np.float64))
    start = np.zeros(B)
    for t in range(T):
        arguments = (told["seen"][t], told["actions"][t], told["rewards"][t], start)
        buffer.add(*arguments, batch.values[t], batch.old_logprobs[t].sum(-1))
        start = told["done"][t]
    buffer.compute_returns_and_advantage(torch.from_numpy(told["following"]), told["done"][-1])
    return model


def theirs_of(policy) -> dict[str, torch.Tensor]:
    """Return their parameters under our names."""
    found = {"log_std": policy.log_std}
    towers = {"policy": (policy.mlp_extractor.policy_net, policy.action_net)}
    towers["value_head"] = (policy.mlp_extractor.value_net, policy.value_net)
    for name, (hidden, last) in towers.items():
        for number, layer in ((0, hidden[0]), (2, hidden[2]), (4, last)):
            found |= {f"{name}.{number}.{key}": parameter for key, parameter in layer.named_parameters()}
    return found


def noted(step, parameters: dict[str, torch.Tensor], notes: dict):
    """Return the step of an optimiser that first notes the clipped gradients, the first time."""

    def note(*args, **kwargs):
        for name, parameter in parameters.items():
            notes.setdefault(f"gradient {name}", parameter.grad.clone())
        return step(*args, **kwargs)

    return note


def run_both(monkeypatch, num_updates: int, share: float = 1.0, **changed) -> dict[str, tuple]:
    """Make updates in both libraries; return advantages, metrics, gradients and weights: ours and theirs."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # so that no number is rounded to float32
    monkeypatch.setattr(policies, "preprocess_obs", lambda obs, *args, **kwargs: obs)
    settings = PRESETS["sb3"]["ppo"] | OTHERS | {key.replace("__", "."): value for key, value in changed.items()}
    model, ours, theirs = policy(), {}, {}
    batch, told = recorded(model)
    other = their_model(told, batch, model, 0.2 * share)
    algorithm = PPO(PPOConfig(**section(settings, "algorithm")))
    algorithm.clip_fraction = share
    worker = TrainWorker(
        model, TrainerConfig(**section(settings, "trainer")), temperature=1.0, micro_batch_size=MINIBATCH // 2 + 3,
        val_micro_batch_size=T * B, precision="fp32",
    )  # fmt: skip
    algorithm.compute_advantages(batch)
    ours |= {"returns": batch.returns, "values": batch.values}
    theirs |= {name: torch.from_numpy(getattr(other.rollout_buffer, name)) for name in ours}
    if settings["algorithm.normalize_over"] == "minibatch":
        ours["advantages"] = batch.advantages[..., 0]
        theirs["advantages"] = torch.from_numpy(other.rollout_buffer.advantages)
    flat, buffer = batch.flatten(), other.rollout_buffer
    worker.train_step.step = noted(worker.train_step.step, dict(model.named_parameters()), ours)
    other.policy.optimizer.step = noted(other.policy.optimizer.step, theirs_of(other.policy), theirs)
    clip = torch.nn.utils.clip_grad_norm_
    norms = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: norms.append(clip(*args)) or norms[-1])
    next(iter(buffer.get(1)))  # their buffer flattens itself, the envs first
    plan = MinibatchPlan(batch.loss_mask, range(B), MINIBATCH, seed=0)
    parts: list[Minibatch] = [part for epoch in range(EPOCHS) for part in plan.epoch(epoch)][:num_updates]
    for part in parts:
        found = worker.update(flat, part, algorithm, step=0)
        rows = (part.rows % B * T + part.rows // B).numpy()
        monkeypatch.setattr(buffer, "get", lambda size, rows=rows: [buffer._get_samples(rows)])
        other.train()
        told_of = other.logger.name_to_value
        for name, mine, yours in (
            ("policy loss", found["policy_loss"], told_of["train/policy_gradient_loss"]),
            ("value loss", 2 * found["value_loss"], told_of["train/value_loss"]),  # ours is half of the squared error
            ("entropy", found["entropy"], -told_of["train/entropy_loss"]),
            ("clip fraction", found["outside_fraction"], told_of["train/clip_fraction"]),
            ("approx_kl", found["approx_kl"], told_of["train/approx_kl"]),
            ("loss", found["loss"], told_of["train/loss"]),
            ("norm", found["grad_norm"], norms[-1]),
        ):
            ours.setdefault(name, []).append(float(mine))
            theirs.setdefault(name, []).append(float(yours))
        other.logger.name_to_value.clear()
        other.logger.name_to_count.clear()
    ours |= {f"weights {name}": each.detach() for name, each in model.named_parameters()}
    theirs |= {f"weights {name}": each.detach() for name, each in theirs_of(other.policy).items()}
    assert ours.keys() == theirs.keys()
    return {name: tuple(torch.as_tensor(each[name], dtype=torch.float64) for each in (ours, theirs)) for name in ours}


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_advantages_losses_gradients_and_weights_are_theirs(share, monkeypatch):
    found = run_both(monkeypatch, UPDATES, share)
    assert UPDATES == 100 and sum(name.startswith("gradient") for name in found) == 13
    assert found["norm"][1].min() > 0.5 and found["clip fraction"][1].max() > 0.05  # both are clipped
    for name, (ours, theirs) in found.items():
        limit = 1e-5 if name.startswith("weights") else 1e-6
        assert gap(ours, theirs) < limit, f"{name}: {gap(ours, theirs)}"


@pytest.mark.parametrize(
    "changed",
    [
        {"algorithm__value_coef": 0.5}, {"algorithm__normalize_over": "rollout"}, {"algorithm__critic_warmup_steps": 3},
        {"algorithm__entropy_level": "token"}, {"trainer__clip_together": False}, {"trainer__adam_eps": 1e-8},
        {"trainer__adam_beta2": 0.95}, {"trainer__value_learning_rate": 1e-3}, {"trainer__max_grad_norm": 1.0},
        {"algorithm__gamma": 0.97},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_each_difference_by_choice_is_seen(changed, monkeypatch):
    if "algorithm__critic_warmup_steps" in changed:
        with pytest.raises(AttributeError, match="clone"):  # a policy in warm-up has no gradient
            run_both(monkeypatch, 3, **changed)
        return
    assert max(gap(*pair) for pair in run_both(monkeypatch, 3, **changed).values()) > 1e-5
