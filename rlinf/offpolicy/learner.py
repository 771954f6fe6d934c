"""Common base class of SAC and TD3: critics, target critics, and the update."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rlinf.algorithms.base import AnyAlgorithm, Updates
from rlinf.algorithms.offpolicy_config import OffPolicyConfig
from rlinf.distributed.transfers import to_device
from rlinf.errors import CheckpointError, NonFiniteError
from rlinf.models.actors.base import Actor, Critics
from rlinf.offpolicy.replay import Batch, offline_bytes, replay_bytes
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.train_step import TrainStep
from rlinf.seeding import derive_seed
from rlinf.types import ClassAndConfig

if TYPE_CHECKING:
    from rlinf.cluster.rollout_workers import RolloutWorkers
    from rlinf.config.schema import RunConfig
    from rlinf.envs.base import VectorEnv
    from rlinf.offpolicy.trainer import OffPolicyTrainer
    from rlinf.training.action_trainer import TrainerContext

AT_BOUND = 0.99
"""Magnitude above which an actor output is considered saturated."""


class OffPolicyLearner(AnyAlgorithm, ABC):
    """Actor-critic learner that trains on batches of transitions."""

    config_class: ClassVar[type[OffPolicyConfig]] = OffPolicyConfig
    freezes_policy: ClassVar[bool] = True

    def __init__(self, config: OffPolicyConfig, actor: Actor, seed: int) -> None:
        self.config, self.actor = config, actor
        self.device = next(actor.parameters()).device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "critics"))
            critics = Critics(config.actor, actor.critic_input_dim, config.num_critics)
        self.critics = critics.to(self.device)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.target_encoder = copy.deepcopy(actor.encoder).requires_grad_(False)
        self.generator = torch.Generator().manual_seed(derive_seed(seed, "learner"))
        self._live: list[Tensor] = [*self.critics.parameters(), *actor.encoder.parameters()]
        self._slow: list[Tensor] = [*self.targets.parameters(), *self.target_encoder.parameters()]
        self.steps = {"actor": self._adam(self.actor_parameters()), "critics": self._adam(self._live)}
        self.num_updates = 0

    @classmethod
    def make_trainer(cls, context: TrainerContext, env: VectorEnv, workers: RolloutWorkers | None) -> OffPolicyTrainer:
        """Build the trainer, which steps envs of its own."""
        from rlinf.offpolicy.trainer import (
            make_offpolicy_trainer,  # imports this module, and evaluation and checkpoints
        )

        return make_offpolicy_trainer(cls, context)

    @classmethod
    def check(cls, config: RunConfig, policy: ClassAndConfig | None) -> None:
        from rlinf.offpolicy.checks import check_off_policy  # imports transformers

        check_off_policy(config, policy)

    @classmethod
    def updates(cls, config: Any) -> Updates:
        algorithm, rollout = config.algorithm, config.rollout
        env_steps = rollout.num_envs * rollout.num_chunks * config.model.action_chunks_len
        rate = f"{algorithm.utd_ratio:g} per env step after the first {algorithm.learning_starts:,}"
        table = {"updates": f"{rate}, {algorithm.batch_size} transitions each"}
        return Updates(int(algorithm.utd_ratio * env_steps), table)

    @classmethod
    def buffer_bytes(cls, config: Any, model: Any, call_bytes: int) -> int:
        return replay_bytes(config.algorithm, model) + offline_bytes(config.algorithm, model)

    @classmethod
    def noise_std(cls, config: Any) -> float | None:
        """Return the std of the actor's exploration noise, or None if it is learned."""
        return None

    def actor_parameters(self) -> list[nn.Parameter]:
        """Return the parameters trained by the actor loss."""
        return list(self.actor.network.parameters())

    def _adam(self, parameters: Any) -> TrainStep:
        return TrainStep(MasterAdamW(parameters, decoupled=False, weight_decay=0.0, lr=self.config.learning_rate), 0.0)

    def decay(self, factor: float) -> None:
        """Multiply the learning rate by a factor for all subsequent updates."""
        for step in self.steps.values():
            step.decay = factor

    @abstractmethod
    def next_actions(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return ``K`` candidate actions ``[B, K, A]`` for the next observations, and a bonus ``[B, 1]`` added to their value, or None."""

    @abstractmethod
    def actor_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the actor loss and metrics; ``batch.features`` must already be encoded."""

    def actor_is_trained(self) -> bool:
        """Return whether the current update trains the actor."""
        return self.num_updates >= self.config.critic_only_updates

    def target(self, batch: Batch) -> Tensor:
        """Return the target values ``[B]``: ``sum g^k r_k + g^n max over K of min over M of Q(s', a')``."""
        with torch.no_grad():
            actions, bonus = self.next_actions(batch)
            values = self.targets.option_values(self.target_encoder(batch.next_features), batch.next_base, actions)
            if self.config.num_target_critics < len(values):
                drawn = torch.randperm(len(values), generator=self.generator)[: self.config.num_target_critics]
                values = values[drawn.to(values.device)]
            smallest = values.amin(0)
            return batch.returns + batch.discounts * (smallest if bonus is None else smallest + bonus).amax(1)

    def values(self, features: Tensor, base: Tensor, actions: Tensor) -> Tensor:
        """Return the values ``[B]`` of actions ``[B, A]`` given encoded features; the actor maximises these (``actor_q``)."""
        values = self.critics(features, base[:, 0], actions)
        match self.config.actor_q:
            case "min":
                return values.amin(0)
            case "first":
                return values[0]
            case _:
                return values.mean(0)

    def update(self, batch: Batch, num_offline: int = 0) -> dict[str, Tensor]:
        """Train critics and actor on a batch and return metrics; raise NonFiniteError before the step if a loss is NaN or infinite.

        Args:
            num_offline: Number of demonstration transitions at the end of the batch; their values are reported separately.
        """
        batch = Batch(*(to_device(tensor, self.device) for tensor in vars(batch).values()))
        target = self.target(batch)
        batch = replace(batch, features=self.actor.encoder(batch.features))
        values = self.critics(batch.features, batch.base[:, 0], batch.actions)
        loss = (values - target).square().mean(1).sum()
        if self.config.critic_loss_weight != 1:
            loss = self.config.critic_loss_weight * loss
        self._step("critics", loss)
        metrics = {"critic_loss": loss.detach(), "q_mean": values.detach().mean(), "target_mean": target.mean()}
        if num_offline > 0:
            online, offline = values.detach().split([len(target) - num_offline, num_offline], 1)
            metrics |= {"q_mean_online": online.mean()} if online.numel() else {}
            metrics |= {"q_mean_offline": offline.mean()}
        # The actor loss uses detached features, so it does not train the encoder.
        if self.actor_is_trained():
            loss, more = self.actor_loss(replace(batch, features=batch.features.detach()))
            self._step("actor", loss)
            metrics |= {"policy_loss": loss.detach(), **more}
        if self.num_updates % self.config.target_update_interval == 0:
            with torch.no_grad():
                torch._foreach_lerp_(self._slow, self._live, self.config.tau)
        self.num_updates += 1
        return metrics

    def _step(self, name: str, loss: Tensor) -> None:
        step, number = self.steps[name], float(loss.detach())
        if not math.isfinite(number):
            raise NonFiniteError(
                f"The loss of the {name} is {number} at update {self.num_updates}; the step was not taken. "
                "Set a lower algorithm.learning_rate, or check the env's rewards"
            )
        parameters = step.optimizer.parameters
        # Do not use loss.backward(): the actor loss depends on the critics, which must not be trained by it.
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        step.step()

    def check_finite(self) -> None:
        """Raise NonFiniteError if a weight of the actor or the critics is NaN or infinite."""
        # Checking the loss is not enough, because a finite loss can have non-finite gradients.
        for name, module in (("actor", self.actor), ("critics", self.critics)):
            bad = [key for key, parameter in module.named_parameters() if not bool(parameter.isfinite().all())]
            if bad:
                raise NonFiniteError(
                    f"{bad[0]} of the {name} is not finite after {self.num_updates} updates, although every loss was. Resume from the "
                    "last checkpoint, and set a lower algorithm.learning_rate"
                )

    def normal_for_options(self, num_rows: int) -> Tensor:
        """Draw standard normal random numbers ``[num_rows, noise_dim]`` for the observations' candidates."""
        return to_device(torch.randn(num_rows, self.actor.noise_dim, generator=self.generator), self.device)

    def load_critics(self, critics: Critics) -> None:
        """Load the critics' weights; raise CheckpointError if their number or width differs."""
        for module in (self.critics, self.targets):
            try:
                module.load_state_dict(critics.state_dict())
            except RuntimeError as error:
                raise CheckpointError(
                    f"The policy's critics do not match: {error}. Set algorithm.num_critics={critics.num_critics}, and "
                    "algorithm.actor as in its actor.json"
                ) from error

    def _modules(self) -> dict[str, nn.Module]:
        return {"critics": self.critics, "targets": self.targets, "target_encoder": self.target_encoder}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state, excluding the actor, which is part of the policy."""
        state = {
            f"{name}.{key}": value
            for name, module in self._modules().items()
            for key, value in module.state_dict().items()
        }
        for name, step in self.steps.items():
            for index, parameter in enumerate(step.optimizer.parameters):
                for key, value in step.optimizer.state.get(parameter, {}).items():
                    state[f"{name}_optimizer.{index}.{key}"] = value
        return state | {"num_updates": torch.tensor(self.num_updates), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state_dict``."""
        for name, module in self._modules().items():
            module.load_state_dict({key: state[f"{name}.{key}"] for key in module.state_dict()})
        for name, step in self.steps.items():
            step.optimizer.state.clear()
            for index, parameter in enumerate(step.optimizer.parameters):
                prefix = f"{name}_optimizer.{index}."
                values = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
                if values:
                    step.optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in values.items()}
        self.num_updates = int(state["num_updates"])
        self.generator.set_state(state["generator"].cpu())


def action_saturation(r: Tensor) -> Tensor:
    """Return the fraction of saturated actor outputs."""
    return (r.detach().abs() > AT_BOUND).float().mean()
