"""Heads on a language model's hidden states: values, and OpenVLA-OFT's continuous actions with their state input."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlinf.models.precision import without_autocast


class ValueHead(nn.Module):
    """An MLP with layers ``mlp.{0,2,...}``; by default Linear(H, 512), GELU, Linear(512, 128), GELU, Linear(128, 1, no bias)."""

    def __init__(
        self,
        hidden_size: int,
        hidden_sizes: Sequence[int] = (512, 128),
        activation: type[nn.Module] = nn.GELU,
        bias: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in hidden_sizes:
            layers += [nn.Linear(hidden_size, width), activation()]
            hidden_size = width
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden_size, 1, bias=bias))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        # With small weights in the last layer, initial values are near 0.
        nn.init.normal_(self.mlp[-1].weight, std=0.02)
        if self.mlp[-1].bias is not None:
            nn.init.zeros_(self.mlp[-1].bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[B, H]`` or ``[B, S, H]`` to float32 values ``[B]`` or ``[B, S]``."""
        with without_autocast(hidden_states):
            return self.mlp(hidden_states.to(self.mlp[0].weight.dtype)).squeeze(-1).float()


NUM_BLOCKS = 2


class _ResidualMLP(nn.Module):
    """An MLP with blocks ``x + ReLU(Linear(LayerNorm(x)))`` between two linear layers."""

    def __init__(self, input_dim: int, width: int, output_dim: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(input_dim)
        self.fc1 = nn.Linear(input_dim, width)
        self.mlp_resnet_blocks = nn.ModuleList(
            nn.ModuleDict({"ffn": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())})
            for _ in range(NUM_BLOCKS)
        )
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = x + block["ffn"](x)
        return self.fc2(self.layer_norm2(x))


class L1ActionHead(nn.Module):
    """Maps the concatenated hidden states of each step to a normalised action (OpenVLA-OFT, Kim et al. 2025)."""

    def __init__(self, hidden_size: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = _ResidualMLP(action_dim * hidden_size, hidden_size, action_dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[B, C * D, H]`` to normalised actions float32 ``[B, C, D]``."""
        steps = hidden_states.unflatten(1, (-1, self.action_dim)).flatten(2)
        return self.model(steps).float()


class ProprioProjector(nn.Module):
    """Maps the normalised state ``[B, S]`` to one language-model token ``[B, H]``."""

    def __init__(self, state_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, state: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(state)))
