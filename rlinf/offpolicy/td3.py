"""Twin delayed deep deterministic policy gradients of a head (Fujimoto et al. 2018)."""

from __future__ import annotations

import copy
from typing import ClassVar

from torch import Tensor, nn

from rlinf.algorithms.offpolicy_config import TD3Config
from rlinf.models.heads.base import Head
from rlinf.offpolicy.learner import OffPolicyLearner, share_at_bound
from rlinf.offpolicy.replay import Batch


class TD3(OffPolicyLearner):
    """``-mean Q`` for the head, which explores with noise of a fixed deviation; clipped noise smooths the target."""

    config_class: ClassVar[type[TD3Config]] = TD3Config
    config: TD3Config

    def __init__(self, config: TD3Config, head: Head, seed: int) -> None:
        super().__init__(config, head, seed)
        self.target_head = head
        if config.target_policy:
            self.target_head = copy.deepcopy(head).requires_grad_(False)
            self._slow += self.target_head.network.parameters()
            self._live += self.own_parameters()

    def _modules(self) -> dict[str, nn.Module]:
        more = {} if self.target_head is self.head else {"target_head": self.target_head.network}
        return super()._modules() | more

    @classmethod
    def noise_std(cls, config: TD3Config) -> float | None:
        return config.noise_std

    def head_is_trained(self) -> bool:
        return super().head_is_trained() and self.num_updates % self.config.actor_every == 0

    def next_actions(self, batch: Batch) -> tuple[Tensor, None]:
        config, noise = self.config, self.normal_for_options(len(batch.actions))
        smoothing = (config.target_noise_std * noise).clamp(-config.target_noise_clip, config.target_noise_clip)
        encoder = self.head.encoder if self.target_head is self.head else self.target_encoder
        features = encoder(batch.next_features)
        return self.target_head.options(
            features, batch.next_base, smoothing / config.noise_std
        ), None  # a head multiplies by it

    def head_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        base = self.head.trained_on(batch.base, self.generator)
        r = self.head.mode(batch.features, base)
        actions = self.head.compose(base, r)
        values = self.values(batch.features, batch.base, actions)
        loss = (self.head.penalty(batch.base, actions) - values).mean()
        return loss, {"at_bound": share_at_bound(r), "correction": r.detach().abs().mean()}
