"""Weights in memory that other processes on the same machine can open, through shared memory on CPUs or CUDA IPC on GPUs."""

from __future__ import annotations

import math
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from rlinf.distributed.devices import gpu_uuids, index_of_gpu
from rlinf.errors import ConfigError, RLinfError

ALIGNMENT = 64
"""Alignment of tensors in bytes. The first aligned block is the header, which starts with the nonce."""
NONCE_LEN = 16
BUCKET_BYTES = {"cpu": 8 * 1024**2, "cuda": 256 * 1024**2}
"""Bucket size in bytes. On CPUs, it fits the cache shared by writer and reader; on GPUs, few large transfers are faster."""


class WeightsRejectedError(RLinfError):
    """Raised if weights are incomplete, wrong or damaged, or their memory was overwritten or freed."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's dtype and shape, and whether training changes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool = True


@dataclass(frozen=True)
class TensorEntry(TensorSpec):
    """A tensor in shared memory, or part of one that is larger than a bucket.

    Attributes:
        offset: Position of the first byte in the shared memory.
        start, stop: Element range within the flattened tensor.
        checksum: Sum of the 64-bit words modulo 2^64, which detects a change of any single byte.
    """

    offset: int = 0
    start: int = 0
    stop: int = 0
    checksum: int = 0

    @property
    def is_complete(self) -> bool:
        """Return whether the entry is the complete tensor."""
        return self.stop - self.start == math.prod(self.shape)

    @property
    def padded_nbytes(self) -> int:
        """Return the number of bytes up to the next entry."""
        return _padded((self.stop - self.start) * self.dtype.itemsize)


@dataclass(frozen=True)
class WeightsHandle:
    """Small picklable reference to all weights or one bucket in a push, valid until its ``WeightBuffer`` is rewritten or freed.

    Attributes:
        version: Number of weight updates that produced these weights.
        manifest: Tensors, or parts of tensors, by name.
        nbytes: Size of the shared memory in bytes.
        nonce: Random bytes drawn at each ``write``; the shared memory starts with them as long as it contains these weights.
        path: File that backs the shared memory on a CPU, or None.
        ipc, gpu: ``(rebuild, arguments)`` for the shared memory on a GPU, and the GPU's UUID.
    """

    version: int
    manifest: dict[str, TensorEntry]
    nbytes: int
    nonce: bytes
    path: str | None = None
    ipc: tuple[Any, tuple] | None = None
    gpu: str = ""

    def open(self, mapped: dict[str, Tensor] | None = None, verify: bool = False) -> dict[str, Tensor]:
        """Return all tensors by name as views of the shared memory; parts of tensors are flat.

        Raise WeightsRejectedError if they were overwritten, freed or, with ``verify``, damaged; or if they are on a GPU that this
        process does not see. ``mapped`` caches the shared memory opened during a push.
        """
        memory = self._map({} if mapped is None else mapped)
        if verify:
            self._verify(memory)
        return {name: _view(memory, entry) for name, entry in self.manifest.items()}

    def buckets(self, trained_only: bool) -> Iterator[WeightsHandle]:
        """Yield this handle, which is a ``WeightSource`` with a single bucket that always sends all tensors."""
        assert not trained_only
        yield self

    def builds_on(self, loaded: object) -> bool:
        """Return False, because a handle cannot be compared with the previous weights."""
        return False

    def _map(self, mapped: dict[str, Tensor]) -> Tensor:
        if self.ipc is not None:
            rebuild, arguments = self.ipc
            arguments = list(arguments)
            # Argument 6 of torch's rebuild function is the device index, which may differ in this process.
            arguments[6] = index_of_gpu(self.gpu, gpu_uuids())
            if arguments[6] is None:
                raise WeightsRejectedError(
                    f"The weights of version {self.version} are on the GPU {self.gpu}, but this process sees {gpu_uuids()}; nothing was "
                    "loaded. The engine must see the trainer's GPU: start it without its own CUDA_VISIBLE_DEVICES"
                )
            memory = rebuild(*arguments)
        else:
            try:
                size = os.stat(self.path).st_size
            except FileNotFoundError:
                size = 0
            # Mapping more than the file's size would extend it, and the number of a closed descriptor may now belong to a different file.
            if size == self.nbytes and self.path not in mapped:
                mapped[self.path] = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
            memory = mapped[self.path] if size == self.nbytes else None
        if memory is None or bytes(memory[:NONCE_LEN].tolist()) != self.nonce:
            raise WeightsRejectedError(
                f"Weights version {self.version} has been overwritten or freed; nothing was loaded. Keep the WeightBuffer, and "
                "do not write it again, while its handle is in use"
            )
        return memory

    def _verify(self, memory: Tensor) -> None:
        pairs = zip(self.manifest.items(), _checksums(memory, self.manifest.values()), strict=True)
        damaged = [name for (name, entry), checksum in pairs if checksum != entry.checksum]
        if damaged:
            raise WeightsRejectedError(
                f"Weights version {self.version} were damaged in transfer: {', '.join(damaged[:8])} ({len(damaged)} of "
                f"{len(self.manifest)} tensors of this bucket) differ from the tensors sent. Push again"
            )


class WeightBuffer:
    """Reusable, unnamed shared memory for weights. Keep the buffer while its handles are in use."""

    def __init__(self) -> None:
        self._entries: dict[str, TensorEntry] = {}
        self._end = 0
        self._memory: Tensor | None = None
        self._fd: int | None = None
        self._release: weakref.finalize | None = None

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor], version: int) -> WeightsHandle:
        """Copy tensors, all on one device, bit for bit; earlier handles become invalid."""
        if not tensors:
            raise ConfigError("WeightBuffer.write needs at least one tensor. Pass e.g. model.state_dict()")
        sizes = (_padded(tensor.numel() * tensor.element_size()) for tensor in tensors.values())
        self.clear(ALIGNMENT + sum(sizes), next(iter(tensors.values())).device)
        for name, tensor in tensors.items():
            self.add(name, tensor)
        return self.seal(version)

    def clear(self, nbytes: int, device: torch.device) -> None:
        """Empty the shared memory and resize it to ``nbytes``, including the header; earlier handles become invalid."""
        if self._memory is None or len(self._memory) != nbytes or self._memory.device != device:
            self._allocate(nbytes, device)
        # Overwrite the nonce, so that a concurrent reader notices the change.
        self._memory[:NONCE_LEN].zero_()
        self._entries, self._end = {}, ALIGNMENT

    def add(self, name: str, tensor: Tensor, start: int = 0) -> int:
        """Copy as many elements of a flattened tensor as fit, from ``start`` on; return the index after the last copied element."""
        count, itemsize = tensor.numel(), tensor.element_size()
        free = len(self._memory) - self._end
        # Split a tensor only if it does not fit into an empty buffer.
        if _padded((count - start) * itemsize) <= free:
            stop = count
        elif self._entries:
            return start
        else:
            stop = start + free // itemsize
        entry = TensorEntry(tensor.dtype, tuple(tensor.shape), True, self._end, start, stop)
        used = (stop - start) * itemsize
        self._memory[self._end + used : self._end + entry.padded_nbytes].zero_()  # the checksum covers the padding
        part = tensor if entry.is_complete else tensor.reshape(-1)[start:stop]
        _view(self._memory, entry).copy_(part)
        self._entries[name] = entry
        self._end += entry.padded_nbytes
        return stop

    def seal(self, version: int) -> WeightsHandle:
        """Write checksums and nonce, and return a handle for the added tensors."""
        sums = _checksums(self._memory, self._entries.values())
        pairs = zip(self._entries.items(), sums, strict=True)
        manifest = {name: replace(entry, checksum=checksum) for (name, entry), checksum in pairs}
        nonce, nbytes, device = secrets.token_bytes(NONCE_LEN), len(self._memory), self._memory.device
        # Write the nonce last, because it makes the memory valid for readers.
        self._memory[:NONCE_LEN].copy_(torch.tensor(list(nonce), dtype=torch.uint8))
        if device.type == "cpu":
            return WeightsHandle(version, manifest, nbytes, nonce, path=f"/proc/{os.getpid()}/fd/{self._fd}")
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize(device)
        gpu = gpu_uuids()[device.index]
        return WeightsHandle(version, manifest, nbytes, nonce, ipc=reduce_tensor(self._memory), gpu=gpu)

    def close(self) -> None:
        """Free the memory."""
        self._memory = None
        if self._release is not None:
            self._release()
            self._release = self._fd = None

    def _allocate(self, nbytes: int, device: torch.device) -> None:
        self.close()
        if device.type != "cpu":
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            return
        self._fd = os.memfd_create("rlinf-weights")
        self._release = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, nbytes)
        self._memory = torch.from_file(f"/proc/self/fd/{self._fd}", shared=True, size=nbytes, dtype=torch.uint8)


class WeightBuckets:
    """Double-buffered shared memory for weights of any size: one buffer is filled while the receiver reads the other.

    ``nbytes`` is the size of each buffer in bytes; None uses ``BUCKET_BYTES`` for the device.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self.nbytes = nbytes
        self._buffers = WeightBuffer(), WeightBuffer()

    @torch.no_grad()
    def pack(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Iterator[WeightsHandle]:
        """Copy tensors, all on one device, bucket by bucket. Each bucket overwrites the one before the previous bucket."""
        buffers = cycle(self._buffers)
        buffer: WeightBuffer | None = None
        for name, tensor in tensors:
            start = 0
            while True:
                if buffer is None:
                    buffer = next(buffers)
                    nbytes = self.nbytes or BUCKET_BYTES[tensor.device.type]
                    buffer.clear(ALIGNMENT + _padded(nbytes), tensor.device)
                start = buffer.add(name, tensor, start)
                if start == tensor.numel():
                    break
                yield buffer.seal(version)
                buffer = None
        if buffer is not None:
            yield buffer.seal(version)

    def close(self) -> None:
        """Free the memory."""
        for buffer in self._buffers:
            buffer.close()


def check_manifest(manifest: Mapping[str, TensorSpec], required: Mapping[str, Tensor]) -> None:
    """Raise WeightsRejectedError if tensors are missing, unknown or quantised, or have a different shape.

    ``required`` is the receiving model's ``state_dict(keep_vars=True)``; for a tied tensor, one of its names is enough.
    """
    present = {id(tensor) for name, tensor in required.items() if name in manifest}
    missing = sorted(name for name, tensor in required.items() if id(tensor) not in present)
    unknown = sorted(set(manifest) - set(required))
    reshaped, quantised = [], []
    for name, entry in sorted(manifest.items()):
        if name in required and tuple(required[name].shape) != entry.shape:
            reshaped.append(f"{name} is {list(entry.shape)} instead of {list(required[name].shape)}")
        if name in required and required[name].is_floating_point() > entry.dtype.is_floating_point:
            quantised.append(f"{name} is {entry.dtype} instead of {required[name].dtype}")
    faults = {"missing": missing, "unknown": unknown, "different shape:": reshaped, "quantised:": quantised}
    parts = [f"{fault} {', '.join(names[:8])} ({len(names)} in all)" for fault, names in faults.items() if names]
    if parts:
        raise WeightsRejectedError(
            f"Weights rejected: {'; '.join(parts)}. Required: the {len(required)} tensors of the model"
        )


def complete_tied(tensors: Mapping[str, Tensor], required: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` with tied weights under all their names, because ``check_manifest`` requires only one."""
    by_id = {id(required[name]): tensor for name, tensor in tensors.items()}
    return {name: tensors.get(name, by_id[id(tensor)]) for name, tensor in required.items() if id(tensor) in by_id}


def _padded(nbytes: int) -> int:
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


def _view(memory: Tensor, entry: TensorEntry) -> Tensor:
    nbytes = (entry.stop - entry.start) * entry.dtype.itemsize
    flat = memory[entry.offset : entry.offset + nbytes].view(entry.dtype)
    return flat.view(entry.shape) if entry.is_complete else flat


def _checksums(memory: Tensor, entries: Iterable[TensorEntry]) -> list[int]:
    sums = [memory[e.offset : e.offset + e.padded_nbytes].view(torch.int64).sum() for e in entries]
    return torch.stack(sums).tolist() if sums else []
