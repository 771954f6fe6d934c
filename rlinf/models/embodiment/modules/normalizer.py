"""Convert actions and states between env units and [-1, 1], using bounds of the training data."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError, did_you_mean
from rlinf.models.embodiment.modules.ranges import Range
from rlinf.models.loading import check_statistics
from rlinf.options import closest
from rlinf.types import Statistics


def select_stats(norm_stats: Statistics, unnorm_key: str | None) -> Statistics:
    """Check and return a data set's statistics (``action``, and ``proprio`` if any); None selects the only data set."""
    if unnorm_key is None:
        if len(norm_stats) != 1:
            raise ConfigError(
                f"The checkpoint contains action statistics of {len(norm_stats)} data sets, but model.unnorm_key is null; "
                f"choose one, e.g. model.unnorm_key={next(iter(norm_stats), '<name>')}. "
                f"Known: {', '.join(norm_stats) or '(none)'}."
            )
        unnorm_key = next(iter(norm_stats))
    if unnorm_key not in norm_stats:
        known = closest(unnorm_key, norm_stats) or next(iter(norm_stats), "<name>")
        problem = f"Unknown model.unnorm_key '{unnorm_key}'.{did_you_mean(unnorm_key, norm_stats)}"
        raise ConfigError(f"{problem} Set model.unnorm_key={known}")
    stats = norm_stats[unnorm_key]
    for part in ("action", "proprio"):
        check_statistics(stats.get(part) or {} if isinstance(stats, Mapping) else stats, f"{part} of '{unnorm_key}'")
    return stats


def select_action_stats(norm_stats: Statistics, unnorm_key: str | None) -> Statistics:
    """Return a data set's ``action`` statistics; see ``select_stats``."""
    return select_stats(norm_stats, unnorm_key).get("action") or {}


def unit_range_stats(action_dim: int, state_dim: int | None = None) -> Statistics:
    """Return statistics, under the key ``unit_range``, for actions (and states) that already range over [-1, 1]."""
    widths = {"action": action_dim} | ({"proprio": state_dim} if state_dim else {})
    bounds = {"q01": -1.0, "q99": 1.0, "min": -1.0, "max": 1.0, "mask": True}
    return {"unit_range": {part: {name: [x] * dim for name, x in bounds.items()} for part, dim in widths.items()}}


class ActionNormalizer:
    """Compute ``x = 0.5 * (n + 1) * (high - low) + low`` where ``mask`` is true, and ``x = n`` elsewhere, in float64.

    Args:
        stats: Two lists of ``D`` values, named by ``bounds``, and optionally ``mask`` (``D`` booleans, by default true).
        unnormalize_epsilon: Added to ``high - low`` when unnormalising (OpenVLA-OFT: 1e-8); normalising always adds 1e-8.
    """

    def __init__(
        self,
        stats: Statistics,
        action_dim: int | None = None,
        bounds: tuple[str, str] = ("q01", "q99"),
        unnormalize_epsilon: float = 0.0,
    ) -> None:
        low, high = bounds
        if low not in stats or high not in stats:
            raise ConfigError(
                f"The statistics contain {', '.join(stats)}; normalising by {low} and {high} needs both. "
                "Set a different model.unnorm_key"
            )
        self.range = Range.of(stats, bounds, "action or state")
        self.low, self.high = (np.array(stats[name], dtype=np.float64) for name in bounds)
        self.mask = np.array(stats.get("mask") or [True] * len(self.low), dtype=bool)
        self.unnormalize_epsilon = unnormalize_epsilon
        self._by_device: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        if action_dim not in (None, len(self.low)):
            raise ConfigError(
                f"model.action_token_len is {action_dim}, but the action statistics have {len(self.low)} dimensions. "
                f"Set model.action_token_len={len(self.low)}, or a different model.unnorm_key"
            )

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if device not in self._by_device:
            arrays = (self.low, self.high, self.mask)
            self._by_device[device] = tuple(to_device(torch.from_numpy(array), device) for array in arrays)
        return self._by_device[device]

    def unnormalize(self, normalized: Tensor) -> Tensor:
        """Map ``[..., D]`` in [-1, 1] to env units, float64."""
        low, high, mask = self._tensors(normalized.device)
        normalized = normalized.double()
        span = high - low + self.unnormalize_epsilon
        return torch.where(mask, 0.5 * (normalized + 1.0) * span + low, normalized)

    def normalize(self, actions: Tensor) -> Tensor:
        """Map ``[..., D]`` in env units to [-1, 1], float64, clipped; a dimension with high = low maps to -1."""
        low, high, mask = self._tensors(actions.device)
        actions = actions.double()
        scaled = 2.0 * (actions - low) / (high - low + 1e-8) - 1.0
        return torch.where(mask, scaled, actions).clamp(-1.0, 1.0)
