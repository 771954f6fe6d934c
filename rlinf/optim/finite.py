"""Checks for weights that are NaN or infinite."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rlinf.distributed.transfers import fetch
from rlinf.errors import CheckpointError, NonFiniteError


def not_finite(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return, by tensor name, one element that is NaN or infinite.

    One pass over each tensor, without a copy. It waits for a GPU once, unless an element is bad.
    """
    checked = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel() and tensor.element_size() > 1
    }
    bad = {}
    for name, suspect in zip(checked, fetch(_suspects(list(checked.values()))), strict=True):
        if not math.isfinite(suspect):
            # aminmax returns NaN twice if any element is NaN, so its two values decide. A sum that overflowed ends here, too.
            extremes = [float(value) for value in torch.aminmax(checked[name]) if not value.isfinite()]
            if extremes:
                bad[name] = extremes[0]
    return bad


def _suspects(tensors: list[Tensor]) -> list[Tensor]:
    """Return a scalar per tensor that is finite only if every element is."""
    # On a GPU, one kernel computes the largest magnitude of many tensors. On a CPU, the sum takes a fraction of that time; it can also
    # overflow for finite elements, as a 2-norm can, so the caller confirms.
    on_gpu = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    largest = iter(torch._foreach_norm(on_gpu, ord=math.inf) if on_gpu else ())
    return [next(largest) if tensor.device.type == "cuda" else tensor.sum() for tensor in tensors]


def different(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> list[str]:
    """Return the names of pairs of tensors that differ in an element, or hold NaN. All pairs on a GPU take one wait."""
    differences: dict[str, Tensor | bool] = {}
    for name, first, second in pairs:
        if first.device.type == "cuda" and first.shape == second.shape:
            differences[name] = (first != second).any()
        else:
            # On a CPU there is nothing to wait for, and torch.equal allocates no array of bools.
            differences[name] = not torch.equal(first, second)
    return [name for name, differs in zip(differences, fetch(list(differences.values())), strict=True) if differs]


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise NonFiniteError for weights of a running policy that are NaN or infinite; it names the tensor."""
    if bad := not_finite(tensors):
        name, value = next(iter(bad.items()))
        raise NonFiniteError(
            f"The weight '{name}' holds {value} ({len(bad)} of {len(tensors)} tensors are not finite); nothing was sent to the "
            "rollout. An earlier update failed: resume from the last checkpoint with a lower trainer.learning_rate"
        )


def check_loaded(tensors: Mapping[str, Tensor], source: object) -> None:
    """Raise CheckpointError for weights from ``source`` that are NaN or infinite; it names the tensor."""
    if bad := not_finite(tensors):
        name, value = next(iter(bad.items()))
        raise CheckpointError(
            f"'{source}' holds weights that are not finite: '{name}' has {value} ({len(bad)} of {len(tensors)} tensors). "
            "Use a different checkpoint"
        )
