"""Weights and optimiser state, saved with torch.distributed.checkpoint (DCP), so that any number of ranks can load them.

The state is a flat dict of the existing tensors: ``model.<name>`` and ``optimizer.<parameter name>.<key>``. ``model.<name>`` is
the tensor that the optimiser steps: for a 16-bit parameter its float32 master. The file does not distinguish a master from a
float32 shard, so either can be loaded into the other.
"""

# Why not `torch.distributed.checkpoint.state_dict`: on an optimiser without state it takes a step with zero gradients, after which
# AdamW's bias correction starts at 2. It also cannot restore a state in which some parameters have not been stepped yet, as during
# the critic's warm-up.

import pickle
import re
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

from rlinf.checkpoints.model_files import may_leave_base
from rlinf.distributed.process_group import rank
from rlinf.errors import CheckpointError
from rlinf.files import write_error
from rlinf.optim.master_adamw import MasterAdamW

MODEL, OPTIMIZER = "model.", "optimizer."
METADATA_FILE = ".metadata"
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")

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
    """Reads DCP's index file, a pickle, and accepts only the classes of an index."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _PICKLED_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no class of an index")


class _Reader(FileSystemReader):
    """DCP's reader with a restricted unpickler for the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / METADATA_FILE, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Writer(FileSystemWriter):
    """DCP's writer, without the path and the random id of this run in the index: equal runs write equal files."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def trainer_tensors(model: nn.Module, optimizer: Optimizer | None, with_base: bool = True) -> dict[str, Tensor]:
    """Return the tensors to save, by name, not copied. Raise CheckpointError if the optimiser's state is not all tensors.

    ``with_base`` includes parameters that are not trained: False for adapters and actors with base weights that are stored elsewhere.
    """
    left_out = set() if with_base else frozen_names(model)
    weights = weights_to_save(model, optimizer)
    tensors = {f"{MODEL}{name}": tensor for name, tensor in weights.items() if name not in left_out}
    for name, stepped in _stepped(model, optimizer).items():
        for key, value in optimizer.state.get(stepped, {}).items():
            if not isinstance(value, Tensor):
                what = f"{type(optimizer).__name__} keeps '{key}' of '{name}' as {type(value).__name__}"
                raise CheckpointError(f"{what}; only tensors can be saved. Use a different optimiser.")
            tensors[f"{OPTIMIZER}{name}.{key}"] = value
    return tensors


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that are not trained."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def write_tensors(folder: str | Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write ``trainer_tensors`` or a copy of them (a collective call of ``group``); raise CheckpointError if that fails."""
    # Not in warnings.catch_warnings: at its end, it would undo filters that a different thread has set meanwhile.
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        dcp.save(tensors, storage_writer=_Writer(folder), process_group=group, no_dist=not dist.is_initialized())
    except (CheckpointException, OSError) as error:  # the first is a BaseException
        reason = write_error(_cause(error), Path(folder) / f"__{rank()}_0.distcp") or _reason(error)
        fix = "Check space and permissions, or choose a different output_dir."
        raise CheckpointError(f"Cannot write {folder}: {reason}. {fix}") from error


def read_entries(folder: str | Path) -> dict[str, TensorStorageMetadata]:
    """Return names, shapes and dtypes of the tensors in a folder; raise CheckpointError if it cannot be read."""
    try:
        return _checked_entries(Path(folder), _Reader(folder).read_metadata())
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. Use a different checkpoint.") from error


def read_tensors(folder: str | Path, targets: dict[str, Tensor], no_dist: bool = False) -> None:
    """Read tensors of a folder into ``targets`` in place (a collective call, unless ``no_dist``); raise CheckpointError on failure."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        dcp.load(targets, storage_reader=_Reader(folder), no_dist=no_dist or not dist.is_initialized())
    except (CheckpointException, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be loaded: {_reason(error)}. Use a different checkpoint.") from error


def load_trainer_state(folder: str | Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Load into ``model`` and ``optimizer`` in place (a collective call). Optimiser state of other parameters is ignored.

    The folder may be from any number of ranks, and the model may be sharded; 16-bit weights are rounded from the file. Raise
    CheckpointError if the folder cannot be read, or its names or shapes differ from the model's.
    """
    entries = read_entries(folder)
    weights = model.state_dict()
    saved = {name.removeprefix(MODEL): entry for name, entry in entries.items() if name.startswith(MODEL)}
    _compare_names(folder, saved, weights, may_lack=frozen_names(model) if may_leave_base(model) else set())
    stepped = _stepped(model, optimizer)
    targets = {f"{MODEL}{name}": t for name, t in weights_to_save(model, optimizer).items() if name in saved}
    states: dict[Tensor, dict[str, Tensor]] = {}
    for entry in entries:
        name, _, key = entry.removeprefix(OPTIMIZER).rpartition(".")
        if entry.startswith(OPTIMIZER) and name in stepped:
            target = _empty_like(entries[entry], stepped[name], optimizer)
            targets[entry] = states.setdefault(stepped[name], {})[key] = target
    read_tensors(folder, targets)
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(states)
    with torch.no_grad():
        for name, tensor in stepped.items():
            weights[name].copy_(tensor)  # the model's weight is the rounded master


def _checked_entries(folder: Path, metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the index by name; raise ValueError unless all entries are tensors in the folder."""
    # DCP would unpickle any other entry, and follow a file name out of the folder.
    entries: dict[str, TensorStorageMetadata] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{METADATA_FILE} holds '{name}' as {type(entry).__name__}, and only tensors are read")
        entries[name] = entry
    for file in (place.relative_path for place in metadata.storage_data.values()):
        if not _DATA_FILE.fullmatch(file):
            raise ValueError(f"{METADATA_FILE} names the file '{file}', which is not a data file of the folder")
    return entries


def weights_to_save(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return the state dict of a model, with the float32 masters of 16-bit parameters."""
    return model.state_dict() | {name: tensor.detach() for name, tensor in _stepped(model, optimizer).items()}


def _stepped(model: nn.Module, optimizer: Optimizer | None) -> dict[str, nn.Parameter]:
    """Return, by parameter name, the tensor that the optimiser steps: the parameter, or its master."""
    if isinstance(optimizer, MasterAdamW):
        masters = {name: optimizer.master_of(parameter) for name, parameter in model.named_parameters()}
        return {name: master for name, master in masters.items() if master is not None}
    if optimizer is None:
        return {}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in held}


def _empty_like(entry: TensorStorageMetadata, stepped: nn.Parameter, optimizer: Optimizer) -> Tensor:
    """Return an empty state tensor: sharded and typed like the stepped tensor if it has its shape, else unsharded."""
    if entry.size == stepped.shape and stepped.ndim > 0:
        return torch.zeros_like(stepped, requires_grad=False)
    # Fused kernels require step counts on the device, others on the CPU.
    device = stepped.device if optimizer.defaults.get("fused") else None
    return torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)


def _compare_names(
    folder: str | Path, saved: dict[str, TensorStorageMetadata], weights: dict[str, Tensor], may_lack: set[str]
) -> None:
    what, fix = f"{folder} belongs to a different model", "Use the model section of its config.yaml."
    missing, unexpected = sorted(weights.keys() - saved.keys() - may_lack), sorted(saved.keys() - weights.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"{what}: {len(missing)} tensors of the model are not in it ({', '.join(missing[:3])}), and it has "
            f"{len(unexpected)} additional tensors ({', '.join(unexpected[:3])}). {fix}"
        )
    for name, entry in saved.items():
        there, here = list(entry.size), list(weights[name].shape)
        if there != here:
            raise CheckpointError(f"{what}: '{name}' is {there} there and {here} here. {fix}")


def _cause(error: BaseException) -> BaseException:
    """Return the first cause (DCP wraps the errors of all ranks); raise it if it is a KeyboardInterrupt."""
    if not isinstance(error, CheckpointException):
        return error
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, KeyboardInterrupt):
        raise KeyboardInterrupt from error
    return cause


def _reason(error: BaseException) -> str:
    """Return the first cause in one line."""
    cause = _cause(error)
    return str(error) if cause is error else f"{type(cause).__name__}: {cause}"
