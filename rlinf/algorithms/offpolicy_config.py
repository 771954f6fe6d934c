"""Configuration of the off-policy algorithms, which train a small actor on a frozen policy, or alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf.algorithms.config import AnyAlgorithmConfig
from rlinf.options import PathText, option

LARGEST_SCALE = 2.0
"""The whole range of the env, in its halves."""

SCRATCH = "scratch"
"""The actor that acts alone: SAC and TD3 from scratch."""


@dataclass
class ActorConfig:
    """The small network that learns. It is all that is trained of a policy, and a checkpoint keeps these settings with it."""

    name: str | None = option(
        None,
        "Registered actor: what it makes of the action of the frozen policy. null: residual, or where `mlp` or `cnn` were not trained, "
        "scratch, which learns from scratch.",
    )
    scale: float = option(
        1.0,
        "Largest correction of a number of an action, in halves of the range of the env: what is missing to success must be smaller. "
        "Of the actor `dsrl`, the largest noise, in standard deviations.",
        minimum=1e-6,
        maximum=LARGEST_SCALE,
    )
    hidden_size: int = option(128, "Width of the hidden layers.", minimum=1)
    num_candidates: int = option(
        4, "N: chunks of the frozen policy, the greedy one and sampled ones, that the actor `expo` reads.", minimum=1
    )
    reference_dropout: float = option(
        0.5,
        "Fraction of the rows of a loss in which the actor `rlt` does not see the chunk of the frozen policy.",
        minimum=0,
        maximum=1,
    )
    reference_weight: float = option(
        0.1,
        "Weight of (a - b)^2, the distance to the chunk of the frozen policy, in the loss of the actor `rlt`.",
        minimum=0,
    )
    num_layers: int = option(2, "Hidden layers.", minimum=1)
    layer_norm: bool = option(True, "Normalise each hidden layer of actor and critics.")
    log_std_min: float = option(-5.0, "Smallest logarithm of the deviation that an actor of SAC gives.")
    log_std_max: float = option(1.0, "Largest logarithm of the deviation that an actor of SAC gives.")
    tanh_epsilon: float = option(
        0.0, "Added to 1 - tanh(u)^2 in the density of SAC, as some libraries do; 0: the exact density.", minimum=0
    )


@dataclass
class OffPolicyConfig(AnyAlgorithmConfig):
    """Options of every algorithm that learns from a replay buffer. The defaults were measured on `quickstart_residual`."""

    actor: ActorConfig = option(ActorConfig(), "What learns.")
    gamma: float = option(0.95, "Discount per env step.", minimum=0, maximum=1)
    n_step: int = option(1, "Policy calls whose rewards are summed before the critic takes over.", minimum=1)
    batch_size: int = option(128, "Transitions of an update.", minimum=1)
    learning_rate: float = option(5e-4, "Learning rate of actor and critics.", minimum=0, maximum=1)
    tau: float = option(
        0.01, "Share by which the target critics move to the critics in each update.", minimum=0, maximum=1
    )
    target_update_interval: int = option(1, "Updates of the critics for each movement of the targets.", minimum=1)
    critic_loss_weight: float = option(
        1.0, "Factor of the sum over the critics of the mean squared error.", minimum=1e-6
    )
    actor_q: str = option(
        "mean",
        "Value that the actor climbs: of all critics the mean or the min, or the first.",
        choices=("mean", "min", "first"),
    )
    utd_ratio: float = option(0.5, "Updates per env step (UTD): below 1, an update waits for several steps.", minimum=0)
    num_critics: int = option(2, "E: critics.", minimum=1)
    num_target_critics: int = option(
        2, "M: critics of which the smallest gives the target, drawn from the E for each update.", minimum=1
    )
    learning_starts: int = option(
        1024, "First env steps, which the actor plays at random; no update is made before.", minimum=0
    )
    overlap: bool = option(
        False,
        "Update in a thread while the envs play. A policy call is then made without the updates that the env steps of the call before "
        "have earned; results do not depend on how long anything takes.",
    )
    critic_only_updates: int = option(0, "First updates, which train the critics alone.", minimum=0)
    replay_capacity: int = option(
        100_000, "Observations that the buffer holds over all envs; the oldest are replaced.", minimum=1
    )
    replay_from: PathText | None = option(
        None,
        "Checkpoint or run folder whose replay buffer this run starts with. The frozen policy, what it is asked for and the env must be "
        "the same.",
    )
    offline_dataset: PathText | None = option(
        None, "Folder of demonstrations with rewards or successes, in a format that `sft.dataset` takes; null: none."
    )
    offline_ratio: float = option(
        0.0, "Fraction of each batch that is drawn from `algorithm.offline_dataset`.", minimum=0, maximum=1
    )
    offline_episodes: str = option(
        "all",
        "all: also those that failed; successes: only those that succeeded; assume_success: all, each as if it succeeded in its last row, for "
        "demonstrations that do not say so.",
        choices=("all", "successes", "assume_success"),
    )

    def complete(self, model: Any, is_alone: Callable[[], bool]) -> None:
        """Choose the actor if none is named. The actor ``scratch`` reads what the model reads."""
        if self.actor.name is None:
            self.actor.name = SCRATCH if is_alone() else "residual"
        if self.actor.name == SCRATCH:
            model.features = "inputs"

    @property
    def num_offline_rows(self) -> int:
        """Transitions of each batch that are drawn from demonstrations."""
        return round(self.offline_ratio * self.batch_size) if self.offline_dataset is not None else 0


@dataclass
class SACConfig(OffPolicyConfig):
    """Soft actor-critic (Haarnoja et al. 2018) of an actor. The critics leave the entropy out, as in RLPD (Ball et al. 2023)."""

    name: str = option("sac", "Registered algorithm.")
    initial_alpha: float = option(0.05, "Weight of the entropy at the start.", minimum=1e-8)
    target_entropy: float | None = option(
        None,
        "Entropy of the actor, in units of its scale, towards which the weight is driven; null: -1/2 for each number of a chunk.",
    )
    entropy_in_target: bool = option(False, "Add the weighted entropy of the next action to the target of the critics.")


@dataclass
class TD3Config(OffPolicyConfig):
    """Twin delayed deep deterministic policy gradients (Fujimoto et al. 2018) of an actor."""

    name: str = option("td3", "Registered algorithm.")
    noise_std: float = option(0.2, "Deviation of the noise of exploration, in units of the scale.", minimum=1e-3)
    target_noise_std: float = option(0.2, "Deviation of the noise of the target's actions.", minimum=0, maximum=10)
    target_noise_clip: float = option(0.5, "Largest noise of the target's actions.", minimum=0)
    policy_delay: int = option(2, "Updates of the critics for each one of the actor.", minimum=1)
    target_policy: bool = option(
        False, "Take the target's actions from a slow copy of the actor, which moves with the target critics."
    )
