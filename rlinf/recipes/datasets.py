"""Load dataset rows from the hub, a folder or a file, and read them in an order that depends only on the seed."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from rlinf.data.rows import shuffled_rows
from rlinf.distributed.process_group import world_size
from rlinf.errors import ConfigError, import_extra
from rlinf.files import TextFileError
from rlinf.models.loading import hub_fault
from rlinf.recipes.row_files import KINDS, METADATA, is_plain, stream_rows
from rlinf.recipes.samples import BadRowError, Row, tokens_of, truncated_and_equal
from rlinf.seeding import derive_seed

logger = logging.getLogger("rlinf")

Packed = TypeVar("Packed")

SECTION = "train.train_policy.dataset"
MAKERS = {"arithmetic": "scripts/make_arithmetic_data.py", "shapes": "scripts/make_shapes_vqa.py"}
"""Scripts that generate the packaged recipes' datasets, by output folder."""
READERS = (*KINDS, ".parquet")
"""Supported file suffixes."""
CHECK_SECONDS = 30.0
BLOCK_ROWS = 1000
_SAVED = ("dataset_info.json", "dataset_dict.json")


@dataclass
class Rows:
    """Contiguous range of a dataset with random access.

    Attributes:
        start, stop: Range of rows within ``data``; a stop of None means the end.
        offset: Row number of ``data``'s first item within the dataset, for messages.
        section: Recipe section that configures the dataset, for messages.
    """

    data: Any
    source: str = "the dataset"
    start: int = 0
    stop: int | None = None
    offset: int = 0
    section: str = SECTION

    def __post_init__(self) -> None:
        self.stop = len(self.data) if self.stop is None else self.stop
        if self.stop <= self.start:
            raise ConfigError(
                f"{self.source} has no rows; expected at least one. Set {self.section}.name or {self.section}.split"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self.data[self.start + index]
        if not isinstance(row, Mapping):
            raise BadRowError(f"it is {row!r}; expected a map of columns to values.")
        return dict(row)

    def number(self, index: int) -> int:
        """Return an item's row number within the dataset, counted from 0."""
        return self.offset + self.start + index

    def split_off(self, size: int | float | None) -> tuple[Rows | None, Rows]:
        """Split into validation and training rows; ``size`` is the number (int) or fraction (float) of validation rows, or None."""
        count = math.ceil(size * len(self)) if isinstance(size, float) else int(size or 0)
        if count < 0 or count >= len(self):
            raise ConfigError(f"{SECTION}.test_size={size} takes {count} of the {len(self)} rows of {self.source}, but at least one must "
                              f"remain for training. Set {SECTION}.test_size={max(1, len(self) // 10)}")  # fmt: skip
        if not count:
            return None, self
        middle = self.start + count
        return Rows(self.data, self.source, self.start, middle), Rows(self.data, self.source, middle, self.stop)


def load_rows(
    name: str,
    split: str | Sequence[str] = "train",
    subset: str = "",
    revision: str | None = None,
    streaming: bool = False,
    section: str = SECTION,
) -> Any:
    """Load rows with the ``datasets`` library; return ``Rows``, or a ``datasets.IterableDataset`` if ``streaming``.

    Args:
        name: File (csv, json, jsonl, parquet), folder written by ``save_to_disk``, folder of such files or of images, or ``owner/name``
            on the hub. A mirror in ``$COSMOS_CACHE/datasets/<owner>/<name>`` takes precedence over the hub.
        split: Split, or list of splits to concatenate. A file has only the split ``train``.
        subset: Name of the dataset's configuration, or subfolder of a mirror; empty for the default.
        section: Recipe section that configures the dataset, for messages.
    """
    library: Any = import_extra("datasets", "A recipe", "recipes")
    splits = [split] if isinstance(split, str) else list(split)
    if not name or not splits:
        raise ConfigError(
            f"{section}.name={name!r}, split={split!r}; expected both. Set {section}.name=<folder or file>"
        )
    library.disable_progress_bars()
    check_place(name, section)
    place = f"'{name}' ({subset + ', ' if subset else ''}split {'+'.join(splits)})"
    reason = hub_fault() if local_folder(name) is None else None
    try:
        parts = [_load_split(library, name, split_name, subset, revision, streaming) for split_name in splits]
        # Leave decoding to the packers, which report a broken image with its row number.
        for part in parts:
            if getattr(part, "features", None) is not None:
                part.info.features = library.Features(_undecoded(part.features))
        if isinstance(parts[0], list):
            data: Any = [row for part in parts for row in part]
        else:
            data = parts[0] if len(parts) == 1 else library.concatenate_datasets(parts)
    except TextFileError:
        raise
    except (OSError, ValueError, StopIteration, library.exceptions.DatasetsError) as error:
        cause = error.__cause__ or str(error) or "It has no rows; expected at least one."
        cause = f"it is not in the cache, and {reason}." if reason else cause
        message = f"{place} cannot be read: {cause} Set {section}.name, {section}.subset or {section}.split"
        raise ConfigError(message) from error
    return data if streaming else Rows(data, place, section=section)


def local_folder(name: str) -> Path | None:
    """Return the local folder with the dataset, its file or its ``$COSMOS_CACHE`` mirror, or None if it is not on this machine."""
    path = Path(name).expanduser()
    if path.is_file():
        return path.parent
    if path.is_dir():
        return path
    mirror = cosmos_cache() / "datasets" / name
    return mirror if mirror.is_dir() else None


def cosmos_cache() -> Path:
    """Return the root folder for mirrored datasets and their videos."""
    return Path(os.environ.get("COSMOS_CACHE") or "~/.cache/cosmos").expanduser()


def made_by(name: str) -> str:
    """Return the command that generates a packaged recipe's dataset, or an empty string for all remaining datasets."""
    folder = next(iter(Path(name).parts), "")
    return f"python {MAKERS[folder]} {folder}" if folder in MAKERS else ""


def check_place(name: str, section: str) -> None:
    """Raise ConfigError for an unsupported file type or a missing path, but accept names that may be on the hub."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix not in READERS:
        known = ", ".join(sorted(READERS))
        raise ConfigError(f"{section}.name={name} is a file of type '{path.suffix}'; expected {known}, or a folder.")
    if local_folder(name) is None and (path.is_absolute() or name.startswith(".") or path.suffix in READERS):
        make = f"Make it with {made_by(name)}, or set" if made_by(name) else "Set"
        raise ConfigError(f"{section}.name={name} does not exist. {make} {section}.name=<file, folder or hub name>")


def _load_split(library: Any, name: str, split: str, subset: str, revision: str | None, streaming: bool) -> Any:
    """Load a split as a dataset, or as a list of rows for JSON and CSV files, which declare no types."""
    path, folder = Path(name).expanduser(), local_folder(name)
    # Plain files have only the split train, so apply a slice such as test[:100] to it.
    part = f"train{split[len(split.partition('[')[0]) :]}"
    paths = [path] if path.is_file() else _mirrored_files(folder, subset, split)
    if paths and paths[0].suffix not in KINDS:
        files = [str(file) for file in paths]
        return library.load_dataset("parquet", data_files=files, split=part, streaming=streaming)
    if paths:
        return _undeclared(library, {"train": paths}, KINDS[paths[0].suffix], part, streaming)
    if folder is not None and any((folder / file_name).exists() for file_name in _SAVED):
        saved = library.load_from_disk(str(folder))
        if isinstance(saved, library.DatasetDict):
            if split not in saved:
                raise ValueError(f"Unknown split {split!r}. Should be one of {sorted(saved)}.")
            saved = saved[split]
        return saved.to_iterable_dataset() if streaming else saved
    source = {"path": str(folder or name), "name": subset or None, "revision": None if folder else revision}
    builder = library.load_dataset_builder(**source)
    is_declared = builder.info.features is not None or getattr(builder.config, "field", None) is not None
    # Without declared features, the library infers types from the first rows and fails on later ones, so read the files directly.
    by_split = {str(key): list(value) for key, value in (builder.config.data_files or {}).items()}
    if builder.name in ("csv", "json") and not is_declared:
        return _undeclared(library, by_split, getattr(builder.config, "sep", "json"), split, streaming)
    about = {key: [file for file in files if Path(file).name in METADATA] for key, files in by_split.items()}
    if builder.name == "imagefolder" and folder is not None and all(about.values()):
        return _undeclared(library, about, KINDS[Path(about[next(iter(about))][0]).suffix], split, streaming)
    return library.load_dataset(**source, split=split, streaming=streaming)


def _undeclared(library: Any, files: Mapping[str, Sequence[Any]], kind: str, split: str, streaming: bool) -> Any:
    """Read a split, or a slice such as ``train[:100]``, from untyped ``files`` by split; raise ValueError if it is missing."""
    if streaming and split in files:
        source = {"files": [str(file) for file in files[split]], "kind": kind}
        return library.IterableDataset.from_generator(stream_rows, gen_kwargs=source)
    fetch = library.DownloadManager().download_and_extract
    chosen = [name for name in files if name in split] or list(files)
    rows = {name: list(stream_rows([f if is_plain(f) else fetch(f) for f in files[name]], kind)) for name in chosen}
    if split in rows:
        return rows[split]
    parts = library.ReadInstruction.from_spec(split).to_absolute({name: len(rows[name]) for name in chosen})
    return [row for part in parts for row in rows[part.splitname][part.from_ : part.to]]


def _mirrored_files(folder: Path | None, subset: str, split: str) -> list[Path]:
    """Return a split's files ``<subset>/*<split>*.json`` in a mirror without a dataset card."""
    if folder is None or not subset or (folder / "README.md").exists():
        return []
    files = sorted(path for path in (folder / subset).glob(f"*{split}*") if path.suffix in READERS)
    return [path for path in files if path.suffix == files[0].suffix]


def _undecoded(features: Any) -> Any:
    """Disable decoding of all images, videos and audio in ``features``, in place."""
    for feature in features.values() if isinstance(features, Mapping) else [getattr(features, "feature", None)]:
        if type(feature).__name__ in ("Image", "Video", "Audio"):
            feature.decode = False
        elif feature is not None:
            _undecoded(feature)
    return features


@dataclass
class PackedRows(Generic[Packed]):
    """Packed rows for each optimiser step. They depend only on the seed and the step, so a resumed run reads the same rows.

    ``pack`` converts a row to a sample, pair or prompt, or raises BadRowError. ``seed`` shuffles each epoch; None keeps dataset order.
    ``skip_bad_rows`` replaces each bad row with the next good one. ``in_memory`` caches packed rows.
    """

    rows: Rows
    pack: Callable[[Row], Packed]
    seed: int | None = 0
    skip_bad_rows: bool = False
    in_memory: bool = False
    _bad: dict[int, str] = field(default_factory=dict)
    _cache: dict[int, Packed] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_skipped(self) -> int:
        """Number of bad rows found by this process."""
        return len(self._bad)

    def check(self, seconds: float = CHECK_SECONDS) -> int:
        """Pack rows in dataset order for at most ``seconds`` and return how many were packed; raise BadRowError for a bad row."""
        # Limit the time, because packing a complete dataset would delay the start.
        end, number, num_truncated, num_equal = time.monotonic() + seconds, 0, 0, 0
        for number in range(len(self)):
            is_truncated, is_equal = truncated_and_equal(self._pack_or_mark(number))
            num_truncated, num_equal = num_truncated + is_truncated, num_equal + is_equal
            if time.monotonic() > end:
                break
        if self.num_skipped == number + 1:
            self._good(0)
        checked = f"of the first {number + 1} rows of {self.rows.source}"
        if num_truncated:
            logger.warning("%d %s are longer than policy.model_max_length and are truncated", num_truncated, checked)
        if num_equal == len(self):
            raise ConfigError(f"All {num_equal} pairs of {self.rows.source} are equal, so nothing can be learned; {num_truncated} of them are truncated "
                              "at policy.model_max_length. Raise policy.model_max_length, or use different pairs")  # fmt: skip
        if num_equal:
            logger.warning("%d %s are pairs of equal completions, from which nothing is learned", num_equal, checked)
        if self._bad:
            logger.warning("%d %s are skipped", self.num_skipped, checked)
        return number + 1

    def numbers(self, step: int, batch_size: int) -> np.ndarray:
        """Return the row numbers for a step, int64 ``[batch_size]``; a batch may span two epochs."""
        if self.seed is None:
            return np.arange(step * batch_size, (step + 1) * batch_size) % len(self)
        return shuffled_rows(len(self), step, batch_size, self.seed)

    def batch(self, step: int, batch_size: int, rank: int = 0, num_ranks: int = 1) -> list[Packed]:
        """Return this rank's rows for a step, counted from 0; ranks read consecutive parts of equal size."""
        return [self[int(number)] for number in rank_items(self.numbers(step, batch_size), rank, num_ranks)]

    def __getitem__(self, index: int) -> Packed:
        """Return the packed row with this number, or the next good one."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._good(index)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because the step number alone determines the rows."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, because the state is empty (see ``state_dict``)."""

    def _good(self, index: int) -> Packed:
        for offset in range(len(self)):
            packed = self._pack_or_mark((index + offset) % len(self))
            if packed is not None:
                return packed
        raise ConfigError(f"None of the {len(self)} rows of {self.rows.source} can be used. First row: {self._bad[0]}")

    def _pack_or_mark(self, index: int) -> Packed | None:
        if index in self._bad:
            return None
        if index in self._cache:
            return self._cache[index]
        try:
            packed = self.pack(self.rows[index])
        except BadRowError as error:
            number = self.rows.number(index)
            if not self.skip_bad_rows:
                raise error.at(number, self.rows.source) from None
            logger.warning("Row %d of %s is skipped: %s", number, self.rows.source, error.reason)
            self._bad[index] = error.reason
            return None
        if self.in_memory:
            self._cache[index] = packed
        return packed


def rank_items(items: Any, rank: int, num_ranks: int) -> Any:
    """Return the ``rank``-th of ``num_ranks`` equal, consecutive parts; raise ConfigError if they cannot be equal."""
    if len(items) % num_ranks:
        raise ConfigError(f"A batch of {len(items)} rows cannot be divided among {num_ranks} ranks. "
                          f"Set train.train_batch_per_replica={num_ranks * max(1, len(items) // num_ranks)}")  # fmt: skip
    size = len(items) // num_ranks
    return items[rank * size : (rank + 1) * size]


class StreamedRows(Generic[Packed]):
    """Packed rows from a streamed dataset, for consecutive steps; see ``PackedRows`` for ``pack``, ``seed`` and ``skip_bad_rows``.

    Rows are shuffled within blocks, seeded by seed, epoch and block. Larger blocks mix rows better but need more memory. Every rank
    reads all rows and packs its part. ``state_dict`` stores the start of the current block, which a resumed run reads again.

    Attributes:
        digest: On several ranks, a hash of all blocks opened so far: their sizes and the tokens of their first, middle and last rows. It is
            equal on ranks with equal rows, and has 48 bits so that a float64 represents it exactly.
    """

    def __init__(
        self,
        data: Any,
        pack: Callable[[Row], Packed],
        seed: int | None = 0,
        skip_bad_rows: bool = False,
        source: str = "the dataset",
        block_rows: int = BLOCK_ROWS,
    ) -> None:
        self._data, self._pack, self._seed, self._skip = data, pack, seed, skip_bad_rows
        self.source, self.block_rows = source, block_rows
        self._num_skipped = 0
        self.digest = 0
        self._first = data.state_dict() if hasattr(data, "state_dict") else None
        if self._first is None:
            raise ConfigError(f"{source} is a {type(data).__name__}; required for streaming: datasets.IterableDataset.")
        self._state = {"epoch": 0, "block": 0, "position": 0, "step": 0, "data": self._first}
        self._iterator: Iterator | None = None
        self._block: PackedRows[Packed] | None = None
        self._order: list[int] = []

    @property
    def num_skipped(self) -> int:
        """Number of bad rows found by this process."""
        return self._num_skipped + (self._block.num_skipped if self._block else 0)

    @property
    def num_read(self) -> int:
        """Number of rows read so far in the current epoch."""
        return self._state["block"] * self.block_rows + (len(self._block) if self._block else 0)

    def check(self, seconds: float = CHECK_SECONDS) -> int:
        """Pack rows from the first block; see ``PackedRows.check``."""
        self._open_block()
        return self._block.check(seconds)

    def batch(self, step: int, batch_size: int, rank: int = 0, num_ranks: int = 1) -> list[Packed]:
        """See ``PackedRows.batch``; steps must be consecutive."""
        if step != self._state["step"]:
            raise ConfigError(f"Step {step} of {self.source} was requested, but it is at step {self._state['step']}.")
        # Advance through the complete batch on every rank, so that the streams stay in sync.
        chosen = set(rank_items(range(batch_size), rank, num_ranks))
        packed = []
        for number in range(batch_size):
            block, index = self._next()
            if number in chosen:
                packed.append(block[index])
        self._state["step"] += 1
        return packed

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the position in ``state_dict``, with the same rows in the same order."""
        self._state, self._iterator, self._block = dict(state), None, None

    def _next(self) -> tuple[PackedRows[Packed], int]:
        self._open_block()
        if self._state["position"] == len(self._order):
            self._state["block"] += 1
            self._state["position"] = 0
            self._num_skipped += self._block.num_skipped
            self._block = None
            # Update the state before reading the next block, so that a resumed stream starts at this block.
            self._state["data"] = self._data.state_dict()
            self._open_block()
        self._state["position"] += 1
        return self._block, self._order[self._state["position"] - 1]

    def _open_block(self) -> None:
        if self._block is not None:
            return
        if self._iterator is None:
            self._iterator = self._iterate(self._state["data"])
        rows = self._read()
        if not rows:
            self._state |= {"epoch": self._state["epoch"] + 1, "block": 0, "data": self._first}
            self._iterator = self._iterate(self._first)
            rows = self._read()
        first = self._state["block"] * self.block_rows
        self._block = PackedRows(Rows(rows, self.source, offset=first), self._pack, skip_bad_rows=self._skip)
        self._order = list(range(len(rows)))
        if self._seed is not None:
            seed = derive_seed(self._seed, "block", self._state["epoch"], self._state["block"])
            self._order = np.random.default_rng(seed).permutation(len(rows)).tolist()
        if world_size() > 1:
            tokens = [tokens_of(self._block[row]) for row in (0, len(rows) // 2, len(rows) - 1)]
            text = repr((self.digest, len(rows), tokens))
            self.digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])

    def _iterate(self, state: dict[str, Any]) -> Iterator:
        self._data.load_state_dict(state)
        return iter(self._data)

    def _read(self) -> list[Row]:
        return [row for _, row in zip(range(self.block_rows), self._iterator, strict=False)]
