"""Twin delayed deep deterministic policy gradients of a head (Fujimoto et al. 2018)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rlinf.algorithms.offpolicy_config import TD3Config
from rlinf.offpolicy.learner import OffPolicyLearner, share_at_bound
from rlinf.offpolicy.replay import Batch


class TD3(OffPolicyLearner):
    """``-mean Q`` for the head, which explores with noise of a fixed deviation; clipped noise smooths the target."""

    config_class: ClassVar[type[TD3Config]] = TD3Config
    config: TD3Config

    @classmethod
    def noise_std(cls, config: TD3Config) -> float | None:
        return config.noise_std

    def head_is_trained(self) -> bool:
        return super().head_is_trained() and self.num_updates % self.config.actor_every == 0

    def next_actions(self, batch: Batch) -> Tensor:
        limit = self.config.target_noise_clip
        noise = (self.config.target_noise_std * self.normal_like(batch.actions)).clamp(-limit, limit)
        r = (self.head.mode(batch.next_features, batch.next_base) + noise).clamp(-1.0, 1.0)
        return self.head.compose(batch.next_base, r)

    def head_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        r = self.head.mode(batch.features, batch.base)
        values = self.values(batch.features, batch.base, self.head.compose(batch.base, r))
        return -values.mean(), {"at_bound": share_at_bound(r), "correction": r.detach().abs().mean()}
