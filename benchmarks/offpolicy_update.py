"""Compares a SAC update using batched critics and fused Adam with a plain implementation.

The plain update uses a separate network per critic, torch's default Adam for CPUs, and a loop over target tensors. Both sample batches
from the same buffer and train on the same numbers of rows. They alternate so that a busy machine slows both, and median update times
are compared. One thread is used unless ``--threads`` is set.

    python benchmarks/offpolicy_update.py [--updates 200] [--critics 2] [--hidden-size 128] [--batch-size 128] [--threads 1]

With ``--sb3-steps 2000``, SAC and TD3 are also compared with Stable-Baselines3 on Pendulum-v1, trained from scratch with one env, one
update per env step, and equal networks and batches. Runs alternate, and only the final env steps, which have updates, are timed.

    python benchmarks/offpolicy_update.py --sb3-steps 2000 [--rounds 3]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time

import torch
from torch import Tensor, nn

from rlinf.algorithms.offpolicy_config import ActorConfig, SACConfig
from rlinf.models.actors.base import perceptron
from rlinf.models.actors.kinds import ResidualActor
from rlinf.offpolicy.algorithms import SAC
from rlinf.offpolicy.replay import Batch, ReplayBuffer

FEATURES, NUMBERS, ENVS = 256, 2, 32


class PlainSAC:
    """A textbook implementation of the ``SAC`` update."""

    def __init__(self, config: SACConfig) -> None:
        self.config, self.actor = config, ResidualActor(config.actor, FEATURES, NUMBERS)
        widths = [FEATURES + 2 * NUMBERS] + [config.actor.hidden_size] * config.actor.num_layers
        self.critics = nn.ModuleList(perceptron(widths, 1) for _ in range(config.num_critics))
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = nn.Parameter(torch.tensor(config.initial_alpha).log())
        parts = (self.actor.parameters(), self.critics.parameters(), [self.log_alpha])
        self.optimizers = [torch.optim.Adam(list(part), lr=config.learning_rate) for part in parts]

    def values(self, critics: nn.ModuleList, features: Tensor, base: Tensor, actions: Tensor) -> Tensor:
        return torch.stack([critic(torch.cat([features, base[:, 0], actions], 1))[:, 0] for critic in critics])

    def act(self, features: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        r, logprobs = self.actor.sample(features, base, torch.randn(len(features), NUMBERS))
        return self.actor.compose(base, r), logprobs

    def update(self, batch: Batch) -> None:
        with torch.no_grad():
            actions, _ = self.act(batch.next_features, batch.next_base)
            after = self.values(self.targets, batch.next_features, batch.next_base, actions).amin(0)
            target = batch.returns + batch.discounts * after
        found = self.values(self.critics, batch.features, batch.base, batch.actions)
        self.step(1, (found - target).square().mean(1).sum())
        actions, logprobs = self.act(batch.features, batch.base)
        alpha, entropy = self.log_alpha.detach().exp(), -logprobs.detach().mean()
        value = self.values(self.critics, batch.features, batch.base, actions).mean(0)
        self.step(0, (alpha * logprobs - value).mean())
        self.step(2, self.log_alpha * (entropy + 0.5 * NUMBERS))
        with torch.no_grad():
            for slow, live in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(live, self.config.tau)

    def step(self, number: int, loss: Tensor) -> None:
        self.optimizers[number].zero_grad()
        loss.backward()
        self.optimizers[number].step()


def filled_buffer(num_calls: int = 100) -> ReplayBuffer:
    """Return a buffer of random transitions."""
    sizes = {"feature_dim": FEATURES, "num_candidates": 1, "output_dim": NUMBERS, "chunk_len": 1}
    buffer, envs = ReplayBuffer(ENVS * (num_calls + 1), ENVS, seed=0, **sizes), torch.arange(ENVS)
    for _ in range(num_calls):
        buffer.observe(envs, torch.randn(ENVS, FEATURES), torch.rand(ENVS, 1, NUMBERS))
        done = torch.rand(ENVS) < 0.1
        buffer.act(envs, torch.rand(ENVS, NUMBERS), done[:, None].float(), torch.ones(ENVS, 1, dtype=torch.bool), done)
    return buffer


def our_steps_per_second(name: str, steps: int) -> float:
    """Train from scratch with the standard trainer; return env steps per second for iterations with updates."""
    from rlinf.commands.train import train
    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config
    from rlinf.tracking.tracker import read_metrics

    words = [
        "model=mlp", "model.init_config.state_dim=3", "model.action_token_len=1", "env=gymnasium", "env.num_processes=0",
        "env.new_each_episode=false", f"algorithm={name}", "algorithm.utd_ratio=1", "algorithm.learning_starts=200",
        "algorithm.batch_size=256", "algorithm.gamma=0.99", "algorithm.learning_rate=3e-4", "algorithm.tau=0.005",
        "algorithm.actor.hidden_size=256", "algorithm.actor.layer_norm=false", "rollout.num_envs=1", f"trainer.max_steps={1 + steps // 200}",
        "evaluation.num_episodes=1", "evaluation.num_videos_per_task=0", "tracking.tensorboard=false", "tracking.progress=false",
        "cluster.num_threads=1",
    ]  # fmt: skip
    if name == "td3":
        words += ["algorithm.target_policy=true", "algorithm.target_update_interval=2", "algorithm.actor_q=first"]
    else:
        words += ["algorithm.entropy_in_target=true", "algorithm.actor_q=min"]
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(compose_config([*words, f"output_dir={folder}"]))
        train(config)
        rates = [line["throughput/env_steps_per_s"] for line in read_metrics(folder) if "train/critic_loss" in line]
    return len(rates) / sum(1 / rate for rate in rates)


def their_steps_per_second(name: str, steps: int) -> float:
    """Train the same task with Stable-Baselines3."""
    import stable_baselines3

    settings = {
        "policy_kwargs": {"net_arch": [256, 256]},
        "batch_size": 256,
        "learning_rate": 3e-4,
        "buffer_size": 100_000,
    }
    settings |= {"learning_starts": 200, "train_freq": 1, "gradient_steps": 1, "device": "cpu", "seed": 0}
    model = getattr(stable_baselines3, name.upper())("MlpPolicy", "Pendulum-v1", **settings)
    model.learn(200)
    start = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    return steps / (time.perf_counter() - start)


def against_sb3(steps: int, rounds: int) -> None:
    """Print the median env steps per second of both libraries over several rounds."""
    for name in ("sac", "td3"):
        pairs = [(our_steps_per_second(name, steps), their_steps_per_second(name, steps)) for _ in range(rounds)]
        ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratios = [one / other for one, other in pairs]
        result = {
            "name": f"offpolicy_steps_{name}",
            "ours": ours,
            "sb3": theirs,
            "unit": "env steps/s",
            "ratio": statistics.median(ratios),
        }
        print(json.dumps(result | {"ratios": ratios, "steps": steps}), flush=True)


def main() -> None:
    """Measure both updates and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {
        "updates": 200,
        "critics": 2,
        "hidden-size": 128,
        "batch-size": 128,
        "threads": 1,
        "sb3-steps": 0,
        "rounds": 3,
    }
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    actor = ActorConfig(hidden_size=options.hidden_size)
    config = SACConfig(actor=actor, num_critics=options.critics, batch_size=options.batch_size)
    ours, peer = SAC(config, ResidualActor(actor, FEATURES, NUMBERS), seed=0), PlainSAC(config)
    buffer, seconds = filled_buffer(), {"ours": [], "peer": []}
    for number in range(options.updates + 10):
        for name, learner in (("ours", ours), ("peer", peer)):
            start = time.perf_counter()
            learner.update(buffer.sample(config.batch_size, config.gamma))
            if number >= 10:  # the first updates allocate memory
                seconds[name].append(time.perf_counter() - start)
    found = {name: 1000 * statistics.median(each) for name, each in seconds.items()}
    result = {"name": "offpolicy_update", **found, "unit": "ms", "ratio": found["peer"] / found["ours"]}
    result |= {"fastest_ours": 1000 * min(seconds["ours"]), "sizes": vars(options)}
    print(json.dumps(result), flush=True)
    if options.sb3_steps:
        against_sb3(options.sb3_steps, options.rounds)


if __name__ == "__main__":
    main()
