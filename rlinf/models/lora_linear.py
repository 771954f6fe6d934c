"""Linear layers with LoRA adapters that launch fewer kernels than PEFT's: scale and sums are part of matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import linear

from rlinf.models.precision import autocast_type


class FusedLoraLinear(Linear):
    """PEFT's layer with three instead of five kernels in a forward pass, and five instead of seven in a backward pass.

    Results are equal within rounding: a matrix product that adds to its result rounds once. Dropout, autocast, mixed number
    formats, trained base weights, ``torch.compile``, and adapters other than a single plain one named ``default`` run PEFT's code.
    """

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Transform ``[..., in]`` into ``[..., out]``."""
        if args or kwargs or not self._is_plain(x):
            return super().forward(x, *args, **kwargs)
        return _apply(x, [self])[0]

    @staticmethod
    def together(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """Return the result of each layer for the same input; their products with ``A``, and the input's gradients, are joined."""
        plain = [layer for layer in layers if isinstance(layer, FusedLoraLinear) and layer._is_plain(x)]
        if len(plain) == len(layers):
            return _apply(x, plain)
        return tuple(layer(x) for layer in layers)

    def _is_plain(self, x: Tensor) -> bool:
        if self.disable_adapters or self.merged or self.active_adapters != ["default"] or self.lora_variant:
            return False
        base, a, b = self.base_layer, self.lora_A["default"].weight, self.lora_B["default"].weight
        return (
            isinstance(self.lora_dropout["default"], nn.Identity)
            and not self.lora_bias["default"]
            and not any(parameter.requires_grad for parameter in base.parameters())
            and not (base._forward_hooks or base._forward_pre_hooks)
            and x.dtype == base.weight.dtype == a.dtype == b.dtype
            and not torch.is_autocast_enabled(autocast_type(x))
            and not torch.compiler.is_compiling()
        )


def fuse_adapters(model: nn.Module) -> None:
    """Convert PEFT's adapted ``nn.Linear`` layers in place, without changing parameters or their names."""
    for layer in model.modules():
        if type(layer) is Linear and type(layer.get_base_layer()) is nn.Linear:
            layer.__class__ = FusedLoraLinear


def _apply(x: Tensor, layers: Sequence[FusedLoraLinear]) -> tuple[Tensor, ...]:
    weights = [
        (layer.base_layer.weight, layer.base_layer.bias, layer.lora_A["default"].weight, layer.lora_B["default"].weight)
        for layer in layers
    ]
    outputs = _LoraLinears.apply(x, [layer.scaling["default"] for layer in layers], *sum(weights, ()))
    # A view made by the function itself could not be changed in place, as OLMo's attention does.
    return tuple(output.view(*x.shape[:-1], output.shape[-1]) for output in outputs)


class _LoraLinears(torch.autograd.Function):
    """``x W' + bias + scale (x A') B'``, ``[rows, out]``, for several layers, whose ``(W, bias, A, B)`` follow each other; ``W`` and ``bias`` are frozen."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, scales: Sequence[float], *weights: Tensor) -> tuple[Tensor, ...]:
        rows, adapters = x.reshape(-1, x.shape[-1]), weights[2::4]
        a = adapters[0] if len(adapters) == 1 else torch.cat(adapters)
        low, outputs = linear(rows, a), []
        ctx.shape, ctx.scales, ctx.ranks = x.shape, scales, [len(adapter) for adapter in adapters]
        parts = low.split(ctx.ranks, dim=1)
        for weight, bias, b, part, scale in zip(weights[::4], weights[1::4], weights[3::4], parts, scales, strict=True):
            outputs.append(linear(rows, weight, bias).addmm_(part, b.T, alpha=scale))
        ctx.save_for_backward(rows, low, a, *weights[::4], *weights[3::4])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, a, *weights = ctx.saved_tensors
        number, x_grad, low_grad = len(gradients), None, torch.empty_like(low)
        results: list[Tensor | None] = []
        parts = zip(low.split(ctx.ranks, dim=1), low_grad.split(ctx.ranks, dim=1), strict=True)
        for gradient, weight, b, (part, part_grad), scale in zip(
            gradients, weights[:number], weights[number:], parts, ctx.scales, strict=True
        ):
            # With beta=0, the first argument is not read.
            torch.addmm(part, gradient, b, beta=0, alpha=scale, out=part_grad)
            results += [None, None, None, torch.addmm(b, gradient.T, part, beta=0, alpha=scale)]
            if ctx.needs_input_grad[0]:
                x_grad = gradient @ weight if x_grad is None else x_grad.addmm_(gradient, weight)
        if x_grad is not None:
            x_grad = x_grad.addmm_(low_grad, a).view(ctx.shape)
        results[2::4] = (low_grad.T @ rows).split(ctx.ranks)
        return x_grad, None, *results
