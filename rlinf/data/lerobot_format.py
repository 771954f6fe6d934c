"""The LeRobotDataset v3.0 format: names, paths and the description of its columns (``meta/info.json``)."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from rlinf.data.damage import import_reader
from rlinf.errors import ConfigError

VERSION = "v3.0"
INFO = "meta/info.json"
STATS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
EPISODES_FOLDER = "meta/episodes"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEOS = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
FILES_PER_CHUNK = 1000

ACTION = "action"
STATE = "observation.state"
EXECUTED = "executed_action"
"""The action with the demonstrator's noise, where ``action`` is without."""
REWARD, DONE, TRUNCATED, SUCCESS = "next.reward", "next.done", "next.truncated", "next.success"
"""Consequences of a row's action; datasets of others may lack any of them."""
INTERVENTION = "intervention"
"""The row's action is a person's, who has taken over from a policy."""
IMAGES = "observation.images."
"""Prefix of camera columns."""

ROW_COLUMNS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Columns of every dataset: seconds and rows since the start of the episode, and the indices of episode, row and task."""


def import_pyarrow(wanted_by: str) -> ModuleType:
    """Return the module ``pyarrow``, with ``pyarrow.parquet``."""
    import_reader("pyarrow.parquet", wanted_by, "parquet files")
    return import_reader("pyarrow", wanted_by, "parquet files")


def read_info(folder: Path) -> dict[str, Any]:
    """Read ``meta/info.json``; raise ConfigError if that fails or the format has another version."""
    path = folder / INFO
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        version, features = info["codebase_version"], info["features"]
        for feature in features.values():
            feature["dtype"], feature["shape"] = feature["dtype"], tuple(feature["shape"])
        info["total_frames"], info["total_episodes"] = int(info["total_frames"]), int(info["total_episodes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{path} cannot be read as the description of a LeRobotDataset ({reason}). Use another folder"
        ) from error
    if not str(version).startswith("v3."):
        raise ConfigError(
            f"{folder} is a LeRobotDataset of version {version}; required: {VERSION}. Convert it with lerobot's script "
            "convert_dataset_v21_to_v30, or use another folder"
        )
    return info


def path_inside(folder: Path, path: str) -> Path:
    """Return ``folder / path`` for an untrusted ``path`` of a dataset; raise ConfigError if it leads out of the folder."""
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ConfigError(
            f"The dataset {folder} names the file '{path}'; required: a path within the folder. Use another dataset"
        )
    return folder / path
