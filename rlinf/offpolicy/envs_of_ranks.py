"""What a policy call on a frozen policy leads to, joined over the envs of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.types import EpisodeResult


@dataclass
class Said:
    """What the frozen policy said of observations, in main memory.

    Attributes:
        envs: int64 ``[K]``, whose observations, numbered over all ranks.
        features: ``[K, F]``.
        chunks: ``[K, N, C, D]`` in env units.
    """

    envs: Tensor
    features: Tensor
    chunks: Tensor


@dataclass
class CallOutcome:
    """What came of a policy call.

    Attributes:
        rewards: float32 ``[B, C]``; 0 if not executed.
        executed: bool ``[B, C]``.
        terminated: bool ``[B]``: the episode ended by its own rules.
        ended: int64 ``[K]``, envs whose episode ended.
        cut: bool ``[K]``: the time limit ended it.
        episodes: The ``K`` results.
        lost: int64 ``[L]``, envs whose simulator was lost.
        last: Said of the true last observations of the episodes that were cut.
        following: Said of the next observations.
    """

    rewards: np.ndarray
    executed: np.ndarray
    terminated: np.ndarray
    ended: np.ndarray
    cut: np.ndarray
    episodes: list[EpisodeResult]
    lost: np.ndarray
    last: Said
    following: Said


def joined(parts: Sequence[Any]) -> Any:
    """Join what each rank has, in the order of the ranks: lists, arrays and tensors along their first dimension, the fields of the others."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, list):
        return [each for part in parts for each in part]
    return type(first)(*(joined([getattr(part, field.name) for part in parts]) for field in fields(first)))
