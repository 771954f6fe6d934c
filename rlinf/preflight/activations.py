"""Peak memory of forward and backward passes, measured on torch's meta device, where tensors have no data.

A pass takes only seconds for any model, and its tensors (including those saved by autograd) have the same sizes as in a real pass.
Attention is measured as in GPU kernels, which save no score matrix.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rlinf.models.embodiment.base import ActionModel
from rlinf.models.layers import find_layers, set_training_options
from rlinf.models.precision import autocast
from rlinf.types import Observation

GRAIN = 512
"""Granularity of torch's CUDA allocator, in bytes."""
FEW, MORE = 8, 16
"""Batch sizes of the measured passes. With smaller ones, the gradient of a single weight could exceed all activations."""
LINEAR = {
    functional.linear, functional.conv2d, torch.conv2d, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm,
}  # fmt: skip
"""Operations that autocast runs in 16 bits."""
MOST_READS = 10_000
"""Maximum number of tensor values that a phase may read; beyond it, the phase is assumed to wait for a value that never changes here."""


class LinearFit(NamedTuple):
    """Memory of a pass in bytes, as a linear function of the batch size: ``fixed`` plus ``row`` per batch row."""

    fixed: float
    row: float

    @classmethod
    def through(cls, few: float, more: float, first: int, last: int) -> LinearFit:
        """Return the fit through the bytes measured at the batch sizes ``first`` and ``last``."""
        row = (more - few) / (last - first)
        return cls(few - first * row, row)

    def at(self, rows: int) -> int:
        """Return the bytes at a batch size."""
        return max(0, int(self.fixed + rows * self.row))


@dataclass(frozen=True)
class PassMemory:
    """Memory of a policy's passes in bytes, without its weights and their gradients."""

    acts: LinearFit  # a policy call of a rollout
    scores: LinearFit  # a scoring pass without gradients
    updates: LinearFit  # a forward and a backward pass without recomputation
    recomputes: LinearFit  # a forward and a backward pass with all layers recomputed
    saved: tuple[float, ...] = ()

    def update(self, recomputed: int) -> LinearFit:
        """Return the bytes of a forward and a backward pass that recompute the first layers, interpolated by the bytes saved per layer."""
        fraction = sum(self.saved[:recomputed]) / (sum(self.saved) or 1.0)
        pairs = zip(self.updates, self.recomputes, strict=True)
        return LinearFit(*(full + fraction * (reduced - full) for full, reduced in pairs))


NOTHING = PassMemory(*[LinearFit(0.0, 0.0)] * 4)
"""Memory of a policy without local weights."""


def measure_passes(
    model: ActionModel, observe: Callable[[int], Observation], precision: str, phases: Iterable[str]
) -> PassMemory:
    """Measure the memory of passes of ``model``, which must be on the meta device and have a processor.

    Args:
        observe: Returns an observation of a given batch size.
        phases: ``rl`` (acting, scoring, updates), ``sft`` (cloning updates), ``actor`` (proposals of a frozen policy).
    """
    few, more = (_measure(model, observe(rows), rows, precision, phases) for rows in (FEW, MORE))
    acts, scores = (LinearFit.through(few.peaks[name], more.peaks[name], FEW, MORE) for name in ("acts", "scores"))
    # If a run clones before RL, only the update that needs more memory matters.
    kind = max(more.updates, key=more.updates.get, default=None)
    if kind is None:
        return PassMemory(acts, scores, *[LinearFit(0.0, 0.0)] * 2)
    updates = LinearFit.through(few.updates[kind], more.updates[kind], FEW, MORE)
    if not (layers := find_layers(model)):
        return PassMemory(acts, scores, updates, updates)
    set_training_options(model, recomputed=True, compiled=False)
    less = [
        _measure(model, observe(rows), rows, precision, [kind], counted.sequences).updates[kind]
        for rows, counted in ((FEW, few), (MORE, more))
    ]
    for layer in layers:
        del layer.forward  # remove the instance's recomputing wrapper, so that the class's method applies again
    return PassMemory(
        acts,
        scores,
        updates,
        LinearFit.through(*less, FEW, MORE),
        tuple(max(0.0, size / MORE) for size in more.saved[kind]),
    )


def measure_update(
    model: nn.Module, run: Callable[[int], list[Tensor]], rows: int
) -> tuple[LinearFit, tuple[float, ...]]:
    """Return the bytes of an update, from 1 and ``rows`` rows, and the bytes per row that recomputing each layer would save.

    ``model`` must be on the meta device; ``run`` returns the outputs of a number of rows.
    """
    peaks, saved = [], [0]
    for count in (1, rows):
        with MetaBytes(model) as memory, AsOnGpu():
            peak, saved = _update(model, memory, partial(run, count))
        peaks.append(peak)
    return LinearFit.through(*peaks, 1, rows), tuple(max(0.0, size / rows) for size in saved)


class PeakMemory:
    """Peak memory measured at one batch size.

    Attributes:
        peaks, updates: Bytes of acting and scoring, and of each kind of update.
        saved: Bytes saved by recomputing each layer, by kind of update.
        sequences: Samples generated by acting, reused to measure further updates.
    """

    def __init__(self) -> None:
        self.peaks = {"acts": 0, "scores": 0}
        self.updates: dict[str, int] = {}
        self.saved: dict[str, list[int]] = {}
        self.sequences: Tensor | None = None


def _measure(
    model: ActionModel,
    observation: Observation,
    rows: int,
    precision: str,
    phases: Iterable[str],
    known: Tensor | None = None,
) -> PeakMemory:
    """Measure the peak of each phase, or only of updates if sequences are ``known``."""
    result, phases = PeakMemory(), list(phases)
    for phase in phases:
        with MetaBytes(model) as memory, AsOnGpu(), autocast(model, precision):
            with torch.no_grad():
                inputs = model.preprocess(observation)
                if phase == "actor":
                    model.propose(inputs)
                    result.peaks["acts"] = max(result.peaks["acts"], memory.peak)
                    continue
                sequences = None
                if phase == "rl" and known is not None:
                    sequences = known.clone()
                elif phase == "rl":
                    uniforms = torch.full((rows, model.num_uniforms), 0.5)
                    prediction = model.predict_action_batch(uniforms=uniforms, **inputs)
                    model.rollout_logprobs(prediction)
                    sequences = result.sequences = prediction.sequences[:, -model.num_sampled :].clone()
                    del prediction
                    result.peaks["acts"] = max(result.peaks["acts"], memory.peak)
                    memory.peak = memory.now
                    model.evaluate_actions(inputs, sequences)
                    result.peaks["scores"] = memory.peak
            if any(p.requires_grad for p in model.parameters()):
                result.updates[phase], result.saved[phase] = _update(
                    model, memory, partial(_outputs, model, inputs, sequences, rows)
                )
    return result


def _outputs(model: ActionModel, inputs: Mapping[str, Tensor], sequences: Tensor | None, rows: int) -> list[Tensor]:
    """Run a pass with gradients; return the scores of sequences, or the cloning loss."""
    if sequences is not None:
        return [tensor for tensor in model.evaluate_actions(inputs, sequences) if tensor.requires_grad]
    uniforms = torch.full((rows, model.num_sft_uniforms), 0.5) if model.num_sft_uniforms else None
    actions = torch.zeros(rows, model.sft_chunk_len, model.action_dim)  # on the CPU, where tokenisers read them
    return [model.sft_loss(inputs, actions, *(() if uniforms is None else (uniforms.to("meta"),)))]


def _update(model: nn.Module, memory: MetaBytes, run: Callable[[], list[Tensor]]) -> tuple[int, list[int]]:
    """Return the peak of a forward and a backward pass, and the bytes that recomputing each layer would save."""
    layers, memory.peak = find_layers(model), memory.now
    saved: dict[int, int] = {}
    with _watched(layers, memory, saved), _no_gradients_kept(model):
        outputs = run()
        total = torch.stack([output.float().sum() for output in outputs]).sum()
        del outputs
        # ``Tensor.backward`` would disable the mode ``AsOnGpu``, which recomputed layers need, so call the engine directly.
        torch.autograd.Variable._execution_engine.run_backward(
            (total,), (torch.ones_like(total),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    return memory.peak, [saved.get(id(layer), 0) for layer in layers]


@contextmanager
def _watched(layers: list[nn.Module], memory: MetaBytes, saved: dict[int, int]) -> Iterator[None]:
    """Record the bytes that each layer saves for the backward pass, excluding its output; a layer may run several times."""
    start: dict[int, int] = {}

    def before(layer: nn.Module, *_: object) -> None:
        start[id(layer)] = memory.now

    def after(layer: nn.Module, _: object, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        # Count by storage, because several outputs may be views of the same memory.
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        saved[id(layer)] = saved.get(id(layer), 0) + memory.now - start[id(layer)] - sum(storages.values())

    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _no_gradients_kept(model: nn.Module) -> Iterator[None]:
    """Free each gradient immediately, because ``StateBytes`` counts gradients."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class MetaBytes(TorchDispatchMode):
    """Count the bytes of meta tensors created in the context, and their peak, excluding the weights of ``model``.

    Values read from meta tensors are 1 or true, and copies to other devices stay on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = self._num_reads = 0
        self._known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name.partition("::")[2]
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if name == "_local_scalar_dense":
                self._num_reads += 1
                if self._num_reads > MOST_READS:
                    raise RuntimeError(f"a pass reads more than {MOST_READS:,} values, perhaps in an endless loop")
                return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
            if name == "_to_copy":
                kwargs.pop("device", None)
            # The result's size depends on data. Upper bound: assume that every element is non-zero.
            if name == "nonzero":
                return self._counted(torch.zeros(args[0].numel(), args[0].ndim, dtype=torch.int64, device="meta"))
            if name in ("index", "index_put_"):
                args = (args[0], _without_masks(args[1]), *args[2:])
        result = func(*args, **kwargs)
        return self._counted(result) if isinstance(result, Tensor) else tree_map_only(Tensor, self._counted, result)

    def _counted(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_meta and storage._cdata not in self._known:
            key, size = storage._cdata, -(-storage.nbytes() // GRAIN) * GRAIN
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key, size).atexit = False
        return tensor

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _without_masks(indices: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Replace each mask among indices by index tensors with one entry per element, an upper bound."""
    result: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            result.append(index)
        else:
            result += [torch.zeros(index.numel(), dtype=torch.int64, device="meta") for _ in range(index.ndim)]
    return result


class AsOnGpu(TorchFunctionMode):
    """Use GPU kernels for attention, and 16 bits for linear layers under autocast, because the meta device supports neither."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        attends = func is functional.scaled_dot_product_attention
        if (attends or func in LINEAR) and torch.is_autocast_enabled("cpu"):
            cast = partial(_in_format, dtype=torch.get_autocast_dtype("cpu"))
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        return attend(*args, **kwargs) if attends else func(*args, **kwargs)


def _in_format(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with the kernel that a GPU would choose: flash in 16 bits without a mask, otherwise memory-efficient."""
    if enable_gqa and key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if attn_mask is None and query.shape[-1] <= 256 and query.element_size() == 2:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    keeps_sums = torch.is_grad_enabled() and query.requires_grad
    return efficient(query, key, value, attn_mask, keeps_sums, dropout_p, is_causal, scale=scale)[0]
