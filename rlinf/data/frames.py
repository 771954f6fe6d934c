"""Camera frames of a dataset on disk, read by row: images inside files, or frames of videos. Threads may share them."""

from __future__ import annotations

import io
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from rlinf.data.video import VideoReader
from rlinf.errors import ConfigError

MAX_OPEN_VIDEOS = 16
"""Video files that one thread keeps open at a time."""


class Frames(ABC):
    """The frames of one camera, one per row of the dataset."""

    @abstractmethod
    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return the frames of ``rows`` (int64 ``[B]``), uint8 ``[B, H, W, 3]``.

        Raises:
            ConfigError: A frame is missing or damaged.
        """


class EncodedFrames(Frames):
    """PNG or JPEG images that lie somewhere inside files.

    Args:
        files: Open files.
        file_ids: int64 ``[N]``, index into ``files`` of each row.
        offsets: int64 ``[N]``, first byte.
        lengths: int64 ``[N]``, bytes.
    """

    def __init__(self, files: Sequence[BinaryIO], file_ids: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        self.files, self.file_ids, self.offsets, self.lengths = list(files), file_ids, offsets, lengths

    def read(self, rows: np.ndarray) -> np.ndarray:
        return np.stack([self._decode(int(row)) for row in rows])

    def _decode(self, row: int) -> np.ndarray:
        file = self.files[self.file_ids[row]]
        encoded = os.pread(file.fileno(), int(self.lengths[row]), int(self.offsets[row]))
        try:
            return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
        except (UnidentifiedImageError, OSError) as error:
            raise ConfigError(
                f"The image of row {row} in {file.name} cannot be read ({type(error).__name__}: {error}). "
                "Copy the dataset again, or type sft.dataset=<a whole dataset>"
            ) from error


class VideoFrames(Frames):
    """Frames of videos that hold many episodes one after the other.

    Args:
        paths: The files.
        file_ids: int64 ``[N]``, index into ``paths`` of each row.
        seconds: float64 ``[N]``, time within the file.
    """

    def __init__(self, paths: Sequence[Path], file_ids: np.ndarray, seconds: np.ndarray) -> None:
        self.paths, self.file_ids, self.seconds = list(paths), file_ids, seconds
        self._local = threading.local()

    def read(self, rows: np.ndarray) -> np.ndarray:
        order = np.lexsort((self.seconds[rows], self.file_ids[rows]))
        found: dict[int, np.ndarray] = {}
        for position in order.tolist():
            row = int(rows[position])
            found[position] = self._reader(int(self.file_ids[row])).frame_at(float(self.seconds[row]))
        return np.stack([found[position] for position in range(len(rows))])

    def _reader(self, file_id: int) -> VideoReader:
        readers: dict[int, VideoReader] = self._local.__dict__.setdefault("readers", {})
        if file_id not in readers:
            if len(readers) >= MAX_OPEN_VIDEOS:
                readers.pop(next(iter(readers))).close()
            readers[file_id] = VideoReader(self.paths[file_id])
        return readers[file_id]
