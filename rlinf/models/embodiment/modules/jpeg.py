"""JPEG compression and decompression of images in torch: the bits of TensorFlow, batched and on any device.

Robot data sets in RLDS hold JPEG images, and the public evaluations of models that were trained on them send each camera
image through ``tf.io.encode_jpeg`` and ``tf.io.decode_image`` first. The lossless half of the format (entropy coding)
changes nothing and is left out. What remains are integer calculations, in the order of operations of libjpeg-turbo:
colour conversion, halved colour planes, discrete cosine transform (Loeffler, Ligtenberg and Moschytz 1989), rounding to
multiples of the quantisation tables, and back, with the faster and coarser inverse transform (Arai, Agui and Nakajima
1988) that TensorFlow takes by default, and which Pillow never takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

# Tables K.1 and K.2 of the JPEG standard (ITU-T T.81), the second one's right and lower part being 99 throughout.
LUMINANCE = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87,
    80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121, 120, 101, 72, 92,
    95, 98, 112, 100, 103, 99,
)  # fmt: skip
CHROMINANCE = (
    17, 18, 24, 47, *[99] * 4, 18, 21, 26, 66, *[99] * 4, 24, 26, 56, *[99] * 5, 47, 66, *[99] * 38,
)  # fmt: skip
QUALITY_SCALE = 10
"""Per cent of the tables at quality 95, the default of TensorFlow."""
IMAGES_AT_ONCE = 4
"""Images per slice of the work on a CPU, so that its intermediate results stay in the cache."""


def jpeg_round_trip(images: Tensor) -> Tensor:
    """Return what ``tf.io.decode_image(tf.io.encode_jpeg(image))`` gives: quality 95, colours at half the resolution.

    ``images`` are uint8 RGB ``[B, 3, H, W]``, wider than 4 pixels; so is the result.
    """
    slices = images.split(IMAGES_AT_ONCE if images.device.type == "cpu" else max(1, len(images)))
    return torch.cat([_round_trip(part) for part in slices])


def _round_trip(images: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    luminance, blue, red = _to_ycc(*images.int().unbind(1))
    luminance = _code(luminance, LUMINANCE)[:, :height, :width]
    colours = torch.cat([_halve(blue), _halve(red)])
    colours = _double(_code(colours, CHROMINANCE)[:, : -(-height // 2), : -(-width // 2)])[:, :height, :width]
    return torch.stack(_to_rgb(luminance, *colours.chunk(2)), dim=1).clamp_(0, 255).to(torch.uint8)


def _fixed(value: float, bits: int = 16) -> int:
    return math.floor(value * (1 << bits) + 0.5)


def _to_ycc(r: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    half, centre = 1 << 15, (128 << 16) + (1 << 15) - 1
    luminance = (_fixed(0.299) * r + _fixed(0.587) * g + _fixed(0.114) * b + half) >> 16
    blue = (-_fixed(0.16874) * r - _fixed(0.33126) * g + _fixed(0.5) * b + centre) >> 16
    red = (_fixed(0.5) * r - _fixed(0.41869) * g - _fixed(0.08131) * b + centre) >> 16
    return luminance, blue, red


def _to_rgb(luminance: Tensor, blue: Tensor, red: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    blue, red, half = blue - 128, red - 128, 1 << 15
    r = luminance + ((_fixed(1.402) * red + half) >> 16)
    g = luminance + ((-_fixed(0.34414) * blue - _fixed(0.71414) * red + half) >> 16)
    b = luminance + ((_fixed(1.772) * blue + half) >> 16)
    return r, g, b


def _extend(planes: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat the last row and column of ``[N, H, W]`` until both sizes are multiples of ``rows`` and ``columns``."""
    below, right = -planes.shape[-2] % rows, -planes.shape[-1] % columns
    planes = torch.cat([planes, planes[:, -1:].expand(-1, below, -1)], dim=1)
    return torch.cat([planes, planes[:, :, -1:].expand(-1, -1, right)], dim=2)


def _halve(planes: Tensor) -> Tensor:
    """Mean of 2 x 2 pixels, rounded down at halves in even columns and up in odd ones."""
    planes = _extend(planes, 2, 16)
    total = planes[:, ::2, ::2] + planes[:, ::2, 1::2] + planes[:, 1::2, ::2] + planes[:, 1::2, 1::2]
    bias = 1 + torch.arange(total.shape[-1], dtype=torch.int32, device=planes.device) % 2
    return (total + bias) >> 2


def _double(planes: Tensor) -> Tensor:
    """Upsample ``[N, H, W]`` to twice the size, three parts of the nearest pixel and one of the next in each direction."""
    above = torch.cat([planes[:, :1], planes[:, :-1]], dim=1)
    below = torch.cat([planes[:, 1:], planes[:, -1:]], dim=1)
    rows = torch.stack([3 * planes + above, 3 * planes + below], dim=2).flatten(1, 2)
    left = torch.cat([rows[..., :1], rows[..., :-1]], dim=-1)
    right = torch.cat([rows[..., 1:], rows[..., -1:]], dim=-1)
    return torch.stack([(3 * rows + left + 8) >> 4, (3 * rows + right + 7) >> 4], dim=-1).flatten(-2)


def _code(planes: Tensor, table: tuple[int, ...]) -> Tensor:
    """Transform, quantise and transform back ``[N, H, W]``; the result is extended to whole blocks of 8 x 8."""
    planes = _extend(planes, 8, 8)
    blocks = (planes - 128).unflatten(2, (-1, 8)).unflatten(1, (-1, 8))  # [N, rows, 8, columns, 8]
    coefficients = _along(_along(blocks, 4, _forward, first=True), 2, _forward, first=False)
    steps, scaled_steps = _tables(table, planes.device)
    divisor = 8 * steps
    levels = coefficients.sign() * ((coefficients.abs() + (divisor >> 1)) // divisor)
    pixels = _along(_along(levels * scaled_steps, 2, _inverse), 4, _inverse)
    return ((pixels >> 5) + 128).clamp_(0, 255).flatten(3, 4).flatten(1, 2)


@lru_cache(maxsize=8)
def _tables(table: tuple[int, ...], device: torch.device) -> Tensor:
    """Return quantisation steps, and those times the scales that ``_inverse`` leaves out, int32 ``[2, 8, 1, 8]``."""
    steps = [min(max((value * QUALITY_SCALE + 50) // 100, 1), 255) for value in table]
    scales = [1.0] + [math.cos(k * math.pi / 16) * math.sqrt(2) for k in range(1, 8)]
    scaled = [(step * _fixed(scales[i // 8] * scales[i % 8], 14) + (1 << 11)) >> 12 for i, step in enumerate(steps)]
    return torch.tensor([steps, scaled], dtype=torch.int32, device=device).view(2, 8, 1, 8)


def _along(blocks: Tensor, axis: int, transform: Callable[..., list[Tensor]], **arguments: bool) -> Tensor:
    return torch.stack(transform(*blocks.unbind(axis), **arguments), dim=axis)


def _forward(*x: Tensor, first: bool) -> list[Tensor]:
    """One pass of the transform; the first leaves 2 bits behind the point, the second takes them away."""

    def rounded(value: Tensor) -> Tensor:
        bits = 11 if first else 15
        return (value + (1 << (bits - 1))) >> bits

    def constant(value: float) -> int:
        return _fixed(value, bits=13)

    s0, s1, s2, s3 = (x[i] + x[7 - i] for i in range(4))
    d0, d1, d2, d3 = (x[i] - x[7 - i] for i in range(4))
    outer, inner, high, low = s0 + s3, s1 + s2, s0 - s3, s1 - s2
    ends = [outer + inner, outer - inner]
    ends = [value << 2 if first else (value + 2) >> 2 for value in ends]
    turned = (low + high) * constant(0.541196100)
    z5 = (d0 + d1 + d2 + d3) * constant(1.175875602)
    z1, z2 = (d0 + d3) * constant(0.899976223), (d1 + d2) * constant(2.562915447)
    z3, z4 = z5 - (d1 + d3) * constant(1.961570560), z5 - (d0 + d2) * constant(0.390180644)
    return [
        ends[0],
        rounded(d0 * constant(1.501321110) - z1 + z4),
        rounded(turned + high * constant(0.765366865)),
        rounded(d1 * constant(3.072711026) - z2 + z3),
        ends[1],
        rounded(d2 * constant(2.053119869) - z2 + z4),
        rounded(turned - low * constant(1.847759065)),
        rounded(d3 * constant(0.298631336) - z1 + z3),
    ]


def _inverse(*x: Tensor) -> list[Tensor]:
    """One pass of the inverse transform, with constants of 8 bits and without rounding."""
    middle = x[2] + x[6]
    turned = _times(x[2] - x[6], 1.414213562) - middle
    high, low = x[0] + x[4], x[0] - x[4]
    even = [high + middle, low + turned, low - turned, high - middle]
    z13, z10, z11, z12 = x[5] + x[3], x[5] - x[3], x[1] + x[7], x[1] - x[7]
    z5 = _times(z10 + z12, 1.847759065)
    odd = [z11 + z13]
    odd.append(z5 + _times(z10, -1.613125930) - z10 - odd[0])
    odd.append(_times(z11 - z13, 1.414213562) - odd[1])
    odd.append(z5 - _times(z12, 1.082392200) - odd[2])
    left = [_lowest_bits(even[i] + odd[i], 16) for i in range(4)]
    right = [_lowest_bits(even[i] - odd[i], 16) for i in range(4)]
    return left + right[::-1]


def _times(x: Tensor, factor: float) -> Tensor:
    return _lowest_bits(x, 14) * _fixed(factor, bits=8) >> 8


def _lowest_bits(x: Tensor, bits: int) -> Tensor:
    """What a 16-bit register of x86 keeps: blocks of saturated colours overflow, and TensorFlow shows wrong pixels there."""
    return x << (32 - bits) >> (32 - bits)
