"""Batched resizing and JPEG round trips of uint8 images, bit-identical to Pillow, torch or TensorFlow."""

import io
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

PRECISION_BITS = 22
"""Number of fraction bits in Pillow's fixed-point weights."""
IMAGES_AT_ONCE = 4
"""Number of images per slice on a CPU, chosen so that intermediate results stay in the cache."""


def _in_slices(images: Tensor, size: tuple[int, int], resize: Callable[[Tensor, int, int], Tensor]) -> Tensor:
    """Apply ``resize(slice, height, width)`` to slices of images; images of the right size are returned unchanged."""
    if tuple(images.shape[-2:]) == size:
        return images
    slices = images.split(IMAGES_AT_ONCE if images.device.type == "cpu" else max(1, len(images)))
    return torch.cat([resize(part, *size) for part in slices])


def resize_bicubic(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 ``[B, C, H, W]`` to ``size`` (height, width) as ``PIL.Image.resize(..., BICUBIC)`` does.

    A horizontal and then a vertical pass compute weighted sums in 32-bit integers, rounded and clipped to uint8; shrinking
    widens the kernel (antialiasing). Pillow up to version 12 always uses this order, as did public checkpoints' training;
    version 13 starts with the vertical pass if an image loses more than two rows per lost column.
    """
    return _in_slices(images, tuple(size), _bicubic_slice)


def _bicubic_slice(images: Tensor, height: int, width: int) -> Tensor:
    pixels = images.int()
    if images.shape[-1] != width:
        pixels = _resize_rows(pixels.transpose(-1, -2).contiguous(), width).transpose(-1, -2).contiguous()
    if images.shape[-2] != height:
        pixels = _resize_rows(pixels, height)
    return pixels.to(torch.uint8)


def _resize_rows(pixels: Tensor, length: int) -> Tensor:
    """Resize the second to last axis of int32 ``[B, C, N, M]`` to ``length``."""
    return _weighted_rows(pixels, *_taps(pixels.shape[-2], length, pixels.device), PRECISION_BITS)


def _weighted_rows(pixels: Tensor, indices: Tensor, weights: Tensor, bits: int) -> Tensor:
    """Sum the int32 rows ``indices [taps, length]`` (second to last axis) times ``weights`` with ``bits`` fraction bits."""
    shape = (*pixels.shape[:-2], indices.shape[1], pixels.shape[-1])
    # Start at half a unit, so that the shift below rounds to nearest.
    total = pixels.new_full(shape, 1 << (bits - 1))
    for index, weight in zip(indices, weights, strict=True):
        total.addcmul_(pixels.index_select(-2, index), weight)
    return total.bitwise_right_shift_(bits).clamp_(0, 255)


@lru_cache(maxsize=64)
def _taps(length: int, new_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return input positions ``[taps, new_length]`` and int32 weights ``[taps, new_length, 1]`` for a pass.

    The kernel is Keys' cubic convolution with a = -1/2 (Keys 1981, eq. 4), stretched by the scale when shrinking. Each
    output pixel's weights are divided by their sum and rounded half away from zero.
    """
    scale = length / new_length
    stretch = max(scale, 1.0)
    support = 2.0 * stretch
    centres = (np.arange(new_length) + 0.5) * scale
    # Same order of operations as in Pillow's C code, which truncates towards zero and, unlike np.sum, adds sequentially.
    first = np.maximum((centres - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centres + support + 0.5).astype(np.int64), length)
    positions = first + np.arange((end - first).max())[:, None]
    weights = np.where(positions < end, _cubic((positions - centres + 0.5) * (1.0 / stretch)), 0.0)
    weights = weights / np.cumsum(weights, axis=0)[-1] * (1 << PRECISION_BITS)
    fixed = np.trunc(weights + np.copysign(0.5, weights)).astype(np.int32)
    indices = torch.from_numpy(np.minimum(positions, length - 1))
    return indices.to(device), torch.from_numpy(fixed)[..., None].to(device)


def _cubic(x: np.ndarray) -> np.ndarray:
    x, a = np.abs(x), -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def resize_bilinear(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 ``[B, C, H, W]`` to ``size`` (height, width) as torch on a CPU does: bilinear, without antialiasing."""
    # torch has no such kernel for GPUs, so the same integers are computed there explicitly.
    if images.device.type == "cpu":
        return torch.nn.functional.interpolate(images, size=size, mode="bilinear")
    return bilinear_by_integers(images, *size)


def bilinear_by_integers(images: Tensor, height: int, width: int) -> Tensor:
    """Return a result bit-identical to ``resize_bilinear``, on any device."""
    pixels = images.int()
    for length, axis in ((width, -1), (height, -2)):
        if images.shape[axis] != length:
            pixels = pixels.transpose(axis, -2).contiguous()
            taps = _bilinear_taps(pixels.shape[-2], length, pixels.device)
            pixels = _weighted_rows(pixels, *taps).transpose(axis, -2)
    return pixels.contiguous().to(torch.uint8)


@lru_cache(maxsize=64)
def _bilinear_taps(length: int, new_length: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return positions, weights and bits for ``_weighted_rows``, with as many bits as fit into 16-bit weights, as in torch."""
    source = np.maximum((np.arange(new_length) + 0.5) * (length / new_length) - 0.5, 0.0)
    above = np.minimum(source.astype(np.int64), length - 1)
    fraction = source - above
    weights = np.stack([1.0 - fraction, fraction])
    bits = next(bits for bits in range(PRECISION_BITS) if int(0.5 + weights.max() * (1 << (bits + 1))) >= 1 << 15)
    fixed = torch.from_numpy((0.5 + weights * (1 << bits)).astype(np.int32))[..., None]
    indices = torch.from_numpy(np.stack([above, np.minimum(above + 1, length - 1)]))
    return indices.to(device), fixed.to(device), bits


def resize_lanczos3(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 ``[B, C, H, W]`` to ``size`` (height, width) as TensorFlow's ``lanczos3`` with antialiasing does.

    A vertical and then a horizontal pass run in float32; the result is rounded and clipped to uint8. The kernel is
    ``sinc(x) sinc(x / 3)`` for ``|x| <= 3`` (Duchon 1979), stretched by the scale when shrinking.
    """
    return _in_slices(images, size, _lanczos3_slice)


def _lanczos3_slice(images: Tensor, height: int, width: int) -> Tensor:
    pixels = _lanczos3_rows(images.float(), height)
    pixels = _lanczos3_rows(pixels.transpose(-1, -2).contiguous(), width).transpose(-1, -2)
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def _lanczos3_rows(pixels: Tensor, length: int) -> Tensor:
    total = pixels.new_zeros(*pixels.shape[:-2], length, pixels.shape[-1])
    for index, weight in zip(*_lanczos3_taps(pixels.shape[-2], length, pixels.device), strict=True):
        # Not addcmul_, which rounds once; TensorFlow rounds the product before adding.
        total.add_(pixels.index_select(-2, index).mul_(weight))
    return total


@lru_cache(maxsize=64)
def _lanczos3_taps(length: int, new_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return input positions ``[taps, new_length]`` and float32 weights ``[taps, new_length, 1]`` for a pass."""
    unit, half, radius = np.float32(1.0), np.float32(0.5), np.float32(3.0)
    scale = unit / (np.float32(new_length) / np.float32(length))
    stretch = max(scale, unit)
    centres = (np.arange(new_length, dtype=np.float32) + half) * scale
    first = np.clip(np.ceil(centres - radius * stretch - half).astype(np.int64), 0, length - 1)
    last = np.clip(np.floor(centres + radius * stretch - half).astype(np.int64), 0, length - 1)
    positions = first + np.arange((last - first).max() + 1)[:, None]
    weights = _lanczos3(np.abs((positions.astype(np.float32) + half - centres) * (unit / stretch)))
    weights = np.where(positions <= last, weights, np.float32(0.0))
    weights *= unit / np.cumsum(weights, axis=0)[-1]
    indices = torch.from_numpy(np.minimum(positions, length - 1))
    return indices.to(device), torch.from_numpy(weights)[..., None].to(device)


def _lanczos3(x: np.ndarray) -> np.ndarray:
    pi, radius = np.float32(np.pi), np.float32(3.0)
    near = x <= np.float32(1e-3)
    angle = pi * np.where(near, np.float32(1.0), x)
    value = radius * _sine(angle) * _sine(angle / radius) / (pi * pi * x * x + near)
    return np.where(x > radius, np.float32(0.0), np.where(near, np.float32(1.0), value))


def _sine(angle: np.ndarray) -> np.ndarray:
    # NumPy's own float32 sine is not correctly rounded on some processors.
    return np.sin(angle.astype(np.float64)).astype(np.float32)


def crop_and_resize(images: Tensor, area: float, size: tuple[int, int]) -> Tensor:
    """Crop the centre of uint8 ``[B, C, H, W]`` and resize it as ``tf.image.crop_and_resize`` (bilinear) does.

    ``area`` is the remaining fraction of the image. The result is converted to uint8 as by ``tf.image.convert_image_dtype``.
    """
    pixels = images.float().mul_(1.0 / 255.0)
    pixels = _interpolate_rows(pixels.transpose(-1, -2), area, size[1]).transpose(-1, -2)
    pixels = _interpolate_rows(pixels, area, size[0])
    return pixels.clamp_(0.0, 1.0).mul_(255.5).to(torch.uint8)


def _interpolate_rows(pixels: Tensor, area: float, length: int) -> Tensor:
    """Sample the second to last axis at ``length`` positions between the borders of the crop."""
    unit, last = np.float32(1.0), np.float32(pixels.shape[-2] - 1)
    side = np.sqrt(np.float32(area))
    low = (unit - side) / np.float32(2.0)
    step = (low + side - low) * last / np.float32(length - 1)
    places = torch.from_numpy(low * last + np.arange(length, dtype=np.float32) * step).to(pixels.device)
    above = pixels.index_select(-2, places.floor().long())
    below = pixels.index_select(-2, places.ceil().long())
    return above + (below - above) * (places - places.floor())[:, None]


QUALITY = 95
"""TensorFlow's default."""


def jpeg_round_trip(images: Tensor) -> Tensor:
    """Return ``tf.io.decode_image(tf.io.encode_jpeg(image))`` of uint8 RGB ``[B, 3, H, W]``, on the same device."""
    rows = images.permute(0, 2, 3, 1).cpu().contiguous().numpy()
    decoded = np.empty_like(rows)
    for row, image in enumerate(rows):
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG", quality=QUALITY, subsampling="4:2:0")
        decoded[row] = simplejpeg.decode_jpeg(stream.getvalue(), fastdct=True, fastupsample=False)
    return torch.from_numpy(decoded).permute(0, 3, 1, 2).contiguous().to(images.device)
