"""Shared memory of ``ProcessCollector`` and its workers, for the task with the policy's tensors and for replies."""

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
    """A tensor's metadata: everything except its values. ``is_trained`` is its ``requires_grad``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    # Needed even without gradients, because torch's choice of kernels, and thus rounding, depends on it.
    is_trained: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Return the form of ``tensor``, with strides for contiguous storage."""
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
    """A task for other processes. Its model's tensors are moved into shared memory, so that all processes see every update.

    Raises ConfigError, without moving anything, if the task contains an object that cannot be pickled or a class of the main
    script, or if two of the model's tensors overlap in memory, because the move would separate them.

    Args:
        task: A picklable object that contains ``model``.

    Attributes:
        memory: Shared memory containing the tensors, then the pickled task.
        start, size: Offset and length of the pickled task, in bytes.
    """

    def __init__(self, task: Any, model: nn.Module) -> None:
        self.model = model
        tensors = {id(tensor): tensor for tensor in self._tensors().values() if tensor.numel()}
        # Check before pickling, to fail early; the task's remaining tensors are known only afterwards.
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
            message = f"The policy or the env cannot be sent to a different process: {type(error).__name__}: {error}."
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
    """Raise ConfigError if a tensor to be moved overlaps a different one, which would then miss its updates."""
    extents = [(*_extent(tensor), True) for tensor in moved] + [(*_extent(tensor), False) for tensor in fixed]
    moved_end = end = 0
    # In address order, tensors overlap if one starts before the end of the previous ones.
    for first, last, moves in sorted(extents):
        if first < (end if moves else moved_end):
            raise ConfigError(
                "The policy cannot be moved into shared memory: two of its tensors are views of the same memory; expected "
                "separate memory for each parameter and buffer."
            )
        end = max(end, last)
        moved_end = max(moved_end, last) if moves else moved_end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a strided tensor's first byte and of the end of its last byte."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def read_task(memory: mmap.mmap, start: int, size: int) -> Any:
    """Return the task of a ``SharedTask``."""
    return _TaskUnpickler(memory, start, size).load()


def reject_main_script(value: Any) -> None:
    """Raise PicklingError for a class or function of the main script, which other processes cannot import."""
    if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
        raise pickle.PicklingError(f"{value.__qualname__} is defined in the main script; expected a module")


class _TaskPickler(pickle.Pickler):
    """Writes a ``BufferSlice`` in place of each shared tensor, and collects the remaining CPU tensors."""

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
    """A pickle without its arrays, and the arrays' sizes in bytes. They are stored consecutively in the worker's reply buffer."""

    data: bytes
    sizes: list[int]


def write_reply(value: Any, file: int) -> PackedReply:
    """Write the arrays and tensors of ``value`` into a shared memory's file, which grows if needed."""
    buffers: list[pickle.PickleBuffer] = []
    data = io.BytesIO()
    _ReplyPickler(data, protocol=5, buffer_callback=buffers.append).dump(value)
    views = [buffer.raw() for buffer in buffers]
    total = sum(aligned(view.nbytes) for view in views)
    # The reader truncates the file after each reply, which frees the memory in the meantime.
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
    """Return the value. Its arrays are views of the shared memory, so copy them before the worker writes its next reply."""
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
    """Round ``size`` up to a multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT
