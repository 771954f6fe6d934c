"""Access a dataset's camera frames by row, from encoded images or videos. The readers are thread-safe."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np

from rlinf.data.video import VideoReader
from rlinf.errors import damaged
from rlinf.images import open_image

MAX_OPEN_VIDEOS = 16
"""Maximum number of open video files per thread."""
TOLERANCE_S = 1e-4
"""Maximum difference between the timestamps of a frame and its row, in seconds, as in lerobot."""


class Frames(ABC):
    """The frames of one camera, one per row of the dataset."""

    shape: tuple[int, int]
    """(height, width) in the dataset's description, or () if any size is allowed."""
    faults: Mapping[int, str] = MappingProxyType({})
    """Maps rows known to lack an image, even without decoding, to the reason."""

    @abstractmethod
    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return the frames of ``rows`` (int64 ``[B]``), uint8 ``[B, H, W, 3]``; raise ConfigError if one is missing or damaged."""

    def _checked(self, image: np.ndarray, row: int, place: str | os.PathLike) -> np.ndarray:
        if self.shape and image.shape[:2] != self.shape:
            size, required = (" x ".join(map(str, shape)) for shape in (image.shape[:2], self.shape))
            raise damaged(place, f"the image of row {row} has {size} pixels, but its description requires {required}")
        return image


@dataclass(eq=False)
class EncodedFrames(Frames):
    """PNG or JPEG images: row ``n`` is stored in the open file ``files[file_ids[n]]`` as ``lengths[n]`` bytes at ``offsets[n]``."""

    files: Sequence[BinaryIO]
    file_ids: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    shape: tuple[int, int]
    names: Sequence[str | os.PathLike]
    faults: Mapping[int, str] = field(default_factory=dict)

    def read(self, rows: np.ndarray) -> np.ndarray:
        return np.stack([self._decode(int(row)) for row in rows])

    def _decode(self, row: int) -> np.ndarray:
        file, name = self.files[self.file_ids[row]], self.names[self.file_ids[row]]
        encoded = os.pread(file.fileno(), int(self.lengths[row]), int(self.offsets[row]))
        return self._checked(np.asarray(open_image(encoded, name=f"The image of row {row} in {name}")), row, name)


@dataclass(eq=False)
class VideoFrames(Frames):
    """Frames of videos that contain many episodes: row ``n`` is at ``times[n]`` (in time-base units) in ``paths[file_ids[n]]``."""

    paths: Sequence[Path]
    file_ids: np.ndarray
    times: np.ndarray
    shape: tuple[int, int]
    faults: Mapping[int, str] = field(default_factory=dict)
    _local: threading.local = field(default_factory=threading.local, init=False)

    @classmethod
    def locate(
        cls, paths: Sequence[Path], file_ids: np.ndarray, starts: np.ndarray, stamps: np.ndarray, shape: tuple[int, int]
    ) -> VideoFrames:
        """Find the frame of each row, ``stamps`` seconds into its episode, which starts ``starts`` seconds into the file."""
        times, faults = np.zeros(len(starts), dtype=np.int64), {}
        for number, path in enumerate(paths):
            with closing(VideoReader(path)) as reader:
                ticks, base = reader.times(), float(reader.time_base)
            rows = np.flatnonzero(file_ids == number)
            rows = rows[np.argsort(starts[rows], kind="stable")]
            wanted = starts[rows] + stamps[rows]
            numbers = frame_numbers(ticks * base, wanted)
            times[rows] = ticks[numbers]
            about = f"{len(ticks)} frames for {len(rows)} rows, the last one at {ticks[-1] * base:.4f} s"
            for row, second in zip(rows[numbers < 0].tolist(), wanted[numbers < 0], strict=True):
                faults[row] = f"{path} has no separate frame at {second:.4f} s ({about})"
        return cls(paths, file_ids, times, shape, faults)

    def read(self, rows: np.ndarray) -> np.ndarray:
        frames: dict[int, np.ndarray] = {}
        # Read in file and time order, because seeking in a video is slow.
        for position in np.lexsort((self.times[rows], self.file_ids[rows])).tolist():
            row = int(rows[position])
            reader = self._reader(int(self.file_ids[row]))
            frames[position] = self._checked(reader.frame_at(int(self.times[row])), row, reader.path)
        return np.stack([frames[position] for position in range(len(rows))])

    def _reader(self, file_id: int) -> VideoReader:
        # One reader per thread, because FFmpeg's decoders are not thread-safe.
        readers: dict[int, VideoReader] = self._local.__dict__.setdefault("readers", {})
        if file_id not in readers:
            if len(readers) >= MAX_OPEN_VIDEOS:
                readers.pop(next(iter(readers))).close()
            readers[file_id] = VideoReader(self.paths[file_id])
        return readers[file_id]


def frame_numbers(shown: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Match rows to frames, int64 ``[R]``, by time in seconds or, without gaps, by position; -1: no match."""
    number, steps = np.searchsorted((shown[1:] + shown[:-1]) / 2, wanted), np.diff(shown)
    tolerance = TOLERANCE_S + np.spacing(wanted.astype(np.float32))  # time stamps are stored as float32
    is_there = np.abs(shown[number] - wanted) <= tolerance
    matched = np.flatnonzero(is_there)
    is_there[matched[1:]] = np.diff(number[matched]) > 0  # a frame belongs to one row
    if not is_there.all() and len(shown) == len(wanted) > 1:
        step = np.median(steps)
        if (np.abs(steps - step) < step / 2).all() and (np.abs(shown - wanted) < 0.99 * step).all():
            return np.arange(len(wanted))
    return np.where(is_there, number, -1)
