"""Push the trained weights to the rollout policy, completely or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlinf.distributed.deadlines import deadline
from rlinf.distributed.parallel import local_part
from rlinf.distributed.process_group import any_rank, gather_objects
from rlinf.distributed.transfers import check_finite, different
from rlinf.engines.weight_transfer import ModuleReceiver, PushHeader, manifest_of
from rlinf.errors import RLinfError
from rlinf.models.embodiment.base import ActionModel

if TYPE_CHECKING:
    from rlinf.models.lora import MergedCopy  # imports peft


class WeightPush:
    """Synchronises the rollout policy with the trained model.

    The rollout policy is ``generator`` if given, otherwise ``rollout_model``. A ``rollout_model`` other than the trained model
    itself is a full replica on each rank, so rollouts of a sharded trainer need no collective calls. The first push
    copies every tensor, later ones only the trained ones.

    Args:
        trainer_model: The trained model, sharded or not.
        rollout_model: ``trainer_model`` itself, or a full model of the same architecture. On the meta device, it only describes
            the policy, and ``generator`` receives its weights from the trained model.
        generator: An engine or rollout workers with ``update_weights(version)``, or None.
        merge_adapters: Roll out a copy of ``rollout_model`` with merged adapters, which each push refreshes.
    """

    def __init__(
        self,
        trainer_model: nn.Module,
        rollout_model: ActionModel,
        generator: Any = None,
        merge_adapters: bool = False,
    ) -> None:
        self.trainer_model, self.rollout_model, self.generator = trainer_model, rollout_model, generator
        self.merged: MergedCopy | None = None
        if merge_adapters:
            from rlinf.models.lora import MergedCopy  # imports peft

            self.merged = MergedCopy(rollout_model)
        holds_numbers = rollout_model is not trainer_model and not any(p.is_meta for p in rollout_model.parameters())
        self._replica = ModuleReceiver(rollout_model) if holds_numbers else None
        self.version: int | None = None
        self._seen: dict[str, list[int]] = {}  # ``_writes`` of all tensors at the last push

    @property
    def rollout_policy(self) -> Any:
        """The policy for rollouts. Raises RLinfError if the last push failed, because its weights may mix two versions."""
        if self.version is None:
            raise RLinfError(
                "The rollout policy has no complete weights, because the last push failed or there was none. Push again"
            )
        if self.generator is not None:
            return self.generator
        return (self.rollout_model if self.merged is None else self.merged.policy).eval()

    @torch.no_grad()
    @deadline("push")
    def push(self, version: int) -> int:
        """Copy the trained weights to the rollout policy (a collective call), and return ``version``.

        A replica that already has this version is not copied again. Frozen tensors are checked in the first push, and whenever
        torch has counted a write to them (writes through ``.data`` are not counted). This takes one all-gather for each FSDP unit
        with trained weights and two reductions of flags. Raise NonFiniteError, before any copy, if a weight is not finite, and
        RLinfError if names or shapes differ, the copy does not equal the original, or a different rank failed.
        """
        # Until the push has succeeded, the rollout policy may mix two versions and must not be used.
        base, self.version = self.version, None
        seen, self._seen = self._seen, {}
        state = self.trainer_model.state_dict()
        trained = {name for name, spec in manifest_of(self.trainer_model).items() if spec.trained}
        suspects = {name: x for name, x in state.items() if name in trained or seen.get(name) != self._writes(name, x)}
        # All ranks must reach the collective calls below, so a local error is raised on all of them first.
        on_every_rank(lambda: check_finite({name: local_part(tensor)[0] for name, tensor in suspects.items()}))
        if self._replica is not None:
            if base != version:
                self._copy(version, base)
            on_every_rank(lambda: self._check_replica(suspects))
        self._seen = {name: self._writes(name, tensor) for name, tensor in state.items()}
        if self.merged is not None:
            self.merged.refresh()
        if self.generator is not None:
            self.generator.update_weights(version)
        self.version = version
        return version

    def rest(self) -> None:
        """Free an engine's GPU memory until the next push or rollout."""
        if self.generator is not None:
            self.generator.sleep()

    def _writes(self, name: str, tensor: Tensor) -> list[int]:
        """Return torch's write counts for a tensor and its replica, so that unchanged frozen tensors need not be read again."""
        replica = {} if self._replica is None else self._replica.tensors
        return [copy._version for copy in (local_part(tensor)[0], replica.get(name)) if copy is not None]

    def _copy(self, version: int, base: int | None) -> None:
        manifest = manifest_of(self.trainer_model)
        self._replica.start_push(PushHeader(version, manifest, base))
        wanted = {name for name, spec in manifest.items() if base is None or spec.trained}
        for name, tensor in gathered(self.trainer_model, wanted):
            self._replica.take(name, tensor)
        self._replica.commit()

    def _check_replica(self, tensors: dict[str, Tensor]) -> None:
        """Compare this rank's part of the weights with the replica, bit for bit."""
        # Comparing log-probabilities would not reveal a stale value head or, in 16 bits, an update smaller than rounding.
        held = self._replica.tensors

        def pairs() -> Iterator[tuple[str, Tensor, Tensor]]:
            for name, tensor in tensors.items():
                part, where = local_part(tensor)
                if name in held:
                    yield name, part.to(held[name]), held[name][where]  # one rounded copy at a time

        stale = [name for name in tensors if name not in held] + different(pairs())
        if stale:
            raise RLinfError(
                f"The rollout policy differs from the trained policy after the weight push in {len(stale)} of "
                f"{len(held)} tensors: {', '.join(stale[:8])}. Rollouts would use outdated weights. Either "
                "the weight push (WeightPush) is faulty, or other code writes to the rollout policy"
            )


def gathered(model: nn.Module, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's full tensors ``names``, one FSDP unit at a time; each is valid until the next one (a collective call)."""
    state = model.state_dict()
    units: dict[str, list[str]] = {}
    prefixes = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    for name in state:
        if name in names:
            owner = max(
                (prefix for prefix in prefixes if f"{name}.".startswith(f"{prefix}." if prefix else "")),
                key=len,
                default="",
            )
            units.setdefault(owner, []).append(name)
    for owner, unit_names in units.items():
        unit = model.get_submodule(owner)
        if not isinstance(unit, FSDPModule):
            yield from ((name, state[name]) for name in unit_names)
            continue
        # The last evaluation may have left the root unit gathered, with weights from before the update.
        unit.reshard()
        unit.unshard()
        try:
            for name in unit_names:
                module, _, part = name.rpartition(".")
                yield name, getattr(model.get_submodule(module), part)
        finally:
            unit.reshard()


def on_every_rank(check: Callable[[], None]) -> None:
    """Run a check without collective calls. Raise the first error from any rank on all ranks, so that no rank waits for it."""
    error: RLinfError | None = None
    try:
        check()
    except RLinfError as raised:
        error = raised
    if any_rank(error is not None):
        raise next(item for item in gather_objects(error) if item is not None)
