"""What ``ProcessCollector`` and its workers hold in shared memory: the task with the policy's tensors, and the answers."""

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
"""Bytes; a multiple of them is where each array begins."""


class Place(NamedTuple):
    """The place of a tensor in shared memory.

    ``is_trained``: its ``requires_grad``. No gradients are computed in a worker, but torch chooses kernels by it, and different kernels
    round differently.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    is_trained: bool

    def tensor(self, memory: mmap.mmap) -> Tensor:
        """Return the tensor, which shares the memory."""
        count = math.prod(self.shape)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset)
        return flat.as_strided(self.shape, self.stride)


class SharedTask:
    """A task for other processes, in shared memory, whose model computes there, too.

    The tensors of the model are moved into the memory. What is written into them is seen by all processes at once.

    Args:
        task: Anything that can be pickled and holds ``model``.
        model: On the CPU.

    Attributes:
        memory: Tensors, then the pickled task.
        start, size: Bytes of the pickled task.

    Raises:
        ConfigError: The task cannot be sent to another process: it holds an object that cannot be pickled, or a class of the
            main script, which other processes cannot import. Or memory of the model is that of several tensors, which the
            move would separate. Nothing has been moved.
    """

    def __init__(self, task: Any, model: nn.Module) -> None:
        self.model = model
        tensors = {id(each): each for each in self._tensors().values() if each.numel()}
        _refuse_overlaps(list(tensors.values()), [])
        places, end = {}, 0
        for key, tensor in tensors.items():
            stride = torch.empty_like(tensor, device="meta").stride()  # without gaps
            is_parameter, is_trained = isinstance(tensor, nn.Parameter), tensor.requires_grad
            places[key] = Place(end, tuple(tensor.shape), stride, tensor.dtype, is_parameter, is_trained)
            end += aligned(tensor.numel() * tensor.element_size())
        data = io.BytesIO()
        pickler = _TaskPickler(data, places)
        try:
            pickler.dump(task)
        except Exception as error:  # classes of users raise what they like
            message = f"The policy or the env cannot be sent to another process: {type(error).__name__}: {error}."
            raise ConfigError(message) from error
        _refuse_overlaps(list(tensors.values()), pickler.other_tensors)
        self.start, self.size = end, data.tell()
        self.memory = SharedMemory(end + self.size)
        self.memory.map[end : end + self.size] = data.getvalue()
        for key, tensor in tensors.items():
            shared = places[key].tensor(self.memory.map)
            tensor.data = shared.copy_(tensor.detach())
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._tensors().items()}

    def moved(self) -> list[str]:
        """Return the names of the model's tensors that are not, or no longer, stored in the shared memory."""
        return [name for name, tensor in self._tensors().items() if tensor.data_ptr() != self._addresses.get(name)]

    def _tensors(self) -> dict[str, Tensor]:
        return dict([*self.model.named_parameters(), *self.model.named_buffers()])


def _refuse_overlaps(moved: list[Tensor], others: list[Tensor]) -> None:
    """Raise ConfigError if a tensor that moves shares memory with another one, which would then miss its updates."""
    extents = [(*_extent(tensor), True) for tensor in moved] + [(*_extent(tensor), False) for tensor in others]
    moved_end = end = 0
    for first, last, moves in sorted(extents):
        if first < (end if moves else moved_end):
            raise ConfigError(
                "The policy cannot be moved into shared memory: two of its tensors are views of the same memory; required: "
                "memory of its own for each parameter and buffer."
            )
        end = max(end, last)
        moved_end = max(moved_end, last) if moves else moved_end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a strided tensor's first byte and of the byte behind its last one."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def read_task(memory: mmap.mmap, start: int, size: int) -> Any:
    """Return the task of a ``SharedTask``."""
    return _TaskUnpickler(memory, start, size).load()


class _TaskPickler(pickle.Pickler):
    """Writes the ``Place`` of a shared tensor in its stead, and notes the other tensors on the CPU."""

    def __init__(self, file: io.BytesIO, places: dict[int, Place]) -> None:
        super().__init__(file, protocol=5)
        self.places = places
        self.other_tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Place | None:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in the main script; required: in a module")
        if not isinstance(value, Tensor):
            return None
        place = self.places.get(id(value))
        if place is None and value.device.type == "cpu" and value.layout == torch.strided and value.numel():
            self.other_tensors.append(value)
        return place


class _TaskUnpickler(pickle.Unpickler):
    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        super().__init__(io.BytesIO(memory[start : start + size]))
        self.memory = memory

    def persistent_load(self, place: Place) -> Tensor:
        tensor = place.tensor(self.memory)
        return nn.Parameter(tensor, place.is_trained) if place.is_parameter else tensor


class Answer(NamedTuple):
    """What a worker answers.

    Attributes:
        data: A pickle without its arrays.
        sizes: Bytes of the arrays, which lie one after the other in the memory of the worker's answers.
    """

    data: bytes
    sizes: list[int]


def write_answer(value: Any, file: int) -> Answer:
    """Write the arrays and tensors of ``value`` into the file of a shared memory, which grows if needed."""
    buffers: list[pickle.PickleBuffer] = []
    data = io.BytesIO()
    _AnswerPickler(data, protocol=5, buffer_callback=buffers.append).dump(value)
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
    return Answer(data.getvalue(), [view.nbytes for view in views])


def read_answer(answer: Answer, file: int) -> Any:
    """Return the value, whose arrays are those in the shared memory: copy them before the worker writes the next ones."""
    views, first = [], 0
    if answer.sizes:
        memory = memoryview(mmap.mmap(file, sum(map(aligned, answer.sizes))))
        for size in answer.sizes:
            views.append(memory[first : first + size])
            first += aligned(size)
    return pickle.loads(answer.data, buffers=views)


class _AnswerPickler(pickle.Pickler):
    """Writes tensors as arrays, which a pickle can leave out."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented


def aligned(size: int) -> int:
    """Return the multiple of ``ALIGNMENT`` that is at least ``size``."""
    return -(-size // ALIGNMENT) * ALIGNMENT
