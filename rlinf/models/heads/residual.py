"""A correction of the action of the frozen policy (residual RL: Johannink et al. 2019, Silver et al. 2018)."""

from __future__ import annotations

from torch import Tensor

from rlinf.models.heads.base import Head


class ResidualHead(Head):
    """``clip(b + scale r)``: begins as the frozen policy, and never leaves its neighbourhood."""

    begins_as_base = True

    def compose(self, base: Tensor, r: Tensor) -> Tensor:
        return (base[:, 0] + self.config.scale * r).clamp(-1.0, 1.0)
