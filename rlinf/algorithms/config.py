"""Configuration dataclasses for the algorithms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf.optim.schedule import DECAYS
from rlinf.options import option

LEVELS = ("token", "action", "chunk")


@dataclass
class AnyAlgorithmConfig:
    """Options shared by all algorithms."""

    name: str = option("ppo", "Registered algorithm.")
    preset: str | None = option(
        None,
        "Preset for keys that are not set elsewhere; sb3: the settings of Stable-Baselines3 (docs/results.md).",
        choices=("sb3",),
    )

    def complete(self, model: Any, is_alone: Callable[[], bool]) -> None:
        """Fill in values that depend on other sections; ``is_alone`` returns whether ``model`` has an encoder but no trained weights."""


@dataclass
class AlgorithmConfig(AnyAlgorithmConfig):
    """Options shared by all policy-gradient algorithms."""

    update_epochs: int = option(1, "Number of passes over each rollout.", minimum=1)
    logprob_level: str = option("action", "Compute one importance ratio per token, action or chunk.", choices=LEVELS)
    advantage_level: str = option(
        "chunk",
        "chunk: one advantage per policy call; action: one per action, minus the chunk's earlier rewards.",
        choices=("action", "chunk"),
    )
    clip_range_low: float = option(0.2, "Clip the importance ratio below 1 minus this value.", minimum=0)
    clip_range_high: float = option(0.2, "Clip the importance ratio above 1 plus this value.", minimum=0)
    clip_decay: str = option("none", "How both clip ranges decay over the run's iterations.", choices=tuple(DECAYS))
    dual_clip: float | None = option(
        None, "Dual clip: bound losses of negative advantages by this times |advantage| (Ye et al. 2020).", minimum=1
    )
    tis_cap: float | None = option(
        None, "Cap on the truncated importance weights trainer / rollout (Yao et al. 2025); null: off.", minimum=1
    )
    # `rollout` saves a forward pass over all samples, but then the parity gate compares only one policy call per env and iteration.
    old_logprobs: str = option(
        "trainer",
        "Source of the old log-probs and values: recomputed by the trainer, or taken from the rollout.",
        choices=("trainer", "rollout"),
    )
    entropy_level: str = option("token", "Average the entropy per token, action or chunk.", choices=LEVELS)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", minimum=0)
    kl_coef: float = option(0.0, "Weight of the KL penalty relative to the policy before RL.", minimum=0)
    kl_estimator: str = option("k3", "Estimator of the KL penalty (Schulman 2020).", choices=("k1", "k2", "k3"))
    normalize_advantages: bool = option(True, "Shift and scale advantages to mean 0 and std 1.")
    scale_rewards: bool = option(
        False, "Divide rewards by the running std of discounted returns and clip them at 10 (Engstrom et al. 2020)."
    )


@dataclass
class PPOConfig(AlgorithmConfig):
    """Proximal policy optimisation (Schulman et al. 2017) with generalised advantage estimation."""

    normalize_over: str = option(
        "rollout", "Normalise advantages over the rollout or within each minibatch.", choices=("rollout", "minibatch")
    )
    gamma: float = option(0.97, "Discount per policy call.", minimum=0, maximum=1)
    gae_lambda: float = option(0.95, "Lambda of generalised advantage estimation (GAE).", minimum=0, maximum=1)
    value_coef: float = option(0.5, "Weight of the value loss.", minimum=0)
    value_clip_range: float | None = option(
        None, "Maximum change of a value from the old value before clipping; null: no clipping.", minimum=0
    )
    huber_delta: float | None = option(None, "Threshold of the Huber value loss; null: squared error.", minimum=0)
    critic_warmup_steps: int = option(3, "Number of initial iterations that train only the value head.", minimum=0)


@dataclass
class GroupConfig(AlgorithmConfig):
    """Options shared by algorithms that compare episodes with the same EpisodeSpec."""

    normalize_advantages: bool = option(False, "Also normalise advantages over the entire rollout.")
    max_resamples: int = option(
        0, "Maximum rounds per iteration for replacing groups with equal returns (DAPO, Yu et al. 2025).", minimum=0
    )
    drop_zero_variance_groups: bool = option(True, "Exclude groups with equal returns from the update.")


@dataclass
class GRPOConfig(GroupConfig):
    """Group relative policy optimisation (Shao et al. 2024) over episodes that share an EpisodeSpec."""

    name: str = option("grpo", "Registered algorithm.")
    scale_by_std: bool = option(True, "Divide by the group's std; false: Dr. GRPO (Liu et al. 2025).")


@dataclass
class RLOOConfig(GroupConfig):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024) over episodes that share an EpisodeSpec."""

    name: str = option("rloo", "Registered algorithm.")


@dataclass
class ReinforcePPConfig(AlgorithmConfig):
    """REINFORCE++ (Hu et al. 2025): returns-to-go, normalised over the entire rollout; the KL penalty is part of the reward."""

    name: str = option("reinforce_pp", "Registered algorithm.")
    kl_estimator: str = option("k1", "Estimator of the KL penalty (Schulman 2020).", choices=("k1", "k2", "k3"))
    gamma: float = option(1.0, "Discount per policy call.", minimum=0, maximum=1)


@dataclass
class FilteredBCConfig(AnyAlgorithmConfig):
    """Filtered behaviour cloning: clone the policy's own successful episodes, together with the demonstrations in ``sft.dataset``."""

    name: str = option("filtered_bc", "Registered algorithm.")
    num_episodes: int = option(100, "Episodes per iteration, which sample at `rollout.temperature`.", minimum=1)
    num_updates: int = option(500, "Optimiser steps per iteration, within which the rate decays.", minimum=1)
    restart: bool = option(
        False, "Clone from the run's first weights in each iteration; false: continue from the current ones."
    )
    task_sampling: str = option(
        "uniform", "Draw tasks uniformly, or by their last failure rates.", choices=("uniform", "failures")
    )
