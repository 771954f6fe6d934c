"""A dictionary of token data whose tensors share their first axis, the rows of a batch."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.llm.packing import deal_by_length, first_fit_decreasing

Spec = TypeVar("Spec")

IMAGE_KEYS = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw", "spatial_shapes",
              "batch_num_images")  # fmt: skip
"""Keys whose second axis never is that of the tokens. A tensor has one image per row; a list has a tensor of the images of each row."""


class DynamicBatchingArgs(TypedDict, total=False):
    """Micro-batches of as many rows as fit a number of tokens, padding included.

    Attributes:
        max_tokens_per_microbatch: Largest ``rows * longest row``.
        input_lengths_key: Key of the row lengths; without it they are the sums of ``attention_mask``.
        sequence_length_round: The longest row counts rounded up to a multiple of this.
    """

    max_tokens_per_microbatch: int
    input_lengths_key: str
    sequence_length_round: int


class SequencePackingArgs(TypedDict, total=False):
    """Micro-batches of sequences that are laid end to end in one row (``rlinf.llm.packing``).

    Attributes:
        max_tokens_per_microbatch: Largest sum of lengths.
        input_lengths_key: As above.
    """

    max_tokens_per_microbatch: int
    input_lengths_key: str


class BatchedDataDict(UserDict[str, Any], Generic[Spec]):
    """Rows by key. ``BatchedDataDict["GenerationDatumSpec"]`` names the keys that are expected.

    Tensors (of one axis or more) and lists hold one entry per row. Everything else (numbers, text, None, tensors without an
    axis) belongs to the batch as a whole and goes with every part of it.

    Attributes:
        micro_batches: Row numbers of each micro-batch, on the parts of ``shard_by_batch_size`` with dynamic batching or
            packing; None elsewhere.
    """

    micro_batches: list[list[int]] | None = None

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """Join batches along the rows, after padding tensors on the right to the widest.

        Args:
            batches: All with the same keys; what belongs to a batch as a whole must be equal in all.
            pad_value_dict: Value to pad with, by key; 0 elsewhere.

        Raises:
            ConfigError: There is no batch, or the keys, number of axes or whole-batch values differ.
        """
        if not batches:
            raise ConfigError("from_batches got no batch; required: one or more.")
        batches = [cls(batch) for batch in batches]
        for batch in batches[1:]:
            if batch.keys() != batches[0].keys():
                differing = sorted(batch.keys() ^ batches[0].keys())
                raise ConfigError(
                    f"from_batches got batches whose keys differ: {differing}. Give all of them the same keys"
                )
        pad_values = pad_value_dict or {}
        return cls({key: _join([batch[key] for batch in batches], pad_values.get(key, 0), key) for key in batches[0]})

    @property
    def size(self) -> int:
        """Number of rows.

        Raises:
            ConfigError: Two keys have different numbers of rows, or no key has rows.
        """
        sizes = {key: len(value) for key, value in self.items() if _has_rows(value)}
        if len(set(sizes.values())) != 1:
            hint = " Give images as a list, with a tensor of those of each row" if set(IMAGE_KEYS) & set(sizes) else ""
            raise ConfigError(f"The rows of a batch are {sizes or 'missing'}; required: one number for all keys.{hint}")
        return next(iter(sizes.values()))

    def lengths(self, key: str | None = None) -> list[int]:
        """Tokens of each row: the values of ``key``, else those of prompt and response, else of ``attention_mask``."""
        name = key or "attention_mask"
        if key is None and "output_ids" in self:
            return tokens_and_mask(self)[1].sum(-1).tolist()
        if name not in self:
            raise ConfigError(f"The batch has no '{name}', which gives the length of each row; it has {sorted(self)}.")
        return (self[key] if key else self["attention_mask"].sum(-1)).tolist()

    def select_indices(self, indices: Sequence[int] | Tensor) -> BatchedDataDict:
        """Return the rows of these numbers, in this order; of a bool tensor ``[B]``, those where it is true.

        Raises:
            ConfigError: A bool tensor has not one entry per row.
        """
        rows = torch.as_tensor(indices)
        if rows.dtype == torch.bool:
            if rows.shape != (self.size,):
                raise ConfigError(f"select_indices got bools {list(rows.shape)}; required: [{self.size}], one per row.")
            rows = rows.nonzero().squeeze(1)
        rows = rows.long()

        def select(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[rows.to(value.device)]
            return [value[row] for row in rows.tolist()]

        return self._map_rows(select)

    def slice(self, start: int, end: int) -> BatchedDataDict:
        """Return the rows ``start`` to ``end`` (exclusive); tensors are views.

        Raises:
            ConfigError: The range reaches outside the batch.
        """
        if not 0 <= start <= end <= self.size:
            raise ConfigError(f"Rows {start} to {end} were asked of a batch with {self.size}.")
        return self._map_rows(lambda value: value[start:end])

    def get_batch(self, batch_index: int, batch_size: int) -> BatchedDataDict:
        """Return the rows of the ``batch_index``-th batch of ``batch_size`` rows; the last one may be shorter."""
        start = batch_index * batch_size
        return self.slice(start, min(start + batch_size, self.size))

    def chunk(self, rank: int, chunks: int) -> BatchedDataDict:
        """Return the ``rank``-th of ``chunks`` contiguous parts; the first ones have a row more if it does not divide."""
        if not 0 <= rank < chunks:
            raise ConfigError(f"chunk got rank={rank} of chunks={chunks}; required: 0 to {chunks - 1}.")
        bounds = _bounds(self.size, chunks)
        return self.slice(bounds[rank], bounds[rank + 1])

    def reorder_data(self, indices: Sequence[int]) -> None:
        """Move row ``i`` to place ``indices[i]``, in place: undoes the order that ``shard_by_batch_size`` reports.

        Raises:
            ConfigError: ``indices`` is not a permutation of the rows.
        """
        if sorted(indices) != list(range(self.size)):
            raise ConfigError(f"reorder_data got {list(indices)}; required: each of 0 to {self.size - 1} once.")
        self.update(self.select_indices(torch.as_tensor(indices).argsort()))

    def repeat_interleave(self, num_repeats: int) -> BatchedDataDict:
        """Return each row ``num_repeats`` times in a row."""
        return self.select_indices(torch.arange(self.size).repeat_interleave(num_repeats))

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Keep the first ``truncated_len`` entries of axis ``dim`` of all tensors that have it, in place; images stay whole.

        Raises:
            ConfigError: ``dim`` is that of the rows, or counts from the end, where it may be.
        """
        if dim < 1:
            raise ConfigError(f"truncate_tensors got dim={dim}; required: 1 or more. Of rows, use slice")
        for key, value in self.items():
            if (
                key not in IMAGE_KEYS
                and isinstance(value, Tensor)
                and value.ndim > dim
                and value.shape[dim] > truncated_len
            ):
                self[key] = value.narrow(dim, 0, truncated_len)

    def to(self, device: str | torch.device) -> BatchedDataDict:
        """Return the batch with its tensors on ``device``, those in lists too."""
        moved = type(self)({key: _moved(value, device) for key, value in self.items()})
        moved.micro_batches = self.micro_batches
        return moved

    def get_dict(self) -> dict[str, Any]:
        """Return a plain dictionary of the same values."""
        return dict(self.data)

    def all_gather(
        self, group: dist.ProcessGroup | None = None, pad_value_dict: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """Join the batches of all ranks, in rank order, on every rank; numbers of rows and widths may differ.

        Args:
            group: Process group; None: the default one. Without any, or of one rank, the batch itself is returned.
            pad_value_dict: As in ``from_batches``.
        """
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
        """Split the rows over ranks, so that each global batch of ``batch_size`` rows is spread over all of them.

        With ``shards=2, batch_size=4``, rows ``0..7`` go to ``[0, 1, 4, 5]`` and ``[2, 3, 6, 7]``.

        Args:
            shards: Number of parts.
            batch_size: Rows of one global batch; None: all rows are one.
            allow_uneven_shards: Let the first parts have a row more where it does not divide (only without the two below).
            dynamic_batching_args: Deal rows by length and mark ``micro_batches`` by padded tokens; all parts have equally many.
            sequence_packing_args: Deal bins of sequences and mark them as ``micro_batches``; all parts have equally many.

        Returns:
            The parts; with one of the last two arguments also ``order``: the row numbers of the parts one after another, for
            ``reorder_data`` of what was computed from them.

        Raises:
            ConfigError: The rows do not divide, a row does not fit, or the arguments exclude each other.
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
                dealt = [[[batch[item] for item in each] for each in bins[rank::shards]] for rank in range(shards)]
            else:
                bounds = _bounds(len(batch), shards)
                dealt = [[batch[bounds[rank] : bounds[rank + 1]]] for rank in range(shards)]
            for rank, groups in enumerate(dealt):
                for group in groups:
                    micro_batches[rank].append(list(range(len(rows[rank]), len(rows[rank]) + len(group))))
                    rows[rank] += group
        parts = [self.select_indices(each) for each in rows]
        if arguments is None:
            return parts
        for part, marked in zip(parts, micro_batches, strict=True):
            part.micro_batches = marked
        return parts, [row for each in rows for row in each]

    def make_microbatch_iterator(self, microbatch_size: int | None = None) -> Iterator[BatchedDataDict]:
        """Yield micro-batches: of ``microbatch_size`` rows (the last may be shorter), or else those that are marked.

        Padding columns that no row of a marked micro-batch needs are cut off.

        Raises:
            ConfigError: No size is given and none are marked.
        """
        if microbatch_size is not None:
            for start in range(0, self.size, microbatch_size):
                yield self.slice(start, min(start + microbatch_size, self.size))
            return
        if self.micro_batches is None:
            raise ConfigError(
                "make_microbatch_iterator needs microbatch_size=<rows>: this batch has no marked micro-batches."
            )
        for rows in self.micro_batches:
            yield self.select_indices(rows).without_padding_columns()

    def without_padding_columns(self) -> BatchedDataDict:
        """Return the batch without the last columns that are padding in every row, of outputs where there are any."""
        if "output_ids" not in self and "attention_mask" not in self:
            return self
        mask = tokens_and_mask(self)[1] if "output_ids" in self else self["attention_mask"]
        needed = max(1, int(mask.bool().any(0).nonzero().max()) + 1) if mask.any() else 1

        def cut(key: str, value: Any) -> Any:
            per_token = key not in IMAGE_KEYS and isinstance(value, Tensor) and value.shape[:2] == mask.shape
            return value[:, :needed] if per_token else value

        return type(self)({key: cut(key, value) for key, value in self.items()})

    def _check_shards(self, shards: int, batch_size: int, uneven: bool, dynamic: Any, packing: Any) -> None:
        if min(shards, batch_size) < 1:
            raise ConfigError(f"shard_by_batch_size got shards={shards}, batch_size={batch_size}; required: 1 or more.")
        for given, spec in ((dynamic, DynamicBatchingArgs), (packing, SequencePackingArgs)):
            known = spec.__annotations__.keys()
            if given is not None and not {"max_tokens_per_microbatch"} <= given.keys() <= known:
                raise ConfigError(
                    f"shard_by_batch_size got {dict(given)}; required: max_tokens_per_microbatch, and of {', '.join(known)} no others."
                )
        if dynamic is not None and packing is not None:
            raise ConfigError("dynamic_batching_args and sequence_packing_args exclude each other. Give one of them")
        if uneven and (dynamic is not None or packing is not None):
            raise ConfigError(
                "allow_uneven_shards=True is for plain shards; dynamic batching and packing choose the rows."
            )
        if packing is not None or uneven:
            return
        hint = "" if dynamic is not None else ", or allow_uneven_shards=True"
        if self.size % batch_size:
            raise ConfigError(
                f"{self.size} rows do not divide into batch_size={batch_size}. Use a divisor of {self.size}{hint}"
            )
        if batch_size % shards:
            raise ConfigError(
                f"{batch_size} rows do not divide into shards={shards}. Use a divisor of {batch_size}{hint}"
            )

    def _map_rows(self, function: Any) -> BatchedDataDict:
        return type(self)({key: function(value) if _has_rows(value) else value for key, value in self.items()})


def tokens_and_mask(data: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Token ids ``[B, S]`` and bool mask ``[B, S]`` of prompts, training data or outputs of a generation.

    Outputs (``output_ids``) come first, so that a batch to which they were added is read as prompt and response.

    Raises:
        ConfigError: A key is missing, is not a tensor, or has another shape than the other asks for.
    """
    generated = "output_ids" in data
    keys = ("output_ids", "unpadded_sequence_lengths") if generated else ("input_ids", "attention_mask")
    for key in keys:
        if key not in data:
            raise ConfigError(f"The batch has no '{key}'; it has {sorted(data)}.")
        if not isinstance(data[key], Tensor):
            raise ConfigError(
                f"'{key}' is a {type(data[key]).__name__}; required: a torch.Tensor, padded on the right."
            )
    ids, other = (data[key] for key in keys)
    if ids.ndim != 2 or other.shape != (ids.shape[:1] if generated else ids.shape):
        required = "[B, S] and [B]" if generated else "one shape [B, S]"
        raise ConfigError(f"{keys[0]} are {list(ids.shape)} and {keys[1]} {list(other.shape)}; required: {required}.")
    if not generated:
        return ids, other.bool()
    return ids, torch.arange(ids.shape[1], device=ids.device) < other.to(ids.device).unsqueeze(1)


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _moved(value: Any, device: str | torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value


def _bounds(total: int, parts: int) -> list[int]:
    """Ends of contiguous parts as equal as they can be, the first ones larger."""
    shorter, extra = divmod(total, parts)
    return [part * shorter + min(part, extra) for part in range(parts + 1)]


def _join(values: list[Any], pad_value: float, key: str) -> Any:
    first = values[0]
    if len({(isinstance(value, list), isinstance(value, Tensor)) for value in values}) > 1:
        raise ConfigError(f"from_batches: '{key}' is of the types {[type(value).__name__ for value in values]}.")
    if isinstance(first, list):
        return [item for value in values for item in value]
    if not _has_rows(first):
        same = all(torch.equal(first, value) if isinstance(first, Tensor) else first == value for value in values)
        if not same:
            raise ConfigError(f"from_batches: '{key}' belongs to the whole batch and differs: {values}.")
        return first
    return join_padded(values, key, pad_value)


def join_padded(values: Sequence[Tensor], key: str, pad_value: float = 0.0) -> Tensor:
    """Join tensors along the rows, every other axis padded at its end to the longest.

    Raises:
        ConfigError: They have different numbers of axes; names ``key``.
    """
    if len({value.ndim for value in values}) > 1:
        raise ConfigError(
            f"'{key}' has the shapes {[list(value.shape) for value in values]}; required: equally many axes."
        )
    widest = [max(value.shape[axis] for value in values) for axis in range(1, values[0].ndim)]
    return torch.cat([_pad_right(value, widest, pad_value) for value in values])


def _pad_right(value: Tensor, widths: list[int], pad_value: float) -> Tensor:
    missing = [amount for axis in range(len(widths), 0, -1) for amount in (0, widths[axis - 1] - value.shape[axis])]
    return torch.nn.functional.pad(value, missing, value=pad_value) if any(missing) else value
