"""Settings of transformers' modules: compile layers or recompute their activations in passes with gradients; accept saving."""

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
from transformers.generation import GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from rlinf.errors import ConfigError

TOGETHER = 4
"""Number of vision layers recomputed together; their activations then need no more memory than one language layer's."""


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules whose classes ``fsdp_wrap_modules`` lists, and the layers of transformers' own models."""
    names = set(getattr(model, "fsdp_wrap_modules", ()))
    layers: list[nn.Module] = []
    pending = [model]
    while pending:
        for child in pending.pop().children():
            is_layer = type(child).__name__ in names or isinstance(child, GradientCheckpointingLayer)
            (layers if is_layer else pending).append(child)
    return layers


def set_training_options(model: nn.Module, *, recomputed: bool | int, compiled: bool) -> None:
    """Set in place how a model's layers (or, without any, its direct submodules) run in passes with gradients.

    Args:
        recomputed: Recompute activations from the layer's inputs in the backward pass (Chen et al. 2016). With a number
            n, only the first n layers of ``find_layers`` are recomputed.
        compiled: Compile each layer with ``torch.compile``.
    """
    if not (recomputed or compiled):
        return
    layers = find_layers(model)
    if recomputed and not layers:
        raise ConfigError(
            f"{type(model).__name__} has no repeated layers (fsdp_wrap_modules) whose activations could be recomputed.",
            gradient_checkpointing=False,
        )
    number = len(layers) if recomputed is True else recomputed
    # Replace the layer's `forward`, not `__call__`, so that FSDP2's hooks run once, outside the recomputed part.
    for place, layer in enumerate(layers or model.children()):
        layer.forward = partial(_forward, layer, place < number, compiled)


def run_in_turn(layers: Sequence[nn.Module], hidden_states: Tensor, *args: Any) -> Tensor:
    """Run layers in sequence; each group of ``TOGETHER`` recomputed layers stores only the input of its first layer."""
    for start in range(0, len(layers), TOGETHER):
        group = layers[start : start + TOGETHER]
        if torch.is_grad_enabled() and all(map(_is_recomputed, group)):
            hidden_states = checkpoint(_run, group, hidden_states, *args, use_reentrant=False, together=True)
        else:
            hidden_states = _run(group, hidden_states, *args)
    return hidden_states


def _run(layers: Sequence[nn.Module], hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    for layer in layers:
        hidden_states = layer(hidden_states, *args, **options)
    return hidden_states


def _is_recomputed(layer: nn.Module) -> bool:
    return isinstance(layer.forward, partial) and bool(layer.forward.args[1])


def _forward(
    layer: nn.Module, recomputed: bool, compiled: bool, *args: Any, together: bool = False, **kwargs: Any
) -> Any:
    """Run a layer; ``together`` means that ``run_in_turn`` recomputes it with its neighbours."""
    function = type(layer).forward
    if torch.is_grad_enabled():
        function = _compile(function) if compiled else function
        if recomputed and not together:
            return checkpoint(function, layer, *args, use_reentrant=False, **kwargs)
    return function(layer, *args, **kwargs)


def check_compiler(device: str) -> None:
    """Raise ConfigError if ``torch.compile`` finds no compiler for ``device`` ("cpu" or "cuda")."""
    if device == "cuda":
        if not has_triton():
            raise ConfigError("torch.compile needs Triton on GPUs, but Triton cannot be imported.", compile=False)
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        compiler = os.environ.get("CXX", "g++")
        raise ConfigError(
            f"torch.compile needs a C++ compiler on CPU, but no working {compiler} was found (variable CXX). "
            "Install one (apt-get install g++), or turn compilation off.",
            compile=False,
        ) from error


@cache
def _compile(function: Callable) -> Callable:
    """Compile a class's ``forward`` once for all layers of the class."""
    return torch.compile(function)


class _AsRead(GenerationConfig):
    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Accept settings that transformers can read but would not save, e.g. a temperature without ``do_sample``."""


def accept_saving(model: Any) -> Any:
    """Let transformers save a model, including nested ones, with its original ``generation_config.json``; return the model."""
    for module in model.modules():
        if isinstance(getattr(module, "generation_config", None), GenerationConfig):
            module.generation_config.__class__ = _AsRead
    return model
