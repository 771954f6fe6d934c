"""Data parallelism for a trained model, with replicas (``Replicated``) or shards (``Sharded``, FSDP2)."""

from __future__ import annotations

import copy
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlinf.distributed.deferred import FileTensor, Weight, deferred_parameters
from rlinf.distributed.devices import own_device
from rlinf.distributed.process_group import gather_objects, new_mesh, world_size
from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.memory import main_memory_bytes
from rlinf.number_formats import GIB, format_bytes

ENTRY_POINTS = ("predict_action_batch", "evaluate_actions", "sft_loss")

SMALL_STATE = GIB
"""Maximum bytes of weights, gradients and optimiser state per rank for which sharding is not worth its overhead."""
FITS = 0.6
"""Maximum fraction of a rank's memory for its replica; activations and rollouts need the remaining memory."""
BYTES_OF_STEPS = 16
"""Bytes per trained parameter in each replica: float32 master weight, gradient and AdamW's two moments."""
STEPS_FIT = 0.25
"""Maximum fraction of a rank's memory for this state; above it, the memory saved by sharding is worth the overhead."""
LOCAL_SUMS = GIB // 2
"""Maximum bytes of full float32 gradients for which a rank accumulates micro-batches before the sum over ranks."""


class Parallel(ABC):
    """A model trained on all ranks. This rank's optimiser updates the parameters of ``model``."""

    model: nn.Module

    @abstractmethod
    def gathered(self) -> Any:
        """Return a context in which this rank has all weights, so that forward passes need no collective calls.

        Entering the context is a collective call. Inside it, do not change weights or run backward passes.
        """

    @abstractmethod
    def start_backward(self, is_last: bool) -> None:
        """Prepare for a micro-batch's backward pass. ``is_last`` marks the last micro-batch before an optimiser step."""

    @abstractmethod
    def sum_gradients(self, stepped: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of the ``stepped`` parameters over all ranks, once per optimiser step (a collective call)."""


class Replicated(Parallel):
    """Every rank has the full model, which is also used for rollouts without pushing or copying weights.

    All ranks start with equal weights (``take_weights_of_rank_0``) and apply equal updates, so the weights remain bitwise identical.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """See ``Parallel.gathered``."""
        yield

    def start_backward(self, is_last: bool) -> None:
        """See ``Parallel.start_backward``."""

    @torch.no_grad()
    def sum_gradients(self, stepped: Sequence[nn.Parameter]) -> None:
        """Sum in one all-reduce. If no rank has a gradient for a tensor, it remains None, so the tensor is not updated."""
        if world_size() == 1 or not stepped:
            return
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in stepped]
        has = [float(p.grad is not None) for p in stepped]
        flat = torch.cat([part.flatten() for part in (*parts, to_device(torch.tensor(has), parts[0].device))])
        dist.all_reduce(flat)
        *sums, present = flat.split([*(p.numel() for p in stepped), len(stepped)])
        # If this rank has all gradients, every tensor has one; no wait for the GPU is needed.
        held = has if all(has) else present.tolist()
        for parameter, gradient, ranks in zip(stepped, sums, held, strict=True):
            parameter.grad = gradient.view_as(parameter) if ranks else None


class Sharded(Parallel):
    """Fully sharded data parallelism (FSDP2; Zhao et al. 2023, arXiv:2304.11277) over the modules declared by a model.

    Trained 16-bit weights are stored as float32 shards. They are gathered and used in 16 bits, and their gradients are
    summed over ranks and micro-batches in float32. ``model.compute_dtypes`` is set to map their names to the 16-bit dtype.
    Frozen weights remain in 16 bits, and modules in ``float32_modules`` remain in float32.

    Args:
        model: Sharded in place, one unit at a time, so that the device never contains more than the shards and one full unit.
        shard_size: Number of ranks over which weights are sharded; groups of this size are replicas. None means all ranks.
        cpu_offload: Store shards, their gradients and the optimiser's moments in main memory.
    """

    def __init__(
        self, model: nn.Module, device: str, *, shard_size: int | None = None, cpu_offload: bool = False
    ) -> None:
        # FSDP2 warns about in-place writes to the model's outputs, but none occur here.
        warnings.filterwarnings(
            "ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning
        )
        check_can_shard(model)
        self.model = model
        sources = deferred_parameters(model)
        offload = CPUOffloadPolicy(pin_memory=device != "cpu") if cpu_offload else OffloadPolicy()
        shared: dict[str, Any] = {"mesh": _mesh(device, shard_size), "offload_policy": offload}
        model.compute_dtypes = {
            name: p.dtype for name, p in model.named_parameters() if p.requires_grad and p.element_size() == 2
        }
        dtype = next((p.dtype for p in model.parameters() if p.element_size() == 2), None)
        layers = _layers(model)
        for module in [] if dtype is None else _float32_modules(model, dtype):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **shared)
            layers = [layer for layer in layers if not any(layer is inner for inner in module.modules())]
        # The model casts its own inputs; a cast here would round a flow policy's denoising chain and state.
        sums = None if dtype is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=sums, cast_forward_inputs=False)
        for module in [*layers, model]:
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.element_size() == 2:
                    parameter.data = parameter.data.float()
            fully_shard(module, mp_policy=policy, **shared)
        # Read weights after sharding, so that each rank reads only its own rows.
        read_deferred(model, sources, "cpu" if cpu_offload else device)
        for unit in self.units():
            # Each rank's loss is its part of a mean over all ranks, so gradients are summed, not averaged.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        for name in ENTRY_POINTS:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._sums_locally = 4 * trained <= LOCAL_SUMS
        self._is_gathered = False

    def units(self) -> Iterator[nn.Module]:
        """Yield the FSDP modules in the order of ``model.modules()``, followed by the root."""
        yield from (
            module for module in self.model.modules() if isinstance(module, FSDPModule) and module is not self.model
        )
        yield self.model

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """See ``Parallel.gathered``."""
        if self._is_gathered:
            yield
            return
        units = list(self.units())
        self._is_gathered = True
        try:
            for unit in units:
                # A forward pass without a backward pass leaves the root gathered, possibly with outdated weights.
                unit.reshard()
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            yield
        finally:
            self._is_gathered = False
            for unit in units:
                unit.reshard()
                # Restore FSDP2's default: the root stays gathered because it is first in the backward pass.
                unit.set_reshard_after_forward(unit is not self.model, recurse=False)

    def start_backward(self, is_last: bool) -> None:
        """See ``Parallel.start_backward``."""
        # With small gradients (``LOCAL_SUMS``), accumulate micro-batches locally and communicate only in the last backward pass.
        self.model.set_requires_gradient_sync(is_last or not self._sums_locally)

    def sum_gradients(self, stepped: Sequence[nn.Parameter]) -> None:
        """Do nothing, because the backward pass has already summed the gradients."""


def take_weights_of_rank_0(model: nn.Module) -> None:
    """Copy parameters and buffers from rank 0 to every rank, sending only tensors that differ (a collective call)."""
    if world_size() == 1:
        return
    # Equal seeds are not enough, because code run on only one rank may have drawn random numbers. Deferred weights are not copied,
    # because all ranks read the same files.
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    checksums = gather_objects({name: _checksum(tensor) for name, tensor in tensors.items()})
    for name in checksums[0]:
        if any(checksum[name] != checksums[0][name] for checksum in checksums):
            sent = tensors[name].detach().cpu().contiguous()
            dist.broadcast(sent, 0)
            tensors[name].data.copy_(sent)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def make_parallel(
    model: nn.Module, device: str, sharded: bool, *, shard_size: int | None = None, cpu_offload: bool = False
) -> Parallel:
    """Shard or replicate a model across all ranks on ``device``, and read its deferred weights."""
    if sharded:
        return Sharded(model, device, shard_size=shard_size, cpu_offload=cpu_offload)
    read_deferred(model, deferred_parameters(model), device)
    return Replicated(model.to(device))


@torch.no_grad()
def read_deferred(model: nn.Module, sources: Mapping[str, FileTensor], device: str) -> None:
    """Allocate deferred parameters on ``device`` and read them one by one. For sharded parameters, read only this rank's rows.

    ``sources`` must be the result of ``deferred_parameters`` from before the model was sharded.
    """
    if not sources:
        return
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # Preserve the identity of parameter objects, so that tied parameters remain tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(lambda t: torch.empty_like(t, device=device) if t.device.type == "meta" else t)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    parameters = dict(model.named_parameters())
    for name, source in sources.items():
        part, where = local_part(parameters[name])
        if part.numel():
            part.copy_(part_of(source, where))


def empty_copy(model: nn.Module, device: str) -> nn.Module:
    """Copy an unsharded model to a device, leaving parameters uninitialised and copying buffers."""
    # Preserve requires_grad because torch uses it to select kernels, and different kernels round differently.
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    return copy.deepcopy(model, memo).to(device).eval()


def check_can_shard(model: nn.Module) -> None:
    """Raise ConfigError if a model declares no units to shard. The model may be on the meta device."""
    declared = tuple(getattr(model, "fsdp_wrap_modules", ()))
    if not declared:
        problem = "its fsdp_wrap_modules are empty; expected the class names of its layers"
    elif not _layers(model):
        problem = f"it contains none of its fsdp_wrap_modules {sorted(declared)}"
    else:
        return
    raise ConfigError(f"{type(model).__name__} cannot be sharded: {problem}.", sharding="replicate")


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules declared as units by a model, with inner modules before outer ones."""
    names = set(model.fsdp_wrap_modules)
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]


def _mesh(device: str, shard_size: int | None) -> DeviceMesh:
    ranks = world_size()
    if shard_size is None or shard_size == ranks:
        return init_device_mesh(device, (ranks,))
    return new_mesh(device, ranks // shard_size)


def _float32_modules(model: nn.Module, dtype: torch.dtype) -> Iterator[nn.Module]:
    """Yield the modules that remain in float32 although the model computes in ``dtype``."""
    for name in getattr(model, "float32_modules", ()):
        module = getattr(model, name, None)
        if isinstance(module, nn.Parameter):
            raise ConfigError(
                f"{name} of {type(model).__name__} is not a module, so its shards would be used in {str(dtype)[6:]}. "
                "Remove it from float32_modules, wrap it in its own module, or set model.precision=bf16-mixed"
            )
        if isinstance(module, nn.Module):
            yield module


# -- the choice ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateBytes:
    """Memory used by a model and its optimiser on one rank, in bytes."""

    weights: int  # trained shards are float32
    masters: int  # float32 copies of trained 16-bit weights; not needed for shards
    gradients: int  # of trained parameters, summed in float32
    moments: int  # AdamW's two float32 values per trained parameter

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.weights + self.masters + self.gradients + self.moments

    @classmethod
    def of(cls, model: nn.Module, num_shards: int | None) -> StateBytes:
        """Count the bytes of a model split into ``num_shards`` shards (None if replicated). It may be on the meta device."""
        parameters = list(model.parameters())
        weights = sum(p.numel() * p.element_size() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        half = 2 * sum(p.numel() for p in parameters if p.requires_grad and p.element_size() == 2)
        if num_shards is None:
            return cls(weights, 2 * half, 4 * trained + half, 8 * trained)
        return cls((weights + half) // num_shards, 0, 4 * trained // num_shards, 8 * trained // num_shards)


class Choice(NamedTuple):
    """The choice of whether to shard a model, with the reason."""

    sharded: bool
    reason: str

    def __str__(self) -> str:
        return f"trainer.sharding={'fsdp2' if self.sharded else 'replicate'}: {self.reason}"


def choose_sharding(
    sharding: str, model: nn.Module, num_ranks: int, memory_bytes: int, *, cpu_offload: bool = False,
    shard_size: int | None = None,
) -> Choice:  # fmt: skip
    """Choose between replicas and shards, given ``memory_bytes`` of memory per rank.

    Args:
        sharding: One of ``rlinf.distributed.config.SHARDINGS``.
        model: The model, possibly on the meta device, with adapters applied and parameters frozen as in training.
        cpu_offload: Whether to offload shards to the CPU, which requires sharding.
        shard_size: Number of ranks over which weights are sharded. If it has no effect, the reason mentions this.
    """
    if sharding == "replicate" and cpu_offload:
        raise ConfigError("sharding=replicate with cpu_offload=true; expected shards to offload.", sharding="fsdp2")
    if sharding == "replicate" and shard_size is not None:
        problem = f"sharding=replicate with shard_size={shard_size}; expected shards of that size, or none."
        raise ConfigError(problem, sharding="fsdp2", shard_size=None)
    if sharding == "fsdp2" or cpu_offload:
        check_can_shard(model)
        return Choice(True, "as configured" if sharding == "fsdp2" else "cpu_offload=true moves shards")
    if sharding == "replicate":
        return Choice(False, "as configured")
    unused = "" if shard_size is None else f"; shard_size={shard_size} has no effect on replicas"
    if num_ranks == 1:
        return Choice(False, f"there is one rank{unused}")
    needed = StateBytes.of(model, None).total
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    fraction = trained / max(1, sum(p.numel() for p in model.parameters()))
    text = f"{fraction:.1%} of the parameters are trained, and a replica takes {format_bytes(needed)} of a rank's {format_bytes(memory_bytes)}"
    steps_fit = BYTES_OF_STEPS * trained <= STEPS_FIT * memory_bytes
    if needed <= SMALL_STATE:
        return Choice(False, f"{text}, which is at most {format_bytes(SMALL_STATE)}{unused}")
    if steps_fit and needed <= FITS * memory_bytes:
        return Choice(False, text + unused)
    check_can_shard(model)
    return Choice(True, text)


def rank_memory_bytes(device: str, num_ranks: int) -> int:
    """Return the memory available to one rank in bytes: its GPU's memory, or its fraction of main memory."""
    if device == "cuda":
        return torch.cuda.get_device_properties(own_device()).total_memory
    return main_memory_bytes() // num_ranks


# -- tensors that may be sharded -------------------------------------------------------------------------------------


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor (a collective call on all ranks); return any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's part of a tensor and its slices in the full tensor. An unsharded tensor is returned in full."""
    if not isinstance(tensor, DTensor):
        return tensor, (...,)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def part_of(full: Weight, where: tuple[Any, ...]) -> Tensor:
    """Return the part of a full tensor given by ``local_part`` slices. From a file, only the required rows are read."""
    if isinstance(full, Tensor):
        return full[where]
    return full.rows() if where[0] is ... else full.rows(where[0].start, where[0].stop)


def grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the gradients' global 2-norm as a float32 scalar on their device (a collective call for shards)."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], foreach=True)
    return full_tensor(norm).float()


def clip_gradients(parameters: list[nn.Parameter], norm: Tensor | float, max_norm: float) -> None:
    """Scale down gradients with global norm ``norm`` to a norm of at most ``max_norm``; 0 disables clipping."""
    if max_norm > 0 and parameters:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, to_device(norm, parameters[0].device), foreach=True)
