"""Write MP4 files of camera frames, and read frames at exact times. PyAV is imported at first use."""

from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np

from rlinf.errors import ConfigError, damaged, import_extra


def import_av(wanted_by: str) -> ModuleType:
    return import_extra("av", wanted_by, "lerobot")


class VideoWriter:
    """Writes H.264 (4:2:0; ``height`` and ``width`` must be even). As in LeRobot, every second frame is a key frame for fast seeking."""

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
    """Reads single frames of a video file in any format that FFmpeg supports. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        av = import_av(f"Reading {path}")
        self.path = path
        try:
            self._container = av.open(str(path))
            self._stream = self._container.streams.video[0]
        except (OSError, IndexError, av.error.FFmpegError) as error:
            raise damaged(path, f"it cannot be read as a video: {type(error).__name__}: {error}") from error
        # One decoder thread, because several threads already read in parallel.
        self._stream.codec_context.thread_count = 1
        self._errors = av.error.FFmpegError
        self.time_base = Fraction(self._stream.time_base)
        rate = self._stream.average_rate or self._stream.guessed_rate or 30
        self._step = max(1, int(1 / (rate * self.time_base)))  # from a frame to the next
        self._frames, self._frame = iter(()), None

    def times(self) -> np.ndarray:
        """Return the presentation times of all frames in units of ``time_base``, as increasing int64 ``[F]``, without decoding."""
        try:
            packets = [packet.pts for packet in self._container.demux(self._stream) if not packet.is_discard]
        except self._errors as error:
            raise damaged(self.path, error) from error
        if set(packets) <= {None}:
            raise damaged(self.path, "it has no frames with time stamps")
        return np.unique(np.array([time for time in packets if time is not None], dtype=np.int64))

    def frame_at(self, time: int) -> np.ndarray:
        """Return the frame at a presentation time, uint8 ``[H, W, 3]``; raise ConfigError if it is missing."""
        try:
            # Continue decoding from the current frame if it is close, because a seek restarts at the previous key frame.
            if self._frame is None or not 0 <= time - self._frame.pts <= 4 * self._step:
                self._container.seek(time - self._step, stream=self._stream)
                self._frames = self._container.decode(self._stream)
                self._frame = next(self._frames, None)
            while self._frame is not None and self._frame.pts < time:
                self._frame = next(self._frames, None)
        except self._errors as error:
            raise self._missing(time, f"{type(error).__name__}: {error}") from error
        if self._frame is None or self._frame.pts != time:
            raise self._missing(time, "the file ends earlier, or has a gap")
        return self._frame.to_ndarray(format="rgb24")

    def _missing(self, time: int, reason: str) -> ConfigError:
        self._frame = None
        return damaged(self.path, f"no frame at {float(time * self.time_base):.3f} s: {reason}")

    def close(self) -> None:
        self._container.close()
