"""A small Gaussian policy with the state vector as input; the quickest way to debug an algorithm or an env."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlinf.algorithms.running_moments import RunningMoments
from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.models.config import TokenizerConfig
from rlinf.models.embodiment.base import Inputs, check_hidden_size
from rlinf.models.embodiment.modules.normalizer import ActionNormalizer, select_stats
from rlinf.models.embodiment.modules.ranges import Range
from rlinf.models.embodiment.plain_policy import PlainConfig, PlainPolicy
from rlinf.models.loading import field_error
from rlinf.models.precision import without_autocast
from rlinf.models.sampling import draw_uniforms
from rlinf.types import ActionEvaluation, ActionPrediction, BaseActions, EnvSpec, Observation

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


@dataclass
class MLPConfig(PlainConfig):
    """Configuration of the state policy.

    Args:
        state_dim: Width of ``Observation.state``.
        hidden_sizes: Widths of the hidden layers of policy and critic.
        initial_log_std: Logarithm of the initial std, in normalised action units.
        activation: A key of ``ACTIVATIONS``.
        value_gain: Gain of the orthogonal initialisation of the critic's last layer.
        normalize_state: Normalise the state by its running mean and variance over RL rollouts.
    """

    model_type: ClassVar[str] = "mlp"
    # With 0, the env renders no images.
    num_images_in_input: ClassVar[int] = 0

    state_dim: int = 1
    hidden_sizes: list[int] | None = None
    initial_log_std: float = -0.5
    activation: str = "tanh"
    value_gain: float = math.sqrt(2.0)
    normalize_state: bool = False

    def __post_init__(self) -> None:
        self.hidden_sizes = list(self.hidden_sizes or [256, 256])
        self.norm_stats = self.norm_stats or {}
        if min(self.hidden_sizes) < 1:
            raise field_error(f"hidden_sizes is {self.hidden_sizes}; expected all positive", "hidden_sizes=[256,256]")
        if self.activation not in ACTIVATIONS:
            problem = f"activation is {self.activation!r}; expected {' or '.join(ACTIVATIONS)}"
            raise field_error(problem, "activation=tanh")
        if self.normalize_state and not self.state_dim:
            problem = f"normalize_state=true for {self.model_type} with state_dim=0; expected a state to normalise"
            raise field_error(problem, "normalize_state=false")


class MLPForRLActionPrediction(PlainPolicy):
    """Diagonal Gaussian with a state-independent std; policy and critic have separate weights.

    ``sequences`` contains sampled actions in normalised units, which are clipped to [-1, 1] for execution. ``temperature``
    multiplies the variance.
    """

    config_class = MLPConfig
    base_model_prefix = "mlp"
    main_input_name = "state"
    # Even indices are linear layers, odd ones activations.
    lora_target_modules: ClassVar[str] = r"policy\.\d*[02468]"
    trained_in_full: ClassVar[tuple[str, ...]] = ("value_head", "log_std", "state_moments")
    needs_state: ClassVar[bool] = True
    without_state: ClassVar[str] = "model=cnn"
    float32_modules: ClassVar[tuple[str, ...]] = ("policy", "value_head", "log_std")

    @classmethod
    def check_env(cls, config: MLPConfig, env: EnvSpec) -> None:
        """Reject an env whose state width differs from the policy's, and a policy without state input."""
        if cls.needs_state and config.state_dim < 1:
            if env.state_dim == 0:
                raise ConfigError(f"The policy reads a state; env.name={env.name} has none. Set {cls.without_state}")
            raise ConfigError(
                f"state_dim={config.state_dim}; expected at least 1, because the state is the policy's only input. "
                f"Set model.init_config.state_dim={env.state_dim or 4}"
            )
        super().check_env(config, env)

    def __init__(
        self,
        config: MLPConfig,
        hidden_size: int | None = None,
        unnorm_key: str | None = None,
        action_dim: int = 2,
        action_chunks_len: int = 1,
        value_head: bool = True,
        detach_value: bool = True,
    ) -> None:
        super().__init__(config)
        check_hidden_size(hidden_size, config.hidden_sizes[-1])
        self.action_dim, self.action_chunks_len = action_dim, action_chunks_len
        # This has no effect, because policy and critic have separate weights.
        self.detach_value = detach_value
        stats = select_stats(config.norm_stats, unnorm_key)
        self.action_normalizer = ActionNormalizer(stats.get("action") or {}, action_dim)
        # The network reads the unnormalised state; the range is only used to detect wrong units.
        if config.state_dim and "q99" in (stats.get("proprio") or {}):
            self.state_range = Range.of(stats["proprio"], ("q01", "q99"), "proprio")
        self.state_moments = RunningMoments(config.state_dim) if config.normalize_state else None
        widths, activation = [self._add_encoder(config), *config.hidden_sizes], ACTIVATIONS[config.activation]
        self.policy = _perceptron([*widths, self.num_logprobs], activation)
        self.log_std = nn.Parameter(torch.full((self.num_logprobs,), float(config.initial_log_std)))
        self.value_head = _perceptron([*widths, 1], activation) if value_head else None
        self.post_init()

    def _add_encoder(self, config: MLPConfig) -> int:
        """Add an input encoder, if any; return its output width."""
        return config.state_dim

    def _features(self, state: Tensor) -> Tensor:
        """Return features ``[B, F]`` for the result of ``preprocess``."""
        return self._normalized(state)

    def _normalized(self, state: Tensor | None) -> Tensor | None:
        """Return the state in the form that the network reads."""
        return state if state is None or self.state_moments is None else self.state_moments.normalize(state)

    @classmethod
    def _new_heads(cls, config: MLPConfig, arguments: dict[str, Any]) -> dict[str, nn.Module | None]:
        return {"value_head": cls(config, **arguments).value_head}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            gain = math.sqrt(2.0)
            if module is self.policy[-1]:
                gain = 0.01
            elif self.value_head is not None and module is self.value_head[-1]:
                gain = self.config.value_gain
            nn.init.orthogonal_(module.weight, gain)
            nn.init.zeros_(module.bias)
        elif module is self:
            nn.init.constant_(self.log_std, self.config.initial_log_std)

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        if observation.state is None or observation.state.shape[1] != self.config.state_dim:
            given = "no state" if observation.state is None else f"a state of width {observation.state.shape[1]}"
            width = self.config.state_dim if observation.state is None else observation.state.shape[1]
            raise ConfigError(
                f"The policy reads a state of width {self.config.state_dim}, but the environment provides {given}. "
                f"Set model.init_config.state_dim={width}, or use an image policy: model=openvla_tiny"
            )
        return {"state": to_device(torch.from_numpy(observation.state).float(), self.device)}

    def prompt_lengths(self, observation: Observation) -> Sequence[Hashable]:
        return [0] * len(observation)

    def _distribution(self, features: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        with without_autocast(features):
            mean = self.policy(features.to(self.policy[0].weight.dtype)).float()
        log_std = self.log_std.float() + 0.5 * math.log(temperature)
        return mean, log_std.expand_as(mean)

    def _values(self, features: Tensor) -> Tensor:
        if self.value_head is None:
            return features.new_zeros(len(features), dtype=torch.float32)
        with without_autocast(features):
            return self.value_head(features.to(self.value_head[0].weight.dtype)).squeeze(-1).float()

    @torch.no_grad()
    def predict_action_batch(
        self, do_sample: bool = True, temperature: float = 1.0, uniforms: Tensor | None = None, **inputs: Tensor
    ) -> ActionPrediction:
        features = self._features(**inputs)
        mean, log_std = self._distribution(features, temperature)
        actions = mean
        if do_sample:
            if uniforms is None:
                uniforms = draw_uniforms(*mean.shape, device=mean.device)
            actions = mean + log_std.exp() * torch.special.ndtri(uniforms.double()).to(mean)
        logits = torch.stack([mean, log_std], dim=-1)
        return ActionPrediction(self.decode_actions(actions), actions, logits, self._values(features))

    @property
    def feature_dim(self) -> int:
        """Width of the last hidden layer (``hidden``), the network's input (``pooled``), or the state (``inputs``)."""
        if self.feature_kind == "inputs":
            return self.config.state_dim
        return self.policy[-1 if self.feature_kind == "hidden" else 0].in_features

    def make_encoder(self) -> tuple[nn.Module, int]:
        """Return an identity encoder, because actors read the state directly."""
        return nn.Identity(), self.config.state_dim

    def _as_numbers(self, state: Tensor) -> Tensor:
        """Return each row's inputs as one vector."""
        return state

    def _propose(self, inputs: Inputs, samples: bool) -> BaseActions:
        if self.feature_kind == "inputs":
            numbers = self._as_numbers(**inputs)
            middle = torch.zeros(len(numbers), 1, self.action_chunks_len, self.action_dim, device=numbers.device)
            return BaseActions(self.action_normalizer.unnormalize(middle).float(), numbers, None)
        encoded = self._features(**inputs)
        with without_autocast(encoded):
            hidden = self.policy[:-1](encoded.to(self.policy[0].weight.dtype))
            mean = self.policy[-1](hidden).float()

        def sample(uniforms: Tensor) -> Tensor:
            noise = torch.special.ndtri(uniforms.double()).to(mean)
            drawn = mean.unsqueeze(1) + self.log_std.float().exp() * noise
            return self.decode_actions(drawn.flatten(0, 1)).unflatten(0, drawn.shape[:2])

        features = (hidden if self.feature_kind == "hidden" else encoded).float()
        return BaseActions(self.decode_actions(mean).unsqueeze(1), features, sample if samples else None)

    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        mean, log_std = prediction.logits.unbind(-1)
        return _gaussian_logprobs(prediction.sequences.float(), mean, log_std)

    def evaluate_actions(self, inputs: Inputs, sequences: Tensor, temperature: float = 1.0) -> ActionEvaluation:
        features = self._features(**inputs)
        mean, log_std = self._distribution(features, temperature)
        logprobs = _gaussian_logprobs(sequences[:, -self.num_logprobs :].float(), mean, log_std)
        entropy = log_std + 0.5 * math.log(2 * math.pi * math.e)
        return ActionEvaluation(logprobs, entropy, self._values(features))

    def sft_loss(self, inputs: Inputs, actions: Tensor, uniforms: Tensor | None = None) -> Tensor:
        """Return the mean negative log-density ``[B]`` of ``actions [B, C, D]`` in normalised units."""
        mean, log_std = self._distribution(self._features(**inputs), 1.0)
        target = self.action_normalizer.normalize(actions).flatten(1).to(mean)
        return -_gaussian_logprobs(target, mean, log_std).mean(-1)

    def decode_actions(self, sequences: Tensor) -> Tensor:
        normalized = sequences[:, -self.num_logprobs :].clamp(-1.0, 1.0)
        normalized = normalized.unflatten(1, (self.action_chunks_len, self.action_dim))
        return self.action_normalizer.unnormalize(normalized).float()


def load_processor(tokenizer_config: TokenizerConfig, model_config: Any, path: str | None) -> None:
    """Return None, because a state needs no processor."""


def _perceptron(widths: list[int], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        layers += [nn.Linear(fan_in, fan_out)] + ([activation()] if index < len(widths) - 2 else [])
    return nn.Sequential(*layers)


def _gaussian_logprobs(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    return -0.5 * ((x - mean) * torch.exp(-log_std)).square() - log_std - 0.5 * math.log(2 * math.pi)
