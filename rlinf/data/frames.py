"""Read camera frames of a dataset by row, from images inside files or from videos. Threads may share the readers."""

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

from rlinf.data.damage import damaged
from rlinf.data.video import VideoReader
from rlinf.images import open_image

MAX_OPEN_VIDEOS = 16
"""Video files that a thread keeps open at a time."""
TOLERANCE_S = 1e-4
"""Largest distance of a frame from the time of its row, as lerobot's."""


class Frames(ABC):
    """The frames of one camera, one per row of the dataset."""

    shape: tuple[int, int]
    """(height, width) in the dataset's description; (): any."""
    faults: Mapping[int, str] = MappingProxyType({})
    """Rows of which it is known without decoding that they have no image, and why."""

    @abstractmethod
    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return the frames of ``rows`` (int64 ``[B]``), uint8 ``[B, H, W, 3]``; reject missing or damaged ones."""

    def _checked(self, image: np.ndarray, row: int, place: str | os.PathLike) -> np.ndarray:
        if self.shape and image.shape[:2] != self.shape:
            found, described = (" x ".join(map(str, shape)) for shape in (image.shape[:2], self.shape))
            raise damaged(place, f"the image of row {row} has {found} pixels, but its description says {described}")
        return image


@dataclass(eq=False)
class EncodedFrames(Frames):
    """PNG or JPEG images: row ``n`` is stored in the open ``files[file_ids[n]]``, ``lengths[n]`` bytes from ``offsets[n]`` on."""

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
    """Frames of videos that hold many episodes each: row ``n`` is shown by ``paths[file_ids[n]]`` at ``times[n]``, in its time base."""

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
        """Find the frame of each row, ``stamps`` seconds after its episode, which starts ``starts`` seconds into the file."""
        times, faults = np.zeros(len(starts), dtype=np.int64), {}
        for number, path in enumerate(paths):
            with closing(VideoReader(path)) as reader:
                ticks, base = reader.times(), float(reader.time_base)
            rows = np.flatnonzero(file_ids == number)
            rows = rows[np.argsort(starts[rows], kind="stable")]
            wanted = starts[rows] + stamps[rows]
            found = frame_numbers(ticks * base, wanted)
            times[rows] = ticks[found]
            about = f"{len(ticks)} frames for {len(rows)} rows, the last one at {ticks[-1] * base:.4f} s"
            for row, second in zip(rows[found < 0].tolist(), wanted[found < 0], strict=True):
                faults[row] = f"{path} has no frame of its own at {second:.4f} s ({about})"
        return cls(paths, file_ids, times, shape, faults)

    def read(self, rows: np.ndarray) -> np.ndarray:
        found: dict[int, np.ndarray] = {}
        for position in np.lexsort((self.times[rows], self.file_ids[rows])).tolist():
            row = int(rows[position])
            reader = self._reader(int(self.file_ids[row]))
            found[position] = self._checked(reader.frame_at(int(self.times[row])), row, reader.path)
        return np.stack([found[position] for position in range(len(rows))])

    def _reader(self, file_id: int) -> VideoReader:
        readers: dict[int, VideoReader] = self._local.__dict__.setdefault("readers", {})
        if file_id not in readers:
            if len(readers) >= MAX_OPEN_VIDEOS:
                readers.pop(next(iter(readers))).close()
            readers[file_id] = VideoReader(self.paths[file_id])
        return readers[file_id]


def frame_numbers(shown: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return which frame of a video each row shows, int64 ``[R]``, -1 for none: the one at its time, or the one of its number, if known.

    It is known where the video has as many frames as rows and no gap, and each frame is less than one away from its row's time.
    ``shown``, ``[F]``, are the seconds of the frames, increasing, and ``wanted``, ``[R]``, of the rows, in their order.
    """
    number, steps = np.searchsorted((shown[1:] + shown[:-1]) / 2, wanted), np.diff(shown)
    tolerance = TOLERANCE_S + np.spacing(wanted.astype(np.float32))  # as which time stamps are stored
    is_there = np.abs(shown[number] - wanted) <= tolerance
    own = np.flatnonzero(is_there)
    is_there[own[1:]] = np.diff(number[own]) > 0  # a frame belongs to one row
    if not is_there.all() and len(shown) == len(wanted) > 1:
        step = np.median(steps)
        if (np.abs(steps - step) < step / 2).all() and (np.abs(shown - wanted) < 0.99 * step).all():
            return np.arange(len(wanted))
    return np.where(is_there, number, -1)
