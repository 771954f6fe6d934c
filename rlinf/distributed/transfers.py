"""Tensor copies to and from a GPU, and checks of tensors there, that wait for the GPU as rarely as possible."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rlinf.errors import CheckpointError, NonFiniteError


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


def not_finite(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return one NaN or infinite element per bad tensor, by tensor name.

    Reads each tensor once, without a copy, and waits for the GPU only once if all elements are finite.
    """
    checked = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel() and tensor.element_size() > 1
    }
    bad = {}
    for name, suspect in zip(checked, fetch(_suspects(list(checked.values()))), strict=True):
        if not math.isfinite(suspect):
            # aminmax returns NaN twice if any element is NaN, so check both values. They are finite if only the sum overflowed.
            extremes = [float(value) for value in torch.aminmax(checked[name]) if not value.isfinite()]
            if extremes:
                bad[name] = extremes[0]
    return bad


def _suspects(tensors: list[Tensor]) -> list[Tensor]:
    """Return one scalar per tensor that is finite only if every element is finite."""
    # On a GPU, one kernel computes the maximum magnitude of many tensors. On a CPU, the sum is much faster, but like a 2-norm it can
    # overflow even for finite elements, so the caller checks again.
    on_gpu = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    largest = iter(torch._foreach_norm(on_gpu, ord=math.inf) if on_gpu else ())
    return [next(largest) if tensor.device.type == "cuda" else tensor.sum() for tensor in tensors]


def different(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> list[str]:
    """Return the names of tensor pairs that differ in an element or contain NaN. Waits for the GPU once for all pairs."""
    differences: dict[str, Tensor | bool] = {}
    for name, first, second in pairs:
        if first.device.type == "cuda" and first.shape == second.shape:
            differences[name] = (first != second).any()
        else:
            # A CPU needs no synchronisation, and torch.equal avoids allocating an array of bools.
            differences[name] = not torch.equal(first, second)
    return [name for name, differs in zip(differences, fetch(list(differences.values())), strict=True) if differs]


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise NonFiniteError, naming the tensor, if a running policy's weights are NaN or infinite."""
    if bad := not_finite(tensors):
        name, value = next(iter(bad.items()))
        raise NonFiniteError(
            f"The weight '{name}' contains {value} ({len(bad)} of {len(tensors)} tensors are not finite); nothing was sent to the "
            "rollout. An earlier update failed: resume from the last checkpoint with a lower trainer.learning_rate"
        )


def check_loaded(tensors: Mapping[str, Tensor], source: object) -> None:
    """Raise CheckpointError, naming the tensor, if weights from ``source`` are NaN or infinite."""
    if bad := not_finite(tensors):
        name, value = next(iter(bad.items()))
        raise CheckpointError(
            f"'{source}' contains weights that are not finite: '{name}' has {value} ({len(bad)} of {len(tensors)} tensors). "
            "Use a different checkpoint"
        )
