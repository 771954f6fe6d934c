"""REINFORCE++, which normalises advantages over the entire rollout and needs neither a value function nor groups."""

from typing import ClassVar

import torch

from rlinf.algorithms.advantages import gae, masked_mean, masked_normalize
from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.config import ReinforcePPConfig
from rlinf.algorithms.groups import check_one_episode, known_episodes
from rlinf.algorithms.losses import kl_estimates
from rlinf.types import RolloutBatch


class ReinforcePP(Algorithm):
    """REINFORCE++ (Hu et al. 2025, "REINFORCE++"), where an action of the policy corresponds to a token in the paper.

    Let ``KL_t`` be an estimate of ``log pi_old - log pi_ref`` (k1 in the paper), summed over the tokens of call ``t``. Then::

        A_t  = sum_{i >= t} gamma^(i - t) (r_i - kl_coef KL_i)     until the end of the episode
        A'_t = (A_t - mean(A)) / std(A)                            over the rollout's valid actions on all ranks

    The paper uses ``gamma = 1`` and a single reward at the end. The loss is PPO's clipped surrogate without a KL term. A time limit is
    treated as a termination, because without a value estimate it cannot be bootstrapped.
    """

    config_class: ClassVar[type[ReinforcePPConfig]] = ReinforcePPConfig
    needs_full_episodes: ClassVar[bool] = True
    penalizes_rewards: ClassVar[bool] = True
    config: ReinforcePPConfig

    def compute_advantages(self, batch: RolloutBatch) -> dict[str, float]:
        check_one_episode(batch)
        config = self.config
        batch.loss_mask = batch.loss_mask & known_episodes(batch)
        rewards = torch.where(batch.loss_mask.unsqueeze(-1), batch.action_rewards.double(), 0.0)
        if self.needs_reference:
            tokens = batch.old_logprobs.unflatten(-1, (batch.action_mask.shape[-1], -1))
            scored = (batch.action_mask & batch.loss_mask.unsqueeze(-1)).unsqueeze(-1).expand_as(tokens)
            kl = kl_estimates(tokens, batch.ref_logprobs.view_as(tokens), scored, config.kl_estimator)
            # `kl` is 0 for actions that were not executed, because `scored` masks them.
            rewards = rewards - config.kl_coef * kl.sum(-1)
        sums = rewards.sum(-1)
        zeros = torch.zeros_like(sums)
        # With all values 0 and lambda 1, GAE equals the discounted return-to-go within the episode.
        returns, _ = gae(sums, zeros, batch.terminated, batch.truncated, zeros, config.gamma, 1.0)
        batch.returns, batch.advantages = returns.float(), self.per_action(returns, rewards).float()
        mask = batch.action_mask & batch.loss_mask.unsqueeze(-1)
        metrics = {
            "train/advantage_mean": masked_mean(batch.advantages, mask),
            "train/return_mean": masked_mean(batch.returns, batch.loss_mask),
        }
        if config.normalize_advantages:
            batch.advantages = masked_normalize(batch.advantages, mask)
        return metrics
