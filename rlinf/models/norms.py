"""RMSNorm (Zhang and Sennrich 2019) in one kernel on GPUs, and without float32 copies elsewhere."""

from __future__ import annotations

import inspect
from functools import cache, partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def fuse_norms(model: nn.Module) -> None:
    """Let all modules that compute an RMSNorm use torch's kernel on GPUs: one launch instead of eight.

    The product with the weight is rounded once, where transformers' modules round twice in 16 bits.
    """
    for module in model.modules():
        if hasattr(module, "variance_epsilon") and _is_rms_norm(type(module)):
            module.forward = partial(_fused_norm, module)


def _fused_norm(module: LlamaRMSNorm, x: Tensor) -> Tensor:
    weight, epsilon = module.weight, module.variance_epsilon
    if x.is_cuda and x.dtype == weight.dtype:
        return _kernel(x, weight, epsilon)
    if x.is_meta and x.dtype == weight.dtype != torch.float32:
        # This stores the tensors that the kernel stores, for estimates of memory.
        return _RMSNorm.apply(x, weight, epsilon)
    return type(module).forward(module, x)


def _kernel(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rms_norm(x, weight.shape, weight, epsilon)


@cache
def _is_rms_norm(norm: type[nn.Module]) -> bool:
    """Return whether a class of transformers computes torch's RMSNorm, from an example in float32."""
    if len(inspect.signature(norm.forward).parameters) != 2:  # such as a second input, a gate
        return False
    with torch.device("cpu"):  # models may be built on the meta device
        x, weight = torch.linspace(-3, 5, 24).view(3, 8).float(), torch.linspace(1, -2, 8).float()
        example = SimpleNamespace(weight=weight, variance_epsilon=1e-2)
        try:
            result = norm.forward(example, x)
        except (
            AttributeError,
            TypeError,
            RuntimeError,
            ValueError,
            LookupError,
            AssertionError,
        ):  # it has other attributes or shapes
            return False
        return torch.allclose(result, rms_norm(x, (8,), weight, 1e-2), atol=1e-6)


class LeanRMSNorm(LlamaRMSNorm):
    """``LlamaRMSNorm`` that stores its 16-bit input instead of a float32 copy.

    On a GPU, torch's fused kernel takes one launch instead of eight, and rounds the product with the weight once instead of twice.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.is_cuda and hidden_states.dtype == self.weight.dtype:
            return _kernel(hidden_states, self.weight, self.variance_epsilon)
        # A float32 input needs no copy.
        if hidden_states.dtype == torch.float32:
            return super().forward(hidden_states)
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return weight * wide.mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, weight_grad = x.float(), None
        if ctx.needs_input_grad[1]:
            weight_grad = (gradient * (wide * scale).to(x.dtype)).sum_to_size(weight.shape).to(weight.dtype)
        normed_grad = (gradient * weight).to(x.dtype).float()
        scale_grad = (normed_grad * wide).sum(-1, keepdim=True)
        square_grad = -0.5 * scale_grad * scale.pow(3) / x.shape[-1]
        return (normed_grad.mul_(scale) + wide.mul_(2).mul_(square_grad)).to(x.dtype), weight_grad, None
