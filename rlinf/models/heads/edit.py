"""The best of several chunks of the frozen policy and their corrections, as the critics see it (EXPO, Dong et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.offpolicy_config import HeadConfig
from rlinf.models.heads.residual import ResidualHead


class EditHead(ResidualHead):
    """``N`` chunks and ``clip(b + scale r)`` of each: the critics choose in acting and in the target."""

    chooses = True
    begins_as_base = False  # untrained critics may choose a sampled chunk

    @classmethod
    def num_candidates_of(cls, config: HeadConfig) -> int:
        return config.num_candidates

    @property
    def num_noises(self) -> int:
        return self.num_candidates * self.num_numbers

    def options(self, features: Tensor, base: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the chunks of the frozen policy, then the correction of each: ``[B, 2 N, A]``."""
        count = base.shape[1]
        rows, each = features.repeat_interleave(count, 0), base.flatten(0, 1).unsqueeze(1)
        corrected = super().options(
            rows, each, None if noise is None else noise.unflatten(1, (count, -1)).flatten(0, 1)
        )
        return torch.cat([base, corrected.unflatten(0, (-1, count)).squeeze(2)], 1)

    def trained_on(self, base: Tensor, generator: torch.Generator) -> Tensor:
        """Return one chunk of each row at random, ``[B, 1, A]``: any of them may be corrected."""
        chosen = torch.randint(base.shape[1], (len(base),), generator=generator).to(base.device)
        return base[torch.arange(len(base), device=base.device), chosen].unsqueeze(1)
