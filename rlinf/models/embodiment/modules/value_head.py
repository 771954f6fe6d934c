"""The critic: hidden states to values."""

from __future__ import annotations

from torch import Tensor, nn


class ValueHead(nn.Module):
    """Two-layer GELU perceptron: Linear(H, 512), Linear(512, 128), Linear(128, 1, no bias).

    Parameter names are those of public RL checkpoints: ``mlp.{0,2,4}``. Initialisation: the hidden layers keep torch's
    default (uniform in +-1/sqrt(fan_in)), the last layer is normal with deviation 0.02, so that values start near 0.

    Args:
        hidden_size: Width ``H`` of the hidden states.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 512),
            nn.GELU(),
            nn.Linear(512, 128),
            nn.GELU(),
            nn.Linear(128, 1, bias=False),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights (see the class)."""
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        nn.init.normal_(self.mlp[-1].weight, std=0.02)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[B, H]`` or ``[B, S, H]`` to float32 values ``[B]`` or ``[B, S]``."""
        return self.mlp(hidden_states.to(self.mlp[0].weight.dtype)).squeeze(-1).float()
