"""Configuration of the algorithms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf.optim.schedule import DECAYS
from rlinf.options import option

LEVELS = ("token", "action", "chunk")


@dataclass
class AnyAlgorithmConfig:
    """What the configuration of every algorithm has."""

    name: str = option("ppo", "Registered algorithm.")
    preset: str | None = option(
        None,
        "sb3: the settings with which PPO, SAC or TD3 is Stable-Baselines3's, but for those that an experiment or the command line "
        "sets (docs/golden.md). null: none.",
        choices=("sb3",),
    )

    def complete(self, model: Any, is_alone: Callable[[], bool]) -> None:
        """Fill in what follows from other sections; ``is_alone``: ``model`` has an encoder and no trained weights."""


@dataclass
class AlgorithmConfig(AnyAlgorithmConfig):
    """Options of every policy-gradient algorithm."""

    update_epochs: int = option(1, "Passes over each rollout.", minimum=1)
    logprob_level: str = option(
        "action", "Unit of the importance ratio: sum of log-probs over a token, an action or a chunk.", choices=LEVELS
    )
    advantage_level: str = option(
        "chunk",
        "chunk: one advantage per policy call; action: rewards before an action inside its chunk are left out.",
        choices=("action", "chunk"),
    )
    clip_range_low: float = option(0.2, "Ratio is clipped below 1 - this.", minimum=0)
    clip_range_high: float = option(0.2, "Ratio is clipped above 1 + this.", minimum=0)
    clip_decay: str = option(
        "none", "How both ranges decay over the iterations of a run; none: they stay.", choices=tuple(DECAYS)
    )
    dual_clip: float | None = option(
        None,
        "For negative advantages the loss is at most this times |advantage| (Ye et al. 2020); null: off.",
        minimum=1,
    )
    tis_cap: float | None = option(
        None,
        "Weigh policy losses by min(trainer / generator probability, this): truncated importance sampling (Yao et al. 2025); "
        "null: off.",
        minimum=1,
    )
    old_logprobs: str = option(
        "trainer",
        "Log-probabilities before the update, and PPO's values. trainer: of each sample, scored again, so that the parity gate sees "
        "all of them. rollout: of the rollout, which saves that pass, while the gate accepts one policy call of each env and iteration.",
        choices=("trainer", "rollout"),
    )
    entropy_level: str = option(
        "token", "Unit whose entropy is averaged: a token, or the sum over an action or a chunk.", choices=LEVELS
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", minimum=0)
    kl_coef: float = option(0.0, "Weight of the KL penalty to the reference policy (the policy before RL).", minimum=0)
    kl_estimator: str = option("k3", "Estimator of the KL penalty (Schulman 2020).", choices=("k1", "k2", "k3"))
    normalize_advantages: bool = option(True, "Shift and scale advantages to mean 0, deviation 1.")
    scale_rewards: bool = option(
        False,
        "Divide rewards by the standard deviation of the running discounted return, and cut them at 10 (Engstrom et al. 2020). "
        "Reported returns stay as they are.",
    )


@dataclass
class PPOConfig(AlgorithmConfig):
    """Proximal policy optimisation (Schulman et al. 2017) with generalised advantage estimation."""

    normalize_over: str = option(
        "rollout",
        "What normalised advantages have mean 0 and deviation 1 over: the rollout, or each minibatch by itself.",
        choices=("rollout", "minibatch"),
    )
    gamma: float = option(0.97, "Discount per policy call.", minimum=0, maximum=1)
    gae_lambda: float = option(0.95, "GAE lambda.", minimum=0, maximum=1)
    value_coef: float = option(0.5, "Weight of the value loss.", minimum=0)
    value_clip_range: float | None = option(
        None, "Clip the value update to this distance from the old value; null: off.", minimum=0
    )
    huber_delta: float | None = option(None, "Huber value loss with this threshold; null: squared error.", minimum=0)
    critic_warmup_steps: int = option(3, "First iterations train the value head only.", minimum=0)


@dataclass
class GroupConfig(AlgorithmConfig):
    """Options of algorithms that compare episodes of one EpisodeSpec."""

    normalize_advantages: bool = option(
        False, "Shift and scale advantages over the whole rollout, on top of the groups."
    )
    max_resamples: int = option(
        0,
        "Times per iteration that groups of equal returns, and only these, are played again from other initial states to replace "
        "them (DAPO, Yu et al. 2025).",
        minimum=0,
    )
    drop_zero_variance_groups: bool = option(True, "Leave groups in which all returns are equal out of the update.")


@dataclass
class GRPOConfig(GroupConfig):
    """Group relative policy optimisation (Shao et al. 2024) over episodes that share an EpisodeSpec."""

    name: str = option("grpo", "Registered algorithm.")
    scale_by_std: bool = option(
        True, "Divide by the group's standard deviation; false: as in Dr. GRPO (Liu et al. 2025)."
    )


@dataclass
class RLOOConfig(GroupConfig):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024) over episodes that share an EpisodeSpec."""

    name: str = option("rloo", "Registered algorithm.")


@dataclass
class ReinforcePPConfig(AlgorithmConfig):
    """REINFORCE++ (Hu et al. 2025): returns-to-go, normalised over the whole rollout; the KL penalty is a reward."""

    name: str = option("reinforce_pp", "Registered algorithm.")
    kl_estimator: str = option("k1", "Estimator of the KL penalty (Schulman 2020).", choices=("k1", "k2", "k3"))
    gamma: float = option(1.0, "Discount per policy call.", minimum=0, maximum=1)
