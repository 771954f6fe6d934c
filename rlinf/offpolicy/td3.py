"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018)."""

import copy
from typing import ClassVar

from torch import Tensor, nn

from rlinf.algorithms.offpolicy_config import TD3Config
from rlinf.models.actors.base import Actor
from rlinf.offpolicy.learner import OffPolicyLearner, action_saturation
from rlinf.offpolicy.replay import Batch


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
