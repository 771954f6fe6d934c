"""Tensor copies to and from a GPU that wait for the GPU as rarely as possible."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device. The host waits only when copying from a GPU."""
    # A copy from a GPU must block; otherwise, the host could read memory before it is written.
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def fetch(numbers: Sequence[Tensor | float]) -> list[float]:
    """Convert scalar tensors to floats with a single copy from each device."""
    floats = [0.0] * len(numbers)
    indices_of_device: dict[torch.device, list[int]] = {}
    tensors: dict[int, Tensor] = {}
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor):
            number = number.detach().reshape(())
            tensors[index] = number if number.is_floating_point() else number.double()
            indices_of_device.setdefault(number.device, []).append(index)
        else:
            floats[index] = float(number)
    for indices in indices_of_device.values():
        values = torch.stack([tensors[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            floats[index] = value
    return floats
