"""Tensor copies to and from a GPU, and checks of tensors there, that wait for the GPU as rarely as possible."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlinf.distributed.devices import own_device
from rlinf.errors import CheckpointError, NonFiniteError


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device. The host waits only when copying from a GPU."""
    # A copy from a GPU must block; otherwise, the host could read memory before it is written.
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def fetch(numbers: Sequence[Tensor | float]) -> list[float]:
    """Convert scalar tensors to floats with a single copy from each device."""
    floats = [0.0] * len(numbers)
    indices_of_device: dict[torch.device, list[int]] = {}
    tensors: dict[int, Tensor] = {}
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor):
            number = number.detach().reshape(())
            tensors[index] = number if number.is_floating_point() else number.double()
            indices_of_device.setdefault(number.device, []).append(index)
        else:
            floats[index] = float(number)
    for indices in indices_of_device.values():
        values = torch.stack([tensors[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            floats[index] = value
    return floats


def not_finite(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return one NaN or infinite element per bad tensor, by tensor name.

    Reads each tensor once, without a copy, and waits for the GPU only once if all elements are finite.
    """
    checked = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel() and tensor.element_size() > 1
    }
    bad = {}
    for name, suspect in zip(checked, fetch(_suspects(list(checked.values()))), strict=True):
        if not math.isfinite(suspect):
            # aminmax returns NaN twice if any element is NaN, so check both values. They are finite if only the sum overflowed.
            extremes = [float(value) for value in torch.aminmax(checked[name]) if not value.isfinite()]
            if extremes:
                bad[name] = extremes[0]
    return bad


def _suspects(tensors: list[Tensor]) -> list[Tensor]:
    """Return one scalar per tensor that is finite only if every element is finite."""
    # On a GPU, one kernel computes the maximum magnitude of many tensors. On a CPU, the sum is much faster, but like a 2-norm it can
    # overflow even for finite elements, so the caller checks again.
    on_gpu = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    largest = iter(torch._foreach_norm(on_gpu, ord=math.inf) if on_gpu else ())
    return [next(largest) if tensor.device.type == "cuda" else tensor.sum() for tensor in tensors]


def different(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> list[str]:
    """Return the names of tensor pairs that differ in an element or contain NaN. Waits for the GPU once for all pairs."""
    differences: dict[str, Tensor | bool] = {}
    for name, first, second in pairs:
        if first.device.type == "cuda" and first.shape == second.shape:
            differences[name] = (first != second).any()
        else:
            # A CPU needs no synchronisation, and torch.equal avoids allocating an array of bools.
            differences[name] = not torch.equal(first, second)
    return [name for name, differs in zip(differences, fetch(list(differences.values())), strict=True) if differs]


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise NonFiniteError, naming the tensor, if a running policy's weights are NaN or infinite."""
    if bad := not_finite(tensors):
        name, value = next(iter(bad.items()))
        raise NonFiniteError(
            f"The weight '{name}' contains {value} ({len(bad)} of {len(tensors)} tensors are not finite); nothing was sent to the "
            "rollout. An earlier update failed: resume from the last checkpoint with a lower trainer.learning_rate"
        )


def check_loaded(tensors: Mapping[str, Tensor], source: object) -> None:
    """Raise CheckpointError, naming the tensor, if weights from ``source`` are NaN or infinite."""
    if bad := not_finite(tensors):
        name, value = next(iter(bad.items()))
        raise CheckpointError(
            f"'{source}' contains weights that are not finite: '{name}' has {value} ({len(bad)} of {len(tensors)} tensors). "
            "Use a different checkpoint"
        )


class CudaStream:
    """Runs one worker thread's policy calls and copies their results to the CPU. Has no effect on a CPU.

    Kernels in a stream run in order, so threads with a common stream would wait for each other's calls. Therefore each thread
    has its own stream and synchronises once per call. With ``own_stream=False``, the default stream is used: for a single
    thread, so that updates can reuse its cached memory, and for a simulation on the GPU, which uses the default stream.
    """

    def __init__(self, device: str, own_stream: bool = True) -> None:
        self._on_gpu, self._own_stream = device == "cuda", own_stream
        self._stream: torch.cuda.Stream | None = None
        self._buffer: Tensor | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a block on this thread's stream."""
        # Autocast caches weight casts from the first thread's stream for all threads, which must therefore use a common stream.
        if not (self._on_gpu and self._own_stream) or torch.is_autocast_enabled("cuda"):
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        # Weights are pushed and updated on the default stream, so the streams wait for each other at the block's start and end.
        default = torch.cuda.default_stream()
        self._stream.wait_stream(default)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            default.wait_stream(self._stream)

    def send(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the policy's device, without waiting for the copy."""
        return tensor.pin_memory().to(own_device(), non_blocking=True) if self._on_gpu else tensor

    def fetch(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return a policy call's results on the CPU, with one copy and one synchronisation."""
        elsewhere = [result for result in results if result.device.type != "cpu"]
        if not elsewhere:
            return list(results)
        received = iter(unpacked(self._received(packed(elsewhere)), elsewhere))
        return [result if result.device.type == "cpu" else next(received) for result in results]

    def _received(self, numbers: Tensor) -> Tensor:
        if not self._on_gpu:
            return numbers.cpu()
        size = len(numbers)
        if self._buffer is None or len(self._buffer) < size:
            # Use pinned memory, because a copy to pageable memory would block the thread.
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._buffer[:size].copy_(numbers, non_blocking=True)
        # A blocking event sleeps instead of spinning, which frees the core for the simulators.
        copied = torch.cuda.Event(blocking=True)
        copied.record()
        copied.synchronize()
        return self._buffer[:size].clone()  # the next call overwrites the buffer


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of ``tensors`` as uint8."""
    return torch.cat([tensors[k].contiguous().flatten().view(torch.uint8) for k in _by_width(tensors)])


def unpacked(numbers: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the result of ``packed(tensors)`` with the types and shapes of ``tensors``."""
    order, views = _by_width(tensors), list(tensors)
    sizes = [tensors[k].numel() * tensors[k].element_size() for k in order]
    for k, part in zip(order, numbers.split(sizes), strict=True):
        views[k] = part.view(tensors[k].dtype).view(tensors[k].shape)
    return views


def _by_width(tensors: Sequence[Tensor]) -> list[int]:
    """Return the indices of ``tensors`` by decreasing element size, so that each is aligned to its element size."""
    return sorted(range(len(tensors)), key=lambda k: -tensors[k].element_size())
