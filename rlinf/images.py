"""Open images and convert them to RGB: the one place that decides on orientation, number format and transparency."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image, ImageOps

from rlinf.errors import ConfigError

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
"""Pillow's modes of 8 bits per channel or fewer."""
MAX_NAME = 80
"""Characters of a path that a message shows."""


class ImageError(ConfigError):
    """An image is missing, damaged, or of a number format that has no single conversion to 8 bits; the text begins with its name."""


def open_image(image: Any, folder: Path = Path(), formats: Sequence[str] | None = None, name: str = "") -> Image.Image:
    """Return an image as RGB; raise ImageError if that is impossible.

    Args:
        image: A PIL image, pixels as in ``check_pixels``, a path, a ``data:`` URI, the bytes of a file, or ``{bytes, path}``.
        folder: Where a relative path begins.
        formats: Pillow's names of the file formats that are read; None: all.
        name: For messages; empty: the path.
    """
    if isinstance(image, np.ndarray):
        image = Image.fromarray(check_pixels(image, name or "the image"))
    if isinstance(image, Image.Image):
        return to_rgb(image, name or "the image")
    stored = image if isinstance(image, Mapping) else {"bytes" if isinstance(image, bytes) else "path": image}
    path, data = stored.get("path"), stored.get("bytes")
    if data is None and not isinstance(path, (str, Path)):
        raise ImageError(f"an image is a {type(image).__name__}; required: a path, or bytes that hold an image.")
    shown = str(path)
    shown = shown if len(shown) <= MAX_NAME else f"{shown[: MAX_NAME - 3]}..."
    name = name or (f"the image '{shown}'" if path else "the image in the dataset")
    try:
        if data is None and str(path).startswith("data:"):
            data = _bytes_of_uri(str(path))
        if data is None and "://" in str(path):
            raise ImageError(f"{name} is an address, and nothing is downloaded; required: a file, or a data: URI.")
        with Image.open(io.BytesIO(data) if data is not None else folder / path, formats=formats) as opened:
            return to_rgb(opened, name)
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError(f"{name} does not exist in '{folder}'; required: a file.") from None
    except (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        reason = str(error) if len(str(error)) <= 3 * MAX_NAME else f"{str(error)[: 3 * MAX_NAME]}..."
        raise ImageError(f"{name} cannot be read ({reason}); required: an image such as PNG or JPEG.") from error


def to_rgb(image: Image.Image, name: str = "the image") -> Image.Image:
    """Return a PIL image upright (EXIF) and in RGB, transparent pixels over white; raise ImageError for 16 bits and floats.

    Of colour files with 16 bits per channel, Pillow reads the upper 8.
    """
    if image.mode not in MODES:
        raise ImageError(f"{name} has pixels of the mode '{image.mode}' (16 bits, 32 bits or floats), whose black and white nobody "
                         "says; required: 8 bits per channel. Scale the values to 0 to 255 and save them as uint8.")  # fmt: skip
    if image.getexif().get(0x0112, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours)
    return image.convert("RGB")


def check_pixels(pixels: np.ndarray, name: str = "the image") -> np.ndarray:
    """Return pixels uint8 ``[H, W, 3]``, ``[H, W, 4]`` or ``[H, W]`` (also given as ``[H, W, 1]``); raise ImageError for others."""
    if pixels.dtype != np.uint8:
        raise ImageError(f"{name} has pixels of {pixels.dtype}; required: uint8, 0 to 255. Pixels of 0 to 1: "
                         "(255 * image).round().astype('uint8')")  # fmt: skip
    if pixels.ndim not in (2, 3) or pixels.shape[2:] not in ((), (1,), (3,), (4,)) or not pixels.size:
        raise ImageError(f"{name} has pixels of the shape {list(pixels.shape)}; required: [height, width, 3].")
    return pixels[..., 0] if pixels.shape[2:] == (1,) else pixels


def _bytes_of_uri(uri: str) -> bytes:
    """Return what a ``data:`` URI holds; raise ValueError if it is not in base64."""
    kind, comma, content = uri.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise ValueError("a data: URI without ';base64,'")
    return base64.b64decode(unquote_to_bytes(content), validate=True)
