"""Read camera frames of a dataset by row, from images inside files or from videos. Threads may share the readers."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rlinf.data.damage import damaged
from rlinf.data.video import VideoReader
from rlinf.images import open_image

MAX_OPEN_VIDEOS = 16
"""Video files that a thread keeps open at a time."""


class Frames(ABC):
    """The frames of one camera, one per row of the dataset."""

    shape: tuple[int, int]
    """(height, width) in the dataset's description."""

    @abstractmethod
    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return the frames of ``rows`` (int64 ``[B]``), uint8 ``[B, H, W, 3]``; refuse missing or damaged ones."""

    def _checked(self, image: np.ndarray, row: int, place: str | os.PathLike) -> np.ndarray:
        if image.shape[:2] != self.shape:
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

    def read(self, rows: np.ndarray) -> np.ndarray:
        return np.stack([self._decode(int(row)) for row in rows])

    def _decode(self, row: int) -> np.ndarray:
        file, name = self.files[self.file_ids[row]], self.names[self.file_ids[row]]
        encoded = os.pread(file.fileno(), int(self.lengths[row]), int(self.offsets[row]))
        return self._checked(np.asarray(open_image(encoded, name=f"The image of row {row} in {name}")), row, name)


@dataclass(eq=False)
class VideoFrames(Frames):
    """Frames of videos that hold many episodes each: row ``n`` is shown by ``paths[file_ids[n]]`` at ``seconds[n]``."""

    paths: Sequence[Path]
    file_ids: np.ndarray
    seconds: np.ndarray
    shape: tuple[int, int]
    _local: threading.local = field(default_factory=threading.local, init=False)

    def read(self, rows: np.ndarray) -> np.ndarray:
        order = np.lexsort((self.seconds[rows], self.file_ids[rows]))
        found: dict[int, np.ndarray] = {}
        for position in order.tolist():
            row = int(rows[position])
            reader = self._reader(int(self.file_ids[row]))
            found[position] = self._checked(reader.frame_at(float(self.seconds[row])), row, reader.path)
        return np.stack([found[position] for position in range(len(rows))])

    def _reader(self, file_id: int) -> VideoReader:
        readers: dict[int, VideoReader] = self._local.__dict__.setdefault("readers", {})
        if file_id not in readers:
            if len(readers) >= MAX_OPEN_VIDEOS:
                readers.pop(next(iter(readers))).close()
            readers[file_id] = VideoReader(self.paths[file_id])
        return readers[file_id]
