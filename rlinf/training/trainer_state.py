"""Weights and optimiser state in torch.distributed.checkpoint's format, which any number of ranks can read.

``torch.distributed.checkpoint.state_dict`` is not used for the optimiser: on an optimiser without state it takes a step
with zero gradients (after which AdamW's bias correction starts at 2), and it cannot restore a state in which some
parameters were not stepped yet, as during the critic's warm-up. Here the state is a flat dict of tensors instead:
``model.<name>`` and ``optimizer.<parameter name>.<key>``, for what there is.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.optim import Optimizer

from rlinf.errors import CheckpointError

MODEL, OPTIMIZER = "model.", "optimizer."
METADATA_FILE = ".metadata"

_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_PICKLED_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *_DTYPES},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's index file, which is a pickle, and knows no other classes than those that belong there."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _PICKLED_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong into it")


class _Reader(FileSystemReader):
    """DCP's reader, whose index is read without running code that the file may name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / METADATA_FILE, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Writer(FileSystemWriter):
    """DCP's writer, whose index holds neither the path nor a random id of this run."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def save_trainer_state(folder: str | Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Write the shards of all ranks; a collective call.

    Raises:
        CheckpointError: It cannot be written.
    """
    tensors = {f"{MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in _optimized(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps '{key}' of '{name}' as {type(value).__name__}; only tensors "
                    "can be saved. Use another optimiser."
                )
            tensors[f"{OPTIMIZER}{name}.{key}"] = value
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.save(tensors, storage_writer=_Writer(folder), no_dist=not dist.is_initialized())
        except (CheckpointException, OSError) as error:
            raise CheckpointError(f"Cannot write {folder}: {_reason(error)}. Check space and permissions.") from error


def load_trainer_state(folder: str | Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Read into ``model`` and ``optimizer`` in place; a collective call. State of other parameters is dropped.

    Args:
        folder: What ``save_trainer_state`` wrote, by any number of ranks.
        model: Sharded in any way.
        optimizer: None leaves the state in the file alone.

    Raises:
        CheckpointError: The folder cannot be read, or names or shapes are not those of the model.
    """
    try:
        entries = _Reader(folder).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. Use another checkpoint.") from error
    weights = model.state_dict()
    _compare_names(
        folder, {name.removeprefix(MODEL): e for name, e in entries.items() if name.startswith(MODEL)}, weights
    )
    targets: dict[str, Tensor] = {f"{MODEL}{name}": tensor for name, tensor in weights.items()}
    states: dict[nn.Parameter, dict[str, Tensor]] = {}
    for name, parameter in _optimized(model, optimizer).items():
        prefix = f"{OPTIMIZER}{name}."
        keys = [entry for entry in entries if entry.startswith(prefix) and "." not in entry[len(prefix) :]]
        for entry in keys:
            target = _empty_like(entries[entry], parameter)
            targets[entry] = states.setdefault(parameter, {})[entry[len(prefix) :]] = target
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(targets, storage_reader=_Reader(folder), no_dist=not dist.is_initialized())
        except (CheckpointException, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder} cannot be loaded: {_reason(error)}. Use another checkpoint.") from error
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(states)


def _optimized(model: nn.Module, optimizer: Optimizer | None) -> dict[str, nn.Parameter]:
    """Name to parameter, of the parameters that the optimiser holds."""
    if optimizer is None:
        return {}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in held}


def _empty_like(entry: TensorStorageMetadata, parameter: nn.Parameter) -> Tensor:
    """Make room for a state tensor: sharded as the parameter where it has its shape, else whole."""
    dtype = entry.properties.dtype
    if entry.size == parameter.shape and parameter.ndim > 0:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=dtype)


def _compare_names(folder: str | Path, saved: dict[str, TensorStorageMetadata], weights: dict[str, Tensor]) -> None:
    missing, unexpected = sorted(weights.keys() - saved.keys()), sorted(saved.keys() - weights.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} is of another model: {len(missing)} tensors of the model are not in it "
            f"({', '.join(missing[:3])}), and it has {len(unexpected)} others ({', '.join(unexpected[:3])}). "
            "Use the model section of its config.yaml."
        )
    for name, tensor in weights.items():
        if saved[name].size != tensor.shape:
            raise CheckpointError(
                f"{folder} is of another model: '{name}' is {list(saved[name].size)} there and {list(tensor.shape)} "
                "here. Use the model section of its config.yaml."
            )


def _reason(error: BaseException) -> str:
    """The first cause in one line; DCP wraps the errors of all ranks."""
    if isinstance(error, CheckpointException):
        cause = next(iter(error.failures.values()))[0]
        return f"{type(cause).__name__}: {cause}"
    return str(error)
