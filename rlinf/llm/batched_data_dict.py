"""Dictionary for batched token data, whose values have the batch as their first axis."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar, get_type_hints

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.llm.packing import deal_by_length, first_fit_decreasing

Batch = Mapping[str, Any]
"""Tensors and lists with a row for each sequence, e.g. a ``BatchedDataDict``."""

Spec = TypeVar("Spec")

IMAGE_KEYS = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw", "spatial_shapes",
              "batch_num_images")  # fmt: skip
"""Keys without a token axis. A tensor contains one image per row; a list contains one tensor of images per row."""


class SequencePackingArgs(TypedDict, total=False):
    """Arguments for filling micro-batches with sequences concatenated into one row (``rlinf.llm.packing``).

    Attributes:
        max_tokens_per_microbatch: Maximum sum of the sequence lengths; in dynamic batching, of ``rows * longest row``.
        input_lengths_key: Key with the row lengths; by default, they are the sums of ``attention_mask``.
    """

    max_tokens_per_microbatch: int
    input_lengths_key: str


class DynamicBatchingArgs(SequencePackingArgs, total=False):
    """Arguments for filling micro-batches with padded rows, whose longest is rounded up to a multiple of ``sequence_length_round``."""

    sequence_length_round: int


# Some methods are only called by users, whose code relies on the complete interface.
class BatchedDataDict(UserDict[str, Any], Generic[Spec]):
    """Batch of rows by key. A type such as ``BatchedDataDict["GenerationDatumSpec"]`` documents the expected keys.

    Lists, and tensors with at least one axis, have one entry per row. All remaining values (numbers, text, None, 0-d tensors) belong to
    the complete batch and are copied to every part.

    Attributes:
        micro_batches: Row numbers in each micro-batch, set by ``shard_by_batch_size`` with dynamic batching or packing.
    """

    micro_batches: list[list[int]] | None = None

    @classmethod
    def from_batches(
        cls, batches: Sequence[Batch], pad_value_dict: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """Concatenate batches; right-pad tensors to the widest one, with the padding value for their key or 0.

        Raise ConfigError without batches, or if keys or batch-level values differ.
        """
        if not batches:
            raise ConfigError("from_batches needs at least one batch.")
        batches = [cls(batch) for batch in batches]
        for batch in batches[1:]:
            if batch.keys() != batches[0].keys():
                differing = sorted(batch.keys() ^ batches[0].keys())
                raise ConfigError(f"from_batches needs batches with equal keys, but these differ: {differing}")
        pad_values = pad_value_dict or {}
        return cls({key: _join([batch[key] for batch in batches], pad_values.get(key, 0), key) for key in batches[0]})

    @property
    def size(self) -> int:
        """Number of rows. Raises ConfigError if it differs between keys, or no key has rows."""
        sizes = {key: len(value) for key, value in self.items() if _has_rows(value)}
        if len(set(sizes.values())) != 1:
            hint = " Pass images as a list with one tensor per row" if set(IMAGE_KEYS) & set(sizes) else ""
            raise ConfigError(f"The numbers of rows are {sizes or 'missing'}; expected the same for all keys.{hint}")
        return next(iter(sizes.values()))

    def lengths(self, key: str | None = None) -> list[int]:
        """Return the number of tokens per row, from ``key``, the lengths of prompt and response, or ``attention_mask``."""
        name = key or "attention_mask"
        if key is None and "output_ids" in self:
            return tokens_and_mask(self)[1].sum(-1).tolist()
        if name not in self:
            raise ConfigError(f"The batch has no '{name}', the row lengths; it has {sorted(self)}.")
        return (self[name] if key else self[name].sum(-1)).tolist()

    def select_indices(self, indices: Sequence[int] | Tensor) -> BatchedDataDict:
        """Return rows selected by their numbers, in the given order, or by a bool mask ``[B]``."""
        rows = torch.as_tensor(indices)
        if rows.dtype == torch.bool:
            if rows.shape != (self.size,):
                raise ConfigError(f"select_indices got a mask {list(rows.shape)}; expected shape [{self.size}].")
            rows = rows.nonzero().squeeze(1)
        rows = rows.long()

        def select(value: object) -> Any:
            return value[rows.to(value.device)] if isinstance(value, Tensor) else [value[row] for row in rows.tolist()]

        return self._map_rows(select)

    def slice(self, start: int, end: int) -> BatchedDataDict:
        """Return the rows from ``start`` to ``end`` (exclusive), which must exist; tensors are views."""
        if not 0 <= start <= end <= self.size:
            raise ConfigError(f"Rows {start} to {end} are not in a batch of {self.size} rows.")
        return self._map_rows(lambda value: value[start:end])

    def get_batch(self, batch_index: int, batch_size: int) -> BatchedDataDict:
        """Return the ``batch_index``-th batch of ``batch_size`` rows; the last one may be shorter."""
        start = batch_index * batch_size
        return self.slice(start, min(start + batch_size, self.size))

    def chunk(self, rank: int, chunks: int) -> BatchedDataDict:
        """Return the ``rank``-th of ``chunks`` contiguous parts; if rows do not divide evenly, the first parts are larger."""
        if not 0 <= rank < chunks:
            raise ConfigError(f"chunk got rank={rank} of chunks={chunks}; expected 0 to {chunks - 1}.")
        bounds = _bounds(self.size, chunks)
        return self.slice(bounds[rank], bounds[rank + 1])

    def reorder_data(self, indices: Sequence[int]) -> None:
        """Move each row ``i`` to ``indices[i]`` in place, which restores the order before ``shard_by_batch_size``."""
        if sorted(indices) != list(range(self.size)):
            raise ConfigError(f"reorder_data got {list(indices)}; expected each of 0 to {self.size - 1} once.")
        self.update(self.select_indices(torch.as_tensor(indices).argsort()))

    def repeat_interleave(self, num_repeats: int) -> BatchedDataDict:
        """Return a batch with each row repeated ``num_repeats`` times consecutively."""
        return self.select_indices(torch.arange(self.size).repeat_interleave(num_repeats))

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Truncate axis ``dim`` (at least 1) of all tensors except images to ``truncated_len``, in place."""
        if dim < 1:
            raise ConfigError(f"truncate_tensors got dim={dim}; expected 1 or more. Use slice for rows")
        for key, value in self.items():
            if key not in IMAGE_KEYS and isinstance(value, Tensor) and value.ndim > dim:
                self[key] = value.narrow(dim, 0, min(truncated_len, value.shape[dim]))

    def to(self, device: str | torch.device) -> BatchedDataDict:
        """Return the batch with all tensors on ``device``, including those in lists."""
        moved = type(self)({key: _moved(value, device) for key, value in self.items()})
        moved.micro_batches = self.micro_batches
        return moved

    def get_dict(self) -> dict[str, Any]:
        """Return the values as a plain dictionary."""
        return dict(self.data)

    def all_gather(
        self, group: dist.ProcessGroup | None = None, pad_value_dict: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """Return the batches of all ranks in ``group``, concatenated in rank order with ``from_batches``."""
        if not dist.is_initialized() or dist.get_world_size(group) == 1:
            return self
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, self.to("cpu").get_dict(), group=group)
        joined = type(self).from_batches(parts, pad_value_dict)
        devices = {key: value.device for key, value in self.items() if isinstance(value, Tensor)}
        return type(self)({key: value.to(devices[key]) if key in devices else value for key, value in joined.items()})

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[BatchedDataDict] | tuple[list[BatchedDataDict], list[int]]:
        """Split each global batch of ``batch_size`` rows (all rows if None) over the shards.

        With ``shards=2, batch_size=4``, rows ``0..7`` are split into ``[0, 1, 4, 5]`` and ``[2, 3, 6, 7]``. Raise ConfigError if rows do
        not divide evenly, a row is too long, or mutually exclusive arguments are passed.

        Args:
            allow_uneven_shards: Allow larger first parts if rows do not divide evenly. Cannot be combined with the arguments below.
            dynamic_batching_args: Distribute rows by length, and fill equally many ``micro_batches`` per part by padded tokens.
            sequence_packing_args: Distribute bins of sequences as ``micro_batches``, equally many per part.

        Returns:
            The parts; with one of the last two arguments also their concatenated row numbers, for ``reorder_data``.
        """
        batch_size = self.size if batch_size is None else batch_size
        self._check_shards(shards, batch_size, allow_uneven_shards, dynamic_batching_args, sequence_packing_args)
        rows: list[list[int]] = [[] for _ in range(shards)]
        micro_batches: list[list[list[int]]] = [[] for _ in range(shards)]
        arguments = sequence_packing_args if dynamic_batching_args is None else dynamic_batching_args
        lengths = [] if arguments is None else self.lengths(arguments.get("input_lengths_key"))
        for start in range(0, self.size, batch_size):
            batch = list(range(start, min(start + batch_size, self.size)))
            if dynamic_batching_args is not None:
                length_multiple = dynamic_batching_args.get("sequence_length_round", 1)
                max_tokens = dynamic_batching_args["max_tokens_per_microbatch"]
                dealt = deal_by_length(batch, lengths, shards, max_tokens, length_multiple)
            elif sequence_packing_args is not None:
                capacity = sequence_packing_args["max_tokens_per_microbatch"]
                bins = first_fit_decreasing([lengths[row] for row in batch], capacity, num_bins_multiple=shards)
                dealt = [[[batch[item] for item in items] for items in bins[rank::shards]] for rank in range(shards)]
            else:
                bounds = _bounds(len(batch), shards)
                dealt = [[batch[bounds[rank] : bounds[rank + 1]]] for rank in range(shards)]
            for rank, groups in enumerate(dealt):
                for group in groups:
                    micro_batches[rank].append(list(range(len(rows[rank]), len(rows[rank]) + len(group))))
                    rows[rank] += group
        parts = [self.select_indices(part_rows) for part_rows in rows]
        if arguments is None:
            return parts
        for part, marked in zip(parts, micro_batches, strict=True):
            part.micro_batches = marked
        return parts, [row for part_rows in rows for row in part_rows]

    def make_microbatch_iterator(self, microbatch_size: int | None = None) -> Iterator[BatchedDataDict]:
        """Yield micro-batches with ``microbatch_size`` rows (the last may be shorter), or as defined by ``micro_batches``.

        For the latter, columns that are padding in all rows of a micro-batch are removed.
        """
        if microbatch_size is not None:
            for start in range(0, self.size, microbatch_size):
                yield self.slice(start, min(start + microbatch_size, self.size))
            return
        if self.micro_batches is None:
            raise ConfigError("make_microbatch_iterator needs microbatch_size=<rows>: this batch has no micro_batches.")
        for rows in self.micro_batches:
            yield self.select_indices(rows).without_padding_columns()

    def without_padding_columns(self) -> BatchedDataDict:
        """Return the batch without the trailing columns that are padding in every row."""
        if "output_ids" not in self and "attention_mask" not in self:
            return self
        mask = tokens_and_mask(self)[1] if "output_ids" in self else self["attention_mask"]
        needed = max(1, int(mask.bool().any(0).nonzero().max()) + 1) if mask.any() else 1

        def cut(key: str, value: object) -> Any:
            per_token = key not in IMAGE_KEYS and isinstance(value, Tensor) and value.shape[:2] == mask.shape
            return value[:, :needed] if per_token else value

        return type(self)({key: cut(key, value) for key, value in self.items()})

    def _check_shards(self, shards: int, batch_size: int, uneven: bool, dynamic: Any, packing: Any) -> None:
        if min(shards, batch_size) < 1:
            raise ConfigError(f"shard_by_batch_size got shards={shards}, batch_size={batch_size}; expected 1 or more.")
        for arguments, spec in ((dynamic, DynamicBatchingArgs), (packing, SequencePackingArgs)):
            known = get_type_hints(spec).keys()
            if arguments is not None and not {"max_tokens_per_microbatch"} <= arguments.keys() <= known:
                raise ConfigError(
                    f"shard_by_batch_size got {dict(arguments)}; expected max_tokens_per_microbatch; known: {', '.join(known)}."
                )
        if uneven + (dynamic is not None) + (packing is not None) > 1:
            raise ConfigError("allow_uneven_shards, dynamic_batching_args and sequence_packing_args exclude each other")
        if packing is not None or uneven:
            return
        hint = "" if dynamic is not None else ", or allow_uneven_shards=True"
        for name, rows, parts in (("batch_size", self.size, batch_size), ("shards", batch_size, shards)):
            if rows % parts:
                raise ConfigError(f"{rows} rows do not divide into {name}={parts}. Use a divisor of {rows}{hint}")

    def _map_rows(self, function: Any) -> BatchedDataDict:
        return type(self)({key: function(value) if _has_rows(value) else value for key, value in self.items()})


def tokens_and_mask(data: Batch) -> tuple[Tensor, Tensor]:
    """Return token ids ``[B, S]`` and a bool mask ``[B, S]`` for prompts, training data or generation outputs.

    ``output_ids``, if present, take precedence over ``input_ids``. Raises ConfigError for missing keys, non-tensors and mismatched shapes.
    """
    generated = "output_ids" in data
    keys = ("output_ids", "unpadded_sequence_lengths") if generated else ("input_ids", "attention_mask")
    for key in keys:
        if key not in data:
            raise ConfigError(f"The batch has no '{key}'; it has {sorted(data)}.")
        if not isinstance(data[key], Tensor):
            raise ConfigError(f"'{key}' is a {type(data[key]).__name__}; expected a torch.Tensor, right-padded.")
    ids, lengths_or_mask = (data[key] for key in keys)
    if ids.ndim != 2 or lengths_or_mask.shape != (ids.shape[:1] if generated else ids.shape):
        required = "[B, S] and [B]" if generated else "one shape [B, S]"
        raise ConfigError(
            f"{keys[0]} are {list(ids.shape)} and {keys[1]} {list(lengths_or_mask.shape)}; expected {required}."
        )
    if not generated:
        return ids, lengths_or_mask.bool()
    return ids, torch.arange(ids.shape[1], device=ids.device) < lengths_or_mask.to(ids.device).unsqueeze(1)


def _has_rows(value: object) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _moved(value: object, device: str | torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value


def _bounds(total: int, parts: int) -> list[int]:
    """Return the bounds of contiguous parts with nearly equal sizes, larger ones first."""
    shorter, extra = divmod(total, parts)
    return [part * shorter + min(part, extra) for part in range(parts + 1)]


def _join(values: list[Any], pad_value: float, key: str) -> Any:
    first = values[0]
    if len({(isinstance(value, list), isinstance(value, Tensor)) for value in values}) > 1:
        raise ConfigError(f"from_batches: '{key}' has different types {[type(value).__name__ for value in values]}.")
    if isinstance(first, list):
        return [item for value in values for item in value]
    if not _has_rows(first):
        if not all(torch.equal(first, value) if isinstance(first, Tensor) else first == value for value in values):
            raise ConfigError(f"from_batches: '{key}' is a value per batch and must be equal, but differs: {values}.")
        return first
    return join_padded(values, key, pad_value)


def join_padded(values: Sequence[Tensor], key: str, pad_value: float = 0.0) -> Tensor:
    """Concatenate tensors along the batch axis; pad all remaining axes at the end to the maximum size."""
    if len({value.ndim for value in values}) > 1:
        shapes = [list(value.shape) for value in values]
        raise ConfigError(f"'{key}' has the shapes {shapes}; expected the same number of axes.")
    widest = [max(value.shape[axis] for value in values) for axis in range(1, values[0].ndim)]
    padded = []
    for value in values:
        missing = [n for width, length in zip(widest, value.shape[1:], strict=True) for n in (width - length, 0)]
        padded.append(F.pad(value, missing[::-1], value=pad_value))  # F.pad starts with the last axis
    return torch.cat(padded)
