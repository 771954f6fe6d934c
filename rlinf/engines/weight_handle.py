"""Share weights with another process on the same machine: shared memory on CPUs, CUDA IPC on GPUs."""

from __future__ import annotations

import math
import os
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf.distributed.devices import gpu_uuids, index_of_gpu
from rlinf.errors import ConfigError, RLinfError

ALIGNMENT = 64
"""Every tensor begins at a multiple of this many bytes. The first block is the header, which begins with the nonce."""
NONCE_LEN = 16


class WeightsRefusedError(RLinfError):
    """A handle lacks tensors or has wrong ones, or its memory has been overwritten or freed; nothing was loaded."""


@dataclass(frozen=True)
class TensorEntry:
    """Number format, shape and byte offset of a tensor in the shared memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class WeightsHandle:
    """A small picklable reference to weights. Valid until its ``WeightBuffer`` is written again or freed.

    Attributes:
        version: Number of weight updates that produced these weights.
        manifest: Every tensor by name.
        nbytes: Size of the shared memory.
        nonce: Random bytes of one ``write``. The shared memory begins with them as long as it holds these weights.
        path: File of the shared memory (CPU), or None.
        ipc: ``(rebuild, arguments)`` of the shared memory on a GPU, or None.
        gpu: UUID of that GPU.
    """

    version: int
    manifest: dict[str, TensorEntry]
    nbytes: int
    nonce: bytes
    path: str | None = None
    ipc: tuple[Any, tuple] | None = None
    gpu: str = ""

    def open(self) -> dict[str, Tensor]:
        """Return all tensors by name, as views of the shared memory.

        Raises:
            WeightsRefusedError: The weights have been overwritten or freed, or are on a GPU that this process does not see.
        """
        if self.ipc is not None:
            rebuild, arguments = self.ipc
            arguments = list(arguments)
            arguments[6] = index_of_gpu(self.gpu, gpu_uuids())  # GPUs may be numbered differently in the other process
            if arguments[6] is None:
                raise WeightsRefusedError(
                    f"The weights of version {self.version} are on the GPU {self.gpu}, but this process sees {gpu_uuids()}; nothing was "
                    "loaded. The engine must see the trainer's GPU: start it without its own CUDA_VISIBLE_DEVICES"
                )
            memory = rebuild(*arguments)
        else:
            try:
                size = os.stat(self.path).st_size
            except FileNotFoundError:
                size = 0
            # Mapping more than the file would lengthen it, and a closed descriptor's number may belong to another file now.
            memory = (
                torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8) if size == self.nbytes else None
            )
        if memory is None or bytes(memory[:NONCE_LEN].tolist()) != self.nonce:
            raise WeightsRefusedError(
                f"Weights version {self.version} has been overwritten or freed; nothing was loaded. Keep the WeightBuffer, and "
                "do not write it again, while its handle is in use"
            )
        return {name: _view(memory, entry) for name, entry in self.manifest.items()}


class WeightBuffer:
    """Reusable shared memory for the weights of one process.

    It has no name, so it disappears with the process. Keep the buffer while its handles are in use.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._fd: int | None = None
        self._release: weakref.finalize | None = None

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor], version: int) -> WeightsHandle:
        """Copy tensors, which must be on one device, bit for bit; earlier handles become invalid."""
        if not tensors:
            raise ConfigError("WeightBuffer.write got no tensors. Pass e.g. model.state_dict()")
        manifest: dict[str, TensorEntry] = {}
        end, nonce = ALIGNMENT, secrets.token_bytes(NONCE_LEN)
        for name, tensor in tensors.items():
            manifest[name] = TensorEntry(tensor.dtype, tuple(tensor.shape), end)
            end += math.ceil(tensor.numel() * tensor.element_size() / ALIGNMENT) * ALIGNMENT
        device = next(iter(tensors.values())).device
        if self._memory is None or len(self._memory) != end or self._memory.device != device:
            self._allocate(end, device)
        header = self._memory[:NONCE_LEN]
        header.zero_()  # a concurrent reader must see that the weights change
        for name, tensor in tensors.items():
            _view(self._memory, manifest[name]).copy_(tensor)
        header.copy_(torch.tensor(list(nonce), dtype=torch.uint8))
        if device.type == "cpu":
            return WeightsHandle(version, manifest, end, nonce, path=f"/proc/{os.getpid()}/fd/{self._fd}")
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize(device)
        gpu = gpu_uuids()[device.index]
        return WeightsHandle(version, manifest, end, nonce, ipc=reduce_tensor(self._memory), gpu=gpu)

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


def check_manifest(given: Mapping[str, TensorEntry], required: Mapping[str, Tensor]) -> None:
    """Raise WeightsRefusedError if tensors are missing, unknown, of another shape, or quantised.

    Args:
        given: Manifest of a handle.
        required: ``state_dict(keep_vars=True)`` of the receiving model, for example on the meta device. One name of a tied
            tensor is enough.
    """
    present = {id(tensor) for name, tensor in required.items() if name in given}
    missing = sorted(name for name, tensor in required.items() if id(tensor) not in present)
    unknown = sorted(set(given) - set(required))
    reshaped = sorted(
        f"{name} is {list(entry.shape)} instead of {list(required[name].shape)}"
        for name, entry in given.items()
        if name in required and tuple(required[name].shape) != entry.shape
    )
    quantised = sorted(
        f"{name} is {entry.dtype} instead of {required[name].dtype}"
        for name, entry in given.items()
        if name in required and required[name].is_floating_point() > entry.dtype.is_floating_point
    )
    if missing or unknown or reshaped or quantised:
        parts = [f"{label} {', '.join(names[:8])} ({len(names)} in all)"
                 for label, names in (("missing", missing), ("unknown", unknown), ("other shape:", reshaped),
                                       ("quantised:", quantised)) if names]  # fmt: skip
        raise WeightsRefusedError(
            f"Weights refused, nothing was changed: {'; '.join(parts)}. Required: the {len(required)} tensors of the model"
        )


def complete_tied(given: Mapping[str, Tensor], required: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``given`` with tied weights under all their names; ``check_manifest`` requires only one of them."""
    by_id = {id(required[name]): tensor for name, tensor in given.items()}
    return {name: given.get(name, by_id[id(tensor)]) for name, tensor in required.items()}


def _view(memory: Tensor, entry: TensorEntry) -> Tensor:
    nbytes = math.prod(entry.shape) * entry.dtype.itemsize
    return memory[entry.offset : entry.offset + nbytes].view(entry.dtype).view(entry.shape)
