"""TrainerContext of a Llama layer that keep less for their gradients than autograd would, with the same numbers, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm


class LeanMLP(LlamaMLP):
    """``LlamaMLP`` with SwiGLU (Shazeer 2020), ``silu(gate) * up``. Only ``gate`` and ``up`` are kept, not ``silu(gate)``."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Transform ``[..., H]``."""
        return self.down_proj(_SwiGLU.apply(self.gate_proj(hidden_states), self.up_proj(hidden_states)))


class LeanRMSNorm(LlamaRMSNorm):
    """``LlamaRMSNorm`` (Zhang and Sennrich 2019) that keeps its input in 16 bits, not a float32 copy of it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise ``[..., H]``."""
        if hidden_states.dtype == torch.float32:  # without a copy
            return super().forward(hidden_states)
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_up = silu(gate).mul_(gradient)
        of_gate = gradient * up
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, of_up


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return weight * wide.mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, of_weight = x.float(), None
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * (wide * scale).to(x.dtype)).sum_to_size(weight.shape).to(weight.dtype)
        of_normed = (gradient * weight).to(x.dtype).float()
        of_scale = (of_normed * wide).sum(-1, keepdim=True)
        of_square = -0.5 * of_scale * scale.pow(3) / x.shape[-1]
        return (of_normed.mul_(scale) + wide.mul_(2).mul_(of_square)).to(x.dtype), of_weight, None
