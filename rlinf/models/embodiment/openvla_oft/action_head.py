"""OpenVLA-OFT's continuous action head and state input, with the parameter names used in its public files."""

import torch
from torch import Tensor, nn

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
