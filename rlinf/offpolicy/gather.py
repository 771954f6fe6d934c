"""Outcomes of policy calls, and their all-gather across ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.distributed.process_group import gather_objects
from rlinf.types import EpisodeResult


@dataclass
class BaseOutput:
    """Base-policy output (features and action chunks) for a batch of observations, on the CPU.

    Attributes:
        envs: Env of each observation, numbered across all ranks, int64 ``[K]``.
        features: ``[K, F]``.
        chunks: ``[K, N, C, D]`` in env units.
    """

    envs: Tensor
    features: Tensor
    chunks: Tensor


@dataclass
class CallOutcome:
    """Outcome of a policy call in ``B`` envs.

    Attributes:
        rewards: float32 ``[B, C]``; 0 for actions that were not executed.
        terminated: bool ``[B]``; false at a time limit.
        ended: Envs whose episode ended, int64 ``[K]``.
        truncated: Whether each of these episodes ended because of the time limit, bool ``[K]``.
        lost: Envs whose simulator was lost, int64 ``[L]``.
        last: Base-policy output for the true last observations of truncated episodes.
        following: Base-policy output for the next observations.
    """

    rewards: np.ndarray
    executed: np.ndarray
    terminated: np.ndarray
    ended: np.ndarray
    truncated: np.ndarray
    episodes: list[EpisodeResult]
    lost: np.ndarray
    last: BaseOutput
    following: BaseOutput


def all_gather_concat(part: Any) -> Any:
    """Gather a list, array, tensor, or dataclass of these from all ranks, and concatenate them in rank order (a collective call)."""
    return _concat(gather_objects(part))


def _concat(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, list):
        return [item for part in parts for item in part]
    return type(first)(*(_concat([getattr(part, field.name) for part in parts]) for field in fields(first)))
