"""Base classes of the algorithms, which define their interface to the training loop."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlinf.algorithms.advantages import action_advantages
from rlinf.algorithms.config import AlgorithmConfig, AnyAlgorithmConfig
from rlinf.algorithms.losses import aggregate_logprobs, clipped_policy_loss, kl_penalty, truncated_importance_weights
from rlinf.distributed.process_group import sum_counts
from rlinf.number_formats import format_count
from rlinf.types import ActionEvaluation, ClassAndConfig, LossOutput, RolloutBatch


@dataclass
class LossCounts:
    """Numbers of valid elements in a minibatch across all micro-batches and ranks, which are the divisors of all means.

    Attributes:
        units: Number of importance ratios (tokens, actions or chunks).
        entropies: Tokens, actions or chunks over which the entropy is averaged.
        calls: Number of policy calls.
    """

    units: int
    entropies: int
    calls: int

    @staticmethod
    def of(batch: RolloutBatch, config: AlgorithmConfig) -> LossCounts:
        """Count the valid elements in a flattened batch."""
        action_mask = batch.action_mask & batch.loss_mask.unsqueeze(-1)
        _, units = aggregate_logprobs(batch.old_logprobs, action_mask, config.logprob_level)
        _, entropies = aggregate_logprobs(batch.old_logprobs, action_mask, config.entropy_level)
        return LossCounts(int(units.sum()), int(entropies.sum()), int(batch.loss_mask.sum()))

    def over_ranks(self) -> LossCounts:
        """Return the sums over all ranks (a collective call)."""
        return LossCounts(*sum_counts(self.units, self.entropies, self.calls))


@dataclass(frozen=True)
class Updates:
    """Number of updates per iteration, and the lines that describe them in a dry run's plan.

    Attributes:
        per_iteration: Number of updates, over all epochs.
        table: Texts by label, for the plan.
        env_steps: Maximum number of env steps per iteration; None: as many as in a rollout.
    """

    per_iteration: int
    table: dict[str, str]
    env_steps: int | None = None


class AnyAlgorithm:
    """Base class of all algorithms, on-policy and off-policy. ``config`` is the run's ``RunConfig``.

    An algorithm that is not an ``Algorithm`` has its own trainer (``rlinf.training.rl_trainer.MakesTrainer``).

    Attributes:
        config_class: Configuration dataclass for ``algorithm.*``.
        freezes_policy: Whether only an actor on top of the policy is trained. Each rank then has a full policy without an optimiser.
        runs_episodes: Whether iterations run entire episodes in the evaluation env, without ``rollout.num_envs`` and ``rollout.num_chunks``.
    """

    config_class: ClassVar[type[AnyAlgorithmConfig]] = AnyAlgorithmConfig
    freezes_policy: ClassVar[bool] = False
    runs_episodes: ClassVar[bool] = False

    @classmethod
    def check(cls, config: Any, policy: ClassAndConfig | None) -> None:
        """Raise ConfigError for an unsupported run; ``policy`` is the model's class and configuration, or None if unknown."""

    @classmethod
    def updates(cls, config: Any) -> Updates:
        """Return the number of updates per iteration, if known in advance."""
        return Updates(0, {})

    @classmethod
    def buffer_bytes(cls, config: Any, model: Any, call_bytes: int) -> int:
        """Return the size of one rank's experience in bytes: by default one rollout, with ``call_bytes`` per policy call."""
        return config.rollout.num_envs * config.rollout.num_chunks // config.cluster.num_processes * call_bytes


class Algorithm(AnyAlgorithm, ABC):
    """Policy-gradient algorithm, without I/O. Only ``compute_advantages`` and ``of_minibatch`` may call collectives.

    Attributes:
        clip_fraction: Factor applied to the clip ranges in this iteration (``clip_decay``), set by the trainer.
        needs_values: Whether the model must have a value head.
        needs_full_episodes: Whether returns need complete episodes (one episode per env and iteration).
        needs_groups: Whether complete episodes are compared in groups with the same ``EpisodeSpec`` (``rollout.group_size`` of at least 2).
        penalizes_rewards: Whether ``compute_advantages`` subtracts the KL penalty from the rewards instead of ``loss`` adding it.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    needs_values: ClassVar[bool] = False
    needs_full_episodes: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    penalizes_rewards: ClassVar[bool] = False
    clip_fraction: float = 1.0

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    @classmethod
    def updates(cls, config: Any) -> Updates:
        rollout, trainer, ranks = config.rollout, config.trainer, config.cluster.num_processes
        epochs, rows = config.algorithm.update_epochs, trainer.minibatch_size // ranks
        minibatches = rollout.num_envs * rollout.num_chunks // trainer.minibatch_size
        passes = format_count(math.ceil(rows / config.model.micro_batch_size), "micro-batch")
        table = {
            "minibatches": f"{minibatches} of {trainer.minibatch_size} x {format_count(epochs, 'epoch')}",
            f"each of {format_count(ranks, 'rank')}": f"{format_count(rollout.num_envs // ranks, 'env')}, {rows} rows a minibatch in {passes}",
        }
        return Updates(minibatches * epochs, table)

    @property
    def needs_reference(self) -> bool:
        """Whether ``batch.ref_logprobs`` must contain log-probabilities of the policy before RL."""
        return self.config.kl_coef > 0

    @property
    def discount(self) -> float:
        """Discount per policy call for the returns used by ``scale_rewards``; 1 without an option ``gamma``."""
        return getattr(self.config, "gamma", 1.0)

    @property
    def max_resamples(self) -> int:
        """Maximum number of times per iteration that ``uninformative_envs`` are replaced by new episodes."""
        return 0

    def uninformative_envs(self, batch: RolloutBatch) -> Tensor:
        """Return which envs have no learning signal, always for complete groups: bool ``[B]``.

        ``batch`` is this rank's time-major rollout before scoring, so it has no ``old_logprobs`` or ``values``.
        """
        return torch.zeros(batch.loss_mask.shape[1], dtype=torch.bool)

    def policy_is_frozen(self, iteration: int) -> bool:
        """Return whether only the value head may change in this iteration."""
        return False

    def per_action(self, advantages: Tensor, action_rewards: Tensor) -> Tensor:
        """Expand per-call advantages ``[T, B]`` to per-action advantages ``[T, B, C]``, according to ``advantage_level``."""
        if self.config.advantage_level == "action":
            return action_advantages(advantages, action_rewards)
        return spread_over_actions(advantages, action_rewards.shape[-1])

    @abstractmethod
    def compute_advantages(self, batch: RolloutBatch) -> dict[str, float]:
        """Fill ``advantages [T, B, C]`` and ``returns [T, B]`` in this rank's time-major rollout; return metrics.

        All envs of a group are on one rank. Compute means over all ranks with ``rlinf.algorithms.advantages``, because metrics must be
        equal on all ranks. ``loss_mask`` may be cleared for samples without a learning signal.
        """

    def of_minibatch(self, batch: RolloutBatch) -> RolloutBatch:
        """Return this rank's rows of a minibatch, transformed for the loss (a collective call)."""
        return batch

    def loss(self, batch: RolloutBatch, evaluation: ActionEvaluation, counts: LossCounts, iteration: int) -> LossOutput:
        """Return the loss of one flattened micro-batch, divided by the counts of the entire minibatch."""
        config = self.config
        action_mask = batch.action_mask & batch.loss_mask.unsqueeze(-1)

        def units(logprobs: Tensor) -> Tensor:
            return aggregate_logprobs(logprobs, action_mask, config.logprob_level)[0]

        logprobs, mask = aggregate_logprobs(evaluation.logprobs, action_mask, config.logprob_level)
        old_logprobs = units(batch.old_logprobs)
        # Advantages are [N, C]. A chunk-level ratio needs one per call; all columns are then equal, so use the first one.
        advantages = batch.advantages.unsqueeze(-1)[:, : logprobs.shape[1]]
        weights = None
        if config.tis_cap is not None:
            # The weight corrects for the difference between rollout and trainer policies, and the ratio for the updates since the rollout.
            weights = truncated_importance_weights(old_logprobs, units(batch.rollout_logprobs), mask, config.tis_cap)
        low, high = self.clip_fraction * config.clip_range_low, self.clip_fraction * config.clip_range_high
        total, sums = clipped_policy_loss(
            logprobs, old_logprobs, advantages, mask, low, high, config.dual_clip, weights
        )
        policy_loss = total / counts.units
        metrics = {name: value / counts.units for name, value in sums.items()}

        unit_entropy, entropy_mask = aggregate_logprobs(evaluation.entropy, action_mask, config.entropy_level)
        entropy = torch.where(entropy_mask, unit_entropy, 0.0).sum() / counts.entropies
        loss = policy_loss - config.entropy_coef * entropy
        if self.needs_reference:
            kl = kl_penalty(logprobs, units(batch.ref_logprobs), mask, config.kl_estimator) / counts.units
            # REINFORCE++ has already subtracted the penalty from the rewards, so only report it here.
            if not self.penalizes_rewards:
                loss = loss + config.kl_coef * kl
            metrics["kl_to_reference"] = kl.detach()
        metrics |= {"policy_loss": policy_loss.detach(), "entropy": entropy.detach(), "loss": loss.detach()}
        return LossOutput(loss, metrics)


def spread_over_actions(advantages: Tensor, num_actions: int) -> Tensor:
    """Repeat chunk advantages ``[T, B]`` for each action: ``[T, B, C]``."""
    return advantages.unsqueeze(-1).expand(*advantages.shape, num_actions).contiguous()
