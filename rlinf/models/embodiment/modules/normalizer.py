"""Actions between the units of the environment and [-1, 1], by quantiles of the training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.errors import ConfigError, did_you_mean


def select_action_stats(norm_stats: Mapping[str, Any], unnorm_key: str | None) -> Mapping[str, Any]:
    """Return the ``action`` statistics of one data set.

    Args:
        norm_stats: Data set name to statistics, as in a public ``dataset_statistics.json``.
        unnorm_key: Data set name; None when there is only one.

    Raises:
        ConfigError: The key is unknown, or missing while there are several (or none).
    """
    if unnorm_key is None:
        if len(norm_stats) != 1:
            raise ConfigError(
                f"The checkpoint holds action statistics of {len(norm_stats)} data sets and model.unnorm_key is null; "
                f"choose one, e.g. model.unnorm_key={next(iter(norm_stats), '<name>')}. "
                f"Known: {', '.join(norm_stats) or '(none)'}."
            )
        unnorm_key = next(iter(norm_stats))
    if unnorm_key not in norm_stats:
        raise ConfigError(f"Unknown model.unnorm_key '{unnorm_key}'.{did_you_mean(unnorm_key, norm_stats)}")
    return norm_stats[unnorm_key]["action"]


def unit_range_stats(action_dim: int) -> dict[str, Any]:
    """Return the statistics, under the key ``unit_range``, of actions whose env units are [-1, 1] already."""
    action = {"q01": [-1.0] * action_dim, "q99": [1.0] * action_dim, "mask": [True] * action_dim}
    return {"unit_range": {"action": action}}


class ActionNormalizer:
    """``x = 0.5 * (n + 1) * (q99 - q01) + q01`` where ``mask``; elsewhere ``x = n``. Computed in float64.

    Args:
        stats: ``q01`` and ``q99`` (lists of ``D`` numbers) and optionally ``mask`` (``D`` booleans; absent: all true).
        action_dim: ``D`` that the model has; None: not checked.

    Raises:
        ConfigError: The lists disagree in length, with each other or with ``action_dim``, or in order.
    """

    def __init__(self, stats: Mapping[str, Any], action_dim: int | None = None) -> None:
        self.low = np.array(stats["q01"], dtype=np.float64)
        self.high = np.array(stats["q99"], dtype=np.float64)
        self.mask = np.array(stats.get("mask") or [True] * len(self.low), dtype=bool)
        self._by_device: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        if not len(self.low) == len(self.high) == len(self.mask):
            raise ConfigError(
                f"Action statistics disagree in length: q01 {len(self.low)}, q99 {len(self.high)}, "
                f"mask {len(self.mask)}; all three need one number per action dimension."
            )
        if action_dim not in (None, len(self.low)):
            raise ConfigError(
                f"model.action_token_len is {action_dim}, but the action statistics have {len(self.low)} numbers. "
                f"Type model.action_token_len={len(self.low)}, or another model.unnorm_key"
            )
        if (self.high < self.low).any():
            raise ConfigError(f"Action statistics have q99 < q01: q01={self.low.tolist()}, q99={self.high.tolist()}.")

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if device not in self._by_device:
            arrays = (self.low, self.high, self.mask)
            self._by_device[device] = tuple(torch.from_numpy(array).to(device) for array in arrays)
        return self._by_device[device]

    def unnormalize(self, normalized: Tensor) -> Tensor:
        """Map ``[..., D]`` in [-1, 1] to env units, float64."""
        low, high, mask = self._tensors(normalized.device)
        normalized = normalized.double()
        return torch.where(mask, 0.5 * (normalized + 1.0) * (high - low) + low, normalized)

    def normalize(self, actions: Tensor) -> Tensor:
        """Map ``[..., D]`` in env units to [-1, 1], float64, clipped; a dimension with q99 = q01 gives -1."""
        low, high, mask = self._tensors(actions.device)
        actions = actions.double()
        scaled = 2.0 * (actions - low) / (high - low + 1e-8) - 1.0
        return torch.where(mask, scaled, actions).clamp(-1.0, 1.0)
