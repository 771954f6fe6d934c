"""Shared memory of ``ProcessCollector`` and its workers: the task with the policy's tensors, and the replies."""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlinf.distributed.child_process import SharedMemory
from rlinf.errors import ConfigError

ALIGNMENT = 64
"""Each array starts at a multiple of this many bytes."""


class TensorForm(NamedTuple):
    """Metadata of a tensor: everything except its numbers.

    ``is_trained`` is its ``requires_grad``. Other processes compute no gradients, but torch chooses kernels by it, and
    different kernels round differently.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    is_trained: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Return the form of ``tensor``, with strides that leave no gaps."""
        stride = torch.empty_like(tensor, device="meta").stride()
        return cls(tuple(tensor.shape), stride, tensor.dtype, isinstance(tensor, nn.Parameter), tensor.requires_grad)

    def typed(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` as a parameter if the original was one."""
        return nn.Parameter(tensor, self.is_trained) if self.is_parameter else tensor


class BufferSlice(NamedTuple):
    """Position of a tensor in shared memory."""

    offset: int
    form: TensorForm

    def tensor(self, memory: mmap.mmap) -> Tensor:
        """Return the tensor as a view of the shared memory."""
        form, count = self.form, math.prod(self.form.shape)
        flat = torch.frombuffer(memory, dtype=form.dtype, count=count, offset=self.offset)
        return flat.as_strided(form.shape, form.stride)


class SharedTask:
    """A task for other processes. Its model's tensors are moved into shared memory, so all processes see every update.

    Raise ConfigError, and move nothing, if the task contains an object that cannot be pickled or a class of the main script,
    or if two tensors of the model share memory, which the move would separate.

    Args:
        task: Contains ``model`` and can be pickled.

    Attributes:
        memory: Tensors, then the pickled task.
        start, size: Bytes of the pickled task.
    """

    def __init__(self, task: Any, model: nn.Module) -> None:
        self.model = model
        tensors = {id(tensor): tensor for tensor in self._tensors().values() if tensor.numel()}
        # Before pickling, to fail early; the tensors elsewhere in the task are only known after it.
        _reject_overlaps(list(tensors.values()), [])
        slices, end = {}, 0
        for key, tensor in tensors.items():
            slices[key] = BufferSlice(end, TensorForm.of(tensor))
            end += aligned(tensor.numel() * tensor.element_size())
        data = io.BytesIO()
        pickler = _TaskPickler(data, slices)
        try:
            pickler.dump(task)
        except Exception as error:  # user classes may raise anything
            message = f"The policy or the env cannot be sent to another process: {type(error).__name__}: {error}."
            raise ConfigError(message) from error
        _reject_overlaps(list(tensors.values()), pickler.other_tensors)
        self.start, self.size = end, data.tell()
        self.memory = SharedMemory(end + self.size)
        self.memory.map[end : end + self.size] = data.getvalue()
        for key, tensor in tensors.items():
            shared = slices[key].tensor(self.memory.map)
            tensor.data = shared.copy_(tensor.detach())
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._tensors().items()}

    def moved(self) -> list[str]:
        """Return the names of the model's tensors outside the shared memory."""
        return [name for name, tensor in self._tensors().items() if tensor.data_ptr() != self._addresses.get(name)]

    def _tensors(self) -> dict[str, Tensor]:
        return dict([*self.model.named_parameters(), *self.model.named_buffers()])


def _reject_overlaps(moved: list[Tensor], fixed: list[Tensor]) -> None:
    """Raise ConfigError if a tensor that moves shares memory with a different one, which would then miss its updates."""
    extents = [(*_extent(tensor), True) for tensor in moved] + [(*_extent(tensor), False) for tensor in fixed]
    moved_end = end = 0
    # Sorted by address, an overlap shows as a start before the end of the tensors so far.
    for first, last, moves in sorted(extents):
        if first < (end if moves else moved_end):
            raise ConfigError(
                "The policy cannot be moved into shared memory: two of its tensors are views of the same memory; required: "
                "separate memory for each parameter and buffer."
            )
        end = max(end, last)
        moved_end = max(moved_end, last) if moves else moved_end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a strided tensor's first byte, and the end of its last one."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def read_task(memory: mmap.mmap, start: int, size: int) -> Any:
    """Return the task of a ``SharedTask``."""
    return _TaskUnpickler(memory, start, size).load()


def reject_main_script(value: Any) -> None:
    """Raise PicklingError for a class or function of the main script, which other processes cannot import."""
    if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
        raise pickle.PicklingError(f"{value.__qualname__} is defined in the main script; required: in a module")


class _TaskPickler(pickle.Pickler):
    """Writes a ``BufferSlice`` in place of each shared tensor, and collects the remaining tensors on the CPU."""

    def __init__(self, file: io.BytesIO, slices: dict[int, BufferSlice]) -> None:
        super().__init__(file, protocol=5)
        self.slices = slices
        self.other_tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> BufferSlice | None:
        reject_main_script(value)
        if not isinstance(value, Tensor):
            return None
        buffer_slice = self.slices.get(id(value))
        if buffer_slice is None and value.device.type == "cpu" and value.layout == torch.strided and value.numel():
            self.other_tensors.append(value)
        return buffer_slice


class _TaskUnpickler(pickle.Unpickler):
    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        super().__init__(io.BytesIO(memory[start : start + size]))
        self.memory = memory

    def persistent_load(self, pid: BufferSlice) -> Tensor:
        return pid.form.typed(pid.tensor(self.memory))


class PackedReply(NamedTuple):
    """A pickle without its arrays, and their sizes in bytes. The arrays follow one another in the worker's reply buffer."""

    data: bytes
    sizes: list[int]


def write_reply(value: Any, file: int) -> PackedReply:
    """Write the arrays and tensors of ``value`` into the file of a shared memory, which grows if needed."""
    buffers: list[pickle.PickleBuffer] = []
    data = io.BytesIO()
    _ReplyPickler(data, protocol=5, buffer_callback=buffers.append).dump(value)
    views = [buffer.raw() for buffer in buffers]
    total = sum(aligned(view.nbytes) for view in views)
    if os.fstat(file).st_size < total:
        os.ftruncate(file, total)
    if views:
        with mmap.mmap(file, total) as memory:
            first = 0
            for view in views:
                memory[first : first + view.nbytes] = view
                first += aligned(view.nbytes)
    return PackedReply(data.getvalue(), [view.nbytes for view in views])


def read_reply(reply: PackedReply, file: int) -> Any:
    """Return the value. Its arrays are views of the shared memory: copy them before the worker writes its next reply."""
    views, first = [], 0
    if reply.sizes:
        memory = memoryview(mmap.mmap(file, sum(map(aligned, reply.sizes))))
        for size in reply.sizes:
            views.append(memory[first : first + size])
            first += aligned(size)
    return pickle.loads(reply.data, buffers=views)


class _ReplyPickler(pickle.Pickler):
    """Writes tensors as arrays, which a pickle can store out of band."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented


def aligned(size: int) -> int:
    """Return the multiple of ``ALIGNMENT`` that is at least ``size``."""
    return -(-size // ALIGNMENT) * ALIGNMENT
