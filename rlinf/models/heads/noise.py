"""The noise from which the frozen policy samples its action (DSRL, Wagenmaker et al. 2025)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlinf.models.heads.base import Head


class NoiseHead(Head):
    """``scale r`` standard deviations of noise: only what the frozen policy can sample is ever executed.

    The critics value ``r`` (DSRL-SAC), so an update does not run the frozen policy. It begins with noise 0: the median of each number
    that a policy samples, or what a flow makes of the mode of its noise.
    """

    steers = True

    @classmethod
    def num_numbers_of(cls, model: Any) -> int:
        return model.num_steering_numbers

    def compose(self, base: Tensor, r: Tensor) -> Tensor:
        return r
