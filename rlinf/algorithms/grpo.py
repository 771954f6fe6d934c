"""Group relative policy optimisation, which compares episodes from the same initial state instead of learning a value function."""

from typing import ClassVar

from torch import Tensor

from rlinf.algorithms.advantages import group_advantages
from rlinf.algorithms.config import GRPOConfig
from rlinf.algorithms.groups import GroupAlgorithm


class GRPO(GroupAlgorithm):
    """GRPO (Shao et al. 2024), applied to the episode returns within each group."""

    config_class: ClassVar[type[GRPOConfig]] = GRPOConfig
    config: GRPOConfig

    def group_advantages(self, returns: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        return group_advantages(returns, group_ids, self.config.scale_by_std)
