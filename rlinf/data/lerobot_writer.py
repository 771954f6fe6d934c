"""Write demonstrations as a LeRobotDataset v3.0: parquet rows, PNG images or MP4 videos, statistics."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlinf.data import lerobot_format as layout
from rlinf.data.statistics import ImageStatistics, vector_statistics
from rlinf.data.video import VideoWriter
from rlinf.errors import ConfigError
from rlinf.files import Json, write_text
from rlinf.flags import flags_of

MIB = 2**20
EXTRAS = {layout.REWARD: "float32", layout.DONE: "bool", layout.TRUNCATED: "bool", layout.SUCCESS: "bool"}
"""Columns for the consequences of a row's action."""


class LeRobotWriter:
    """Writes episodes one by one into a hidden folder, which ``close`` renames; a failed ``with`` block removes it.

    Raises ConfigError if the folder exists, or if ``video`` is set and an image has an odd height or width; raises
    MissingDependencyError if pyarrow (or PyAV, if ``video`` is set) is not installed.

    Args:
        fps: Env steps per second of simulated (or real) time.
        image_shapes: Camera name to (height, width).
        state_dim: ``S``; 0: no state.
        video: Whether to write MP4 files (lossy, much smaller) instead of PNG images inside the parquet files (exact).
        more: Additional columns: ``INTERVENTION``, and ``lerobot_format.EXECUTED`` if executed actions differ from the stored ones.

    Attributes:
        about: Maps the names of additional JSON files in ``meta`` to their content; ``close`` writes them.
        data_file_mib, video_file_mib: Size beyond which a new parquet or MP4 file is started.
    """

    data_file_mib, video_file_mib = 100, 200

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        fps: int,
        image_shapes: Mapping[str, tuple[int, int]],
        state_dim: int,
        action_dim: int,
        video: bool,
        robot_type: str | None = None,
        more: Collection[str] = (),
    ) -> None:
        self._pa = layout.import_pyarrow("Writing a LeRobotDataset")
        self.folder = Path(folder).expanduser().absolute()
        if os.path.lexists(self.folder):
            raise ConfigError(f"dataset is '{folder}', which already exists. Set dataset=<a new folder>")
        odd = {name: shape for name, shape in image_shapes.items() if shape[0] % 2 or shape[1] % 2}
        if video and odd:
            raise ConfigError(f"MP4 does not support the odd image sizes {odd}. Set collect.video=false")
        self.fps, self.video = int(fps), video
        self.image_shapes = {f"{layout.IMAGES}{name}": tuple(shape) for name, shape in image_shapes.items()}
        self.widths = {layout.STATE: state_dim, layout.ACTION: action_dim} if state_dim else {layout.ACTION: action_dim}
        self.widths |= {layout.EXECUTED: action_dim} if layout.EXECUTED in more else {}
        self.extras = EXTRAS | ({layout.INTERVENTION: "bool"} if layout.INTERVENTION in more else {})
        self.info: Json = {
            "codebase_version": layout.VERSION,
            "robot_type": robot_type,
            "total_episodes": 0,
            "total_frames": 0,
            "total_tasks": 0,
            "chunks_size": layout.FILES_PER_CHUNK,
            "data_files_size_in_mb": self.data_file_mib,
            "video_files_size_in_mb": self.video_file_mib,
            "fps": self.fps,
            "splits": {},
            "data_path": layout.DATA,
            "video_path": layout.VIDEOS if video else None,
            "features": self._features(),
        }
        # Renamed at the end, so that a folder under its final name is always complete.
        self._partial = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.tmp")
        self._partial.mkdir(parents=True)
        self.about: Json = {}
        self._tasks: dict[str, int] = {}
        self._episodes: list[Json] = []
        self._columns: dict[str, list[np.ndarray]] = {
            name: [] for name in (*self.widths, *self.extras, *layout.ROW_COLUMNS)
        }
        self._images = {key: ImageStatistics() for key in self.image_shapes}
        self._data_file: Any = None
        self._data_number, self._data_bytes = 0, 0
        self._videos: dict[str, VideoWriter] = {}
        self._video_numbers = dict.fromkeys(self.image_shapes, 0)

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abort()  # has no effect after a successful close

    def add_episode(
        self,
        images: Mapping[str, np.ndarray],
        state: np.ndarray | None,
        actions: np.ndarray,
        task: str,
        *,
        rewards: np.ndarray,
        success: np.ndarray,
        truncated: bool = False,
        more: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write one episode of ``T`` rows; row ``t`` stores the observation before action ``t``. Raise ConfigError for wrong shapes.

        ``images`` map cameras to uint8 ``[T, H, W, 3]``; ``state [T, S]``, ``actions [T, D]``, ``rewards [T]`` are float32, ``success``
        bool ``[T]`` (after the action). ``truncated`` is True if the time limit ended the episode. ``more`` contains additional columns.
        """
        length, first = len(actions), self.info["total_frames"]
        if not length:
            raise ConfigError("An episode has no actions; expected at least one")
        done, time_limit = np.zeros((2, length), dtype=bool)
        done[-1], time_limit[-1] = True, truncated
        episode_index = self.info["total_episodes"]
        task_index = self._tasks.setdefault(task, len(self._tasks))
        columns: dict[str, np.ndarray] = {
            layout.ACTION: np.asarray(actions, np.float32),
            layout.REWARD: np.asarray(rewards, np.float32),
            layout.DONE: done,
            layout.TRUNCATED: time_limit,
            layout.SUCCESS: flags_of(success, "`success`"),
            "timestamp": (np.arange(length) / self.fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, episode_index),
            "index": np.arange(first, first + length),
            "task_index": np.full(length, task_index),
        }
        if layout.STATE in self.widths:
            columns[layout.STATE] = np.asarray(state, np.float32)
        if layout.EXECUTED in self.widths:
            columns[layout.EXECUTED] = np.asarray((more or {}).get(layout.EXECUTED, actions), np.float32)
        if layout.INTERVENTION in self.extras:
            columns[layout.INTERVENTION] = flags_of(more[layout.INTERVENTION], "`intervention`")
        seen = {key: np.asarray(images.get(key.removeprefix(layout.IMAGES))) for key in self.image_shapes}
        for name, values in (columns | seen).items():
            shape = (length, *self.info["features"][name]["shape"])
            is_valid = values.dtype == np.uint8 if name in seen else np.isfinite(values).all()
            if not is_valid or (values.shape != shape and values.shape + (1,) != shape):
                kind = "uint8" if name in seen else "finite numbers"
                raise ConfigError(
                    f"'{name}' of episode {episode_index} is {values.dtype} {values.shape}; expected {kind} {shape}"
                )
        statistics = {name: vector_statistics(values.reshape(length, -1)) for name, values in columns.items()}
        about: Json = {"episode_index": episode_index, "tasks": [task], "length": length}
        for key in self.image_shapes:
            counted = ImageStatistics()
            counted.add(seen[key])
            self._images[key].merge(counted)
            statistics[key] = counted.result()
            if self.video:
                about |= self._add_video(key, seen[key])
        about |= self._add_rows(columns, {} if self.video else images)
        about |= {"dataset_from_index": first, "dataset_to_index": first + length}
        about |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        about |= {f"stats/{key}/{name}": x.tolist() for key, stats in statistics.items() for name, x in stats.items()}
        self._episodes.append(about)
        for name, values in columns.items():
            self._columns[name].append(values)
        self.info["total_episodes"] += 1
        self.info["total_frames"] += length

    def close(self) -> Path:
        """Finish the files and rename the folder; raise ConfigError without episodes or if the folder exists by now."""
        pa = self._pa
        if not self._episodes:
            self.abort()
            raise ConfigError("No episodes have been added.")
        self._close_files()
        for key in self._videos:
            height, width = self.image_shapes[key]
            self.info["features"][key]["info"] = {
                "video.height": height, "video.width": width, "video.codec": "h264", "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False, "video.fps": self.fps, "video.channels": 3, "has_audio": False,
            }  # fmt: skip
        self.info["total_tasks"] = len(self._tasks)
        self.info["splits"] = {"train": f"0:{len(self._episodes)}"}
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        statistics = {name: vector_statistics(x.reshape(len(x), -1)) for name, x in columns.items()}
        statistics |= {key: counted.result() for key, counted in self._images.items()}
        plain = {key: {name: x.tolist() for name, x in stats.items()} for key, stats in statistics.items()}
        write_text(self._partial / layout.INFO, json.dumps(self.info, indent=4, ensure_ascii=False))
        write_text(self._partial / layout.STATS, json.dumps(plain, indent=4))
        pa.parquet.write_table(self._task_table(), self._partial / layout.TASKS)
        episodes = self._partial / layout.EPISODES.format(chunk_index=0, file_index=0)
        episodes.parent.mkdir(parents=True)
        pa.parquet.write_table(pa.Table.from_pylist(self._episodes), episodes, compression="snappy")
        for name, content in self.about.items():
            write_text(self._partial / "meta" / name, json.dumps(content, indent=1))
        try:
            if os.path.lexists(self.folder):
                raise FileExistsError(self.folder)
            os.rename(self._partial, self.folder)
        except OSError as error:
            # Hours of collected episodes must not be lost because the name was taken in the meantime.
            instead = self.folder.with_name(f"{self.folder.name}-{os.getpid()}")
            os.rename(self._partial, instead)
            raise ConfigError(
                f"'{self.folder}' was created by a different process in the meantime. The episodes are in '{instead}'"
            ) from error
        return self.folder

    def abort(self) -> None:
        """Delete everything written so far."""
        self._close_files()
        shutil.rmtree(self._partial, ignore_errors=True)

    # Rows and files.

    def _features(self) -> dict[str, Json]:
        features: dict[str, Json] = {}
        for key, (height, width) in self.image_shapes.items():
            names = ["height", "width", "channels"]
            features[key] = {"dtype": "video" if self.video else "image", "shape": [height, width, 3], "names": names}
        for name, width in self.widths.items():
            features[name] = {"dtype": "float32", "shape": [width], "names": None}
        for name, dtype in (self.extras | layout.ROW_COLUMNS).items():
            features[name] = {"dtype": dtype, "shape": [1], "names": None}
        return features

    def _add_rows(self, columns: Mapping[str, np.ndarray], images: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Append a row group to the current parquet file, or start the next file if it is full."""
        pa = self._pa
        shown = self.image_shapes if images else ()
        arrays = {key: self._image_column(images[key.removeprefix(layout.IMAGES)]) for key in shown}
        for name, feature in self.info["features"].items():
            if name not in self.image_shapes:
                kind = getattr(pa, "bool_" if feature["dtype"] == "bool" else feature["dtype"])()
                flat = pa.array(columns[name].reshape(-1), kind)
                width = feature["shape"][0]
                arrays[name] = flat if width == 1 else pa.FixedSizeListArray.from_arrays(flat, width)
        table = pa.table(arrays)
        if self._data_file is not None and self._data_bytes + table.nbytes > self.data_file_mib * MIB:
            self._data_file.close()
            self._data_file, self._data_bytes, self._data_number = None, 0, self._data_number + 1
        where = self._place(self._data_number)
        if self._data_file is None:
            path = self._partial / layout.DATA.format(**where)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Dictionary encoding of PNG files would only waste memory, because no two are equal.
            plain = [name for name in arrays if name not in self.image_shapes]
            self._data_file = pa.parquet.ParquetWriter(path, table.schema, compression="snappy", use_dictionary=plain)
        self._data_file.write_table(table)
        self._data_bytes += table.nbytes
        return {f"data/{name}": number for name, number in where.items()}

    def _image_column(self, images: np.ndarray) -> Any:
        """Return a column of PNG files in the format of the Hugging Face ``datasets`` library."""
        pa = self._pa
        encoded = []
        for image in images:
            buffer = io.BytesIO()
            # PNG is lossless at every level, and higher levels take several times as long.
            Image.fromarray(image).save(buffer, "PNG", compress_level=1)
            encoded.append({"bytes": buffer.getvalue(), "path": None})
        return pa.array(encoded, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))

    def _add_video(self, key: str, images: np.ndarray) -> Json:
        """Append an episode's frames to the camera's current MP4 file, or start the next file if it is full."""
        video = self._videos.get(key)
        if video is not None and video.num_bytes > self.video_file_mib * MIB:
            video.close()
            video, self._video_numbers[key] = None, self._video_numbers[key] + 1
        where = self._place(self._video_numbers[key])
        if video is None:
            path = self._partial / layout.VIDEOS.format(video_key=key, **where)
            video = self._videos[key] = VideoWriter(path, self.fps, *self.image_shapes[key])
        start = video.num_frames
        video.append(images)
        times = {"from_timestamp": start / self.fps, "to_timestamp": video.num_frames / self.fps}
        return {f"videos/{key}/{name}": value for name, value in (where | times).items()}

    def _place(self, number: int) -> dict[str, int]:
        chunk, file = divmod(number, layout.FILES_PER_CHUNK)
        return {"chunk_index": chunk, "file_index": file}

    def _task_table(self) -> Any:
        """Return a table with one row per task; pandas metadata declares the instruction as its index."""
        pa = self._pa
        index = "__index_level_0__"
        table = pa.table(
            {"task_index": pa.array(self._tasks.values(), pa.int64()), index: pa.array(self._tasks, pa.string())}
        )
        columns = [
            {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
            for name, field, kind, dtype in (
                ("task_index", "task_index", "int64", "int64"), (None, index, "unicode", "object"),
            )
        ]  # fmt: skip
        pandas = {"index_columns": [index], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
        return table.replace_schema_metadata({"pandas": json.dumps(pandas)})

    def _close_files(self) -> None:
        if self._data_file is not None:
            self._data_file.close()
            self._data_file = None
        for video in self._videos.values():
            video.close()
