"""How the repeated blocks of a model run where gradients are needed: compiled, or with their activations recomputed.

Rollouts, evaluations and scoring run without gradients, and as if neither option were set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils._triton import has_triton
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rlinf.errors import ConfigError

TOGETHER = 4
"""Blocks of a vision tower that are recomputed together: their activations take at most the space of a language model's layer."""


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules named in ``fsdp_wrap_modules``, and the layers of transformers' own models."""
    names = set(getattr(model, "fsdp_wrap_modules", ()))
    blocks: list[nn.Module] = []
    waiting = [model]
    while waiting:
        for child in waiting.pop().children():
            is_block = type(child).__name__ in names or isinstance(child, GradientCheckpointingLayer)
            (blocks if is_block else waiting).append(child)
    return blocks


def set_training_options(model: nn.Module, *, recomputed: bool | int, compiled: bool) -> None:
    """Set how the blocks of a model (without blocks, its direct submodules) run where gradients are needed, in place.

    The ``forward`` of each block is replaced, not its call, so that the hooks of FSDP2 run once, around it.

    Args:
        model: Model; ``recomputed`` needs repeated blocks.
        recomputed: Keep the inputs of each block only, and compute the rest again for the gradient (Chen et al. 2016). A number: of so
            many blocks, the first ones of ``find_layers``.
        compiled: Run each block through ``torch.compile``.
    """
    if not (recomputed or compiled):
        return
    blocks = find_layers(model)
    if recomputed and not blocks:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks (fsdp_wrap_modules), whose activations could be recomputed.",
            gradient_checkpointing=False,
        )
    number = len(blocks) if recomputed is True else recomputed
    for place, block in enumerate(blocks or model.children()):
        block.forward = partial(_forward, block, place < number, compiled)


def run_in_turn(blocks: Sequence[nn.Module], hidden_states: Tensor, *args: Any) -> Tensor:
    """Run blocks one after the other; ``TOGETHER`` neighbours that are recomputed keep the input of the first one only.

    For blocks whose activations are small beside the activations of the model's other blocks.
    """
    for start in range(0, len(blocks), TOGETHER):
        group = blocks[start : start + TOGETHER]
        if torch.is_grad_enabled() and all(map(_is_recomputed, group)):
            hidden_states = checkpoint(_run, group, hidden_states, *args, use_reentrant=False, together=True)
        else:
            hidden_states = _run(group, hidden_states, *args)
    return hidden_states


def _run(blocks: Sequence[nn.Module], hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    for block in blocks:
        hidden_states = block(hidden_states, *args, **options)
    return hidden_states


def _is_recomputed(block: nn.Module) -> bool:
    return isinstance(block.forward, partial) and bool(block.forward.args[1])


def _forward(
    block: nn.Module, recomputed: bool, compiled: bool, *args: Any, together: bool = False, **kwargs: Any
) -> Any:
    """Run a block; ``together``: ``run_in_turn`` recomputes it with its neighbours."""
    function = type(block).forward
    if torch.is_grad_enabled():
        function = _compile(function) if compiled else function
        if recomputed and not together:
            return checkpoint(function, block, *args, use_reentrant=False, **kwargs)
    return function(block, *args, **kwargs)


def check_compiler(device: str) -> None:
    """Raise ConfigError if ``torch.compile`` has nothing that makes code for ``device``, "cpu" or "cuda"."""
    if device == "cuda":
        if not has_triton():
            raise ConfigError("torch.compile needs Triton on GPUs, which cannot be imported.", compile=False)
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        sought = os.environ.get("CXX", "g++")
        raise ConfigError(
            f"torch.compile needs a C++ compiler on CPU, but finds no working {sought} (the variable CXX names another). "
            "Install one (apt-get install g++), or do without.",
            compile=False,
        ) from error


@cache
def _compile(function: Callable) -> Callable:
    """Return the compiled form of a class's ``forward``, which all blocks of the class share."""
    return torch.compile(function)
