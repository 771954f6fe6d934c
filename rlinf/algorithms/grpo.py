"""Group relative policy optimisation: no value function, episodes of one initial state compared with each other."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rlinf.algorithms.advantages import group_advantages
from rlinf.algorithms.config import GRPOConfig
from rlinf.algorithms.groups import GroupAlgorithm


class GRPO(GroupAlgorithm):
    """GRPO (Shao et al. 2024) on episode returns; one episode per column of the rollout, grouped by ``EpisodeSpec``."""

    config_class: ClassVar[type[GRPOConfig]] = GRPOConfig
    config: GRPOConfig

    def group_advantages(self, returns: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        return group_advantages(returns, group_ids, self.config.scale_by_std)
