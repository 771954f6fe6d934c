"""The registered actors: they output residuals on the base action, actions without it, or noise for the base policy."""

from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms.offpolicy_config import ActorConfig
from rlinf.models.actors.base import Actor
from rlinf.registry import Registry


class ResidualActor(Actor):
    """Actor that adds a bounded residual to the base action, ``clip(b + scale r)`` (Johannink et al. 2019, Silver et al. 2018)."""

    def compose(self, base: Tensor, r: Tensor) -> Tensor:
        return (base[:, 0] + self.config.scale * r).clamp(-1.0, 1.0)


class DirectActor(Actor):
    """Actor that outputs ``r`` from the features only, as a baseline for residual actors. Its initial actions are mid-range."""

    is_standalone = True

    def outputs(self, features: Tensor, base: Tensor) -> tuple[Tensor, Tensor | None]:
        return super().outputs(features, torch.zeros_like(base))

    def compose(self, base: Tensor, r: Tensor) -> Tensor:
        return r


class ScratchActor(Actor):
    """Actor without a base policy, for SAC and TD3 from scratch. Its encoder, if any, is trained with the critics."""

    is_standalone = True

    @classmethod
    def base_dim_for(cls, model: Any) -> int:
        return 0

    def compose(self, base: Tensor, r: Tensor) -> Tensor:
        return r


class RLTActor(ResidualActor):
    """Residual actor that also learns to act without ``b`` and is penalised for deviating from it (RLT, 2604.23073).

    Reference dropout sets ``b`` to 0 in some rows of the loss, where the actor must output the complete chunk. The penalty
    ``reference_weight (a - b)^2`` is computed with the true ``b``.
    """

    def base_for_loss(self, base: Tensor, generator: torch.Generator) -> Tensor:
        """Return the base chunks ``[B, 1, A]`` with some rows set to 0."""
        retained = torch.rand(len(base), generator=generator) >= self.config.reference_dropout
        return base * retained.to(base.device)[:, None, None]

    def penalty(self, base: Tensor, actions: Tensor) -> Tensor:
        """Return ``reference_weight (a - b)^2``, summed over the action dimensions: ``[B]``."""
        return self.config.reference_weight * (actions - base[:, 0]).square().sum(1)


class DSRLActor(Actor):
    """Actor that sets the base policy's noise to ``scale r`` std, so only actions it can sample occur (DSRL, Wagenmaker et al. 2025).

    The critics evaluate ``r`` (DSRL-SAC), so updates do not run the base policy. A new actor outputs noise 0, which yields
    the median of each sampled value, or a flow's output for the mode of its noise.
    """

    sets_noise = True

    @classmethod
    def output_dim_for(cls, model: Any) -> int:
        return model.steering_dim

    def compose(self, base: Tensor, r: Tensor) -> Tensor:
        return r


class EXPOActor(ResidualActor):
    """Actor that proposes ``N`` base chunks and ``clip(b + scale r)`` of each; critics choose, also in targets (EXPO, Dong et al. 2025)."""

    critics_choose = True

    @classmethod
    def num_candidates_for(cls, config: ActorConfig) -> int:
        return config.num_candidates

    @property
    def noise_dim(self) -> int:
        return self.num_candidates * self.output_dim

    def options(self, features: Tensor, base: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the base chunks, followed by the residual action for each one: ``[B, 2 N, A]``."""
        count = base.shape[1]
        rows, chunks = features.repeat_interleave(count, 0), base.flatten(0, 1).unsqueeze(1)
        noise = None if noise is None else noise.unflatten(1, (count, -1)).flatten(0, 1)
        corrected = super().options(rows, chunks, noise)
        return torch.cat([base, corrected.unflatten(0, (-1, count)).squeeze(2)], 1)

    def base_for_loss(self, base: Tensor, generator: torch.Generator) -> Tensor:
        """Return one random base chunk per row, ``[B, 1, A]``, because residuals may be applied to any of them."""
        chosen = torch.randint(base.shape[1], (len(base),), generator=generator).to(base.device)
        return base[torch.arange(len(base), device=base.device), chosen].unsqueeze(1)


ACTORS: Registry[type[Actor]] = Registry(
    "actor",
    "rlinf.actors",
    {
        "scratch": ScratchActor,
        "rlt": RLTActor,
        "direct": DirectActor,
        "expo": EXPOActor,
        "dsrl": DSRLActor,
        "residual": ResidualActor,
    },
)
