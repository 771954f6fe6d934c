"""Proximal policy optimisation with a learned value function."""

from dataclasses import replace
from typing import ClassVar

from rlinf.algorithms.advantages import explained_variance, gae, masked_mean, masked_normalize, normalize_rows
from rlinf.algorithms.base import Algorithm, LossCounts
from rlinf.algorithms.config import PPOConfig
from rlinf.algorithms.losses import value_loss
from rlinf.types import ActionEvaluation, LossOutput, RolloutBatch


class PPO(Algorithm):
    """PPO (Schulman et al. 2017) with GAE advantages, a clipped surrogate, a clipped or Huber value loss, and critic warm-up."""

    config_class: ClassVar[type[PPOConfig]] = PPOConfig
    needs_values: ClassVar[bool] = True
    config: PPOConfig

    def policy_is_frozen(self, iteration: int) -> bool:
        return iteration < self.config.critic_warmup_steps

    def compute_advantages(self, batch: RolloutBatch) -> dict[str, float]:
        config = self.config
        advantages, batch.returns = gae(
            batch.rewards, batch.values, batch.terminated, batch.truncated, batch.bootstrap_values,
            config.gamma, config.gae_lambda,
        )  # fmt: skip
        mask = batch.loss_mask
        per_action = self.per_action(advantages, batch.action_rewards)
        # Compute metrics from the advantages before normalisation, because afterwards their mean is always 0.
        action_mask = batch.action_mask & mask.unsqueeze(-1)
        metrics = {
            "train/explained_variance": explained_variance(batch.values, batch.returns, mask),
            "train/advantage_mean": masked_mean(per_action, action_mask),
            "train/return_mean": masked_mean(batch.returns, mask),
        }
        over_rollout = config.normalize_advantages and config.normalize_over == "rollout"
        batch.advantages = masked_normalize(per_action, action_mask) if over_rollout else per_action
        return metrics

    def of_minibatch(self, batch: RolloutBatch) -> RolloutBatch:
        if not self.config.normalize_advantages or self.config.normalize_over == "rollout":
            return batch
        mask = batch.action_mask & batch.loss_mask.unsqueeze(-1)
        return replace(batch, advantages=normalize_rows(batch.advantages, mask))

    def loss(self, batch: RolloutBatch, evaluation: ActionEvaluation, counts: LossCounts, iteration: int) -> LossOutput:
        config = self.config
        output = super().loss(batch, evaluation, counts, iteration)
        bounds = (config.value_clip_range, config.huber_delta)
        critic = value_loss(evaluation.values, batch.values, batch.returns, batch.loss_mask, *bounds) / counts.calls
        # During critic warm-up, omit the policy loss, so that no gradient reaches the policy, but still report its metrics.
        policy = 0.0 if self.policy_is_frozen(iteration) else output.loss
        total = policy + config.value_coef * critic
        output.metrics |= {"value_loss": critic.detach(), "loss": total.detach()}
        return LossOutput(total, output.metrics)
