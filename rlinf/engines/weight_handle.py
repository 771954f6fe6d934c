"""Weights of one process in the hands of another on the same machine: shared memory on CPUs, CUDA IPC on GPUs."""

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
"""Bytes; every tensor begins at a multiple. As many come before the first one: the header, whose first bytes are the nonce."""
NONCE_LEN = 16


class WeightsRefusedError(RLinfError):
    """A handle lacks tensors, has unknown ones or one of another kind, or its memory was rewritten; nothing was loaded."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in the shared memory: its bytes begin at ``offset``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class WeightsHandle:
    """What is sent instead of weights; small, and picklable. Valid while its ``WeightBuffer`` lives and is not rewritten.

    Attributes:
        version: Weight updates behind these weights.
        manifest: Every tensor by name.
        nbytes: Size of the shared memory.
        nonce: Random bytes of this one ``write``, which the shared memory begins with as long as it holds these weights.
        path: File behind the shared memory (CPU), or None.
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
            WeightsRefusedError: The buffer or the process that wrote them is gone, other weights were written since, or they lie on a
            GPU that this process does not see.
        """
        if self.ipc is not None:
            rebuild, arguments = self.ipc
            arguments = list(arguments)
            arguments[6] = index_of_gpu(self.gpu, gpu_uuids())  # GPUs may be numbered differently in the other process
            if arguments[6] is None:
                raise WeightsRefusedError(
                    f"The weights of version {self.version} lie on the GPU {self.gpu}, and this process sees {gpu_uuids()}; nothing was "
                    "loaded. An engine needs the GPU of the trainer among its own: start it without CUDA_VISIBLE_DEVICES of its own"
                )
            memory = rebuild(*arguments)
        else:
            try:
                size = os.stat(self.path).st_size
            except FileNotFoundError:
                size = 0
            # A longer mapping would lengthen the file, and the number of a closed descriptor may be another file's by now.
            memory = (
                torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8) if size == self.nbytes else None
            )
        if memory is None or bytes(memory[:NONCE_LEN].tolist()) != self.nonce:
            raise WeightsRefusedError(
                f"The shared memory holds the weights of version {self.version} no longer; nothing was loaded. A handle is valid "
                "while its WeightBuffer is kept, until the next write"
            )
        return {name: _view(memory, entry) for name, entry in self.manifest.items()}


class WeightBuffer:
    """Shared memory that one process writes weights into again and again. It has no name: nothing of it outlives the process.

    Keep the buffer for as long as its handles are in use: the memory is freed with it.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._fd: int | None = None
        self._release: weakref.finalize | None = None

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor], version: int) -> WeightsHandle:
        """Copy tensors (all on one device, bit for bit); handles of earlier versions become invalid.

        Raises:
            ConfigError: There is no tensor.
        """
        if not tensors:
            raise ConfigError("WeightBuffer.write got no tensors. Give all of the model, such as model.state_dict()")
        manifest: dict[str, TensorEntry] = {}
        end, nonce = ALIGNMENT, secrets.token_bytes(NONCE_LEN)
        for name, tensor in tensors.items():
            manifest[name] = TensorEntry(tensor.dtype, tuple(tensor.shape), end)
            end += math.ceil(tensor.numel() * tensor.element_size() / ALIGNMENT) * ALIGNMENT
        device = next(iter(tensors.values())).device
        if self._memory is None or len(self._memory) != end or self._memory.device != device:
            self._allocate(end, device)
        header = self._memory[:NONCE_LEN]
        header.zero_()  # whoever reads meanwhile must see that it changes
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
        """Give the memory back."""
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
    """Refuse weights that are not exactly those of a model.

    Args:
        given: Manifest of a handle.
        required: ``state_dict(keep_vars=True)`` of the model that gets them (on the meta device, say); of tensors under
            several names (tied weights) one name is enough.

    Raises:
        WeightsRefusedError: Naming what is missing, unknown, of another shape, or whole numbers where fractions belong, as
            quantised weights are.
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
                                       ("no fractions:", quantised)) if names]  # fmt: skip
        raise WeightsRefusedError(
            f"Weights refused, nothing was changed: {'; '.join(parts)}. Required: the {len(required)} tensors of the model"
        )


def complete_tied(given: Mapping[str, Tensor], required: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``given`` with tied weights under all their names, of which ``check_manifest`` asks for one only."""
    by_id = {id(required[name]): tensor for name, tensor in given.items()}
    return {name: given.get(name, by_id[id(tensor)]) for name, tensor in required.items()}


def _view(memory: Tensor, entry: TensorEntry) -> Tensor:
    nbytes = math.prod(entry.shape) * entry.dtype.itemsize
    return memory[entry.offset : entry.offset + nbytes].view(entry.dtype).view(entry.shape)
