"""TrainerContext of a policy that compute in float32, whatever the rest of it does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf.models.precision import autocast_type


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context in which autocast is off on the device of ``tensor``."""
    return torch.autocast(autocast_type(tensor), enabled=False)


class LinearInFloat32(nn.Linear):
    """A linear layer whose output is float32; same parameters. An output head of any format becomes one by its class."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., H]`` to float32 ``[..., out]``."""
        return linear_in_float32(x, self.weight, self.bias)


def linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer in float32: ``[..., H]`` to ``[..., out]``.

    For logits: next to 16 or more, numbers in bfloat16 are 0.125 apart, and a probability would be off by up to 6 %.
    """
    with without_autocast(x):
        return nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
