"""Encode messages as msgpack with arrays in openpi's or vla-eval's layout; decode and validate messages in either layout.

openpi encodes an array as a map with bin keys, vla-eval as a map with str keys. vla-eval also sends images as PNG or JPEG.
Only arrays of plain little-endian numbers are accepted, not arrays of objects or text.
"""

import io
import math
import re
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
from PIL import Image

from rlinf.images import ImageError, to_rgb
from rlinf.serving import MessageError

DTYPE = re.compile(r"[<|=]?(b1|[iu][1248]|f[248])|bool|u?int(8|16|32|64)|float(16|32|64)")
"""Number formats of arrays, in NumPy's notation."""

MAX_AXES = 8
MAX_DEPTH = 8
"""Maximum nesting of maps and lists; messages in both protocols have three levels."""
MAX_ITEMS = 4096
"""Maximum number of entries in a map or list; an array is one entry."""
MAX_MESSAGE_ITEMS = 65_536
"""Maximum number of entries in all maps and lists of a message, because reading each takes time while holding the GIL."""
MAX_PIXELS = 4096 * 4096
"""Maximum number of declared pixels in a message's compressed images, because a small file can expand to fill the memory."""

FORMATS = {"png": "PNG", "jpeg": "JPEG"}


def encode(value: object) -> bytes:
    """Encode a message in openpi's layout; arrays keep their dtype and shape."""
    return msgpack.packb(value, default=_openpi)


def encode_named(value: object) -> bytes:
    """Encode a message in vla-eval's layout, with arrays under str keys."""
    return msgpack.packb(value, default=_vla_eval)


def decode(data: Any, max_text: int | None = None) -> Any:
    """Decode a message in either layout to writable arrays; raise MessageError if malformed or a text exceeds ``max_text`` bytes."""
    if not isinstance(data, bytes | bytearray):
        raise MessageError("The message is text; expected a binary frame of msgpack")
    try:
        # The limits are enforced while msgpack reads, before a small message can expand in memory.
        counted = _Budget("entries", MAX_MESSAGE_ITEMS)
        options = {"object_hook": counted.items, "list_hook": counted.items, "max_str_len": max_text or len(data)}
        value = msgpack.unpackb(data, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0, **options)
    except MessageError:
        raise
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        if "max_str_len" in str(error):
            raise too_long("A text", str(error).partition(" ")[0], max_text) from None
        raise MessageError(f"The message cannot be read as msgpack ({type(error).__name__}: {error})") from error
    return _decoded(value, 0, _Budget("pixels", MAX_PIXELS))


def too_long(what: str, num_bytes: object, limit: int | None) -> MessageError:
    """Return the error for a text that exceeds the server's limit."""
    return MessageError(f"{what} has {num_bytes} bytes; expected at most {limit} (the server's max_prompt_bytes)")


class _Budget:
    """Remaining budget of entries or pixels in a message."""

    def __init__(self, what: str, limit: int) -> None:
        self.what, self.limit, self.left = what, limit, limit

    def take(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise MessageError(f"The message has too many {self.what}; expected at most {self.limit}")

    def items(self, value: object) -> Any:
        """Deduct the entries of a decoded map or list from the budget, and return it."""
        self.take(len(value))
        return value


def _openpi(value: object) -> Any:
    if isinstance(value, np.ndarray):
        _check_kind(value.dtype)
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        _check_kind(value.dtype)
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(
        f"a {type(value).__name__} cannot be sent; expected numbers, text, lists, maps and arrays of numbers"
    )


def _vla_eval(value: object) -> Any:
    if isinstance(value, np.ndarray):
        _check_kind(value.dtype)
        return {"__ndarray__": True, "data": value.tobytes(), "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return value.item()
    return _openpi(value)


def _check_kind(dtype: np.dtype) -> None:
    if not DTYPE.fullmatch(dtype.str):
        raise TypeError(f"an array of {dtype} cannot be sent; expected little-endian numbers")


def _decoded(value: object, depth: int, pixels: _Budget) -> Any:
    if depth > MAX_DEPTH:
        raise MessageError(f"The message nests maps and lists more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [_decoded(item, depth + 1, pixels) for item in value]
    if not isinstance(value, dict):
        return value
    # This handles both layouts, because keys of openpi's arrays are bytes.
    named = {key.decode("ascii", "replace") if isinstance(key, bytes) else key: item for key, item in value.items()}
    if "__ndarray__" in named:
        return _array(named)
    if "__npgeneric__" in named:
        return _scalar(named)
    if "__image__" in named:
        return _image(named, pixels)
    if not all(isinstance(key, str) for key in value):
        raise MessageError("A map has keys that are not text")
    return {key: _decoded(item, depth + 1, pixels) for key, item in value.items()}


def _array(parts: Mapping[str, Any]) -> np.ndarray:
    dtype, shape, data = _dtype(parts.get("dtype")), _shape(parts.get("shape")), parts.get("data")
    if not isinstance(data, bytes):
        raise MessageError(f"The data of an array is a {type(data).__name__}; expected bytes")
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted:
        raise MessageError(f"An array of {dtype} {list(shape)} has {len(data)} bytes; expected {wanted}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _scalar(parts: Mapping[str, Any]) -> np.generic:
    dtype, number = _dtype(parts.get("dtype")), parts.get("data")
    if not isinstance(number, bool | int | float):
        raise MessageError(f"A number of type {dtype} is a {type(number).__name__}")
    try:
        return dtype.type(number)
    except (OverflowError, ValueError) as error:
        raise MessageError(f"{number} is not a {dtype}") from error


def _image(parts: Mapping[str, Any], pixels_left: _Budget) -> np.ndarray:
    """Decode an image, uint8 ``[H, W, C]``, checking its size before allocating its pixels."""
    shape, data, kind = _shape(parts.get("shape")), parts.get("data"), parts.get("format")
    if len(shape) != 3 or shape[2] not in (1, 3, 4):
        raise MessageError(f"An image has the shape {list(shape)}; expected [H, W, 1, 3 or 4]")
    if kind == "raw":
        return _array({"dtype": "uint8", **parts})
    if kind not in FORMATS or not isinstance(data, bytes):
        raise MessageError(f"An image has the format {kind!r}; expected bytes of png, jpeg or raw")
    pixels_left.take(shape[0] * shape[1])
    try:
        with Image.open(io.BytesIO(data), formats=(FORMATS[kind],)) as image:
            if sorted(image.size) != sorted(shape[:2]):
                raise MessageError(f"An image of {image.size[1]} x {image.size[0]} declares the shape {list(shape)}")
            pixels = np.array(image if image.mode in ("L", "RGBA") else to_rgb(image))
    except ImageError as error:
        raise MessageError(str(error)) from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise MessageError(f"An image cannot be read as {kind} ({type(error).__name__})") from error
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.shape != shape or pixels.dtype != np.uint8:
        raise MessageError(f"An image of {pixels.dtype} {list(pixels.shape)} declares uint8 {list(shape)}")
    return pixels


def _dtype(text: Any) -> np.dtype:
    if not isinstance(text, str) or not DTYPE.fullmatch(text):
        raise MessageError(f"An array has the type {text!r}; expected little-endian numbers of kind b, i, u or f")
    return np.dtype(text)


def _shape(shape: Any) -> tuple[int, ...]:
    fits = isinstance(shape, list) and len(shape) <= MAX_AXES
    if not fits or any(type(size) is not int or not 0 <= size < 2**31 for size in shape):
        raise MessageError(f"An array has the shape {shape!r}; expected at most {MAX_AXES} sizes, none negative")
    if math.prod(max(1, size) for size in shape) >= 2**31:  # a size of 0 must not hide large sizes
        raise MessageError(f"An array has the shape {shape}; expected non-zero sizes with a product below 2**31")
    return tuple(shape)
