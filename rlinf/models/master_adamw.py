"""The optimiser of token policies."""

from __future__ import annotations

import torch
from torch import nn


class MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) on float32 copies of parameters in 16 bits, and on others directly.

    Attributes:
        parameters: The trained parameters of the model.
        masters: What is stepped, in the same order: a float32 copy, or the parameter itself.
    """

    def __init__(self, model: nn.Module, learning_rate: float, weight_decay: float) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self.parameters]
        self._adamw = torch.optim.AdamW(self.masters, lr=learning_rate, weight_decay=weight_decay)

    def zero_grad(self) -> None:
        """Forget the gradients of parameters and copies."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def gather_gradients(self) -> None:
        """Add the gradients of a backward pass to those of the float32 copies, where sums are not rounded to 16 bits."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Step the copies by what was gathered, and round them to the parameters."""
        self.gather_gradients()
        self._adamw.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None
