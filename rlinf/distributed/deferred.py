"""Deferred weights: parameters on the meta device that each rank reads from files once it knows which rows it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from rlinf.errors import CheckpointError

_SOURCE = "rows_in_file"
"""Attribute of a deferred parameter that is preserved when adapters rename it or its dtype changes."""


@dataclass(frozen=True)
class FileTensor:
    """An unread tensor in a safetensors file, or some of its rows."""

    file: Path
    name: str
    shape: torch.Size  # of the selected rows
    first_row: int = 0  # index in the file
    dtype: torch.dtype | None = None  # dtype to convert to, or None for the file's dtype

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows ``start:stop``, or the value of a zero-dimensional tensor."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.file, framework="pt") as file:
                if self.shape:
                    stop = self.shape[0] if stop is None else stop
                    tensor = file.get_slice(self.name)[self.first_row + start : self.first_row + stop]
                else:
                    tensor = file.get_tensor(self.name)
                return tensor if self.dtype is None else tensor.to(self.dtype)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"'{self.name}' in '{self.file}' cannot be read ({error}).") from error

    def chunk(self, chunks: int) -> list[FileTensor]:
        """Divide the rows like ``Tensor.chunk``, without reading them."""
        rows, *row_shape = self.shape
        size = -(-rows // chunks)
        sizes = {start: torch.Size((min(size, rows - start), *row_shape)) for start in range(0, rows, size)}
        return [replace(self, shape=shape, first_row=self.first_row + start) for start, shape in sizes.items()]

    def clone(self) -> FileTensor:
        """Return this object, because each read allocates new memory anyway."""
        return self


Weight = Tensor | FileTensor
"""A checkpoint's tensor, either in memory or still in its file."""


def in_memory(weight: Weight) -> Tensor:
    """Return a checkpoint's tensor, reading it first if it is not in memory."""
    return weight.rows() if isinstance(weight, FileTensor) else weight


def open_tensors(files: list[Path]) -> dict[str, FileTensor]:
    """Return the tensors in safetensors files by name, reading only the headers."""
    from safetensors import SafetensorError, safe_open

    tensors = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    tensors[name] = FileTensor(path, name, torch.Size(file.get_slice(name).get_shape()))
        except (OSError, SafetensorError) as error:
            problem = f"'{path}' cannot be read as safetensors ({error})"
            raise CheckpointError(f"{problem}. Set model.model_path=<another folder>") from error
    return tensors


def defer(parameter: nn.Parameter, source: FileTensor) -> None:
    """Record the file tensor that a meta-device parameter will be read from."""
    setattr(parameter, _SOURCE, source)


def is_deferred(model: nn.Module) -> bool:
    """Return whether any parameters have not been read yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def deferred_parameters(model: nn.Module) -> dict[str, FileTensor]:
    """Return the file tensors of deferred parameters, set to the parameters' dtypes. A shared parameter is included once.

    Raise ValueError if a parameter or buffer on the meta device has no file.
    """
    sources, lost = {}, []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            source = getattr(tensor, _SOURCE, None)
            if source is None:
                lost.append(name)
            else:
                sources[name] = replace(source, dtype=tensor.dtype)
    if lost:
        raise ValueError(f"{lost[:5]} ({len(lost)}) are on the meta device without a file")
    return sources
