"""The value head, which maps hidden states to values."""

from collections.abc import Sequence

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
