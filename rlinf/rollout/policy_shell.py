"""A policy without its weights, in bytes that another process can read."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError


class _Empty(NamedTuple):
    """A tensor of the state dict, whose numbers a push of weights brings. Tied tensors have one ``key``.

    ``is_trained``: its ``requires_grad``. No gradients are computed in a player, but torch chooses kernels by it, and different kernels
    round differently.
    """

    key: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    is_trained: bool


@dataclass(frozen=True)
class PolicyShell:
    """A pickled policy: all of it but the numbers of its state dict.

    A player needs neither the files of the weights nor to know how the trainer came by them (a folder, a checkpoint, adapters,
    statistics of a dataset). Buffers outside the state dict, which no push would bring, keep their numbers.
    """

    data: bytes

    @classmethod
    def of(cls, model: nn.Module) -> PolicyShell:
        """Return the shell of a plain model on the CPU, or of one whose weights are still in their files.

        Raise ConfigError if it cannot be sent to another process.
        """
        data = io.BytesIO()
        try:
            _Pickler(data, model).dump(model)
        except Exception as error:  # classes of users raise what they like
            message = f"The policy cannot be sent to players: {type(error).__name__}: {error}. Set cluster.placement=colocated cluster.start=auto"
            raise ConfigError(message) from error
        return cls(data.getvalue())

    def build(self, device: str) -> Any:
        """Return the policy on a device, in evaluation mode. Its state dict holds arbitrary numbers."""
        from transformers import PreTrainedModel
        from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

        policy = _Unpickler(io.BytesIO(self.data)).load()
        for module in policy.modules():
            if isinstance(
                module, PreTrainedModel
            ):  # which its constructor does; without it, a model returns no hidden states
                _CAN_RECORD_REGISTRY[str(type(module))] = module._can_record_outputs
        return policy.to(device).eval()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, model: nn.Module) -> None:
        super().__init__(file, protocol=5)
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        pushed = set(model.state_dict())
        self.pushed = {id(tensor) for name, tensor in named if name in pushed}

    def persistent_id(self, value: Any) -> _Empty | None:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in the main script; required: in a module")
        if not isinstance(value, Tensor) or id(value) not in self.pushed:
            return None
        stride = torch.empty_like(value, device="meta").stride()  # without gaps
        return _Empty(
            id(value), tuple(value.shape), stride, value.dtype, isinstance(value, nn.Parameter), value.requires_grad
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: dict[int, Tensor] = {}

    def persistent_load(self, empty: _Empty) -> Tensor:
        if empty.key not in self.made:
            tensor = torch.empty_strided(empty.shape, empty.stride, dtype=empty.dtype)
            self.made[empty.key] = nn.Parameter(tensor, empty.is_trained) if empty.is_parameter else tensor
        return self.made[empty.key]
