"""The LeRobotDataset v3.0 format: names, paths and the description of its columns (``meta/info.json``)."""

import json
from collections.abc import Mapping
from operator import index
from pathlib import Path
from types import ModuleType
from typing import Any

from rlinf.errors import ConfigError, damaged, import_extra
from rlinf.files import Json

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
"""The action including the expert's noise, if ``action`` excludes it."""
REWARD, DONE, TRUNCATED, SUCCESS = "next.reward", "next.done", "next.truncated", "next.success"
"""Consequences of a row's action; datasets from other tools may lack any of them."""
INTERVENTION = "intervention"
"""Whether a human had taken over from a policy and chose the row's action."""
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
    for part in ("parquet", "compute"):
        import_extra(f"pyarrow.{part}", wanted_by, "lerobot")
    return import_extra("pyarrow", wanted_by, "lerobot")


def read_info(folder: Path) -> Json:
    """Read ``meta/info.json``; raise ConfigError if that fails, a value has the wrong type, or the version is unsupported."""
    path, place = folder / INFO, "it"
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        for place in ("codebase_version", "features", "total_frames", "total_episodes"):
            info[place] = index(info[place]) if place.startswith("total") else info[place]
        place = "fps"
        if info.setdefault(place) is not None and not 0 < info[place] < 1e6:
            raise ValueError(f"{info[place]}; expected rows per second")
        for name, feature in info["features"].items():
            place = f"features.{name}"
            feature["dtype"], feature["shape"] = str(feature["dtype"]), tuple(map(index, feature["shape"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _not_a_description(path, f"{place}: {type(error).__name__}: {error}") from error
    if not str(info["codebase_version"]).startswith("v3."):
        raise ConfigError(
            f"{folder} is a LeRobotDataset of version {info['codebase_version']}; expected {VERSION}. Convert it with lerobot's script "
            "convert_dataset_v21_to_v30, or use a different folder"
        )
    return info


def _not_a_description(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read as the description of a LeRobotDataset ({reason}). Use a different folder"
    )


def file_of(folder: Path, info: Mapping[str, Any], key: str, usual: str, **numbers: Any) -> Path:
    """Build a file's path from the template ``info[key]``; raise ConfigError if the template is invalid or the file is missing."""
    try:
        name = info.get(key, usual).format(**numbers)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _not_a_description(folder / INFO, f"{key}: {info[key]!r}; expected {usual}") from error
    if not (path := path_inside(folder, name)).is_file():
        raise damaged(folder, f"{path} is missing")
    return path


def path_inside(folder: Path, path: str) -> Path:
    """Return ``folder / path`` for an untrusted ``path`` from a dataset; raise ConfigError if it points outside the folder."""
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ConfigError(
            f"The dataset {folder} refers to the file '{path}'; expected a path within the folder. Use a different dataset"
        )
    return folder / path
