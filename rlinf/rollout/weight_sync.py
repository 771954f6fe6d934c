"""From the trainer's weights to the rollout's: complete, or refused."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from rlinf.distributed.fsdp import full_tensor, local_part
from rlinf.errors import RLinfError
from rlinf.models.embodiment.base import ActionModel
from rlinf.optim.finite import check_finite


class WeightSync:
    """Keeps a rollout policy equal to a trained one.

    In one process they are the same object and nothing is copied. When the trainer is sharded, every rank holds a full
    copy for rollouts, which then need no collective calls while they play.

    Args:
        trainer_model: The trained model, sharded or not.
        rollout_model: A full model of the same architecture, or ``trainer_model`` itself.
        generator: Another policy that plays with the weights of ``rollout_model`` after
            ``update_weights(version)``; None: ``rollout_model`` plays.
    """

    def __init__(self, trainer_model: nn.Module, rollout_model: ActionModel, generator: Any = None) -> None:
        self.trainer_model, self.rollout_model, self.generator = trainer_model, rollout_model, generator
        self.version = 0

    @property
    def rollout_policy(self) -> Any:
        """The policy that collects rollouts."""
        return self.rollout_model.eval() if self.generator is None else self.generator

    @torch.no_grad()
    def push(self, version: int) -> int:
        """Copy all parameters and buffers (a collective call); return the version that the rollout now holds.

        RLinfError if a weight is not finite, tensor names or shapes differ, or the copy does not equal the original.
        """
        check_finite({name: local_part(tensor)[0] for name, tensor in self.trainer_model.state_dict().items()})
        self.version = version
        if self.rollout_model is not self.trainer_model:
            self._copy()
            self._check_replica()
        if self.generator is not None:
            self.generator.update_weights(version)
        return version

    def _copy(self) -> None:
        source = dict(self.trainer_model.state_dict())
        target = self.rollout_model.state_dict()
        if source.keys() != target.keys():
            raise RLinfError(f"Weight sync refused, names differ: {sorted(source.keys() ^ target.keys())[:8]}.")
        # One gather a tensor, in the same order on all ranks.
        for name, tensor in source.items():
            full = full_tensor(tensor)
            if full.shape != target[name].shape:
                raise RLinfError(f"Weight sync refused, '{name}' is {list(full.shape)}, rollout has "
                                 f"{list(target[name].shape)}.")  # fmt: skip
            target[name].copy_(full)

    def _check_replica(self) -> None:
        """Compare this rank's part of the trained weights with what the rollout policy computes with, bit for bit.

        Log-probabilities would not show a stale value head, a stale layer that is hardly used, or, in 16 bits, an update that is
        smaller than the rounding.
        """
        model = self.rollout_model
        held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        stale = []
        for name, tensor in self.trainer_model.state_dict().items():
            part, where = local_part(tensor)
            if name not in held or not torch.equal(part.to(held[name]), held[name][where]):
                stale.append(name)
        if stale:
            raise RLinfError(
                f"The rollout policy differs from the trained policy after the weight sync in {len(stale)} of "
                f"{len(held)} tensors: {', '.join(stale[:8])}. Rollouts would be those of older weights; this is a fault of "
                "the weight sync (WeightSync), or something writes into the rollout policy"
            )


def frozen_copy(model: ActionModel) -> ActionModel:
    """Return a copy of a plain model that is never trained: the reference policy, or a rollout replica."""
    return copy.deepcopy(model).requires_grad_(False).eval()
