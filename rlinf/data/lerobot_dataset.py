"""Read LeRobotDataset v3.0 folders."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rlinf.data import lerobot_format as layout
from rlinf.data.damage import damaged
from rlinf.data.frames import EncodedFrames, Frames, VideoFrames
from rlinf.data.stored import DatasetInfo, Outcomes, StoredDemonstrations
from rlinf.errors import ConfigError
from rlinf.flags import flags_of

OWN_FILE = "rlinf.json"
"""File in ``meta`` where ``rlinf collect`` records the env section of the configuration."""

OUTCOMES = (layout.EXECUTED, layout.REWARD, layout.DONE, layout.TRUNCATED, layout.SUCCESS, layout.INTERVENTION)
"""Columns of the executed actions and of their consequences."""


def describe(folder: Path) -> DatasetInfo:
    """Read the dataset's description; raise ConfigError if that fails or the format has another version."""
    info = layout.read_info(folder)
    features = info["features"]
    shapes = {name: feature["shape"] for name, feature in features.items() if feature["dtype"] in ("image", "video")}
    vectors = {
        name: math.prod(feature["shape"])
        for name, feature in features.items()
        if feature["dtype"] in ("float32", "float64") and name not in layout.ROW_COLUMNS and len(feature["shape"]) == 1
    }
    return DatasetInfo(
        folder=folder,
        format="LeRobotDataset v3.0",
        num_episodes=info["total_episodes"],
        image_shapes={name: _height_width(shape, features[name].get("names")) for name, shape in shapes.items()},
        state_dims={name: width for name, width in vectors.items() if name not in (layout.ACTION, layout.EXECUTED)},
        state_key=layout.STATE,
        action_dim=vectors.get(layout.ACTION, 0),
        packages=("pyarrow", "av") if "video" in (feature["dtype"] for feature in features.values()) else ("pyarrow",),
        env=_recorded_env(folder / "meta" / OWN_FILE),
        num_rows=info["total_frames"],
        has_rewards=layout.REWARD in features,
        says_success=layout.SUCCESS in features,
        says_intervention=layout.INTERVENTION in features,
    )


def open_dataset(
    folder: Path, cameras: Mapping[str, str], state_key: str | None, outcomes: bool = False
) -> StoredDemonstrations:
    """Read the numbers of all rows, and locate the frames of ``cameras`` (name in the env to column).

    With ``outcomes``, also the consequences of the actions, as far as the dataset tells them.
    """
    pa = layout.import_pyarrow(f"Reading {folder}")
    info = layout.read_info(folder)
    names = [name for name in (layout.ACTION, state_key, "timestamp", "index", "episode_index", "task_index") if name]
    names += [name for name in OUTCOMES if outcomes and name in info["features"]]
    spools = {key: _ImageSpool(folder, key) for key in cameras.values() if info["features"][key]["dtype"] == "image"}
    try:
        parts = _read_rows(pa, folder, names, spools)
        episodes = pa.concat_tables(
            [pa.parquet.read_table(path) for path in sorted((folder / layout.EPISODES_FOLDER).glob("*/*.parquet"))],
            promote_options="permissive",
        )
        tasks = _tasks(pa.parquet.read_table(folder / layout.TASKS))
    except ConfigError:
        raise
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise damaged(folder, error) from error
    num_rows = sum(len(part["index"]) for part in parts)
    found, told = (num_rows, episodes.num_rows), (info["total_frames"], info["total_episodes"])
    if found != told:
        counts = "it has {} rows and {} episodes, but its description says {} and {}"
        raise damaged(folder, counts.format(*found, *told))
    if not parts:
        raise damaged(folder, "data/ holds no rows")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    order = np.argsort(columns["index"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    twice = np.flatnonzero(np.diff(columns["index"]) == 0)
    if len(twice):
        raise damaged(folder, f"data/ holds two rows with the index {columns['index'][twice[0]]}")
    unknown = columns["task_index"][(columns["task_index"] < 0) | (columns["task_index"] >= len(tasks))]
    if len(unknown):
        raise damaged(folder, f"a row has the task_index {unknown[0]}, but {layout.TASKS} has {len(tasks)} tasks")
    description = describe(folder)
    frames: dict[str, Frames] = {}
    for camera, key in cameras.items():
        shape = description.image_shapes[key]
        if key in spools:
            frames[camera] = spools[key].frames(order, shape)
        else:
            frames[camera] = _video_frames(folder, info, key, episodes, columns, shape)
    numbers = [columns[name].astype(np.float32).reshape(num_rows, -1) for name in (layout.ACTION, state_key) if name]
    actions, state = numbers[0], numbers[1] if state_key else None
    return StoredDemonstrations(
        description, frames, state, actions, columns["task_index"], tasks, columns["episode_index"],
        outcomes=_outcomes(folder, columns, actions) if outcomes else None,
    )  # fmt: skip


def _read_rows(
    pa: ModuleType, folder: Path, names: list[str], spools: Mapping[str, _ImageSpool]
) -> list[dict[str, np.ndarray]]:
    """Return the columns ``names`` of each row group, and copy the images, because parquet cannot read single rows."""
    parts = []
    for path in sorted((folder / "data").glob("*/*.parquet")):
        for spool in spools.values():
            spool.source = path
        with pa.parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=[*names, *spools])
                parts.append({name: _numbers(table.column(name)) for name in names})
                for key, spool in spools.items():
                    spool.append(table.column(key))
    return parts


def _outcomes(folder: Path, columns: Mapping[str, np.ndarray], actions: np.ndarray) -> Outcomes:
    """Return the consequences of the actions; an episode counts as cut unless a column says that it terminated."""
    flags = {name: _flags(columns[name], f"Column '{name}' of {folder}") for name in OUTCOMES[2:] if name in columns}
    done, cut = flags.get(layout.DONE), flags.get(layout.TRUNCATED)
    rewards = columns.get(layout.REWARD)
    return Outcomes(
        executed=columns.get(layout.EXECUTED, actions).astype(np.float32).reshape(len(actions), -1),
        rewards=None if rewards is None else rewards.astype(np.float32).reshape(-1),
        success=flags.get(layout.SUCCESS),
        intervention=flags.get(layout.INTERVENTION),
        terminated=np.zeros(len(actions), dtype=bool) if done is None or cut is None else done & ~cut,
    )


def _flags(column: np.ndarray, what: str) -> np.ndarray:
    """Return a column of flags, bool ``[N]``."""
    if column.size != len(column):
        raise ConfigError(f"{what} has {column.shape[1]} values in a row; required: one flag")
    return flags_of(column, what).reshape(-1)


class _ImageSpool:
    """The encoded images of one column in a nameless temporary file, in the order of the rows."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.file = tempfile.TemporaryFile()
        self.lengths: list[int] = []
        self.source: Path | None = None
        """The parquet file being read."""

    def append(self, column: Any) -> None:
        for value in column.to_pylist():
            if value is None or (value["bytes"] is None and not value["path"]):
                raise ValueError(f"row {len(self.lengths)} has no image '{self.key}', in {self.source}")
            encoded = value["bytes"]
            if encoded is None:  # the image is a file next to the parquet files
                encoded = layout.path_inside(self.folder, value["path"]).read_bytes()
            self.file.write(encoded)
            self.lengths.append(len(encoded))

    def frames(self, order: np.ndarray, shape: tuple[int, int]) -> EncodedFrames:
        self.file.flush()
        lengths = np.array(self.lengths, dtype=np.int64)
        offsets = np.cumsum(lengths) - lengths
        names = [f"{self.folder} ({self.key})"]
        zeros = np.zeros(len(order), dtype=np.int64)
        return EncodedFrames([self.file], zeros, offsets[order], lengths[order], shape, names)


def _video_frames(
    folder: Path, info: Mapping[str, Any], key: str, episodes: Any, columns: Mapping[str, np.ndarray],
    shape: tuple[int, int],
) -> VideoFrames:  # fmt: skip
    """Locate each row in its video: start of the episode in the file plus time since the start of the episode."""
    try:
        names = ("chunk_index", "file_index", "from_timestamp")
        chunks, files, starts = (episodes.column(f"videos/{key}/{name}").to_pylist() for name in names)
        number_of = {number: position for position, number in enumerate(episodes.column("episode_index").to_pylist())}
        position = np.array([number_of[number] for number in columns["episode_index"].tolist()])
    except KeyError as error:
        raise damaged(folder, f"{layout.EPISODES_FOLDER} lacks the column or the episode {error}") from error
    numbers, file_ids = np.unique(np.stack([chunks, files], axis=1), axis=0, return_inverse=True)
    paths = [
        layout.path_inside(folder, info["video_path"].format(video_key=key, chunk_index=chunk, file_index=file))
        for chunk, file in numbers.tolist()
    ]
    for path in paths:
        if not path.is_file():
            raise damaged(folder, f"{path} is missing")
    seconds = np.asarray(starts, np.float64)[position] + columns["timestamp"].astype(np.float64)
    return VideoFrames(paths, file_ids[position], seconds, shape)


def _recorded_env(path: Path) -> dict[str, Any]:
    """Return the env section that `rlinf collect` recorded; empty for datasets of others."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["env"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from error


def _numbers(column: Any) -> np.ndarray:
    """Return a column of numbers as ``[T]``, or one of lists of equal length as ``[T, D]``."""
    flat = column.combine_chunks()
    if hasattr(flat, "flatten") and flat.type.num_fields == 1:
        return flat.flatten().to_numpy(zero_copy_only=False).reshape(len(flat), -1)
    return flat.to_numpy(zero_copy_only=False)


def _tasks(table: Any) -> list[str]:
    """Return the instructions by ``task_index``; their column is the index of a pandas frame and may have any name."""
    (text,) = [name for name in table.column_names if name != "task_index"]
    found = dict(zip(table.column("task_index").to_pylist(), table.column(text).to_pylist(), strict=True))
    return [found[number] for number in range(len(found))]


def _height_width(shape: tuple[int, ...], names: Any) -> tuple[int, int]:
    """Return (height, width) of ``[H, W, C]`` or ``[C, H, W]``, told apart by the axes' names or the size of C."""
    channels_first = str(names[0]).startswith("channel") if names else shape[0] == 3 != shape[-1]
    return (shape[1], shape[2]) if channels_first else (shape[0], shape[1])
