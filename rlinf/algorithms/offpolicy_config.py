"""Configuration of the off-policy algorithms, which train a small actor on a frozen base policy, or from scratch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf.algorithms.config import AnyAlgorithmConfig
from rlinf.options import PathText, option

LARGEST_SCALE = 2.0
"""Maximum ``actor.scale``. Actions are normalised to [-1, 1], so a residual of 2 can turn any base action into any final action."""

SCRATCH = "scratch"
"""Name of the actor that SAC and TD3 train from scratch, without a base policy."""


@dataclass
class ActorConfig:
    """The trained network of an off-policy run. A checkpoint stores these settings with the actor's weights."""

    name: str | None = option(None, "Registered actor; null: residual, or scratch for an untrained `mlp` or `cnn`.")
    # A residual actor can only reach actions within `scale` of the base policy's action.
    scale: float = option(
        1.0,
        "Maximum residual per action dimension, for actions in [-1, 1]; `dsrl`: maximum noise, in std.",
        minimum=1e-6,
        maximum=LARGEST_SCALE,
    )
    hidden_size: int = option(128, "Width of the hidden layers.", minimum=1)
    num_candidates: int = option(4, "Candidate chunks N in actor `expo`: one greedy, the rest sampled.", minimum=1)
    reference_dropout: float = option(
        0.5, "Probability of hiding the base policy's chunk from actor `rlt` in a loss.", minimum=0, maximum=1
    )
    reference_weight: float = option(
        0.1, "Weight of (a - b)^2 in actor `rlt`'s loss, where b is the base policy's chunk.", minimum=0
    )
    num_layers: int = option(2, "Number of hidden layers in the actor and critics.", minimum=1)
    layer_norm: bool = option(True, "Apply layer normalisation to each hidden layer of the actor and critics.")
    log_std_min: float = option(-5.0, "Lower bound of the actor's log std (SAC).")
    log_std_max: float = option(1.0, "Upper bound of the actor's log std (SAC).")
    tanh_epsilon: float = option(0.0, "Constant added to 1 - tanh(u)^2 in SAC's density; 0: exact.", minimum=0)


@dataclass
class OffPolicyConfig(AnyAlgorithmConfig):
    """Options shared by all algorithms that learn from a replay buffer. The defaults were tuned on a former, easier `quickstart_residual`."""

    actor: ActorConfig = option(ActorConfig(), "The trained actor.")
    gamma: float = option(0.95, "Discount per env step.", minimum=0, maximum=1)
    n_step: int = option(1, "Policy calls per n-step return, before bootstrapping from the target critic.", minimum=1)
    batch_size: int = option(128, "Number of transitions per update.", minimum=1)
    learning_rate: float = option(5e-4, "Learning rate of the actor and critics.", minimum=0, maximum=1)
    tau: float = option(0.01, "Polyak averaging coefficient for the target critics.", minimum=0, maximum=1)
    target_update_interval: int = option(1, "Critic updates between updates of the target critics.", minimum=1)
    critic_loss_weight: float = option(1.0, "Weight of the sum of the critics' mean squared errors.", minimum=1e-6)
    actor_q: str = option(
        "mean",
        "Q value that the actor maximises: the mean or minimum over all critics, or the first critic's.",
        choices=("mean", "min", "first"),
    )
    utd_ratio: float = option(0.5, "Number of updates per env step; below 1, several env steps per update.", minimum=0)
    num_critics: int = option(2, "Number of critics, E.", minimum=1)
    num_target_critics: int = option(
        2, "Target critics M sampled out of E per update; the target uses their minimum.", minimum=1
    )
    learning_starts: int = option(1024, "Initial env steps with random actions and without updates.", minimum=0)
    # Overlapped updates reach the policy exactly one call late. This fixed lag keeps results independent of timing.
    overlap: bool = option(False, "Update in a thread while the envs step, one policy call behind.")
    critic_only_updates: int = option(0, "Number of initial updates that train only the critics.", minimum=0)
    replay_capacity: int = option(100_000, "Capacity of the replay buffer in observations, over all envs.", minimum=1)
    replay_from: PathText | None = option(
        None, "Checkpoint or run folder to load the initial replay buffer from; requires the same base policy and env."
    )
    offline_dataset: PathText | None = option(
        None, "Folder with demonstrations that have rewards or successes, in a format of `sft.dataset`; null: none."
    )
    offline_ratio: float = option(0.0, "Fraction of each batch from `algorithm.offline_dataset`.", minimum=0, maximum=1)
    offline_episodes: str = option(
        "all",
        "Offline episodes to use: all, only successes, or assume_success: all, with each last step marked as a success.",
        choices=("all", "successes", "assume_success"),
    )

    def complete(self, model: Any, is_alone: Callable[[], bool]) -> None:
        """Choose the actor if none is named. The actor ``scratch`` uses the model's inputs as its features."""
        if self.actor.name is None:
            self.actor.name = SCRATCH if is_alone() else "residual"
        if self.actor.name == SCRATCH:
            model.features = "inputs"

    @property
    def num_offline_rows(self) -> int:
        """Number of demonstration transitions per batch."""
        return round(self.offline_ratio * self.batch_size) if self.offline_dataset is not None else 0


@dataclass
class SACConfig(OffPolicyConfig):
    """Soft actor-critic (Haarnoja et al. 2018). By default the critic targets omit the entropy, as in RLPD (Ball et al. 2023)."""

    name: str = option("sac", "Registered algorithm.")
    initial_alpha: float = option(0.05, "Initial entropy coefficient.", minimum=1e-8)
    target_entropy: float | None = option(
        None, "Target entropy of actions divided by the scale; null: -1/2 per dimension of a chunk."
    )
    entropy_in_target: bool = option(False, "Add the next action's weighted entropy to the critics' target.")


@dataclass
class TD3Config(OffPolicyConfig):
    """Twin delayed deep deterministic policy gradients (Fujimoto et al. 2018)."""

    name: str = option("td3", "Registered algorithm.")
    noise_std: float = option(0.2, "Std of the exploration noise, relative to the scale.", minimum=1e-3)
    target_noise_std: float = option(
        0.2, "Std of the noise for target policy smoothing, relative to the scale.", minimum=0, maximum=10
    )
    target_noise_clip: float = option(0.5, "Clipping bound of this noise, relative to the scale.", minimum=0)
    policy_delay: int = option(2, "Critic updates per actor update.", minimum=1)
    target_policy: bool = option(False, "Use a target actor, updated with the target critics, for target actions.")
