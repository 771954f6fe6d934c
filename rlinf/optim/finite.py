"""Weights that are NaN or infinite: refused by name wherever they come in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf.errors import CheckpointError, NonFiniteError


def not_finite(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return, by name, a number of each tensor that is NaN or infinite; one pass over each, without a copy."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() and tensor.element_size() > 1:
            # The sum is finite only if every number is, and takes half the time of the extremes. It may also overflow.
            if tensor.detach().sum().isfinite():
                continue
            # The smallest and the largest number are NaN where any is.
            bad = [float(number) for number in torch.aminmax(tensor.detach()) if not number.isfinite()]
            if bad:
                found[name] = bad[0]
    return found


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights of a running policy. Raise NonFiniteError, with the name of the tensor, if a number is NaN or infinite."""
    found = not_finite(tensors)
    if found:
        name, number = next(iter(found.items()))
        raise NonFiniteError(
            f"The weight '{name}' holds {number} ({len(found)} of {len(tensors)} tensors are not finite); nothing was sent to the "
            "rollout. An update before has gone wrong: resume from the last checkpoint with a lower trainer.learning_rate"
        )


def check_loaded(tensors: Mapping[str, Tensor], source: object) -> None:
    """Refuse weights that were read from ``source``. Raise CheckpointError, with the name of the tensor, if a number is NaN or infinite."""
    found = not_finite(tensors)
    if found:
        name, number = next(iter(found.items()))
        raise CheckpointError(
            f"'{source}' holds weights that are not finite: '{name}' has {number} ({len(found)} of {len(tensors)} tensors). "
            "Use another checkpoint"
        )
