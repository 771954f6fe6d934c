"""Run functions as CUDA graphs: all kernels are recorded once per set of shapes and then launched together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlinf.errors import ConfigError

logger = logging.getLogger("rlinf")
MAX_GRAPHS = 16
"""Maximum number of recordings; the least recently used one is dropped first."""
FEWEST_ROWS, MOST_DOUBLED = 8, 64
"""Recordings use powers of two between these bounds as row counts, and multiples of the upper bound above it."""


def padded_rows(rows: int) -> int:
    """Return the row count to which ``rows`` is padded, so that a shrinking rollout needs only a few recordings."""
    if rows > MOST_DOUBLED:
        return -(-rows // MOST_DOUBLED) * MOST_DOUBLED
    return max(FEWEST_ROWS, 1 << (rows - 1).bit_length())


class _Recording(NamedTuple):
    """A captured graph. ``launch`` computes ``outputs`` from ``inputs`` with the weights stored at the addresses ``places``."""

    inputs: list[Tensor | None]
    outputs: tuple[Tensor, ...]
    launch: Callable[[], None]
    weights: list[Tensor]
    places: list[int]


class CudaGraphs:
    """The recordings of one function, one per set of shapes. Threads, and their streams, run them one at a time.

    The first axis of all tensors indexes independent rows and is padded to ``padded_rows``. Copying the object drops the
    recordings, because they refer to the memory addresses of the original weights.
    """

    def __init__(self) -> None:
        self._recordings: dict[tuple[int, Any, Any, Any], _Recording] = {}
        self._has_dropped = False
        self._lock = threading.Lock()
        self._pool: Any = None
        self._wait_for_last: Callable[[], None] | None = None

    def __reduce__(self) -> tuple[type[CudaGraphs], tuple[()]]:
        return CudaGraphs, ()

    def run(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        tensors: Sequence[Tensor | None],
        *settings: Hashable,
        weights: Callable[[], Iterable[Tensor]],
    ) -> tuple[Tensor, ...]:
        """Return ``function(*tensors, *settings)``, computed with a graph. Raise ConfigError if the weights are not on a GPU.

        Args:
            function: Function whose kernels depend only on tensor shapes; its Python code must not read tensor values.
            tensors: Inputs ``[B, ...]``, at least one not None; they are copied into the graph's input memory.
            weights: Returns the weights that the function reads in place. If they have moved, it is recorded again.
        """
        rows = next(len(tensor) for tensor in tensors if tensor is not None)
        shapes = tuple(None if t is None else (t.shape[1:], t.dtype) for t in tensors)
        key = (padded_rows(rows), shapes, settings, _autocast_dtype())
        with self._lock:
            # A different thread's stream may still be using the graph's memory.
            if self._wait_for_last is not None:
                self._wait_for_last()
            recording = self._recordings.pop(key, None)
            if recording is None or [weight.data_ptr() for weight in recording.weights] != recording.places:
                recording = self._record(function, tensors, settings, list(weights()), padded_rows(rows))
            self._recordings[key] = recording
            if len(self._recordings) > MAX_GRAPHS:
                self._drop_oldest()
            # Surplus rows still contain values from an earlier call; they are dropped from the result.
            for place, given in zip(recording.inputs, tensors, strict=True):
                if place is not None:
                    place[:rows].copy_(given)
            recording.launch()
            results = tuple(output[:rows].clone() for output in recording.outputs)
            self._wait_for_last = _wait_for_present()
            return results

    def _drop_oldest(self) -> None:
        if not self._has_dropped:
            rows = sorted({key[0] for key in self._recordings})
            logger.warning(
                "model.cuda_graph=true: policy calls used %d sets of shapes, with %s rows and thus at least %d prompt lengths, but only "
                "%d recordings are cached. Recording one again takes about as long as three calls without a graph. "
                "Set model.cuda_graph=false, or set env.tasks to tasks with fewer instruction lengths",
                len(self._recordings), ", ".join(map(str, rows)), -(-len(self._recordings) // len(rows)), MAX_GRAPHS,
            )  # fmt: skip
        self._has_dropped = True
        del self._recordings[next(iter(self._recordings))]

    def _record(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        tensors: Sequence[Tensor | None],
        settings: tuple[Hashable, ...],
        weights: list[Tensor],
        rows: int,
    ) -> _Recording:
        device = weights[0].device
        inputs = [None if given is None else _padded(given.to(device), rows) for given in tensors]

        def run() -> tuple[Tensor, ...]:
            # Autocast would cache 16-bit copies of the current weights and free them before the next launch.
            dtype = _autocast_dtype()
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
                return function(*inputs, *settings)

        if self._pool is None:
            self._pool = _new_pool(device)
        launch, outputs = _capture(run, self._pool)
        return _Recording(inputs, outputs, launch, weights, [weight.data_ptr() for weight in weights])


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """Return a copy padded to ``rows`` rows by repeating the last row."""
    return torch.cat([tensor, tensor[-1:].expand(rows - len(tensor), *tensor.shape[1:])])


def _wait_for_present() -> Callable[[], None]:
    """Return a function that makes its caller's stream wait for all work queued so far on the current stream."""
    event = torch.cuda.Event()
    event.record()
    return lambda: torch.cuda.current_stream().wait_event(event)


def _autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _new_pool(device: torch.device) -> Any:
    """Return a memory pool for all recordings of a function; one suffices because they run one at a time and outputs are copied."""
    if device.type != "cuda":
        raise ConfigError(f"CUDA graphs need an NVIDIA GPU, but the weights are on '{device}'.", cuda_graph=False)
    return torch.cuda.graph_pool_handle()


def _capture(run: Callable[[], tuple[Tensor, ...]], pool: Any) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Capture the kernels of ``run``; return the replay function and the output tensors that it fills."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    # The warm-up lets libraries allocate their workspaces outside the graph's memory.
    with torch.cuda.stream(warm_up):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU during the capture, so only this thread's calls are checked.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = run()
    return graph.replay, outputs
