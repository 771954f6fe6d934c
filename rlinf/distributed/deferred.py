"""Deferred weights: parameters on the meta device that are read from files once a rank knows which rows it holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from rlinf.errors import CheckpointError

_SOURCE = "rows_in_file"
"""Attribute of a deferred parameter. It survives when adapters rename the parameter or its dtype changes."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a safetensors file, or some of its rows, which is not read yet."""

    file: Path
    name: str
    shape: torch.Size  # of the rows
    first_row: int = 0  # in the file
    dtype: torch.dtype | None = None  # to which the rows are rounded; None: the file's

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Read only rows ``start:stop``, or the scalar if the tensor has no dimensions."""
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
        """Divide the rows as ``Tensor.chunk`` does; nothing is read."""
        rows, *row_shape = self.shape
        size = -(-rows // chunks)
        sizes = {start: torch.Size((min(size, rows - start), *row_shape)) for start in range(0, rows, size)}
        return [replace(self, shape=shape, first_row=self.first_row + start) for start, shape in sizes.items()]

    def clone(self) -> FileTensor:
        """Return itself: each read allocates new memory."""
        return self


Weight = Tensor | FileTensor
"""A tensor of a checkpoint, read or not."""


def in_memory(weight: Weight) -> Tensor:
    """Return a tensor of a checkpoint, reading it if it is not read yet."""
    return weight.rows() if isinstance(weight, FileTensor) else weight


def open_tensors(files: list[Path]) -> dict[str, FileTensor]:
    """Return the tensors of safetensors files by name; only the headers are read."""
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
    """Record the file tensor of a parameter on the meta device."""
    setattr(parameter, _SOURCE, source)


def is_deferred(model: nn.Module) -> bool:
    """Return whether any parameter is still in a file."""
    return any(parameter.is_meta for parameter in model.parameters())


def deferred_parameters(model: nn.Module) -> dict[str, FileTensor]:
    """Return the file tensors of the deferred parameters, in the parameters' dtypes; a shared parameter appears once.

    Raise ValueError if a parameter or buffer is on the meta device without a file.
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
