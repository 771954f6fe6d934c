"""The optimiser of all trainers: AdamW with float32 master weights."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlinf.errors import RLinfError

CHUNK_BYTES = 2**29
"""Maximum bytes of 16-bit gradients that are converted to float32 at a time, before the 16-bit ones are freed."""


class MasterAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019) that updates 16-bit parameters through float32 masters, and float32 parameters directly.

    It uses fused kernels on all devices, including CPUs. Parameters may be on several devices; in a group, either all or none are shards.

    Args:
        parameters: The model's parameters, or parameter groups as for ``torch.optim.AdamW``.
        masters: Masters from a previous optimiser to reuse; new ones are created for the remaining parameters.
        decoupled: If False, add weight decay to the gradient, as in Adam (Kingma and Ba 2015).
        **settings: Arguments for ``torch.optim.AdamW`` except ``fused`` and ``foreach``.

    Attributes:
        parameters: The model's trained parameters.
        masters: The updated tensors in the same order: a float32 copy or the parameter itself. Groups and state refer to these.
    """

    # RL updates are mostly smaller than 16-bit rounding, so a 16-bit weight updated directly would never change.

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
        """Raise RLinfError unless ``parameters`` include every trained parameter of a model."""
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        missing = [name for name, parameter in trained.items() if parameter not in self._master_of]
        if missing:
            raise RLinfError(
                f"The optimiser lacks {len(missing)} of {len(trained)} trained tensors of {type(model).__name__}, which would never change "
                f"(first: {missing[0]}). Pass all parameters that require gradients, or freeze these with requires_grad_(False)"
            )

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the master of a model parameter, or None if it is not trained."""
        return self._master_of.get(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of parameters and masters to None."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Add a backward pass's gradients to the masters' gradients, where sums are not rounded to 16 bits."""
        # Convert in chunks, so that 16-bit and float32 gradients of the entire model never exist at the same time.
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
        """Update the masters with the gathered gradients, and copy them, rounded, to the parameters."""
        self.gather_gradients()
        super().step()
        if self._pairs:
            torch._foreach_copy_(*(_local(side) for side in zip(*self._pairs, strict=True)))
        for _, master in self._pairs:
            master.grad = None


def _in_chunks(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Split parameters and masters into chunks with about ``CHUNK_BYTES`` of float32 gradients."""
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
    """Add 16-bit gradients to float32 sums."""
    # On a GPU, `_foreach_add_` with mixed dtypes would launch one kernel per tensor.
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
