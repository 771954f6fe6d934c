"""A chunk of its own that stays near that of the frozen policy (RLT, 2604.23073)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.models.heads.residual import ResidualHead


class ChunkHead(ResidualHead):
    """``clip(b + scale r)`` that also learns to act without ``b``, and pays for what it changes.

    In some rows of its loss, ``b`` is replaced by 0 (reference dropout): there it must say the whole chunk by itself. The loss adds
    ``reference_weight (a - b)^2``, with the true ``b``.
    """

    def trained_on(self, base: Tensor, generator: torch.Generator) -> Tensor:
        """Return the base chunks ``[B, 1, A]``, 0 in some rows."""
        kept = torch.rand(len(base), generator=generator) >= self.config.reference_dropout
        return base * kept.to(base.device)[:, None, None]

    def penalty(self, base: Tensor, actions: Tensor) -> Tensor:
        """Return ``reference_weight (a - b)^2``, summed over the numbers of a chunk: ``[B]``."""
        return self.config.reference_weight * (actions - base[:, 0]).square().sum(1)
