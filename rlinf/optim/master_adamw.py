"""The optimiser of all trainers: AdamW, whose steps are not rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlinf.errors import RLinfError

COPIES_AT_ONCE = 2**29
"""Bytes of float32 gradients that are made before the 16-bit ones are given up."""


class MasterAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019) on float32 masters of parameters in 16 bits, and on others directly.

    A step of reinforcement learning is mostly smaller than the rounding of a 16-bit weight, which would swallow it. The fused
    kernel of each device is used, CPUs included; parameters may lie on several devices, and be shards, all of a group or none.

    Args:
        parameters: Parameters of the model, or groups of them, as ``torch.optim.AdamW`` takes them.
        masters: Masters of a former optimiser, which are stepped further; a parameter without one gets a new one.
        decoupled: False: weight decay is part of the gradient, as in Adam (Kingma and Ba 2015).
        **settings: Of ``torch.optim.AdamW``, but for ``fused`` and ``foreach``.

    Attributes:
        parameters: The trained parameters of the model.
        masters: The stepped tensors, in the same order: a float32 copy, or the parameter itself. Groups and state hold these.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
        decoupled: bool = True,
        **settings: Any,
    ) -> None:
        groups = list(parameters)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        known = masters or {}
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.masters = [known[p] if p in known else _master(p) for p in self.parameters]
        self._master_of = dict(zip(self.parameters, self.masters, strict=True))
        self._pairs = [pair for pair in self._master_of.items() if pair[0] is not pair[1]]
        stepped = [group | {"params": [self._master_of[p] for p in group["params"]]} for group in groups]
        super().__init__(stepped, fused=True, **settings)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = decoupled

    def check_trains(self, model: nn.Module) -> None:
        """Raise RLinfError unless every trained parameter of a model is one of ``parameters``."""
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        missing = [name for name, parameter in trained.items() if parameter not in self._master_of]
        if missing:
            raise RLinfError(
                f"The optimiser lacks {len(missing)} of {len(trained)} trained tensors of {type(model).__name__}, which would never change "
                f"(first: {missing[0]}). Give it all parameters that need gradients, or freeze these with requires_grad_(False)"
            )

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the stepped tensor of a parameter of the model; None: it is not trained."""
        return self._master_of.get(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of parameters and masters."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Add the gradients of a backward pass to the masters' gradients, where sums are not rounded to 16 bits."""
        for part in _in_chunks([pair for pair in self._pairs if pair[0].grad is not None]):
            new = [pair for pair in part if pair[1].grad is None]
            known = [pair for pair in part if pair[1].grad is not None]
            for _, master in new:
                master.grad = torch.empty_like(master)
            if new:
                torch._foreach_copy_(_own(m.grad for _, m in new), _own(p.grad for p, _ in new))
            if known:
                _add(_own(m.grad for _, m in known), _own(p.grad for p, _ in known))
            for parameter, _ in part:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step the masters by the gathered gradients, and round them to the parameters."""
        self.gather_gradients()
        super().step()
        if self._pairs:
            torch._foreach_copy_(*(_own(side) for side in zip(*self._pairs, strict=True)))
        for _, master in self._pairs:
            master.grad = None


def _in_chunks(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Split parameters and masters into parts whose float32 gradients take about ``COPIES_AT_ONCE``."""
    part, size = [], 0
    for pair in pairs:
        part.append(pair)
        size += pair[1].numel() * torch.float32.itemsize
        if size >= COPIES_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


def _add(sums: list[Tensor], gradients: list[Tensor]) -> None:
    """Add gradients in 16 bits to float32 ones."""
    if sums[0].device.type != "cpu":  # there, tensors of two formats would take a kernel each
        casts = [torch.empty_like(each) for each in sums]
        torch._foreach_copy_(casts, gradients)
        gradients = casts
    torch._foreach_add_(sums, gradients)


def _own(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's parts of tensors, for operations on many tensors at once."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.element_size() >= torch.float32.itemsize:
        return parameter
    return nn.Parameter(parameter.detach().float())
