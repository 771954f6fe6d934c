"""Tensors on their way to a GPU and back; the host waits for the GPU only where it must."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device. The host waits only for a copy that comes from a GPU."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def fetch(numbers: Sequence[Tensor | float]) -> list[float]:
    """Return tensors of one number each as floats, by one copy from each device."""
    found = [0.0] * len(numbers)
    places: dict[torch.device, list[int]] = {}
    tensors: dict[int, Tensor] = {}
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor):
            number = number.detach().reshape(())
            tensors[index] = number if number.is_floating_point() else number.double()
            places.setdefault(number.device, []).append(index)
        else:
            found[index] = float(number)
    for indices in places.values():
        values = torch.stack([tensors[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            found[index] = value
    return found
