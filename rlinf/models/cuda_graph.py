"""Functions of fixed shapes as CUDA graphs: recorded once, then launched as a whole instead of kernel by kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlinf.errors import ConfigError

MAX_GRAPHS = 16
"""Recordings kept; the one that was used least recently goes first."""


class _Recording(NamedTuple):
    """``launch`` computes ``outputs`` from ``inputs`` with the weights that lie at ``places``."""

    inputs: list[Tensor | None]
    outputs: tuple[Tensor, ...]
    launch: Callable[[], None]
    weights: list[Tensor]
    places: list[int]


class CudaGraphs:
    """The recordings of one function, one for each set of shapes. Threads take turns.

    A copy has no recordings: they belong to the weights that they were made with.
    """

    def __init__(self) -> None:
        self._recordings: dict[Hashable, _Recording] = {}
        self._lock = threading.Lock()
        self._pool: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaGraphs:
        return CudaGraphs()

    def run(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        tensors: Sequence[Tensor | None],
        *settings: Hashable,
        weights: Callable[[], Iterable[Tensor]],
    ) -> tuple[Tensor, ...]:
        """Return ``function(*tensors, *settings)``, computed by its graph. Raise ConfigError if the weights are not on a GPU.

        Args:
            function: Its kernels depend on the shapes of its tensors only: it reads no value of a tensor in Python, and moves
                none between devices.
            tensors: Inputs, which are copied into the memory that the graph reads.
            *settings: Further arguments.
            weights: Returns the weights that the function reads. The graph reads them in place, so an update in place needs
                no new recording; weights that have moved do.
        """
        key = (tuple(None if t is None else (t.shape, t.dtype) for t in tensors), settings, _autocast_dtype())
        with self._lock:
            recording = self._recordings.pop(key, None)
            if recording is None or [weight.data_ptr() for weight in recording.weights] != recording.places:
                recording = self._record(function, tensors, settings, list(weights()))
            self._recordings[key] = recording
            if len(self._recordings) > MAX_GRAPHS:
                del self._recordings[next(iter(self._recordings))]
            for place, given in zip(recording.inputs, tensors, strict=True):
                if place is not None:
                    place.copy_(given)
            recording.launch()
            return tuple(output.clone() for output in recording.outputs)

    def _record(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        tensors: Sequence[Tensor | None],
        settings: tuple[Hashable, ...],
        weights: list[Tensor],
    ) -> _Recording:
        device = weights[0].device
        inputs = [None if given is None else torch.empty_like(given, device=device).copy_(given) for given in tensors]

        def run() -> tuple[Tensor, ...]:
            # Autocast would cache casts of the present weights, and free them before the next launch.
            dtype = _autocast_dtype()
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
                return function(*inputs, *settings)

        if self._pool is None:
            self._pool = _new_pool(device)
        launch, outputs = _capture(run, self._pool)
        return _Recording(inputs, outputs, launch, weights, [weight.data_ptr() for weight in weights])


def _autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _new_pool(device: torch.device) -> Any:
    """Return the memory that all recordings of a function share: only one runs at a time, and its outputs are copied."""
    if device.type != "cuda":
        raise ConfigError(f"CUDA graphs need an NVIDIA GPU, and the weights are on '{device}'.", cuda_graph=False)
    return torch.cuda.graph_pool_handle()


def _capture(run: Callable[[], tuple[Tensor, ...]], pool: Any) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Record the kernels of ``run``. Return a function that launches them again, and the tensors that it fills."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):  # libraries allocate their workspaces here, outside the graph's memory
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on using the GPU meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = run()
    return graph.replay, outputs
