"""Earlier weights of a policy, such as the reference policy from before RL."""

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
    """A copy of a model's trained weights (this rank's shards) and buffers, which can be swapped into the model.

    Frozen weights are not copied, so with LoRA the copy contains only the adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._free_gathered()
        self._copies = {name: tensor.detach().clone() for name, tensor in self._changing().items()}

    def _changing(self) -> dict[str, Tensor]:
        """Return the model's tensors that training changes."""
        trained: dict[str, Tensor] = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        for path, module in self._model.named_modules():
            buffers = dict(module.named_buffers(path, recurse=False))
            unsaved = {f"{path}.{name}".removeprefix(".") for name in module._non_persistent_buffers_set}
            trained |= {name: buffer for name, buffer in buffers.items() if name not in unsaved}
        return trained

    def parts(self) -> dict[str, Tensor]:
        """Return the copies by name, sharded like the model. They are not cloned, so writing to them changes the reference."""
        return self._copies

    def tensors(self) -> dict[str, Tensor]:
        """Return the full weights on rank 0's CPU, and an empty dictionary on other ranks (a collective call)."""
        full = {}
        for name, shard in self._copies.items():
            # Gather one tensor at a time, because all full tensors together may not fit on a rank.
            tensor = full_tensor(shard)
            if rank() == 0:
                full[name] = tensor.cpu()
        return full

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Weight]) -> None:
        """Replace the copies with these full weights. Untrained weights are ignored and not read from files.

        Raise CheckpointError if a trained parameter's weight is missing or has a different shape.
        """
        misfits = [
            name for name, copy in self._copies.items() if name not in tensors or tensors[name].shape != copy.shape
        ]
        if misfits:
            raise CheckpointError(
                f"The reference policy does not match the model: {len(misfits)} of its {len(self._copies)} trained tensors are missing or "
                f"have a different shape: {', '.join(misfits[:3])}"
            )
        for name, copy in self._copies.items():
            part, where = local_part(copy)
            if part.numel():
                part.copy_(part_of(tensors[name], where))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the copies into the model, and the current weights back when the context ends."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the earlier weights into the model."""
        self._free_gathered()
        tensors = self._changing()
        for name, copy in self._copies.items():
            local_part(tensors[name])[0].copy_(local_part(copy)[0])

    @torch.no_grad()
    def _exchange(self) -> None:
        self._free_gathered()
        tensors = self._changing()
        for name, copy in self._copies.items():
            in_model, in_copy = local_part(tensors[name])[0], local_part(copy)[0]
            # Copy one tensor at a time, because a second copy of the entire model may not fit.
            present = in_model.clone()
            in_model.copy_(in_copy)
            in_copy.copy_(present)

    def _free_gathered(self) -> None:
        """Reshard the model to free gathered weights."""
        # A forward pass without a backward pass leaves the root module gathered, with weights that a swap would make stale.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
