"""REINFORCE with a leave-one-out baseline: the mean return of the group's remaining episodes."""

from typing import ClassVar

from torch import Tensor

from rlinf.algorithms.advantages import leave_one_out_advantages
from rlinf.algorithms.config import RLOOConfig
from rlinf.algorithms.groups import GroupAlgorithm


class RLOO(GroupAlgorithm):
    """RLOO (Ahmadian et al. 2024): ``A_i = R_i - 1 / (n - 1) sum_{j != i} R_j`` for every call of episode ``i``.

    ``R_i`` is the undiscounted return. The surrogate is PPO's; in the first minibatch of a rollout its gradient is REINFORCE's.
    The KL penalty is a term of the loss, as in GRPO: subtracted from ``R_i``, as in the paper, it would leave no group with equal returns.
    """

    config_class: ClassVar[type[RLOOConfig]] = RLOOConfig
    config: RLOOConfig

    def group_advantages(self, returns: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        return leave_one_out_advantages(returns, group_ids)
