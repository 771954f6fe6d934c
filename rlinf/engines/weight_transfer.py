"""Push weights to a receiver with ``start_push``, ``load`` for each bucket, and ``commit``; meanwhile, the receiver has no version.

A push either completes or is rejected. The first push sends all tensors, later ones only trained tensors.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlinf.distributed.transfers import not_finite
from rlinf.engines.weight_handle import TensorSpec, WeightBuckets, WeightsHandle, WeightsRejectedError, check_manifest


class WeightSource(Protocol):
    """Weights of one version that can be sent repeatedly, e.g. a ``WeightsHandle``.
    ``version`` is the number of weight updates; ``manifest`` contains the specs of all tensors by name.
    """

    @property
    def version(self) -> int: ...

    @property
    def manifest(self) -> Mapping[str, TensorSpec]: ...

    def builds_on(self, loaded: Any) -> bool:
        """Return whether ``loaded`` has the same frozen tensors."""
        ...

    def buckets(self, trained_only: bool) -> Iterator[WeightsHandle]:
        """Yield buckets with all tensors in the manifest, or only trained ones. A bucket is valid until the one after the next."""
        ...


@dataclass(frozen=True)
class PushHeader:
    """Argument of ``start_push``.

    Attributes:
        version: Version of the weights that follow.
        manifest: Specs of all tensors; None if unchanged since the previous push.
        base: Version that the receiver must have if only trained tensors follow; None if all tensors follow.
    """

    version: int
    manifest: Mapping[str, TensorSpec] | None = None
    base: int | None = None


class Peer(Protocol):
    """Connection to a receiver in a different process."""

    def send(self, command: str, payload: Any) -> None:
        """Send a command without waiting for its reply."""
        ...

    def reply(self, command: str) -> Any:
        """Wait for the reply to the last command; raise the receiver's error."""
        ...


def push(source: WeightSource, peer: Peer, base: int | None = None) -> int:
    """Send weights to a receiver and return its new version; the next bucket is filled while the receiver loads the previous one.

    If the receiver has version ``base``, only trained tensors are sent. Raise WeightsRejectedError if it rejects the weights; the next
    push must then send all tensors.
    """
    manifest = source.manifest if base is None else None
    peer.send("start_push", PushHeader(source.version, manifest, base))
    peer.reply("start_push")
    is_loading = False
    try:
        for handle in source.buckets(trained_only=base is not None):
            if is_loading:
                # Clear the flag before the reply, which may raise, so that the finally clause does not wait for a second reply.
                is_loading = False
                peer.reply("load")
            peer.send("load", handle)
            is_loading = True
    finally:
        if is_loading:
            peer.reply("load")
    peer.send("commit", None)
    return peer.reply("commit")


class ModuleWeights:
    """``WeightSource`` of an unsharded torch module, packed lazily into ``buckets``.

    The module must not change before the receiver has its next weights, because a restarted receiver loads these again.
    """

    def __init__(self, module: nn.Module, version: int, buckets: WeightBuckets) -> None:
        self.module, self.version, self._buckets = module, version, buckets
        self.manifest = manifest_of(module)

    def builds_on(self, loaded: object) -> bool:
        """Return whether ``loaded`` is from the same module."""
        return isinstance(loaded, ModuleWeights) and loaded.module is self.module

    def buckets(self, trained_only: bool) -> Iterator[WeightsHandle]:
        """See ``WeightSource.buckets``."""
        names = {name for name, spec in self.manifest.items() if spec.trained or not trained_only}
        return self._buckets.pack(self.tensors(names), self.version)

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with the given names."""
        return ((name, tensor) for name, tensor in self.module.state_dict().items() if name in names)


def manifest_of(module: nn.Module) -> dict[str, TensorSpec]:
    """Return the manifest for a module's state dict. Parameters without gradients are frozen, but buffers may change."""
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {
        name: TensorSpec(tensor.dtype, tuple(tensor.shape), name not in frozen)
        for name, tensor in module.state_dict().items()
    }


class WeightReceiver(ABC):
    """Base class for receivers. Subclasses check the manifest (``check``) and store the tensors (``receive``)."""

    def __init__(self, version: int | None = None) -> None:
        self._version = version
        self._manifest: dict[str, TensorSpec] = {}
        self._header: PushHeader | None = None
        self._missing: dict[str, int] = {}
        self._mapped: dict[str, Tensor] = {}

    @property
    def version(self) -> int | None:
        """Version of the weights, or None while they are missing or incomplete and so cannot be used."""
        return None if self._header is not None else self._version

    def held(self, _: object = None) -> int | None:
        """Return ``version``; this method makes it available as a command."""
        return self.version

    def start_push(self, header: PushHeader) -> None:
        """Prepare to receive the weights of a version.

        Raise WeightsRejectedError, without changes, if the manifest does not match the model or the version is not ``header.base``.
        """
        self._header, self._mapped = None, {}
        if header.base is not None and (header.base != self._version or not self._manifest):
            current = "no complete weights" if self._version is None else f"version {self._version}"
            raise WeightsRejectedError(
                f"Version {header.version} replaces some tensors of version {header.base}, but the receiver has {current}. Push all tensors"
            )
        manifest = self._manifest if header.manifest is None else dict(header.manifest)
        self.check(manifest)
        self._manifest, self._header = manifest, header
        expected = {name: spec for name, spec in manifest.items() if header.base is None or spec.trained}
        self._missing = {name: math.prod(spec.shape) for name, spec in expected.items()}

    def load(self, handle: WeightsHandle) -> None:
        """Load a bucket; raise WeightsRejectedError if it is damaged, not finite, or not part of this push.

        After an error at the first bucket, the old weights remain; after one at a later bucket, the receiver has none until the next push.
        """
        # Restore the header only at the end, so that an error aborts the push.
        header, self._header = self._header, None
        if header is None or handle.version != header.version:
            wanted = "none: no push has started" if header is None else str(header.version)
            raise WeightsRejectedError(f"A bucket of version {handle.version} arrived; expected: {wanted}")
        weights = handle.open(self._mapped, verify=True)
        if problems := not_finite(weights):
            name, number = next(iter(problems.items()))
            raise WeightsRejectedError(
                f"Weights rejected: '{name}' contains {number} ({len(problems)} of {len(weights)} tensors of this bucket are not finite)"
            )
        for name, entry in handle.manifest.items():
            self._arrived(name, entry.stop - entry.start)
        # From here on, the old weights are overwritten.
        self._version = None
        self.receive(handle)
        self._header = header

    def commit(self, _: object = None) -> int:
        """Complete the push and return the version. Raise WeightsRejectedError if tensors are missing."""
        header, self._header = self._header, None
        self._mapped = {}
        if header is None:
            raise WeightsRejectedError("The push was not started, or one of its buckets was rejected.")
        if self._missing:
            self._version = None
            names = sorted(self._missing)
            raise WeightsRejectedError(
                f"Weights version {header.version} lacks {', '.join(names[:8])} ({len(names)} in all). Push again"
            )
        self.finish(is_complete=header.base is None)
        self._version = header.version
        return header.version

    @abstractmethod
    def check(self, manifest: Mapping[str, TensorSpec]) -> None:
        """Raise WeightsRejectedError if a manifest does not match the model."""

    @abstractmethod
    def receive(self, handle: WeightsHandle) -> None:
        """Store a verified bucket's tensors."""

    def finish(self, is_complete: bool) -> None:  # noqa: B027  (optional)
        """Activate the new weights; ``is_complete`` is True if all tensors were sent instead of only trained ones."""

    def _arrived(self, name: str, count: int) -> None:
        left = self._missing.pop(name, None)
        if left is None or left < count:
            raise WeightsRejectedError(f"'{name}' is not part of this push, or was sent twice.")
        if left > count:
            self._missing[name] = left - count


class ModuleReceiver(WeightReceiver):
    """Receiver that copies weights into a torch module, in this process or a different one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        named = (module.named_parameters, module.named_buffers)
        tensors = {name: tensor for names in named for name, tensor in names(remove_duplicate=False)}
        self.tensors = {name: tensors[name] for name in module.state_dict()}
        self._parts: dict[str, tuple[Tensor, int]] = {}

    def check(self, manifest: Mapping[str, TensorSpec]) -> None:
        """See ``WeightReceiver.check``."""
        check_manifest(manifest, self.tensors)
        self._parts = {}

    def receive(self, handle: WeightsHandle) -> None:
        """See ``WeightReceiver.receive``."""
        for name, tensor in join_parts(handle, self._mapped, self._parts):
            self._copy(name, tensor)

    def take(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor from this process; call it between ``start_push`` and ``commit``."""
        self._version = None
        self._arrived(name, tensor.numel())
        self._copy(name, tensor)

    @torch.no_grad()
    def _copy(self, name: str, tensor: Tensor) -> None:
        self.tensors[name].copy_(tensor)


def join_parts(
    handle: WeightsHandle, mapped: dict[str, Tensor], parts: dict[str, tuple[Tensor, int]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the complete tensors in a bucket: views of it, or joined copies of tensors whose last part has arrived.

    ``mapped`` caches the shared memory opened during this push; ``parts`` contains incomplete tensors with the number of elements
    received so far. Both are empty before the first bucket.
    """
    for name, tensor in handle.open(mapped).items():
        entry = handle.manifest[name]
        if entry.is_complete:
            yield name, tensor
            continue
        joined, count = parts.get(name) or (tensor.new_empty(entry.shape), 0)
        joined.view(-1)[entry.start : entry.stop] = tensor
        parts[name] = joined, count + len(tensor)
        if parts[name][1] == joined.numel():
            del parts[name]
            yield name, joined
