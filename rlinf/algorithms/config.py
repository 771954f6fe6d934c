"""Configuration of the algorithms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf.optim.schedule import DECAYS
from rlinf.options import option

LEVELS = ("token", "action", "chunk")


@dataclass
class AnyAlgorithmConfig:
    """Options of every algorithm."""

    name: str = option("ppo", "Registered algorithm.")
    preset: str | None = option(
        None,
        "sb3: settings of Stable-Baselines3, for keys that are not set elsewhere (docs/results.md).",
        choices=("sb3",),
    )

    def complete(self, model: Any, is_alone: Callable[[], bool]) -> None:
        """Fill in values that follow from other sections; ``is_alone``: ``model`` has an encoder and no trained weights."""


@dataclass
class AlgorithmConfig(AnyAlgorithmConfig):
    """Options of every policy-gradient algorithm."""

    update_epochs: int = option(1, "Passes over each rollout.", minimum=1)
    logprob_level: str = option(
        "action", "Unit of the importance ratio: a token, an action or a chunk.", choices=LEVELS
    )
    advantage_level: str = option(
        "chunk",
        "chunk: one advantage per policy call; action: without the chunk's earlier rewards.",
        choices=("action", "chunk"),
    )
    clip_range_low: float = option(0.2, "The ratio is clipped below 1 - this.", minimum=0)
    clip_range_high: float = option(0.2, "The ratio is clipped above 1 + this.", minimum=0)
    clip_decay: str = option("none", "Decay of both clip ranges over the iterations of a run.", choices=tuple(DECAYS))
    dual_clip: float | None = option(
        None, "Bound the loss of negative advantages by this times |advantage| (Ye et al. 2020).", minimum=1
    )
    tis_cap: float | None = option(
        None, "Cap of the truncated importance weights trainer / rollout (Yao et al. 2025); null: off.", minimum=1
    )
    # `rollout` saves a forward pass over all samples. Its price: the parity gate compares one policy call per env and iteration only.
    old_logprobs: str = option(
        "trainer",
        "Source of old log-probs and values: scored again by the trainer, or the rollout's.",
        choices=("trainer", "rollout"),
    )
    entropy_level: str = option("token", "Unit of the averaged entropy: a token, an action or a chunk.", choices=LEVELS)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", minimum=0)
    kl_coef: float = option(0.0, "Weight of the KL penalty to the policy before RL.", minimum=0)
    kl_estimator: str = option("k3", "Estimator of the KL penalty (Schulman 2020).", choices=("k1", "k2", "k3"))
    normalize_advantages: bool = option(True, "Shift and scale advantages to mean 0 and std 1.")
    scale_rewards: bool = option(
        False, "Divide rewards by the running std of returns, clipped at 10 (Engstrom et al. 2020)."
    )


@dataclass
class PPOConfig(AlgorithmConfig):
    """Proximal policy optimisation (Schulman et al. 2017) with generalised advantage estimation."""

    normalize_over: str = option(
        "rollout", "Normalise advantages over the rollout or over each minibatch.", choices=("rollout", "minibatch")
    )
    gamma: float = option(0.97, "Discount per policy call.", minimum=0, maximum=1)
    gae_lambda: float = option(0.95, "GAE lambda.", minimum=0, maximum=1)
    value_coef: float = option(0.5, "Weight of the value loss.", minimum=0)
    value_clip_range: float | None = option(
        None, "Clip the value to within this of the old value; null: off.", minimum=0
    )
    huber_delta: float | None = option(None, "Huber value loss with this threshold; null: squared error.", minimum=0)
    critic_warmup_steps: int = option(3, "First iterations, which train only the value head.", minimum=0)


@dataclass
class GroupConfig(AlgorithmConfig):
    """Options of algorithms that compare episodes of one EpisodeSpec."""

    normalize_advantages: bool = option(False, "Also normalise advantages over the entire rollout.")
    max_resamples: int = option(
        0, "Maximum rounds per iteration that replace groups of equal returns (DAPO, Yu et al. 2025).", minimum=0
    )
    drop_zero_variance_groups: bool = option(True, "Leave groups of equal returns out of the update.")


@dataclass
class GRPOConfig(GroupConfig):
    """Group relative policy optimisation (Shao et al. 2024) over episodes that share an EpisodeSpec."""

    name: str = option("grpo", "Registered algorithm.")
    scale_by_std: bool = option(True, "Divide by the group's std; false: as in Dr. GRPO (Liu et al. 2025).")


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
