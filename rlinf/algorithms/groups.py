"""GRPO and RLOO, which replace the value function by comparing the returns of episodes with the same ``EpisodeSpec``."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from rlinf.algorithms.advantages import (
    episode_returns,
    group_advantages,
    leave_one_out_advantages,
    masked_mean,
    masked_normalize,
)
from rlinf.algorithms.base import Algorithm, spread_over_actions
from rlinf.algorithms.config import AlgorithmConfig, GroupConfig, GRPOConfig, RLOOConfig
from rlinf.types import RolloutBatch


class GroupAlgorithm(Algorithm):
    """Compares the episode returns within each group; each column of the rollout contains one episode."""

    config_class: ClassVar[type[AlgorithmConfig]] = GroupConfig
    needs_full_episodes: ClassVar[bool] = True
    needs_groups: ClassVar[bool] = True
    config: GroupConfig

    @abstractmethod
    def group_advantages(self, returns: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages ``[B]`` for returns ``[B]``, and a bool ``[B]`` that is True where the group's returns differ."""

    @property
    def max_resamples(self) -> int:
        return self.config.max_resamples

    def uninformative_envs(self, batch: RolloutBatch) -> Tensor:
        """Return the envs of groups whose returns are all equal, bool ``[B]``."""
        _, _, varied, _ = self._compare(batch)
        groups = batch.group_ids[0]
        return ~torch.isin(groups, groups[varied])

    def compute_advantages(self, batch: RolloutBatch) -> dict[str, float]:
        check_groups(batch)
        config = self.config
        returns, advantages, varied, known = self._compare(batch)
        batch.loss_mask = batch.loss_mask & known
        if config.drop_zero_variance_groups:
            batch.loss_mask = batch.loss_mask & varied
        batch.returns = returns.expand_as(batch.loss_mask).contiguous()
        num_actions = batch.action_rewards.shape[-1]
        batch.advantages = spread_over_actions(advantages.expand_as(batch.loss_mask), num_actions)
        if config.normalize_advantages:
            action_mask = batch.action_mask & batch.loss_mask.unsqueeze(-1)
            batch.advantages = masked_normalize(batch.advantages, action_mask)
        return {
            "rollout/zero_variance_group_fraction": masked_mean((~varied).double(), known),
            "train/return_mean": masked_mean(returns, known),
        }

    def _compare(self, batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tensors ``[B]``: return, advantage, whether the group's returns differ, and whether the return is known."""
        known = known_episodes(batch)
        returns = episode_returns(batch.rewards, batch.loss_mask)
        advantages, varied = torch.zeros_like(returns), torch.zeros_like(known)
        if known.any():
            advantages[known], varied[known] = self.group_advantages(returns[known], batch.group_ids[0, known])
        return returns, advantages, varied, known


def known_episodes(batch: RolloutBatch) -> Tensor:
    """Return which columns contain an episode from its start, so that its return is known: bool ``[B]``."""
    # When a simulator is lost, its episode restarts in mid-rollout. The remaining steps are enough for a quick success, but not for a
    # failure at the time limit, so including such episodes would bias the group's returns upwards.
    return (batch.episode_ids == batch.episode_ids[0]).all(0) & batch.loss_mask[0]


def check_one_episode(batch: RolloutBatch) -> None:
    """Raise ValueError if a column contains several episodes."""
    ids, valid = batch.episode_ids, batch.loss_mask
    first = torch.where(valid, ids, torch.iinfo(ids.dtype).max).amin(0)
    if (valid & (ids != first)).any():
        raise ValueError(
            "The algorithm needs one episode per env and rollout, but a column contains several. Set rollout.auto_reset=false"
        )


def check_groups(batch: RolloutBatch) -> None:
    """Raise ValueError if a group has only one episode or mixes ``EpisodeSpec``, or a column contains several episodes."""
    check_one_episode(batch)
    spec_of_group: dict[int, object] = {}
    for group_id, episode_id in zip(batch.group_ids[0].tolist(), batch.episode_ids[0].tolist(), strict=True):
        spec = batch.specs[episode_id]
        first = spec_of_group.setdefault(group_id, spec)
        if spec != first:
            raise ValueError(
                f"Group {group_id} mixes episodes with {first} and {spec}, so its returns cannot be compared."
            )
    sizes = torch.unique(batch.group_ids[0], return_counts=True)[1]
    if int(sizes.min()) < 2:
        raise ValueError("A group with only one episode has no advantage. Set rollout.group_size=2 or more")


class GRPO(GroupAlgorithm):
    """GRPO (Shao et al. 2024), applied to the episode returns within each group."""

    config_class: ClassVar[type[GRPOConfig]] = GRPOConfig
    config: GRPOConfig

    def group_advantages(self, returns: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        return group_advantages(returns, group_ids, self.config.scale_by_std)


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
