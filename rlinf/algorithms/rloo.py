"""REINFORCE with a leave-one-out baseline: the mean return of the remaining episodes in the group."""

from typing import ClassVar

from torch import Tensor

from rlinf.algorithms.advantages import leave_one_out_advantages
from rlinf.algorithms.config import RLOOConfig
from rlinf.algorithms.groups import GroupAlgorithm


class RLOO(GroupAlgorithm):
    """RLOO (Ahmadian et al. 2024): ``A_i = R_i - 1 / (n - 1) sum_{j != i} R_j`` for every call of episode ``i``.

    ``R_i`` is the undiscounted return. The loss is PPO's clipped surrogate, whose gradient is REINFORCE's in a rollout's first minibatch.
    ``Algorithm.loss`` adds the KL penalty to the loss, as for GRPO. The paper instead subtracts it from ``R_i``, but returns in a group
    would then always differ, and groups without a learning signal could no longer be recognised.
    """

    config_class: ClassVar[type[RLOOConfig]] = RLOOConfig
    config: RLOOConfig

    def group_advantages(self, returns: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        return leave_one_out_advantages(returns, group_ids)
