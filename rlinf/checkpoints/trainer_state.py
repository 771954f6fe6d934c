"""Files of a checkpoint's weights, optimiser state and random states, which any number of ranks can load.

torch.distributed.checkpoint (DCP) writes a flat dict of existing tensors, named ``model.<name>`` and ``optimizer.<parameter name>.<key>``. ``model.<name>`` is
the tensor updated by the optimiser: for a 16-bit parameter, its float32 master weight. The file does not distinguish master weights
from float32 parameters, so either can be loaded into the other.
"""

import pickle
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.optim import Optimizer

from rlinf.distributed.process_group import rank
from rlinf.errors import CheckpointError
from rlinf.files import naming, write_error
from rlinf.optim.master_adamw import MasterAdamW

# `torch.distributed.checkpoint.state_dict` is not used because it initialises an empty optimiser state with a zero-gradient step,
# after which AdamW's bias correction starts at step 2. It also cannot restore a state in which some parameters have not been updated
# yet, as during critic warm-up.


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
    """Unpickles DCP's index file, allowing only classes that belong in an index."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _PICKLED_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not allowed in an index")


class _Reader(FileSystemReader):
    """DCP's reader, with a restricted unpickler for the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / METADATA_FILE, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Writer(FileSystemWriter):
    """DCP's writer, which omits the run's path and random ID from the index so that identical runs write identical files."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def trainer_tensors(model: nn.Module, optimizer: Optimizer | None, with_base: bool = True) -> dict[str, Tensor]:
    """Return the tensors to save by name, without copying them. Raise CheckpointError if optimiser state contains non-tensors.

    ``with_base`` includes untrained parameters. Set it to False for adapters and actors with base weights stored elsewhere.
    """
    left_out = set() if with_base else frozen_names(model)
    weights = weights_to_save(model, optimizer)
    tensors = {f"{MODEL}{name}": tensor for name, tensor in weights.items() if name not in left_out}
    for name, stepped in _stepped(model, optimizer).items():
        for key, value in optimizer.state.get(stepped, {}).items():
            if not isinstance(value, Tensor):
                what = f"{type(optimizer).__name__} stores '{key}' of '{name}' as {type(value).__name__}"
                raise CheckpointError(f"{what}; only tensors can be saved. Use a different optimiser.")
            tensors[f"{OPTIMIZER}{name}.{key}"] = value
    return tensors


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of the untrained parameters."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def write_tensors(folder: str | Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write ``trainer_tensors`` or a copy of them (a collective call in ``group``); raise CheckpointError on failure."""
    # Do not use warnings.catch_warnings: on exit, it would undo filters set by other threads in the meantime.
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        dcp.save(tensors, storage_writer=_Writer(folder), process_group=group, no_dist=not dist.is_initialized())
    except (CheckpointException, OSError) as error:  # CheckpointException is a BaseException
        reason = write_error(_cause(error), Path(folder) / f"__{rank()}_0.distcp") or _reason(error)
        fix = "Check disk space and permissions, or choose a different output_dir."
        raise CheckpointError(f"Cannot write {folder}: {reason}. {fix}") from error


def read_entries(folder: str | Path) -> dict[str, TensorStorageMetadata]:
    """Return the names, shapes and dtypes of a folder's tensors; raise CheckpointError if they cannot be read."""
    try:
        return _checked_entries(_Reader(folder).read_metadata())
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. Use a different checkpoint.") from error


def read_tensors(folder: str | Path, targets: dict[str, Tensor], no_dist: bool = False) -> None:
    """Read a folder's tensors into ``targets`` (a collective call unless ``no_dist``); raise CheckpointError on failure."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        dcp.load(targets, storage_reader=_Reader(folder), no_dist=no_dist or not dist.is_initialized())
    except (CheckpointException, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be loaded: {_reason(error)}. Use a different checkpoint.") from error


def load_trainer_state(folder: str | Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Load ``model`` and ``optimizer`` in place (a collective call). Optimiser state for unknown parameters is ignored.

    The folder may have been written by any number of ranks, and the model may be sharded. 16-bit weights are rounded from the saved
    weights. Raise CheckpointError if the folder cannot be read, or tensor names or shapes differ from the model's.
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
            weights[name].copy_(tensor)  # round the master weight to the model's dtype


def _checked_entries(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the index entries by name; raise ValueError unless all are tensors stored in the folder."""
    # DCP would unpickle non-tensor entries, and follow file names that lead out of the folder.
    entries: dict[str, TensorStorageMetadata] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{METADATA_FILE} lists '{name}' as {type(entry).__name__}, but only tensors are allowed")
        entries[name] = entry
    for file in (place.relative_path for place in metadata.storage_data.values()):
        if not _DATA_FILE.fullmatch(file):
            raise ValueError(f"{METADATA_FILE} refers to the file '{file}', which is not a data file of the folder")
    return entries


def weights_to_save(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return a model's state dict, with float32 master weights in place of 16-bit parameters."""
    return model.state_dict() | {name: tensor.detach() for name, tensor in _stepped(model, optimizer).items()}


def _stepped(model: nn.Module, optimizer: Optimizer | None) -> dict[str, nn.Parameter]:
    """Map parameter names to the tensors updated by the optimiser: the parameters or their master weights."""
    if isinstance(optimizer, MasterAdamW):
        masters = {name: optimizer.master_of(parameter) for name, parameter in model.named_parameters()}
        return {name: master for name, master in masters.items() if master is not None}
    if optimizer is None:
        return {}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in held}


def _empty_like(entry: TensorStorageMetadata, stepped: nn.Parameter, optimizer: Optimizer) -> Tensor:
    """Return an empty state tensor. If its shape equals the parameter's, it has the same sharding and dtype; otherwise it is unsharded."""
    if entry.size == stepped.shape and stepped.ndim > 0:
        return torch.zeros_like(stepped, requires_grad=False)
    # Fused kernels require step counts on the parameter's device; other kernels, on the CPU.
    device = stepped.device if optimizer.defaults.get("fused") else None
    return torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)


def _compare_names(
    folder: str | Path, saved: dict[str, TensorStorageMetadata], weights: dict[str, Tensor], may_lack: set[str]
) -> None:
    what, fix = f"{folder} belongs to a different model", "Use the model section of its config.yaml."
    missing, unexpected = sorted(weights.keys() - saved.keys() - may_lack), sorted(saved.keys() - weights.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"{what}: it lacks {len(missing)} tensors of the model ({', '.join(missing[:3])}), and contains "
            f"{len(unexpected)} additional tensors ({', '.join(unexpected[:3])}). {fix}"
        )
    for name, entry in saved.items():
        there, here = list(entry.size), list(weights[name].shape)
        if there != here:
            raise CheckpointError(f"{what}: '{name}' has shape {there} there and {here} here. {fix}")


def _cause(error: BaseException) -> BaseException:
    """Return the first of the errors that DCP collected from all ranks; re-raise it if it is a KeyboardInterrupt."""
    if not isinstance(error, CheckpointException):
        return error
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, KeyboardInterrupt):
        raise KeyboardInterrupt from error
    return cause


def _reason(error: BaseException) -> str:
    """Describe the first cause on one line."""
    cause = _cause(error)
    return str(error) if cause is error else f"{type(cause).__name__}: {cause}"


def rng_state() -> dict[str, Any]:
    """Return a copy of the random states of Python, NumPy and torch."""
    version, integers, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": {"version": version, "integers": torch.tensor(integers, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": legacy["bit_generator"], "keys": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "position": int(legacy["state"]["pos"]), "has_gauss": int(legacy["has_gauss"]), "cached": float(legacy["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }  # fmt: skip
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def save_rng_state(path: Path, state: dict[str, Any]) -> None:
    """Write the result of ``rng_state`` to a file."""
    with naming(path):
        torch.save(state, path)


def load_rng_state(path: Path) -> None:
    """Restore random states from a file; raise CheckpointError if it does not contain any."""
    try:
        _set_state(torch.load(path, weights_only=True))
    except (pickle.UnpicklingError, EOFError, KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        # Omit the error's text: it recommends `weights_only=False`, which would run pickled code.
        reason = type(error).__name__
        raise CheckpointError(f"{path} contains no random states ({reason}). Use a different checkpoint.") from error


def _set_state(state: dict[str, Any]) -> None:
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["integers"].tolist()), python["gauss"]))
    keys = legacy["keys"].numpy().astype(np.uint32)
    np.random.set_state((legacy["name"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def leaves_base(model: Any) -> bool:
    """Return whether a model's checkpoints contain only an actor, because the frozen base policy is in the run folder."""
    return getattr(model, "base_store", None) is not None


def may_leave_base(model: Any) -> bool:
    """Return whether a model's checkpoints may omit its frozen weights."""
    return is_adapter(model) or hasattr(model, "base_store")


def is_adapter(model: Any) -> bool:
    """Return whether a model has LoRA layers. If so, its adapters are saved instead of its full weights."""
    return hasattr(model, "peft_config")
