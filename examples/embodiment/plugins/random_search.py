"""Random search of the weights, an algorithm with a trainer of its own (docs/adding_an_algorithm.md)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlinf.algorithms import register_algorithm
from rlinf.algorithms.base import AnyAlgorithm
from rlinf.algorithms.config import AnyAlgorithmConfig
from rlinf.cluster.rollouts import make_collector
from rlinf.options import option
from rlinf.training.action_trainer import ActionTrainer, Clock
from rlinf.training.rl_trainer import rollout_metrics


@dataclass
class RandomSearchConfig(AnyAlgorithmConfig):
    """Random search of the weights."""

    name: str = option("random_search", "Registered algorithm.")
    std: float = option(0.02, "Std of the change of a weight.", minimum=0)


class RandomSearch(AnyAlgorithm):
    """Keep a random change of the weights if its return is higher."""

    config_class: ClassVar[type[AnyAlgorithmConfig]] = RandomSearchConfig

    @classmethod
    def make_trainer(cls, parts, env, workers):
        policy, autocast = parts.sync.rollout_model, parts.worker.autocast
        return RandomSearchTrainer(parts, make_collector(parts.config, env, policy, autocast, workers))


class RandomSearchTrainer(ActionTrainer):
    """Rollouts of changed weights; every rank draws the same changes."""

    def __init__(self, parts, collector):
        super().__init__(parts, collector)
        self.best = torch.tensor(-math.inf, dtype=torch.float64)  # return; so the first rollout changes nothing

    def state_dict(self):
        return {"best": self.best}

    def begin(self):
        self.loop.restore(self.state_dict())
        super().begin()

    @torch.no_grad()
    def iteration(self, step):
        state, sync, clock = self.loop.state, self.sync, Clock()
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        before = [weight.clone() for weight in weights]
        if self.best > -math.inf:
            generator = torch.Generator().manual_seed(step)
            for weight in weights:
                weight += self.parts.config.algorithm.std * torch.randn(weight.shape, generator=generator)
        state.policy_version += 1
        sync.push(state.policy_version)
        batch = self.collector.result(self.collector.submit(sync.rollout_policy, step, state.policy_version, False))
        metrics = rollout_metrics(batch)
        if metrics["rollout/return_mean"] > self.best:
            self.best.fill_(metrics["rollout/return_mean"])
        else:
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
        clock.lap("rollout")
        env_steps = metrics["rollout/episode_len"] * metrics["rollout/num_episodes"]
        state.env_steps += int(env_steps)
        return metrics | {"throughput/env_steps_per_s": env_steps / clock.total()} | clock.metrics()


register_algorithm("random_search", RandomSearch)
