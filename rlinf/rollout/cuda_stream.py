"""CUDA stream for a rollout's worker thread, which copies all results of a policy call to the CPU in one transfer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlinf.distributed.devices import own_device


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
