"""A GPU that is not there: training code runs on ``cuda`` with the CPU build of torch, and its work is counted.

Tensors on the GPU are fake (``FakeTensorMode``): they have shapes, number formats and a device, but no numbers. Tensors
on the CPU are real. A number that is read or copied from the GPU is 1 or true. So launches, copies, waits and bytes are
real; results and times are not.

torch must meet the stand-in for CUDA (``guard.cpp``) when its own libraries are loaded, so a run needs an interpreter
of its own, started with ``environment()``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

SOURCE = Path(__file__).with_name("guard.cpp")
ROOT = Path(__file__).parents[2]
PACKAGE = f"{ROOT / 'rlinf'}{os.sep}"
ROUNDING = 512
"""Bytes that torch's allocator rounds to."""
PADDED = 8
"""Numbers to which the memory-efficient kernel has masks padded."""

BOOKKEEPING, BACKWARD = ("optim/", "distributed/parallel.py", "distributed/transfers.py"), " accumulate"
"""Where gradients are gathered, clipped and stepped; ``accumulate`` calls the backward pass."""

aten, DEVICE = torch.ops.aten, torch.ops.prim.device.default
Model = TypeVar("Model", bound=nn.Module)

VIEWS = {"_unsafe_view", "_reshape_alias", "detach", "alias", "lift_fresh"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}


# -- the library -------------------------------------------------------------------------------------------------------


def library() -> Path:
    """Return the stand-in for CUDA, compiled for this torch. The first call takes about ten seconds."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlinf"
    found = cache / f"fake_gpu-{torch.__version__}-{key}.so"
    if found.exists():
        return found
    folder = Path(torch.__file__).parent
    headers = [f"-I{folder / 'include' / inner}" for inner in ("", "torch/csrc/api/include")]
    linked = [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder / 'lib'}"]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as place:
        built = Path(place) / found.name
        command = [
            _compiler(),
            "-O1",
            "-shared",
            "-fPIC",
            "-std=c++20",
            *headers,
            str(SOURCE),
            "-o",
            str(built),
            *linked,
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)
        built.replace(found)  # another process may have been quicker
    return found


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def why_not() -> str | None:
    """Return why a run without a GPU is impossible here; None: it is possible."""
    if sys.platform != "linux":
        return f"this is {sys.platform}; expected Linux"
    if torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is a build for GPUs; expected the CPU build"
    if _compiler() is None:
        return "no C++ compiler; expected g++ (apt install g++)"
    try:
        library()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"the stand-in for CUDA does not compile: {getattr(error, 'stderr', None) or error}"
    return None


def environment() -> dict[str, str]:
    """Return the environment of a new interpreter that can enter ``FakeGpu``."""
    return {**os.environ, "LD_PRELOAD": str(library())}


def run_script(main: Callable[[list[str]], None]) -> None:
    """Run a script's ``main`` with its arguments in an interpreter that can enter ``FakeGpu``, which replaces this one."""
    if os.environ.get("LD_PRELOAD"):
        main(sys.argv[1:])
    elif (reason := why_not()) is not None:
        sys.exit(reason)
    else:
        os.execve(sys.executable, sys.orig_argv, environment())


if not torch.backends.cuda.is_built():
    KERNELS = torch.library.Library("aten", "IMPL", "CUDA")
    for name in ("silu_backward", "_fused_rms_norm"):
        KERNELS.impl(name, lambda *_: NotImplemented)  # never reached: tensors are fake
    """Operations with a kernel of their own on a GPU, which a CPU build takes apart into smaller ones."""


# -- the counts --------------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """The work of one phase, by the place in the package that caused it.

    Attributes:
        syncs: Waits for numbers of the GPU (``.item()``, ``bool``, ``nonzero``), and for a copy to it without ``non_blocking``.
        d2h, h2d: Copies from the GPU to the CPU, and back.
        waits: Waits for an event, a stream or the device.
        launches: Kernels, without views and allocations.
        ops: The same by name of the operation.
        captures: CUDA graphs that were recorded. Each launch of one counts as one launch.
        peak_bytes: Most bytes that tensors had, those from before included.
        peak_at: The place that allocated the last of them.
    """

    syncs: Counter[str] = field(default_factory=Counter)
    d2h: Counter[str] = field(default_factory=Counter)
    h2d: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    captures: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    peak_at: str = ""

    def totals(self) -> dict[str, int]:
        """Return each column's sum; ``bookkeeping`` are the launches of optimiser, clipping and gathering of gradients."""
        columns = ("syncs", "d2h", "h2d", "waits", "launches", "captures")
        totals = {name: getattr(self, name).total() for name in columns}
        kept = [
            n for place, n in self.launches.items() if place.startswith(BOOKKEEPING) and not place.endswith(BACKWARD)
        ]
        return totals | {"bookkeeping": sum(kept), "peak_bytes": self.peak_bytes}


def _place(with_library: bool = False) -> str:
    """Return file, line and function of the innermost frame inside the package, and of a library that it has called."""
    frame, library = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{name.removeprefix(PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}{library}"
        if with_library and not library and "/site-packages/" in name and "/torch/" not in name:
            library = f" ({name.partition('/site-packages/')[2]}:{frame.f_lineno})"
        frame = frame.f_back
    return f"elsewhere{library}"


# -- the GPU -----------------------------------------------------------------------------------------------------------


class FakeGpu(TorchDispatchMode):
    """The context in which this thread has a GPU.

    Args:
        memory: Bytes that it says it has.

    Attributes:
        counts: Of the present phase.
        live_bytes: Of all tensors on it.
    """

    def __init__(self, memory: int = 80 * 10**9) -> None:
        super().__init__()
        if torch.accelerator.current_accelerator() is None:
            raise RuntimeError(
                "This interpreter has no stand-in for CUDA. Start it with the variables of environment()"
            )
        self.memory = memory
        self.fake = FakeTensorMode()
        self.counts, self.live_bytes = Counts(), 0
        self._sizes: dict[int, int] = {}
        self._is_capturing = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FakeGpu:
        for owner, name, value in stand_ins(self):
            self._stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        # So `torch.tensor(..., device="cuda")` is a tensor on the CPU and a copy of it.
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        # Otherwise autograd starts a thread for each device, which knows nothing of this mode.
        self._stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    @contextlib.contextmanager
    def count(self) -> Iterator[Counts]:
        """Count the work inside from 0; the peak starts at the bytes that are there."""
        before, self.counts = self.counts, Counts(peak_bytes=self.live_bytes)
        try:
            yield self.counts
        finally:
            self.counts = before

    def place(self, model: Model) -> Model:
        """Put a model, such as one on the meta device, onto the GPU, in place; tied parameters stay tied.

        Tensors that are neither parameters nor buffers stay on the CPU, filled with zeros where they were on the meta device.
        """
        memo: dict[Tensor, Tensor] = {}

        def there(tensor: Tensor) -> Tensor:
            if tensor not in memo:
                moved: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
                if isinstance(tensor, nn.Parameter):
                    moved = nn.Parameter(moved, tensor.requires_grad)
                memo[tensor] = tensor if isinstance(tensor, FakeTensor) else moved
            return memo[tensor]

        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: there(tensor) for name, tensor in tensors.items() if tensor is not None})
            for part in (module, *vars(module).values()):
                if type(part).__module__.startswith("rlinf."):
                    tensors = {
                        name: each for name, each in vars(part).items() if isinstance(each, Tensor) and each.is_meta
                    }
                    vars(part).update(
                        {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in tensors.items()}
                    )
        return model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:  # as many questions as there are operations
            return args[0].fake_device
        kwargs = kwargs or {}
        leaves = list(_flat((*args, *kwargs.values())))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        named = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if not named and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name in _ANSWERS:
            return _ANSWERS[name](self, func, *args, **kwargs)
        if name == "copy_":
            return self._copy(func, *args, **kwargs)
        if func.namespace == "c10d":  # a collective call of a fake process group
            self.launch(name)
            return args[0], FakeWork().boxed()
        if name == "_to_copy" and isinstance(args[0], FakeTensor) and not named and _is_cpu(kwargs.get("device")):
            return self._to_cpu(args[0], kwargs.get("dtype"))
        if name in ("index", "index_put_") and any(_is_mask(each) for each in args[1]):
            args = (args[0], self._as_indices(args[1]), *args[2:])
        out = self._run(func, *args, **kwargs)
        self._record(func, name, tensors, out)
        if (
            name == "_to_copy"
            and not isinstance(tensors[0], FakeTensor)
            and tensors[0].numel()
            and not kwargs.get("non_blocking")
        ):
            self.wait(self.counts.syncs)
        if all(isinstance(leaf, FakeTensor) and leaf.is_cpu for leaf in _flat((out,))):
            return tree_map_only(FakeTensor, lambda tensor: _answer(tensor.shape, tensor.dtype), out)
        return out

    def _run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if any(
            isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) for leaf in _flat((*args, *kwargs.values()))
        ):
            args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        return self.fake.dispatch(func, (), args, kwargs)  # as ``with self.fake``, without its way through torch

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)

    def _record(self, func: Any, name: str, tensors: list[Tensor], out: Any) -> None:
        if name == "_to_copy" and not isinstance(tensors[0], FakeTensor):
            self.counts.h2d[_place()] += 1
        elif not (func.is_view or func.namespace == "prim" or name in VIEWS or name in ALLOCATIONS):
            self.launch(name)
        for tensor in _flat((out,)):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                self._allocate(tensor)

    def launch(self, name: str) -> None:
        """Count a kernel, unless a CUDA graph is being recorded, which is counted when it is launched."""
        if not self._is_capturing:
            self.counts.launches[_place()] += 1
            self.counts.ops[name] += 1

    def wait(self, kind: Counter[str]) -> None:
        """Count something that the CPU waits for; reject it while a CUDA graph is being recorded, as CUDA does."""
        if self._is_capturing:
            raise RuntimeError(f"{_place()} waits for the GPU while a CUDA graph is being recorded")
        kind[_place(with_library=True)] += 1

    def _allocate(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes:
            return
        size = -(-storage.nbytes() // ROUNDING) * ROUNDING
        self._sizes[storage._cdata] = size
        self.live_bytes += size
        if self.live_bytes > self.counts.peak_bytes:
            self.counts.peak_bytes, self.counts.peak_at = self.live_bytes, _place()
        weakref.finalize(storage, self._free, storage._cdata).atexit = False

    def _free(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)

    def _to_cpu(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        self.wait(self.counts.d2h)
        return _answer(tensor.shape, dtype or tensor.dtype)

    def _copy(self, func: Any, into: Tensor, source: Tensor, *rest: Any, **options: Any) -> Tensor:
        if not isinstance(into, FakeTensor):
            self.counts.d2h[_place()] += 1  # may be asynchronous, into pinned memory
            return into.fill_(_answer((), into.dtype))
        self._run(func, into, source, *rest, **options)
        if source.is_cpu and not isinstance(source, FakeTensor):
            self.counts.h2d[_place()] += 1
            if not options.get("non_blocking") and not any(rest):
                self.wait(self.counts.syncs)
        else:
            self.launch("copy_")
        return into

    def _item(self, func: Any, tensor: Tensor) -> bool | int | float:
        self.wait(self.counts.syncs)
        return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1

    def _equal(self, func: Any, *args: Any, **options: Any) -> bool:
        self.launch("equal")
        self.wait(self.counts.syncs)
        return True

    def _nonzero(self, func: Any, tensor: Tensor) -> Tensor:
        """As if nothing were zero."""
        return self._chosen((tensor.numel(), tensor.ndim), torch.int64)

    def _masked_select(self, func: Any, tensor: Tensor, mask: Tensor) -> Tensor:
        """As if the mask were true."""
        return self._chosen((torch.broadcast_shapes(tensor.shape, mask.shape).numel(),), tensor.dtype)

    def _as_indices(self, indices: Any) -> list[Tensor | None]:
        """Replace each mask among indices by numbers, as the GPU does."""
        found: list[Tensor | None] = []
        for index in indices:
            masked = [self._chosen((index.numel(),), torch.int64)] * index.ndim if _is_mask(index) else [index]
            found += masked
        return found

    def _chosen(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose size only the GPU knows: the CPU waits for it."""
        self.launch("nonzero")
        self.wait(self.counts.syncs)
        with self.fake:
            tensor = torch.empty(shape, dtype=dtype, device="cuda")
        self._allocate(tensor)
        return tensor


_ANSWERS: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": FakeGpu._item,
    "allclose": FakeGpu._equal,
    "equal": FakeGpu._equal,
    "nonzero": FakeGpu._nonzero,
    "masked_select": FakeGpu._masked_select,
}
"""Operations whose result depends on numbers."""


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield arguments or results of an operation; the elements of a list in its place."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _is_cpu(device: torch.device | str | None) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _answer(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype)


# -- torch's interface to CUDA -----------------------------------------------------------------------------------------


def stand_ins(gpu: FakeGpu) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and replacement of each function that would ask a driver, or choose a kernel of the CPU."""
    attend, tolist, move = F.scaled_dot_product_attention, FakeTensor.tolist, nn.Module.to

    def to(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **options)
        if device is None or device.type != "cuda":
            return move(module, *args, **options)
        return gpu.place(module if dtype is None else move(module, dtype))

    def scaled_dot_product_attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
        return (_attend if isinstance(query, FakeTensor) else attend)(query, *args, **options)

    yield F, "scaled_dot_product_attention", scaled_dot_product_attention
    yield nn.Module, "to", to
    yield FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist() if tensor.is_cuda else tolist(tensor)
    yield FakeTensor, "__deepcopy__", _deepcopy
    yield FakeTensor, "data_ptr", lambda each: each.untyped_storage()._cdata + each.storage_offset() * each.itemsize
    yield fake_tensor, "init_gpu_context", lambda device: None
    yield torch.cuda.amp.common, "amp_definitely_not_available", lambda: False

    class Stream:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.cuda_stream = 0

        def wait_stream(self, other: Any) -> None: ...

        def wait_event(self, event: Any) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def synchronize(self) -> None:
            gpu.wait(gpu.counts.waits)

        def query(self) -> bool:
            return True

    class Event(Stream):
        def record(self, stream: Any = None) -> None: ...

        def wait(self, stream: Any = None) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return 0.0

    class CUDAGraph:
        def replay(self) -> None:
            gpu.launch("graph")

    @contextlib.contextmanager
    def graph(cuda_graph: Any, *args: Any, **options: Any) -> Iterator[None]:
        gpu.counts.captures[_place()] += 1
        gpu._is_capturing = True
        try:
            yield
        finally:
            gpu._is_capturing = False

    present = Stream()
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_lazy_init": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "a GPU that is not there",
        "get_device_properties": lambda device=None: SimpleNamespace(
            total_memory=gpu.memory, major=9, minor=0, uuid="fake"
        ),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "mem_get_info": lambda device=None: (gpu.memory - gpu.live_bytes, gpu.memory),
        "memory_allocated": lambda device=None: gpu.live_bytes,
        "max_memory_allocated": lambda device=None: gpu.counts.peak_bytes,
        "synchronize": lambda device=None: gpu.wait(gpu.counts.waits),
        "empty_cache": lambda: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: present,
        "default_stream": lambda device=None: present,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 0),
    }
    for name, value in replaced.items():
        yield torch.cuda, name, value
    yield torch.accelerator, "empty_cache", lambda: None


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    return memo[id(tensor)]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend by the kernel that a GPU would take: flash in 16 bits without a mask, else the memory-efficient one."""
    if enable_gqa and key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attn_mask is None and query.shape[-1] <= 256 and query.element_size() == 2:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = F.pad(attn_mask.to(query.dtype), (0, -key.shape[2] % PADDED))[..., : key.shape[2]]
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    needs_sums = torch.is_grad_enabled() and query.requires_grad
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, needs_sums, dropout_p, is_causal, scale=scale)[0]
