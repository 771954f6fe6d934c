"""The shared memory of ``ProcessCollector`` and its workers: the task with the policy's tensors, and the answers."""

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
"""Each array starts at a multiple of so many bytes."""


class TensorForm(NamedTuple):
    """All of a tensor but its numbers.

    ``is_trained`` is its ``requires_grad``: other processes compute no gradients, but torch chooses kernels by it, and
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


class Place(NamedTuple):
    """The place of a tensor in shared memory."""

    offset: int
    form: TensorForm

    def tensor(self, memory: mmap.mmap) -> Tensor:
        """Return the tensor, which shares the memory."""
        form, count = self.form, math.prod(self.form.shape)
        flat = torch.frombuffer(memory, dtype=form.dtype, count=count, offset=self.offset)
        return flat.as_strided(form.shape, form.stride)


class SharedTask:
    """A task for other processes. Its model's tensors are moved into shared memory, so all processes see every update.

    Raise ConfigError, and move nothing, if the task holds an object that cannot be pickled or a class of the main
    script, or if two tensors of the model share memory, which the move would separate.

    Args:
        task: Anything that can be pickled and holds ``model``.
        model: On the CPU.

    Attributes:
        memory: Tensors, then the pickled task.
        start, size: Bytes of the pickled task.
    """

    def __init__(self, task: Any, model: nn.Module) -> None:
        self.model = model
        tensors = {id(each): each for each in self._tensors().values() if each.numel()}
        _reject_overlaps(list(tensors.values()), [])
        places, end = {}, 0
        for key, tensor in tensors.items():
            places[key] = Place(end, TensorForm.of(tensor))
            end += aligned(tensor.numel() * tensor.element_size())
        data = io.BytesIO()
        pickler = _TaskPickler(data, places)
        try:
            pickler.dump(task)
        except Exception as error:  # classes of users raise what they like
            message = f"The policy or the env cannot be sent to another process: {type(error).__name__}: {error}."
            raise ConfigError(message) from error
        _reject_overlaps(list(tensors.values()), pickler.other_tensors)
        self.start, self.size = end, data.tell()
        self.memory = SharedMemory(end + self.size)
        self.memory.map[end : end + self.size] = data.getvalue()
        for key, tensor in tensors.items():
            shared = places[key].tensor(self.memory.map)
            tensor.data = shared.copy_(tensor.detach())
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._tensors().items()}

    def moved(self) -> list[str]:
        """Return the names of the model's tensors outside the shared memory."""
        return [name for name, tensor in self._tensors().items() if tensor.data_ptr() != self._addresses.get(name)]

    def _tensors(self) -> dict[str, Tensor]:
        return dict([*self.model.named_parameters(), *self.model.named_buffers()])


def _reject_overlaps(moved: list[Tensor], others: list[Tensor]) -> None:
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


def reject_main_script(value: Any) -> None:
    """Raise PicklingError for a class or function of the main script, which other processes cannot import."""
    if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
        raise pickle.PicklingError(f"{value.__qualname__} is defined in the main script; required: in a module")


class _TaskPickler(pickle.Pickler):
    """Writes the ``Place`` of a shared tensor in its stead, and notes the other tensors on the CPU."""

    def __init__(self, file: io.BytesIO, places: dict[int, Place]) -> None:
        super().__init__(file, protocol=5)
        self.places = places
        self.other_tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Place | None:
        reject_main_script(value)
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
        return place.form.typed(place.tensor(self.memory))


class StoredAnswer(NamedTuple):
    """A pickle without its arrays, and their sizes in bytes. They lie one after the other in the memory of the worker's answers."""

    data: bytes
    sizes: list[int]


def write_answer(value: Any, file: int) -> StoredAnswer:
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
    return StoredAnswer(data.getvalue(), [view.nbytes for view in views])


def read_answer(answer: StoredAnswer, file: int) -> Any:
    """Return the value. Its arrays lie in the shared memory: copy them before the worker writes its next answer."""
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
