"""The head of a flow policy that learns the deviation of ``flow_noise``, with the names of public RL weights."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlinf.models.embodiment.modules.float32 import without_autocast


class NoiseHead(nn.Module):
    """Deviation of a denoising step (Zhang et al. 2025, ReinFlow): a tanh perceptron whose output spans a range.

    ``log var = low + (high - low) (tanh(mlp(h)) + 1) / 2``, with ``low`` and ``high`` the logarithms of the squared bounds.
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
        for name, bound in deviation_bounds(std_range).items():
            self.register_buffer(name, bound)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[B, H, W]`` to float32 deviations ``[B, H, action_dim]``."""
        output = hidden_states.to(self.mlp_logvar.moduleList[0].linear_1.weight.dtype)
        with without_autocast(hidden_states):
            for layer in self.mlp_logvar.moduleList:
                output = layer(output)
        low, high = self.logvar_min.float(), self.logvar_max.float()
        return torch.exp(0.5 * (low + (high - low) * (torch.tanh(output.float()) + 1.0) / 2.0))


def deviation_bounds(std_range: Sequence[float]) -> dict[str, Tensor]:
    """Return the buffers of a ``NoiseHead``: the logarithms of the squared bounds."""
    low, high = (torch.tensor([2.0 * math.log(bound)]) for bound in std_range)
    return {"logvar_min": low, "logvar_max": high}
