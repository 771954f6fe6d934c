"""Base class of actors, and their critics: small networks whose inputs are a frozen base policy's features and action chunks."""

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlinf.algorithms.offpolicy_config import ActorConfig
from rlinf.models.precision import without_autocast

INITIAL_LOG_STD = -1.0


class Actor(nn.Module):
    """A network that outputs ``r`` in [-1, 1], from which ``compose`` computes the action.

    Actions and base actions are normalised so that the env's action bounds map to -1 and 1.

    Args:
        feature_dim: ``F``, the number of feature dimensions.
        base_dim: Number of dimensions that the actor reads from a base chunk.
        noise_std: Fixed std of the exploration noise. If None, the network predicts the std of a tanh-squashed Gaussian.
        output_dim: ``A``, the number of dimensions of ``r`` and of the actions given to critics; None uses ``base_dim``.
        encoder: Module mapping the features to ``[B, encoded_dim]`` for actor and critics; trained by the critics' loss.

    Attributes:
        is_standalone: Whether ``r`` itself is the action, so that no scale bounds it.
        critics_choose: Whether the actor has several ``options``, of which the critics choose one.
        sets_noise: Whether its actions are noise for the base policy, which the env does not execute.
    """

    critics_choose: ClassVar[bool] = False
    sets_noise: ClassVar[bool] = False
    is_standalone: ClassVar[bool] = False

    def __init__(
        self,
        config: ActorConfig,
        feature_dim: int,
        base_dim: int,
        noise_std: float | None = None,
        output_dim: int | None = None,
        encoder: nn.Module | None = None,
        encoded_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.encoder = nn.Identity() if encoder is None else encoder
        self.encoded_dim = feature_dim if encoded_dim is None else encoded_dim
        output_dim = base_dim if output_dim is None else output_dim
        self.config, self.feature_dim, self.noise_std = config, feature_dim, noise_std
        self.base_dim, self.output_dim = base_dim, output_dim
        num_outputs = output_dim * (2 if noise_std is None else 1)
        widths = [self.encoded_dim + base_dim] + [config.hidden_size] * config.num_layers
        self.network = perceptron(widths, num_outputs, config.layer_norm)
        # The last layer starts at zero, so a new actor outputs r = 0.
        with torch.no_grad():
            self.network[-1].weight.zero_()
            self.network[-1].bias.zero_()
            if noise_std is None:
                self.network[-1].bias[output_dim:] = INITIAL_LOG_STD

    @classmethod
    def num_candidates_for(cls, config: ActorConfig) -> int:
        """Return ``N``, the number of base chunks that an actor with these settings reads."""
        return 1

    @classmethod
    def output_dim_for(cls, model: Any) -> int:
        """Return ``A`` for an actor on top of ``model``, which may be on the meta device."""
        return model.action_dim * model.action_chunks_len

    @classmethod
    def base_dim_for(cls, model: Any) -> int:
        """Return the number of dimensions that an actor reads from each of ``model``'s base chunks."""
        return model.action_dim * model.action_chunks_len

    @property
    def critic_input_dim(self) -> int:
        """Input width of a critic, which reads features, the greedy base chunk and an action."""
        return self.encoded_dim + self.base_dim + self.output_dim

    @property
    def num_candidates(self) -> int:
        """``N``, the number of base chunks that the actor reads; the first is the greedy one."""
        return self.num_candidates_for(self.config)

    @property
    def noise_dim(self) -> int:
        """Number of noise dimensions per observation that ``options`` needs."""
        return self.output_dim

    def options(self, features: Tensor, base: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return candidate actions ``[B, K, A]`` for encoded features ``[B, F]`` and base chunks ``[B, N, A]``.

        ``noise [B, noise_dim]`` is standard normal; None returns the mode.
        """
        r = self.mode(features, base) if noise is None else self.sample(features, base, noise)[0]
        return self.compose(base, r).unsqueeze(1)

    def base_for_loss(self, base: Tensor, generator: torch.Generator) -> Tensor:
        """Return the base chunks ``[B, N, A]`` to use in a training loss, e.g. after dropout."""
        return base

    def penalty(self, base: Tensor, actions: Tensor) -> Tensor:
        """Return an additional loss term ``[B]`` for actions ``[B, A]`` given base chunks ``[B, N, A]``."""
        return actions.new_zeros(len(actions))

    @abstractmethod
    def compose(self, base: Tensor, r: Tensor) -> Tensor:
        """Compute the action ``[B, A]`` from base chunks ``[B, N, A]`` and the network output ``[B, A]``."""

    def outputs(self, features: Tensor, base: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return mean and log-std ``[B, A]`` before tanh; the log-std is None if ``noise_std`` is set."""
        with without_autocast(features):
            outputs = self.network(torch.cat([features, base[:, 0]], 1))
        if self.noise_std is not None:
            return outputs, None
        mean, log_std = outputs.chunk(2, 1)
        return mean, log_std.clamp(self.config.log_std_min, self.config.log_std_max)

    def mode(self, features: Tensor, base: Tensor) -> Tensor:
        """Return ``r [B, A]`` without noise, as used in evaluations."""
        return torch.tanh(self.outputs(features, base)[0])

    def sample(self, features: Tensor, base: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``r [B, A]``, sampled with standard normal ``noise``, and its log-density ``[B]`` (0 if ``noise_std`` is set)."""
        mean, log_std = self.outputs(features, base)
        if log_std is None:
            sampled = (torch.tanh(mean) + self.noise_std * noise).clamp(-1.0, 1.0)
            return sampled, sampled.new_zeros(len(sampled))
        u = mean + log_std.exp() * noise
        return torch.tanh(u), squashed_logprobs(u, noise, log_std, self.config.tanh_epsilon)


def squashed_logprobs(u: Tensor, noise: Tensor, log_std: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return the log-density ``[B]`` of ``tanh(u)`` with ``u = mean + exp(log_std) * noise``, all ``[B, A]``.

    See Haarnoja et al. 2018, appendix C: ``log N(u) - sum log(1 - tanh(u)^2 + epsilon)``.
    """
    normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    if epsilon == 0:
        # 2 (log 2 - u - softplus(-2u)) is exact and stays finite where tanh(u) rounds to 1.
        slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
    else:
        slope = (1 - torch.tanh(u).square() + epsilon).log()
    return (normal - slope).sum(1)


def perceptron(widths: list[int], num_outputs: int, layer_norm: bool = True) -> nn.Sequential:
    """Build an MLP: linear, optional layer normalisation and ReLU per hidden layer, then a linear output layer."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(fan_in, fan_out), *([nn.LayerNorm(fan_out)] if layer_norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_outputs))


class Critics(nn.Module):
    """An ensemble of ``E`` critics with separate weights; ``num_inputs`` is ``Actor.critic_input_dim``."""

    def __init__(self, config: ActorConfig, num_inputs: int, num_critics: int) -> None:
        super().__init__()
        self.num_critics, self.layer_norm, width = num_critics, config.layer_norm, config.hidden_size
        # All critics read the same inputs, so their first layers are computed as one matrix product.
        self.first = nn.Linear(num_inputs, num_critics * width)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.gains, self.shifts = nn.ParameterList(), nn.ParameterList()
        for number in range(config.num_layers):
            if config.layer_norm:
                self.gains.append(torch.ones(num_critics, 1, width))
                self.shifts.append(torch.zeros(num_critics, 1, width))
            # Same uniform initialisation as nn.Linear.
            num_outputs, bound = width if number < config.num_layers - 1 else 1, 1 / math.sqrt(width)
            self.weights.append(torch.empty(num_critics, width, num_outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(num_critics, 1, num_outputs).uniform_(-bound, bound))

    def option_values(self, features: Tensor, base: Tensor, options: Tensor) -> Tensor:
        """Return Q values ``[E, B, K]`` for actions ``[B, K, A]``, given features ``[B, F]`` and base chunks ``[B, N, A]``."""
        count = options.shape[1]
        rows = (tensor.unsqueeze(1).expand(-1, count, -1).flatten(0, 1) for tensor in (features, base[:, 0]))
        return self(*rows, options.flatten(0, 1)).unflatten(1, (-1, count))

    def best_option(self, features: Tensor, base: Tensor, options: Tensor) -> tuple[Tensor, Tensor]:
        """Return the option ``[B, A]`` with the highest mean Q value (the first one if tied) and its index ``[B]``."""
        if options.shape[1] == 1:
            return options[:, 0], torch.zeros(len(options), dtype=torch.int64, device=options.device)
        chosen = self.option_values(features, base, options).mean(0).argmax(1)
        return options[torch.arange(len(options), device=options.device), chosen], chosen

    def forward(self, features: Tensor, base: Tensor, actions: Tensor) -> Tensor:
        """Return Q values ``[E, B]`` for features ``[B, F]``, base actions ``[B, A]`` and actions ``[B, A]``."""
        # Evaluation may run under autocast while training does not; switching it off makes both choose the same option.
        with without_autocast(features):
            x = self.first(torch.cat([features, base, actions], 1)).unflatten(1, (self.num_critics, -1)).transpose(0, 1)
            for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
                if self.layer_norm:
                    normal = nn.functional.layer_norm(x, x.shape[-1:])
                    x = torch.addcmul(self.shifts[number], normal, self.gains[number])
                x = torch.baddbmm(bias, torch.relu(x), weight)
            return x.squeeze(-1)
