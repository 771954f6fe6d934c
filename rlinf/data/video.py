"""Write MP4 files of camera frames, and read single frames at exact times. PyAV is imported at first use."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np

from rlinf.data.damage import damaged, import_reader
from rlinf.errors import ConfigError


def import_av(wanted_by: str) -> ModuleType:
    """Return the module ``av``, which is PyAV."""
    return import_reader("av", wanted_by, "MP4 files")


class VideoWriter:
    """Writes H.264, 4:2:0, ``height`` and ``width`` even; every second frame is a key frame, so that seeking is fast, as in LeRobot."""

    def __init__(self, path: Path, fps: int, height: int, width: int) -> None:
        av = import_av("Writing a video")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.num_frames, self.num_bytes = path, 0, 0
        self._frame_of = av.VideoFrame.from_ndarray
        self._container = av.open(str(path), "w")
        options = {"crf": "20", "g": "2", "tune": "zerolatency", "threads": "1"}
        self._stream = self._container.add_stream("libx264", rate=fps, options=options)
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
        self._stream.codec_context.time_base = Fraction(1, fps)

    def append(self, images: np.ndarray) -> None:
        """Write uint8 ``[T, H, W, 3]``."""
        for image in images:
            frame = self._frame_of(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = self.num_frames, self._stream.codec_context.time_base
            self._write(self._stream.encode(frame))
            self.num_frames += 1

    def close(self) -> None:
        """Flush the encoder and write the file's index. Idempotent."""
        if self._container is not None:
            self._write(self._stream.encode(None))
            self._container.close()
            self._container = None

    def _write(self, packets: list) -> None:
        self.num_bytes += sum(packet.size for packet in packets)
        self._container.mux(packets)


class VideoReader:
    """Reads single frames of a video file in any format of FFmpeg. Use it in one thread only."""

    def __init__(self, path: Path) -> None:
        av = import_av(f"Reading {path}")
        self.path = path
        try:
            self._container = av.open(str(path))
            self._stream = self._container.streams.video[0]
        except (OSError, IndexError, av.error.FFmpegError) as error:
            raise damaged(path, f"it cannot be read as a video: {type(error).__name__}: {error}") from error
        self._stream.codec_context.thread_count = 1
        self._errors = av.error.FFmpegError
        self._frames = self._container.decode(self._stream)
        self._frame, self._half = None, Fraction(1, 2) / Fraction(self._stream.average_rate)

    def frame_at(self, seconds: float) -> np.ndarray:
        """Return the frame shown at ``seconds``, uint8 ``[H, W, 3]``; raise ConfigError without any within half a frame."""
        try:
            if self._frame is None or not 0 <= seconds - self._time() < 8 * self._half:
                self._container.seek(int((seconds - float(self._half)) / self._stream.time_base), stream=self._stream)
                self._frames = self._container.decode(self._stream)
                self._frame = next(self._frames, None)
            while self._frame is not None and self._time() < seconds - self._half:
                self._frame = next(self._frames, None)
        except self._errors as error:
            raise self._missing(seconds, f"{type(error).__name__}: {error}") from error
        if self._frame is None or abs(self._time() - seconds) > self._half:
            raise self._missing(seconds, "the file ends earlier, or has a gap")
        return self._frame.to_ndarray(format="rgb24")

    def _time(self) -> float:
        return float(self._frame.pts * self._stream.time_base)

    def _missing(self, seconds: float, reason: str) -> ConfigError:
        self._frame = None
        return damaged(self.path, f"no frame at {seconds:.3f} s: {reason}")

    def close(self) -> None:
        self._container.close()
