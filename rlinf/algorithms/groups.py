"""Algorithms without a value function: whole episodes, and groups of them that start from one ``EpisodeSpec``."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from rlinf.algorithms.advantages import episode_returns, masked_normalize
from rlinf.algorithms.base import Algorithm, spread_over_actions
from rlinf.algorithms.config import AlgorithmConfig, GroupConfig
from rlinf.types import RolloutBatch


class GroupAlgorithm(Algorithm):
    """Compares the returns of the episodes of a group; one episode per column of the rollout."""

    config_class: ClassVar[type[AlgorithmConfig]] = GroupConfig
    needs_whole_episodes: ClassVar[bool] = True
    needs_groups: ClassVar[bool] = True
    config: GroupConfig

    @abstractmethod
    def group_advantages(self, returns: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages ``[B]`` of returns ``[B]``, and bool ``[B]``: the episode's group has different returns."""

    @property
    def max_resamples(self) -> int:
        return self.config.max_resamples

    def uninformative_envs(self, batch: RolloutBatch) -> Tensor:
        """Groups whose returns are all equal."""
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
            "rollout/zero_variance_group_fraction": float((known & ~varied).sum() / known.sum().clamp_min(1)),
            "train/return_mean": float((returns * known).sum() / known.sum().clamp_min(1)),
        }

    def _compare(self, batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compare each env with its group.

        Returns:
            Return, advantage, whether the returns of the group differ, and whether the return is known, ``[B]`` each.
        """
        known = known_episodes(batch)
        returns = episode_returns(batch.rewards, batch.loss_mask)
        advantages, varied = torch.zeros_like(returns), torch.zeros_like(known)
        if known.any():
            advantages[known], varied[known] = self.group_advantages(returns[known], batch.group_ids[0, known])
        return returns, advantages, varied, known


def known_episodes(batch: RolloutBatch) -> Tensor:
    """bool ``[B]``: the column is one episode from its start, so its return is known.

    It is not known where the simulator was lost: what is left of the rollout is long enough for a quick success of the
    second try, but not for a failure at the time limit.
    """
    return (batch.episode_ids == batch.episode_ids[0]).all(0) & batch.loss_mask[0]


def check_one_episode(batch: RolloutBatch) -> None:
    """Refuse columns of several episodes.

    Raises:
        ValueError: With the override that mends it.
    """
    ids, valid = batch.episode_ids, batch.loss_mask
    first = torch.where(valid, ids, torch.iinfo(ids.dtype).max).amin(0)
    if (valid & (ids != first)).any():
        raise ValueError("The algorithm needs one episode per env and rollout, but episodes change inside a column: "
                         "use rollout.auto_reset=false.")  # fmt: skip


def check_groups(batch: RolloutBatch) -> None:
    """Refuse a group whose episodes do not start from the same ``EpisodeSpec``, and columns of several episodes.

    Raises:
        ValueError: Names the group and its specs.
    """
    check_one_episode(batch)
    spec_of_group: dict[int, object] = {}
    for group_id, episode_id in zip(batch.group_ids[0].tolist(), batch.episode_ids[0].tolist(), strict=True):
        spec = batch.specs[episode_id]
        first = spec_of_group.setdefault(group_id, spec)
        if spec != first:
            raise ValueError(f"Group {group_id} mixes episodes of {first} and {spec}; its returns cannot be compared.")
    sizes = torch.unique(batch.group_ids[0], return_counts=True)[1]
    if int(sizes.min()) < 2:
        raise ValueError("A group of one episode has no advantage; use rollout.group_size=2 or more.")
