"""Image loading and conversion to RGB, taking orientation, pixel format and transparency into account."""

import base64
import io
import struct
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from rlinf.errors import ConfigError

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
"""Pillow's modes with at most 8 bits per channel."""


class ImageError(ConfigError):
    """An image is missing, damaged, or cannot be converted to 8 bits unambiguously."""


def open_image(image: object, folder: Path = Path(), name: str = "") -> Image.Image:
    """Open an image and convert it to RGB; raise ImageError if that is impossible.

    Args:
        image: A PIL image, pixels uint8 ``[H, W]`` or ``[H, W, 1, 3 or 4]``, a path, a ``data:`` URI, a file's bytes, or a
            mapping with ``bytes`` and ``path``.
        folder: Base folder of a relative path.
        name: Name for messages; if empty, the path is used.
    """
    if isinstance(image, (Image.Image, np.ndarray)):
        return to_rgb(image if isinstance(image, Image.Image) else _from_pixels(image), name or "the image")
    stored = image if isinstance(image, Mapping) else {"bytes" if isinstance(image, bytes) else "path": image}
    path, data = stored.get("path"), stored.get("bytes")
    if data is None and not isinstance(path, (str, Path)):
        raise ImageError(f"an image is a {type(image).__name__}; expected a path, or the bytes of an image file.")
    name = name or (f"the image '{_short(path)}'" if path else "the image in the dataset")
    try:
        if data is None and str(path).startswith("data:"):
            data = base64.b64decode(unquote_to_bytes(str(path).partition(";base64,")[2]), validate=True)
        with Image.open(io.BytesIO(data) if data is not None else folder / path) as opened:
            return to_rgb(opened, name)
    except FileNotFoundError:
        raise ImageError(f"{name} does not exist in '{folder}'; expected a file, or a data: URI in base64.") from None
    except (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        if isinstance(error, ImageError):
            raise
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else _short(error)
        raise ImageError(f"{name} cannot be read ({reason}); expected an image such as PNG or JPEG.") from error


def to_rgb(image: Image.Image, name: str = "the image") -> Image.Image:
    """Apply EXIF rotation, convert to RGB on a white background, and raise ImageError for 16-bit and float images."""
    # 16-bit colour files pass this check because Pillow has already reduced them to the upper 8 bits.
    if image.mode not in MODES:
        raise ImageError(f"{name} has pixels of the mode '{image.mode}' (16 or 32 bits, or floats), whose values for black and "
                         "white are unknown; expected 8 bits per channel. Scale them to 0 to 255 and save them as uint8.")  # fmt: skip
    if image.getexif().get(0x0112, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours)
    return image.convert("RGB")


def _from_pixels(pixels: np.ndarray) -> Image.Image:
    if (
        pixels.dtype != np.uint8
        or pixels.ndim not in (2, 3)
        or pixels.shape[2:] not in ((), (1,), (3,), (4,))
        or not pixels.size
    ):
        raise ImageError(f"an image has pixels {pixels.dtype} {list(pixels.shape)}; expected uint8 [height, width, 3]. For pixels in 0 to "
                         "1: (255 * image).round().astype('uint8').")  # fmt: skip
    return Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)


def _short(value: object) -> str:
    return text if len(text := str(value)) <= 200 else f"{text[:197]}..."
