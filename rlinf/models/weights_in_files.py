"""Build transformers models whose weights stay in their files until the ranks shard them."""

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from rlinf.distributed.deferred import FileTensor, Weight, defer, in_memory, is_deferred
from rlinf.distributed.parallel import local_part
from rlinf.distributed.transfers import check_loaded

READ_WHOLE = "read_whole_because"
"""Attribute that stores the reason why a model's weights could not stay in their files."""


def how_read(model: nn.Module) -> str:
    """Describe how the ranks read the weights of a model that they shard."""
    if is_deferred(model):
        return "each rank reads its rows of the weights"
    because = getattr(model, READ_WHOLE, None) or "its weights are random, or its class reads its folder itself"
    return f"each rank first loads the complete model: {because}"


def check_read(model: nn.Module, sources: Mapping[str, FileTensor]) -> None:
    """Raise if weights that ``read_deferred`` read on this rank are NaN or infinite."""
    parameters = dict(model.named_parameters())
    folders = sorted({str(source.file.parent) for source in sources.values()})
    check_loaded({name: local_part(parameters[name])[0] for name in sources}, ", ".join(folders))


class NotDeferredError(Exception):
    """Raised if the weights cannot stay in their files; the message is the reason."""


def without_weights(model_class: type[nn.Module], config: Any, **arguments: Any) -> Any:
    """Build a model with parameters on the meta device, but buffers (including values) in memory."""
    from accelerate import init_empty_weights  # imports transformers

    with init_empty_weights(include_buffers=False):
        model = model_class._from_config(copy.deepcopy(config), **arguments)
    # Moving the weights to the meta device one by one broke their ties.
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


@torch.no_grad()
def defer_weights(model: nn.Module, tensors: Mapping[str, Weight], complete: Collection[str] = ()) -> None:
    """Record which file stores each parameter of a model from ``without_weights``; read buffers immediately.

    ``tensors`` maps names to all weights, in files or in memory (tied weights once). Modules in ``complete`` are read
    immediately as well, because their weights are modified elsewhere. Raise NotDeferredError if names or shapes differ.
    """
    places: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        places.setdefault(id(parameter), []).append(name)
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
    given = [[name for name in names if name in tensors] for names in places.values()]
    fits = all(len(names) == 1 for names in given) and tensors.keys() <= parameters.keys() | buffers.keys()
    targets = parameters | buffers
    if (
        not fits
        or buffers.keys() - tensors.keys()
        or any(targets[name].shape != tensors[name].shape for name in tensors)
    ):
        raise NotDeferredError("the names and shapes in its files differ from the model's")
    for (name,), names in zip(given, places.values(), strict=True):
        parameter, source = parameters[name], tensors[name]
        if isinstance(source, FileTensor) and name.split(".")[0] not in complete:
            defer(parameter, source)
            continue
        numbers = in_memory(source).to(parameter.dtype, copy=True)
        weight = nn.Parameter(numbers, requires_grad=parameter.requires_grad)
        for alias in names:
            module, _, attribute = alias.rpartition(".")
            setattr(model.get_submodule(module), attribute, weight)
    for name, buffer in buffers.items():
        buffer.copy_(in_memory(tensors[name]))
