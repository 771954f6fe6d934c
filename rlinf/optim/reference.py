"""The policy of a former moment, kept as the weights that training changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlinf.distributed.deferred import Weight
from rlinf.distributed.parallel import full_tensor, local_part, part_of
from rlinf.distributed.process_group import rank
from rlinf.errors import CheckpointError


class Reference:
    """A copy of a model's trained weights, of this rank's shards of them, and of its buffers, to compute with in their place.

    Frozen weights exist once: with LoRA the copy holds the adapters only.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._give_up_gathered()
        self._kept = {name: tensor.detach().clone() for name, tensor in self._changing().items()}

    def _changing(self) -> dict[str, Tensor]:
        """Return the tensors of the model that training changes."""
        trained: dict[str, Tensor] = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        saved = self._model.state_dict().keys()
        return trained | {name: buffer for name, buffer in self._model.named_buffers() if name in saved}

    def parts(self) -> dict[str, Tensor]:
        """Return the kept weights by name, sharded as the model is; writing into them changes what is kept."""
        return self._kept

    def tensors(self) -> dict[str, Tensor]:
        """Return the kept weights whole, on the CPU of rank 0; nothing on other ranks (a collective call)."""
        whole = {}
        for name, kept in self._kept.items():
            tensor = full_tensor(kept)  # one at a time: together they may not fit on a rank
            if rank() == 0:
                whole[name] = tensor.cpu()
        return whole

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Weight]) -> None:
        """Keep these whole weights instead; names that are not trained are ignored. From files, only the kept ones are read.

        Raise CheckpointError if the weight of a trained parameter is missing, or has another shape.
        """
        misfits = [
            name for name, kept in self._kept.items() if name not in tensors or tensors[name].shape != kept.shape
        ]
        if misfits:
            raise CheckpointError(
                f"The reference policy does not fit the model: {len(misfits)} of its {len(self._kept)} trained tensors are missing or "
                f"have another shape: {', '.join(misfits[:3])}"
            )
        for name, kept in self._kept.items():
            part, where = local_part(kept)
            if part.numel():
                part.copy_(part_of(tensors[name], where))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the kept weights into the model, and the present ones back at the end."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        self._give_up_gathered()
        tensors = self._changing()
        for name, kept in self._kept.items():
            own, other = local_part(tensors[name])[0], local_part(kept)[0]
            present = own.clone()
            own.copy_(other)
            other.copy_(present)

    def _give_up_gathered(self) -> None:
        """A forward pass without a backward pass leaves the root of a sharded model whole, with the weights of then."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
