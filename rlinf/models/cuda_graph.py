"""Functions of fixed shapes as CUDA graphs: recorded once, then launched as a whole instead of kernel by kernel."""

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
"""Recordings kept; the one that was used least recently goes first."""
FEWEST_ROWS, MOST_DOUBLED = 8, 64
"""Bounds between which the number of rows of a recording is a power of two; above them it is a multiple of the second one."""


def padded_rows(rows: int) -> int:
    """Return the rows of the recording that serves ``rows`` rows: a rollout that shrinks from 64 rows to 1 has four recordings."""
    if rows > MOST_DOUBLED:
        return -(-rows // MOST_DOUBLED) * MOST_DOUBLED
    return max(FEWEST_ROWS, 1 << (rows - 1).bit_length())


class _Recording(NamedTuple):
    """``launch`` computes ``outputs`` from ``inputs`` with the weights that lie at ``places``."""

    inputs: list[Tensor | None]
    outputs: tuple[Tensor, ...]
    launch: Callable[[], None]
    weights: list[Tensor]
    places: list[int]


class CudaGraphs:
    """The recordings of one function, one for each set of shapes. Threads take turns, and so do their streams.

    The first axis of all tensors is rows, which do not depend on each other. A recording has a padded number of them
    (``padded_rows``), the surplus with rows of an earlier call or its own last one, so that a rollout whose rows end one after the other
    needs few recordings. A copy has no recordings: they belong to the weights that they were made with.
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
        """Return ``function(*tensors, *settings)``, computed by its graph. Raise ConfigError if the weights are not on a GPU.

        Args:
            function: Its kernels depend on the shapes of its tensors only: it reads no value of a tensor in Python, and moves
                none between devices.
            tensors: Inputs ``[B, ...]``, at least one not None, which are copied into the memory that the graph reads.
            *settings: Further arguments.
            weights: Returns the weights that the function reads. The graph reads them in place, so an update in place needs
                no new recording; weights that have moved do.
        """
        rows = next(len(tensor) for tensor in tensors if tensor is not None)
        shapes = tuple(None if t is None else (t.shape[1:], t.dtype) for t in tensors)
        key = (padded_rows(rows), shapes, settings, _autocast_dtype())
        with self._lock:
            if self._wait_for_last is not None:
                self._wait_for_last()  # another thread's stream may still read or write the memory of the graph
            recording = self._recordings.pop(key, None)
            if recording is None or [weight.data_ptr() for weight in recording.weights] != recording.places:
                recording = self._record(function, tensors, settings, list(weights()), padded_rows(rows))
            self._recordings[key] = recording
            if len(self._recordings) > MAX_GRAPHS:
                self._drop_oldest()
            for place, given in zip(recording.inputs, tensors, strict=True):
                if place is not None:
                    place[:rows].copy_(given)
            recording.launch()
            results = tuple(output[:rows].clone() for output in recording.outputs)
            self._wait_for_last = _wait_for_present()
            return results

    def _drop_oldest(self) -> None:
        """Give up the recording that was used least recently; at the first one, say what that costs."""
        if not self._has_dropped:
            rows = sorted({key[0] for key in self._recordings})
            logger.warning(
                "model.cuda_graph=true: policy calls have had %d sets of shapes, with %s rows and so %d or more lengths of prompts; %d "
                "recordings are kept. Each call with a dropped one is recorded again, which takes about as long as three calls without a "
                "graph. Set model.cuda_graph=false, or env.tasks to tasks with fewer lengths of instructions",
                len(self._recordings),
                ", ".join(map(str, rows)),
                -(-len(self._recordings) // len(rows)),
                MAX_GRAPHS,
            )
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
        inputs = [None if given is None else _filled_up(given.to(device), rows) for given in tensors]

        def run() -> tuple[Tensor, ...]:
            # Autocast would cache casts of the present weights, and free them before the next launch.
            dtype = _autocast_dtype()
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
                return function(*inputs, *settings)

        if self._pool is None:
            self._pool = _new_pool(device)
        launch, outputs = _capture(run, self._pool)
        return _Recording(inputs, outputs, launch, weights, [weight.data_ptr() for weight in weights])


def _filled_up(tensor: Tensor, rows: int) -> Tensor:
    """Return a copy with ``rows`` rows: all of ``tensor``, then its last one again."""
    return torch.cat([tensor, tensor[-1:].expand(rows - len(tensor), *tensor.shape[1:])])


def _wait_for_present() -> Callable[[], None]:
    """Return a function that lets the stream of its caller wait for all work that is on the present stream now."""
    event = torch.cuda.Event()
    event.record()
    return lambda: torch.cuda.current_stream().wait_event(event)


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
    # Other threads may continue using the GPU meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = run()
    return graph.replay, outputs
