"""Images and videos of rows."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from rlinf.data.video import import_av
from rlinf.recipes.samples import BadRowError

MAX_FRAMES = 64


def open_image(image: Any, folder: Path) -> Image.Image:
    """Return an image as RGB.

    Args:
        image: A PIL image, pixels uint8 ``[H, W, 3]``, a path, or what the ``datasets`` library holds: ``{bytes, path}``.
        folder: Where a relative path begins.
    """
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if isinstance(image, np.ndarray):
        return Image.fromarray(image).convert("RGB")
    is_stored = isinstance(image, Mapping)
    path = image.get("path") if is_stored else image
    data = image.get("bytes") if is_stored else None
    if data is None and not isinstance(path, (str, Path)):
        raise BadRowError(f"an image is a {type(image).__name__}; required: a path, or bytes that hold an image.")
    place = f"'{path}'" if path else "in the dataset"
    try:
        with Image.open(io.BytesIO(data) if data is not None else folder / path) as opened:
            return opened.convert("RGB")
    except FileNotFoundError:
        raise BadRowError(f"the image '{folder / path}' does not exist; required: a file.") from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadRowError(
            f"the image {place} cannot be read ({error}); required: a picture such as PNG or JPEG."
        ) from error


def read_frames(
    path: Path, fps: float = 1.0, max_pixels: int | None = None, max_frames: int = MAX_FRAMES
) -> list[Image.Image]:
    """Read frames of a video at regular times, the first one included.

    Args:
        path: File in any format of FFmpeg.
        fps: Frames per second of the video's time.
        max_pixels: A larger frame is scaled down to this area, its shape kept; None: as it is.
        max_frames: Of more frames, this many are taken, spread evenly.
    """
    av = import_av(f"Reading {path}")
    frames: list[Image.Image] = []
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                seconds = float(frame.time or 0.0)
                if seconds + 1e-6 >= len(frames) / fps:
                    frames.append(_scaled(frame.to_image(), max_pixels))
    except (OSError, IndexError, av.error.FFmpegError) as error:
        raise BadRowError(
            f"the video '{path}' cannot be read ({type(error).__name__}: {error}); required: a video."
        ) from error
    if not frames:
        raise BadRowError(f"the video '{path}' has no frames; required: at least one.")
    if len(frames) > max_frames:
        frames = [frames[round(index)] for index in np.linspace(0, len(frames) - 1, max_frames)]
    return frames


def _scaled(image: Image.Image, max_pixels: int | None) -> Image.Image:
    scale = 1.0 if max_pixels is None else math.sqrt(max_pixels / (image.width * image.height))
    if scale >= 1:
        return image
    return image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))), Image.Resampling.BICUBIC)
