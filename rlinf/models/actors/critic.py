"""An ensemble of critics, evaluated as one batched network."""

import math

import torch
from torch import Tensor, nn

from rlinf.algorithms.offpolicy_config import ActorConfig
from rlinf.models.precision import without_autocast


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
