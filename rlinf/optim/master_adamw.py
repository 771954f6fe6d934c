"""The optimiser of all trainers: AdamW with float32 master weights."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlinf.errors import RLinfError

CHUNK_BYTES = 2**29
"""Bytes of float32 gradients that are made before their 16-bit sources are freed."""


class MasterAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019) that steps float32 masters of 16-bit parameters, and other parameters directly.

    It uses the fused kernel of each device, CPUs included. Parameters may be on several devices; in a group, all or none are shards.

    Args:
        parameters: Parameters of the model, or groups of them, as ``torch.optim.AdamW`` takes them.
        masters: Masters of a former optimiser, to be reused; a parameter without one gets a new one.
        decoupled: False: weight decay is part of the gradient, as in Adam (Kingma and Ba 2015).
        **settings: Arguments of ``torch.optim.AdamW`` except ``fused`` and ``foreach``.

    Attributes:
        parameters: The trained parameters of the model.
        masters: The stepped tensors, in the same order: a float32 copy, or the parameter itself. Groups and state hold these.
    """

    # An RL step is mostly smaller than the rounding of a 16-bit weight: stepped directly, the weight would never change.

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
                f"(first: {missing[0]}). Pass all parameters that require gradients, or freeze these with requires_grad_(False)"
            )

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the stepped tensor of a model parameter, None if it is not trained."""
        return self._master_of.get(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of parameters and masters to None."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Add the gradients of a backward pass to the masters' gradients, where sums are not rounded to 16 bits."""
        # In chunks, so that 16-bit and float32 gradients of the entire model never exist together.
        for chunk in _in_chunks([pair for pair in self._pairs if pair[0].grad is not None]):
            new = [pair for pair in chunk if pair[1].grad is None]
            known = [pair for pair in chunk if pair[1].grad is not None]
            for _, master in new:
                master.grad = torch.empty_like(master)
            if new:
                torch._foreach_copy_(_local(m.grad for _, m in new), _local(p.grad for p, _ in new))
            if known:
                _add(_local(m.grad for _, m in known), _local(p.grad for p, _ in known))
            for parameter, _ in chunk:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step the masters by the gathered gradients, and round them to the parameters."""
        self.gather_gradients()
        super().step()
        if self._pairs:
            torch._foreach_copy_(*(_local(side) for side in zip(*self._pairs, strict=True)))
        for _, master in self._pairs:
            master.grad = None


def _in_chunks(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Split parameters and masters into chunks whose float32 gradients take about ``CHUNK_BYTES``."""
    chunk, size = [], 0
    for pair in pairs:
        chunk.append(pair)
        size += pair[1].numel() * torch.float32.itemsize
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _add(sums: list[Tensor], gradients: list[Tensor]) -> None:
    """Add gradients in 16 bits to float32 ones."""
    # On a GPU, `_foreach_add_` of two dtypes would start a kernel per tensor.
    if sums[0].device.type != "cpu":
        casts = [torch.empty_like(tensor) for tensor in sums]
        torch._foreach_copy_(casts, gradients)
        gradients = casts
    torch._foreach_add_(sums, gradients)


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shards as plain tensors, which the ``_foreach`` functions need."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.element_size() >= torch.float32.itemsize:
        return parameter
    return nn.Parameter(parameter.detach().float())
