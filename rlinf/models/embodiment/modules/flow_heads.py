"""Heads of a flow policy: the critic and the learned deviation of ``flow_noise``, with the names of public RL weights."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FlowValueHead(nn.Module):
    """ReLU perceptron ``mlp.{0,2,...}`` from the mean of the expert's outputs to a value.

    Hidden layers keep torch's default initialisation, the last one is normal with deviation 0.02.

    Args:
        width: Width ``W`` of the action expert.
        hidden_sizes: Widths of the hidden layers.
    """

    def __init__(self, width: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in hidden_sizes:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        self.mlp = nn.Sequential(*layers, nn.Linear(width, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights (see the class)."""
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        nn.init.normal_(self.mlp[-1].weight, std=0.02)
        nn.init.zeros_(self.mlp[-1].bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[B, W]`` to float32 values ``[B]``."""
        return self.mlp(hidden_states.to(self.mlp[0].weight.dtype)).squeeze(-1).float()


class NoiseHead(nn.Module):
    """Deviation of a denoising step (Zhang et al. 2025, ReinFlow): a tanh perceptron whose output spans a range.

    ``log var = low + (high - low) (tanh(mlp(h)) + 1) / 2``, with ``low`` and ``high`` the logarithms of the squared bounds.

    Args:
        width: Width ``W`` of the action expert.
        hidden_sizes: Widths of the hidden layers.
        action_dim: Numbers of one action.
        std_range: Smallest and largest deviation.
    """

    def __init__(self, width: int, hidden_sizes: Sequence[int], action_dim: int, std_range: Sequence[float]) -> None:
        super().__init__()
        sizes = [width, *hidden_sizes, action_dim]
        layers = []
        for index, (fan_in, fan_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            parts = OrderedDict(linear_1=nn.Linear(fan_in, fan_out))
            if index < len(sizes) - 2:
                parts["act_1"] = nn.Tanh()
            layers.append(nn.Sequential(parts))
        self.mlp_logvar = nn.Module()
        self.mlp_logvar.moduleList = nn.ModuleList(layers)
        low, high = (2.0 * math.log(bound) for bound in std_range)
        self.register_buffer("logvar_min", torch.tensor([low]))
        self.register_buffer("logvar_max", torch.tensor([high]))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[B, H, W]`` to float32 deviations ``[B, H, action_dim]``."""
        output = hidden_states.to(self.mlp_logvar.moduleList[0].linear_1.weight.dtype)
        for layer in self.mlp_logvar.moduleList:
            output = layer(output)
        low, high = self.logvar_min.float(), self.logvar_max.float()
        return torch.exp(0.5 * (low + (high - low) * (torch.tanh(output.float()) + 1.0) / 2.0))
