"""The GPU as a worker thread of a rollout sees it: a stream of its own, and one copy of all results of a policy call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlinf.distributed.devices import own_device


class CudaStream:
    """Runs the policy calls of one worker thread, and brings their results to the CPU. On a CPU it does nothing.

    Kernels of a stream run in their order, and a thread that waits for its results waits for all kernels before them. Two
    threads on one stream would wait for each other's calls, so each stream has a stream, and waits once in a call.

    ``own_stream``: False for an only stream, which has nobody to wait for, and whose cached memory serves updates too then; and for
    a simulation on the GPU, which works on the default stream.
    """

    def __init__(self, device: str, own_stream: bool = True) -> None:
        self._on_gpu, self._own_stream = device == "cuda", own_stream
        self._stream: torch.cuda.Stream | None = None
        self._buffer: Tensor | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a block on the stream of this stream.

        Trained weights are pushed and updated on the default stream. The stream waits for its work when the block starts, and
        the default stream waits for the stream when the block ends, so neither sees weights that the other still uses.
        """
        # Autocast keeps casts of weights, made on the stream of the first thread, for all threads: these must share a stream.
        if not (self._on_gpu and self._own_stream) or torch.is_autocast_enabled("cuda"):
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        default = torch.cuda.default_stream()
        self._stream.wait_stream(default)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            default.wait_stream(self._stream)

    def send(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the device of the policy, without waiting for it."""
        return tensor.pin_memory().to(own_device(), non_blocking=True) if self._on_gpu else tensor

    def fetch(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return the results of a policy call on the CPU: by one copy, and one event that is waited for."""
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
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)  # other memory makes the copy wait
        self._buffer[:size].copy_(numbers, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # a thread that waits leaves its core to the simulators
        copied.record()
        copied.synchronize()
        return self._buffer[:size].clone()  # the next call overwrites the buffer


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of ``tensors`` one after the other, uint8."""
    return torch.cat([tensors[k].contiguous().flatten().view(torch.uint8) for k in _by_width(tensors)])


def unpacked(numbers: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the bytes of ``packed(tensors)``, with the types and shapes of ``tensors``."""
    order, views = _by_width(tensors), list(tensors)
    sizes = [tensors[k].numel() * tensors[k].element_size() for k in order]
    for k, part in zip(order, numbers.split(sizes), strict=True):
        views[k] = part.view(tensors[k].dtype).view(tensors[k].shape)
    return views


def _by_width(tensors: Sequence[Tensor]) -> list[int]:
    """Order ``tensors`` by the bytes of a number: numbers in memory must start at a multiple of their size."""
    return sorted(range(len(tensors)), key=lambda k: -tensors[k].element_size())
