"""Read LeRobotDataset v3.0 folders."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rlinf.data import lerobot_format as layout
from rlinf.data.frames import EncodedFrames, VideoFrames
from rlinf.data.stored import NUMBERS, DatasetInfo, Outcomes, StoredDemonstrations, column_names
from rlinf.errors import ConfigError, damaged
from rlinf.files import Json
from rlinf.flags import flags_of

OWN_FILE = "rlinf.json"
"""File in ``meta`` that contains the env section of the configuration used by ``rlinf collect``."""

OUTCOMES = (layout.EXECUTED, layout.REWARD, layout.DONE, layout.TRUNCATED, layout.SUCCESS, layout.INTERVENTION)
"""Columns of the executed actions and their consequences."""

EPISODE_COLUMNS = re.compile(
    r"episode_index|length|dataset_(from|to)_index|(data|videos/.+)/(chunk_index|file_index|from_timestamp)"
)
"""Columns of ``meta/episodes`` that are read; the remaining ones are statistics."""
ROW_KINDS = {name: "float64" if kind == "float32" else kind for name, kind in layout.ROW_COLUMNS.items()}


def describe(folder: Path) -> DatasetInfo:
    """Read the dataset's description; raise ConfigError if that fails or the format version is not supported."""
    info = layout.read_info(folder)
    features = info["features"]
    images = {name: feature for name, feature in features.items() if feature["dtype"] in ("image", "video")}
    vectors = {
        name: math.prod(feature["shape"])
        for name, feature in features.items()
        if NUMBERS.fullmatch(feature["dtype"]) and name not in layout.ROW_COLUMNS and len(feature["shape"]) < 2
    }
    return DatasetInfo(
        folder=folder,
        format="LeRobotDataset v3.0",
        num_episodes=info["total_episodes"],
        image_shapes={name: _height_width(name, image) for name, image in images.items()},
        state_dims={name: width for name, width in vectors.items() if name not in (layout.ACTION, layout.EXECUTED)},
        state_key=layout.STATE,
        action_dim=vectors.get(layout.ACTION, 0),
        packages=("pyarrow", "av") if "video" in (image["dtype"] for image in images.values()) else ("pyarrow",),
        env=_recorded_env(folder / "meta" / OWN_FILE),
        num_rows=info["total_frames"],
        has_rewards=layout.REWARD in features,
        reports_success_per_row=layout.SUCCESS in features,
        reports_intervention=layout.INTERVENTION in features,
        fps=info["fps"],
    )


def open_dataset(
    folder: Path, cameras: Mapping[str, str], state_key: str | Sequence[str] | None, outcomes: bool = False, *,
    action_key: str | Sequence[str] = layout.ACTION, skip_unreadable: bool = False,
) -> StoredDemonstrations:  # fmt: skip
    """Read all numeric columns, locate the frames of ``cameras`` (env camera name to column), and check consistency."""
    pa = layout.import_pyarrow(f"Reading {folder}")
    info, description = layout.read_info(folder), describe(folder)
    action_keys, state_keys = column_names(action_key), column_names(state_key)
    recorded = (
        OUTCOMES if action_keys == [layout.ACTION] else OUTCOMES[1:]
    )  # executed_action refers to the column action
    recorded = [name for name in recorded if outcomes and name in info["features"]]
    kinds = dict.fromkeys(recorded) | dict.fromkeys([*action_keys, *state_keys], "float32") | ROW_KINDS
    dims = {layout.EXECUTED: description.action_dim, layout.ACTION: description.action_dim, **description.state_dims}
    widths = {name: (dims.get(name, 1), kind) for name, kind in kinds.items()}
    spools = {key: _ImageSpool(folder, key) for key in cameras.values() if info["features"][key]["dtype"] == "image"}
    episodes = _episodes(pa, folder, info)
    columns = _read_rows(pa, folder, widths, spools)
    rows = {name: columns[name][:, 0] for name in ROW_KINDS}
    counts, declared = (
        (len(rows["index"]), len(episodes["episode_index"])),
        (info["total_frames"], info["total_episodes"]),
    )
    if counts != declared:
        text = "it has {} rows and {} episodes, but its description states {} and {}"
        raise damaged(folder, text.format(*counts, *declared))
    # Files may store rows in any order; the column `index` defines the order.
    order = np.argsort(rows["index"], kind="stable")
    columns, rows = ({name: values[order] for name, values in table.items()} for table in (columns, rows))
    if len(twice := np.flatnonzero(np.diff(rows["index"]) == 0)):
        raise damaged(folder, f"data/ has two rows with the index {rows['index'][twice[0]]}")
    tasks = _tasks(pa, folder)
    numbers = sorted(tasks)
    if len(unknown := np.setdiff1d(rows["task_index"], numbers)):
        raise damaged(
            folder, f"a row has the task_index {unknown[0]}, but {layout.TASKS} has {', '.join(map(str, numbers))}"
        )
    actions = np.concatenate([columns[name] for name in action_keys], axis=1)
    dataset = StoredDemonstrations(
        description, {}, np.concatenate([columns[name] for name in state_keys], axis=1) if state_keys else None, actions,
        np.searchsorted(numbers, rows["task_index"]), [tasks[number] for number in numbers], rows["episode_index"],
        outcomes=_outcomes(folder, columns, actions) if outcomes else None,
    )  # fmt: skip
    episode = _check_rows(folder, info["fps"], rows, episodes)
    for camera, key in cameras.items():
        shape = description.image_shapes[key]
        if key in spools:
            dataset.frames[camera] = spools[key].frames(order, shape)
        else:
            dataset.frames[camera] = _video_frames(folder, info, key, episodes, episode, rows["timestamp"], shape)
    return dataset.check_images(skip_unreadable)


def _tables(pa: ModuleType, path: Path, names: Collection[str] | None = None, by_group: bool = False) -> Iterator[Any]:
    """Yield the columns ``names`` of a parquet file, as one table or per row group; raise ConfigError if it is damaged or lacks one."""
    try:
        with pa.parquet.ParquetFile(path) as file:
            known, groups = file.schema_arrow.names, range(file.num_row_groups)
            if missing := sorted(set(names or ()) - set(known)):
                raise ConfigError(
                    f"{path} has no column '{missing[0]}'; it has {', '.join(known)}. Use a different dataset"
                )
            for group in groups if by_group else (groups,):
                yield file.read_row_groups([group] if by_group else group, columns=names)
    except (OSError, pa.ArrowException) as error:
        raise damaged(path, error) from error


def _read_rows(
    pa: ModuleType, folder: Path, widths: Mapping[str, tuple[int, str | None]], spools: Mapping[str, _ImageSpool]
) -> dict[str, np.ndarray]:
    """Return numeric columns, ``[T, width]`` each, and copy the images, because parquet cannot read single rows."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in widths}
    if not (paths := sorted((folder / "data").glob("*/*.parquet"))):
        raise damaged(folder, "data/ has no rows")
    for path in paths:
        (table,) = _tables(pa, path, list(widths))
        for name, (width, kind) in widths.items():
            parts[name].append(_numbers(pa, table.column(name), f"{name} of {path}", width, kind))
        for table in _tables(pa, path, list(spools), by_group=True) if spools else ():
            for key, spool in spools.items():
                spool.append(table.column(key), path)
    return {name: np.concatenate(values) for name, values in parts.items()}


def _numbers(pa: ModuleType, column: Any, place: str, width: int, kind: str | None) -> np.ndarray:
    """Return a numeric column as ``[T, width]``; raise ConfigError for other types or widths, or if ``kind`` would change a value."""
    flat, kinds = column.combine_chunks(), pa.types
    lengths = np.ones(len(flat), dtype=np.int64)
    if kinds.is_list(flat.type) or kinds.is_large_list(flat.type) or kinds.is_fixed_size_list(flat.type):
        lengths = pa.compute.fill_null(pa.compute.list_value_length(flat), 0).to_numpy(zero_copy_only=False)
        flat = flat.flatten()
    if not (kinds.is_floating(flat.type) or kinds.is_integer(flat.type) or kinds.is_boolean(flat.type)):
        raise ConfigError(f"{place} is a column of {column.type}; expected numbers. Use a different dataset")
    if len(wrong := np.flatnonzero(lengths != width)):
        problem = f"row {wrong[0]} has {lengths[wrong[0]]} values"
        raise damaged(place, f"{problem}; its description states {width} ({len(wrong)} of {len(lengths)} rows differ)")
    if flat.null_count:
        raise damaged(place, f"row {flat.is_null().to_numpy(zero_copy_only=False).argmax() // width} lacks a value")
    try:
        return (flat if kind is None else flat.cast(kind)).to_numpy(zero_copy_only=False).reshape(-1, width)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{place} does not fit into {kind} ({error}). Use a different dataset") from error


def _episodes(pa: ModuleType, folder: Path, info: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the numeric columns of ``meta/episodes`` in episode order, ``[E]`` each; raise ConfigError if a data file is missing."""
    place = folder / layout.EPISODES_FOLDER
    tables = [table for path in sorted(place.glob("*/*.parquet")) for table in _tables(pa, path)]
    try:
        table, numbers = pa.concat_tables(tables, promote_options="permissive").sort_by("episode_index"), {}
    except pa.ArrowException as error:
        raise damaged(place, error) from error
    for name in filter(EPISODE_COLUMNS.fullmatch, table.column_names):
        kind = "float64" if "timestamp" in name else "int64"
        numbers[name] = _numbers(pa, table.column(name), f"{name} of {place}", 1, kind)[:, 0]
    files = zip(numbers.get("data/chunk_index", ()), numbers.get("data/file_index", ()), strict=False)
    for chunk, file in sorted(set(files)):
        layout.file_of(folder, info, "data_path", layout.DATA, chunk_index=chunk, file_index=file)
    return numbers


def _check_rows(
    folder: Path, fps: float | None, rows: Mapping[str, np.ndarray], episodes: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Check rows against ``meta/episodes``, frame numbers and the rate; return the index of each row's episode, int64 ``[N]``."""
    ids, first, episode, counts = np.unique(rows["episode_index"], True, True, True)
    starts = rows["index"][first]
    computed = {
        "episode_index": ids,
        "length": counts,
        "dataset_from_index": starts,
        "dataset_to_index": starts + counts,
    }
    for name, values in computed.items():
        known = episodes.get(name, values)
        if not np.array_equal(known, values):
            at = int(np.flatnonzero(known[: len(values)] != values[: len(known)])[:1].sum())
            problem = f"{name} of episode {ids[at]} is {values[at]} according to its rows, but {known[at]} in"
            raise damaged(folder, f"{problem} {layout.EPISODES_FOLDER}")
    # A trimmed episode keeps its frame numbers, so they need not start at 0.
    wanted = np.arange(len(episode)) + (rows["frame_index"][first] - first)[episode]
    if len(wrong := np.flatnonzero(rows["frame_index"] != wanted)):
        row = wrong[0]
        problem = f"row {row} (episode {ids[episode[row]]}) has the frame_index {rows['frame_index'][row]}"
        raise damaged(folder, f"{problem}; expected {wanted[row]}, to follow the previous row")
    steps = np.diff(rows["timestamp"])[np.diff(episode) == 0]
    if fps is not None and len(steps) and not abs(np.median(steps) * fps - 1) < 0.1:
        stamps = f"the time stamps of its rows are {np.median(steps):.4f} s apart"
        raise damaged(folder, f"{stamps}, but {layout.INFO} states fps={fps:g}")
    return episode


def _outcomes(folder: Path, columns: Mapping[str, np.ndarray], actions: np.ndarray) -> Outcomes:
    """Return the consequences of the actions; an episode is treated as truncated unless a column marks it as terminated."""
    flags = {
        name: flags_of(columns[name][:, 0], f"Column '{name}' of {folder}") for name in OUTCOMES[2:] if name in columns
    }
    done, truncated = flags.get(layout.DONE), flags.get(layout.TRUNCATED)
    rewards = columns.get(layout.REWARD)
    return Outcomes(
        executed=columns.get(layout.EXECUTED, actions).astype(np.float32).reshape(len(actions), -1),
        rewards=None if rewards is None else rewards.astype(np.float32).reshape(-1),
        success=flags.get(layout.SUCCESS),
        intervention=flags.get(layout.INTERVENTION),
        terminated=np.zeros(len(actions), dtype=bool) if done is None or truncated is None else done & ~truncated,
    )


class _ImageSpool:
    """Encoded images of one column, stored in row order in an unnamed temporary file."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.file = tempfile.TemporaryFile()
        self.lengths: list[int] = []
        self.faults: dict[int, str] = {}

    def append(self, column: Any, source: Path) -> None:
        """Append the images of a column of the parquet file ``source``."""
        if min(getattr(column.type, "get_field_index", lambda _: -1)(name) for name in ("bytes", "path")) < 0:
            required = "expected images (bytes, path). Use a different camera"
            raise ConfigError(f"{self.key} of {source} is a column of {column.type}; {required}")
        for value in column.to_pylist():
            encoded, reason = (value or {}).get("bytes"), f"no image '{self.key}', in {source}"
            if encoded is None and value and value["path"]:  # the image is a file next to the parquet files
                try:
                    encoded = layout.path_inside(self.folder, value["path"]).read_bytes()
                except OSError as error:
                    reason = str(error)
            if not encoded:
                self.faults[len(self.lengths)], encoded = reason, b""
            self.file.write(encoded)
            self.lengths.append(len(encoded))

    def frames(self, order: np.ndarray, shape: tuple[int, int]) -> EncodedFrames:
        self.file.flush()
        lengths = np.array(self.lengths, dtype=np.int64)
        offsets = np.cumsum(lengths) - lengths
        names = [f"{self.folder} ({self.key})"]
        zeros = np.zeros(len(order), dtype=np.int64)
        faults = {int(row): self.faults[order[row]] for row in np.flatnonzero(lengths[order] == 0)}
        return EncodedFrames([self.file], zeros, offsets[order], lengths[order], shape, names, faults)


def _video_frames(
    folder: Path, info: Mapping[str, Any], key: str, episodes: Mapping[str, np.ndarray], episode: np.ndarray,
    stamps: np.ndarray, shape: tuple[int, int],
) -> VideoFrames:  # fmt: skip
    """Locate each row in its video: the start of the row's ``episode`` in the file, plus the time since then."""
    try:
        names = ("chunk_index", "file_index", "from_timestamp")
        chunks, files, starts = (episodes[f"videos/{key}/{name}"] for name in names)
    except KeyError as error:
        raise damaged(folder, f"{layout.EPISODES_FOLDER} lacks the column {error}") from error
    numbers, file_ids = np.unique(np.stack([chunks, files], axis=1), axis=0, return_inverse=True)
    paths = [
        layout.file_of(folder, info, "video_path", layout.VIDEOS, video_key=key, chunk_index=chunk, file_index=file)
        for chunk, file in numbers.tolist()
    ]
    return VideoFrames.locate(paths, file_ids[episode], starts[episode], stamps, shape)


def _recorded_env(path: Path) -> Json:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["env"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, error) from error


def _tasks(pa: ModuleType, folder: Path) -> dict[int, str]:
    """Return the instructions by ``task_index``. Their column is a pandas index, which may have any name."""
    path = folder / layout.TASKS
    (table,) = _tables(pa, path)
    texts = [field.name for field in table.schema if "string" in str(field.type)]
    usual = [name for name in ("task", "__index_level_0__") if name in texts]
    if "task_index" not in table.column_names or not (usual or len(texts) == 1):
        required = "expected task_index, and the instructions as 'task'. Use a different dataset"
        raise ConfigError(f"{path} has the columns {', '.join(table.column_names)}; {required}")
    numbers = _numbers(pa, table.column("task_index"), f"task_index of {path}", 1, "int64")[:, 0].tolist()
    instructions = table.column((*usual, *texts)[0]).to_pylist()
    if None in instructions or len(set(numbers)) < len(numbers):
        raise damaged(path, "a task has no instruction, or two tasks have the same number")
    return dict(zip(numbers, instructions, strict=True))


def _height_width(name: str, feature: Mapping[str, Any]) -> tuple[int, int]:
    """Return (height, width) of ``[H, W, C]`` or ``[C, H, W]``, distinguished by the axes' names or the size of C."""
    shape, axes = feature["shape"], feature.get("names")
    if isinstance(axes, dict) and len(axes) == 1:
        (axes,) = axes.values()
    if len(shape) not in (2, 3) or min(shape) < 1:
        required = "expected [height, width, channels]. Use a different dataset"
        raise ConfigError(f"The image '{name}' has the shape {list(shape)}; {required}")
    channels_first = len(shape) == 3 and shape[0] == 3 != shape[-1]
    if len(shape) == 3 and isinstance(axes, (list, dict)) and axes:
        channels_first = str(next(iter(axes))).startswith("channel")
    return (shape[1], shape[2]) if channels_first else (shape[0], shape[1])
