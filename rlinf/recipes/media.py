"""Images of rows."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from rlinf.recipes.samples import BadRowError

PREVIEW_PIXELS = 128
"""Longer side of a preview."""


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


def preview(image: Image.Image) -> bytes:
    """Return a small copy of an image for the report, as JPEG."""
    small = image.copy()
    small.thumbnail((PREVIEW_PIXELS, PREVIEW_PIXELS))
    stored = io.BytesIO()
    small.save(stored, "JPEG", quality=90)
    return stored.getvalue()
