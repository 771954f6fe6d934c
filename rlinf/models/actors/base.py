"""An actor: a network on the features and chunks of the frozen policy, and a distribution over its output."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlinf.algorithms.offpolicy_config import ActorConfig
from rlinf.models.embodiment.modules.float32 import without_autocast

INITIAL_LOG_STD = -1.0


class Actor(nn.Module):
    """A network that gives numbers ``r`` in [-1, 1], of which ``compose`` makes the action.

    Actions and base actions are in halves of the range of the env: its bounds are -1 and 1.

    Args:
        config: Its settings.
        feature_dim: ``F``, features of an observation.
        base_dim: Numbers of a chunk of the frozen policy.
        noise_std: Deviation of the noise with which it explores; None: it learns its own, as a Gaussian through tanh.
        output_dim: ``A``, numbers of ``r`` and of an action as the critics value it; None: ``base_dim``.
        encoder: Trained by the critics; what it makes of the features, ``[B, encoded_dim]``, is what actor and critics read.
        encoded_dim: None: ``feature_dim``.

    Attributes:
        is_standalone: ``r`` is the action, so no scale cuts it.
        critics_choose: It has several ``options``, among which the critics choose.
        sets_noise: Its actions are the noise from which the frozen policy samples, and are not executed by the env.
        starts_as_base: A new one acts greedily as the frozen policy does.
    """

    critics_choose: ClassVar[bool] = False
    sets_noise: ClassVar[bool] = False
    starts_as_base: ClassVar[bool] = False
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
        with torch.no_grad():  # r is 0 at first
            self.network[-1].weight.zero_()
            self.network[-1].bias.zero_()
            if noise_std is None:
                self.network[-1].bias[output_dim:] = INITIAL_LOG_STD

    @classmethod
    def num_candidates_for(cls, config: ActorConfig) -> int:
        """Return how many chunks of the frozen policy an actor of these settings reads."""
        return 1

    @classmethod
    def output_dim_for(cls, model: Any) -> int:
        """Return ``A`` of an actor on ``model``, a policy that may be on the meta device."""
        return model.action_dim * model.action_chunks_len

    @classmethod
    def base_dim_for(cls, model: Any) -> int:
        """Return the numbers that it reads of each chunk of ``model``."""
        return model.action_dim * model.action_chunks_len

    @property
    def critic_input_dim(self) -> int:
        """Numbers that a critic reads: features, the greedy chunk of the frozen policy, and an action."""
        return self.encoded_dim + self.base_dim + self.output_dim

    @property
    def num_candidates(self) -> int:
        """``N``, chunks of the frozen policy that it reads; the first is the greedy one."""
        return self.num_candidates_for(self.config)

    @property
    def noise_dim(self) -> int:
        """Random numbers of an observation that ``options`` takes."""
        return self.output_dim

    def options(self, features: Tensor, base: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the possible actions ``[B, K, A]`` for encoded features ``[B, F]`` and base chunks ``[B, N, A]``.

        ``noise`` is standard normal, ``[B, noise_dim]``; None: the mode.
        """
        r = self.mode(features, base) if noise is None else self.sample(features, base, noise)[0]
        return self.compose(base, r).unsqueeze(1)

    def base_for_loss(self, base: Tensor, generator: torch.Generator) -> Tensor:
        """Return the base chunks ``[B, N, A]`` with which a loss of the actor is computed."""
        return base

    def penalty(self, base: Tensor, actions: Tensor) -> Tensor:
        """Return the actor's own term ``[B]`` of its loss, for actions ``[B, A]`` at base chunks ``[B, N, A]``."""
        return actions.new_zeros(len(actions))

    @abstractmethod
    def compose(self, base: Tensor, r: Tensor) -> Tensor:
        """Return the action ``[B, A]`` of base chunks ``[B, N, A]`` and the numbers ``[B, A]`` of the network."""

    def outputs(self, features: Tensor, base: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return mean and log-deviation ``[B, A]`` before tanh; with ``noise_std`` the latter is None."""
        with without_autocast(features):
            found = self.network(torch.cat([features, base[:, 0]], 1))
        if self.noise_std is not None:
            return found, None
        mean, log_std = found.chunk(2, 1)
        return mean, log_std.clamp(self.config.log_std_min, self.config.log_std_max)

    def mode(self, features: Tensor, base: Tensor) -> Tensor:
        """Return the numbers ``[B, A]`` without noise, as in an evaluation."""
        return torch.tanh(self.outputs(features, base)[0])

    def sample(self, features: Tensor, base: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers ``[B, A]`` from standard normal ``noise``, and their log-densities ``[B]``; 0 with ``noise_std``."""
        mean, log_std = self.outputs(features, base)
        if log_std is None:
            drawn = (torch.tanh(mean) + self.noise_std * noise).clamp(-1.0, 1.0)
            return drawn, drawn.new_zeros(len(drawn))
        u = mean + log_std.exp() * noise
        return torch.tanh(u), squashed_logprobs(u, noise, log_std, self.config.tanh_epsilon)


def squashed_logprobs(u: Tensor, noise: Tensor, log_std: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return the log-densities ``[B]`` of ``tanh(u)`` with ``u = mean + exp(log_std) * noise``, all ``[B, A]``.

    Haarnoja et al. 2018, appendix C: ``log N(u) - sum log(1 - tanh(u)^2)``, the latter as ``2 (log 2 - u - softplus(-2u))``,
    which is finite where ``tanh(u)`` rounds to 1. With ``epsilon`` it is ``log(1 - tanh(u)^2 + epsilon)``.
    """
    normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    if epsilon == 0:
        slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
    else:
        slope = (1 - torch.tanh(u).square() + epsilon).log()
    return (normal - slope).sum(1)


def perceptron(widths: list[int], num_outputs: int, layer_norm: bool = True) -> nn.Sequential:
    """Return linear layers, each but the last followed by ReLU, and by layer normalisation before it."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(fan_in, fan_out), *([nn.LayerNorm(fan_out)] if layer_norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_outputs))
