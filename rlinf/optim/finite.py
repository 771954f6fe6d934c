"""Weights that are NaN or infinite: rejected by name wherever they come in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rlinf.distributed.transfers import fetch
from rlinf.errors import CheckpointError, NonFiniteError


def not_finite(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return, by name, a number of each tensor that is NaN or infinite.

    One pass over each tensor, without a copy. It waits for a GPU once, unless a number is bad.
    """
    numbers = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel() and tensor.element_size() > 1
    }
    found = {}
    for name, suspect in zip(numbers, fetch(_suspects(list(numbers.values()))), strict=True):
        if not math.isfinite(suspect):
            # The smallest and the largest number are NaN where any is.
            bad = [float(number) for number in torch.aminmax(numbers[name]) if not number.isfinite()]
            if bad:
                found[name] = bad[0]
    return found


def _suspects(tensors: list[Tensor]) -> list[Tensor]:
    """Return a number of each tensor that is finite only if every number of the tensor is.

    On a GPU it is the largest magnitude, of many tensors of one format by one kernel. On a CPU the sum takes a fraction of that time; it may
    also overflow, and so may a 2-norm.
    """
    on_gpu = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    largest = iter(torch._foreach_norm(on_gpu, ord=math.inf) if on_gpu else ())
    return [next(largest) if tensor.device.type == "cuda" else tensor.sum() for tensor in tensors]


def different(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> list[str]:
    """Return the names of pairs of tensors that differ in a number, or hold NaN; those on a GPU take one wait for it."""
    answers: dict[str, Tensor | bool] = {}
    for name, one, other in pairs:
        if one.device.type == "cuda" and one.shape == other.shape:
            answers[name] = (one != other).any()
        else:  # on a CPU there is nothing to wait for, and this makes no array of answers
            answers[name] = not torch.equal(one, other)
    return [name for name, differs in zip(answers, fetch(list(answers.values())), strict=True) if differs]


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise NonFiniteError for weights of a running policy that are NaN or infinite; it names the tensor."""
    found = not_finite(tensors)
    if found:
        name, number = next(iter(found.items()))
        raise NonFiniteError(
            f"The weight '{name}' holds {number} ({len(found)} of {len(tensors)} tensors are not finite); nothing was sent to the "
            "rollout. An update before has gone wrong: resume from the last checkpoint with a lower trainer.learning_rate"
        )


def check_loaded(tensors: Mapping[str, Tensor], source: object) -> None:
    """Raise CheckpointError for weights from ``source`` that are NaN or infinite; it names the tensor."""
    found = not_finite(tensors)
    if found:
        name, number = next(iter(found.items()))
        raise CheckpointError(
            f"'{source}' holds weights that are not finite: '{name}' has {number} ({len(found)} of {len(tensors)} tensors). "
            "Use another checkpoint"
        )
