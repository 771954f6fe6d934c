"""Configuration of the off-policy algorithms, which train a small actor on a frozen base policy, or from scratch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf.algorithms.config import AnyAlgorithmConfig
from rlinf.options import PathText, option

LARGEST_SCALE = 2.0
"""Largest ``actor.scale``. Actions are normalised to [-1, 1], so a residual of 2 reaches any action from any other."""

SCRATCH = "scratch"
"""Name of the actor without a base policy: SAC and TD3 from scratch."""


@dataclass
class ActorConfig:
    """The trained network of an off-policy run. A checkpoint stores these settings with the actor's weights."""

    name: str | None = option(None, "Registered actor; null: residual, or scratch for an untrained `mlp` or `cnn`.")
    # A residual actor reaches an action only if it is within `scale` of the base policy's.
    scale: float = option(
        1.0,
        "Largest residual per action dimension, in actions of [-1, 1]; `dsrl`: largest noise, in std.",
        minimum=1e-6,
        maximum=LARGEST_SCALE,
    )
    hidden_size: int = option(128, "Width of the hidden layers.", minimum=1)
    num_candidates: int = option(4, "Candidate chunks N of actor `expo`: one greedy, the remaining sampled.", minimum=1)
    reference_dropout: float = option(
        0.5, "Probability that actor `rlt` does not see the base policy's chunk in a loss.", minimum=0, maximum=1
    )
    reference_weight: float = option(
        0.1, "Weight of (a - b)^2 in the loss of actor `rlt`, with b the base policy's chunk.", minimum=0
    )
    num_layers: int = option(2, "Hidden layers of actor and critics.", minimum=1)
    layer_norm: bool = option(True, "Normalise each hidden layer of actor and critics.")
    log_std_min: float = option(-5.0, "Lower bound of the actor's log std (SAC).")
    log_std_max: float = option(1.0, "Upper bound of the actor's log std (SAC).")
    tanh_epsilon: float = option(0.0, "Added to 1 - tanh(u)^2 in the density of SAC; 0: the exact density.", minimum=0)


@dataclass
class OffPolicyConfig(AnyAlgorithmConfig):
    """Options of every algorithm that learns from a replay buffer. The defaults were measured on `quickstart_residual`."""

    actor: ActorConfig = option(ActorConfig(), "The trained actor.")
    gamma: float = option(0.95, "Discount per env step.", minimum=0, maximum=1)
    n_step: int = option(1, "Policy calls of an n-step return, before the target critic bootstraps.", minimum=1)
    batch_size: int = option(128, "Transitions per update.", minimum=1)
    learning_rate: float = option(5e-4, "Learning rate of actor and critics.", minimum=0, maximum=1)
    tau: float = option(0.01, "Polyak coefficient of the target critics.", minimum=0, maximum=1)
    target_update_interval: int = option(1, "Critic updates per update of the target critics.", minimum=1)
    critic_loss_weight: float = option(1.0, "Factor of the critics' summed mean squared errors.", minimum=1e-6)
    actor_q: str = option(
        "mean",
        "Q value that the actor maximises: mean or min of all critics, or the first critic's.",
        choices=("mean", "min", "first"),
    )
    utd_ratio: float = option(0.5, "Updates per env step; below 1, several steps per update.", minimum=0)
    num_critics: int = option(2, "Number of critics, E.", minimum=1)
    num_target_critics: int = option(
        2, "Random target critics per update, M of E; the smallest is the target.", minimum=1
    )
    learning_starts: int = option(1024, "First env steps, with random actions and without updates.", minimum=0)
    # A policy call then lacks the updates that the previous call's env steps add: a fixed lag, so results do not depend on timing.
    overlap: bool = option(False, "Update in a thread while the envs step, one policy call late.")
    critic_only_updates: int = option(0, "First updates, which train only the critics.", minimum=0)
    replay_capacity: int = option(100_000, "Observations in the replay buffer, over all envs.", minimum=1)
    replay_from: PathText | None = option(
        None, "Checkpoint or run folder of the initial replay buffer; requires the same base policy and env."
    )
    offline_dataset: PathText | None = option(
        None, "Folder of demonstrations with rewards or successes, as `sft.dataset` takes; null: none."
    )
    offline_ratio: float = option(0.0, "Fraction of each batch from `algorithm.offline_dataset`.", minimum=0, maximum=1)
    offline_episodes: str = option(
        "all",
        "Offline episodes: all, successes only, or assume_success: all, as if the last step succeeded.",
        choices=("all", "successes", "assume_success"),
    )

    def complete(self, model: Any, is_alone: Callable[[], bool]) -> None:
        """Choose the actor if none is named. The actor ``scratch`` reads the model's inputs."""
        if self.actor.name is None:
            self.actor.name = SCRATCH if is_alone() else "residual"
        if self.actor.name == SCRATCH:
            model.features = "inputs"

    @property
    def num_offline_rows(self) -> int:
        """Transitions of each batch from demonstrations."""
        return round(self.offline_ratio * self.batch_size) if self.offline_dataset is not None else 0


@dataclass
class SACConfig(OffPolicyConfig):
    """Soft actor-critic (Haarnoja et al. 2018). By default the critics leave the entropy out, as in RLPD (Ball et al. 2023)."""

    name: str = option("sac", "Registered algorithm.")
    initial_alpha: float = option(0.05, "Initial entropy coefficient.", minimum=1e-8)
    target_entropy: float | None = option(
        None, "Target entropy, for actions divided by the scale; null: -1/2 per dimension of a chunk."
    )
    entropy_in_target: bool = option(False, "Add the next action's weighted entropy to the critics' target.")


@dataclass
class TD3Config(OffPolicyConfig):
    """Twin delayed deep deterministic policy gradients (Fujimoto et al. 2018)."""

    name: str = option("td3", "Registered algorithm.")
    noise_std: float = option(0.2, "Std of the exploration noise, relative to the scale.", minimum=1e-3)
    target_noise_std: float = option(0.2, "Std of the target policy smoothing noise.", minimum=0, maximum=10)
    target_noise_clip: float = option(0.5, "Bound of the target policy smoothing noise.", minimum=0)
    policy_delay: int = option(2, "Critic updates per actor update.", minimum=1)
    target_policy: bool = option(False, "Compute target actions with a target actor, updated with the target critics.")
