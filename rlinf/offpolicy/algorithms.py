"""Soft actor-critic (Haarnoja et al. 2018), by default without entropy in the target (RLPD, Ball et al. 2023), and TD3 (Fujimoto et al. 2018)."""

import copy
import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlinf.algorithms.offpolicy_config import SACConfig, TD3Config
from rlinf.distributed.transfers import to_device
from rlinf.models.actors.base import Actor
from rlinf.offpolicy.learner import OffPolicyLearner, action_saturation
from rlinf.offpolicy.replay import Batch


class SAC(OffPolicyLearner):
    """Soft actor-critic: actor loss ``alpha log pi - mean Q``, with ``alpha`` tuned to ``target_entropy``."""

    config_class: ClassVar[type[SACConfig]] = SACConfig
    config: SACConfig

    def __init__(self, config: SACConfig, actor: Actor, seed: int) -> None:
        super().__init__(config, actor, seed)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.initial_alpha), device=self.device))
        # Use the entropy of the actor's outputs before scaling, so that the target does not depend on algorithm.actor.scale.
        self.target_entropy = -0.5 * actor.output_dim if config.target_entropy is None else config.target_entropy
        self.steps["actor"] = self._adam([*self.actor_parameters(), self.log_alpha])

    def next_actions(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        features, noise = self.actor.encoder(batch.next_features), self.normal_for_options(len(batch.actions))
        if not self.config.entropy_in_target:
            return self.actor.options(features, batch.next_base, noise), None
        r, logprobs = self.actor.sample(features, batch.next_base, noise)
        return self.actor.compose(batch.next_base, r).unsqueeze(1), -self.log_alpha.exp() * logprobs.unsqueeze(1)

    def actor_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        base = self.actor.base_for_loss(batch.base, self.generator)
        noise = to_device(torch.randn(batch.actions.shape, generator=self.generator), self.device)
        r, logprobs = self.actor.sample(batch.features, base, noise)
        actions = self.actor.compose(base, r)
        values = self.values(batch.features, batch.base, actions)
        alpha = self.log_alpha.detach().exp()
        entropy = -logprobs.detach().mean()
        alpha_loss = self.log_alpha * (entropy - self.target_entropy)
        metrics = {
            "alpha": alpha,
            "entropy": entropy,
            "action_saturation": action_saturation(r),
            "residual_norm": r.detach().abs().mean(),
        }
        loss = (alpha * logprobs - values + self.actor.penalty(batch.base, actions)).mean()
        # Add the gradient of the alpha loss, but not its value, so that a single step trains both.
        return loss + alpha_loss - alpha_loss.detach(), metrics

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {"log_alpha": self.log_alpha.detach()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        with torch.no_grad():
            self.log_alpha.copy_(state["log_alpha"])


class TD3(OffPolicyLearner):
    """TD3 with actor loss ``-mean Q``, exploration noise with fixed std, and target policy smoothing."""

    config_class: ClassVar[type[TD3Config]] = TD3Config
    config: TD3Config

    def __init__(self, config: TD3Config, actor: Actor, seed: int) -> None:
        super().__init__(config, actor, seed)
        self.target_actor = actor
        if config.target_policy:
            self.target_actor = copy.deepcopy(actor).requires_grad_(False)
            self._slow += self.target_actor.network.parameters()
            self._live += self.actor_parameters()

    def _modules(self) -> dict[str, nn.Module]:
        more = {} if self.target_actor is self.actor else {"target_actor": self.target_actor.network}
        return super()._modules() | more

    @classmethod
    def noise_std(cls, config: TD3Config) -> float | None:
        return config.noise_std

    def actor_is_trained(self) -> bool:
        return super().actor_is_trained() and self.num_updates % self.config.policy_delay == 0

    def next_actions(self, batch: Batch) -> tuple[Tensor, None]:
        config, noise = self.config, self.normal_for_options(len(batch.actions))
        smoothing = (config.target_noise_std * noise).clamp(-config.target_noise_clip, config.target_noise_clip)
        encoder = self.actor.encoder if self.target_actor is self.actor else self.target_encoder
        features = encoder(batch.next_features)
        # The actor multiplies its noise by noise_std, so the smoothing noise is divided by it.
        return self.target_actor.options(features, batch.next_base, smoothing / config.noise_std), None

    def actor_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        base = self.actor.base_for_loss(batch.base, self.generator)
        r = self.actor.mode(batch.features, base)
        actions = self.actor.compose(base, r)
        values = self.values(batch.features, batch.base, actions)
        loss = (self.actor.penalty(batch.base, actions) - values).mean()
        return loss, {"action_saturation": action_saturation(r), "residual_norm": r.detach().abs().mean()}
