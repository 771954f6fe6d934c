"""Image augmentation for behaviour cloning: random crops and colour changes.

The operations, their order and their bounds match OpenVLA's public fine-tuning code (``image_aug``, in TensorFlow): crop,
brightness, contrast, saturation and hue, with values clipped to [0, 1] after each.
"""

from dataclasses import replace

import numpy as np

from rlinf.data.config import AugmentConfig
from rlinf.seeding import derive_seed
from rlinf.types import Observation


def augment(observation: Observation, config: AugmentConfig, seed: int, rows: np.ndarray) -> Observation:
    """Return the observation with every image randomly augmented, or unchanged if augmentation is off.

    Random numbers depend only on ``seed`` (one per optimiser step), the camera and the row's position in the full minibatch
    (``rows``, int64 ``[B]``), not on threads, ranks or resuming. As in OpenVLA, each camera is augmented independently.
    """
    if config == AugmentConfig():
        return observation
    images = {}
    for camera, batch in observation.images.items():
        # One generator per row, so its random numbers do not depend on threads, ranks or batch size.
        uniforms = [np.random.default_rng(derive_seed(seed, camera, int(row))).random(6) for row in rows]
        pairs = zip(batch, uniforms, strict=True)
        images[camera] = np.stack([augment_image(image, config, numbers) for image, numbers in pairs])
    return replace(observation, images=images, is_cropped=config.crop_area < 1.0)


def augment_image(image: np.ndarray, config: AugmentConfig, uniforms: np.ndarray) -> np.ndarray:
    """Augment a copy of uint8 ``[H, W, 3]`` by uniforms in [0, 1): crop top, crop left, brightness, contrast, saturation, hue."""
    pixels = np.ascontiguousarray(image.transpose(2, 0, 1)).astype(np.float32) / np.float32(255.0)
    signed = (2.0 * uniforms[2:] - 1.0).astype(np.float32)
    if config.crop_area < 1.0:
        pixels = _crop(pixels, np.sqrt(config.crop_area), *uniforms[:2])
    if config.brightness:
        pixels = _clip(pixels + signed[0] * np.float32(config.brightness))
    if config.contrast:
        mean = pixels.mean((1, 2), keepdims=True)
        pixels = _clip((pixels - mean) * (1 + signed[1] * np.float32(config.contrast)) + mean)
    if config.saturation:
        pixels = _clip(_saturate(pixels, 1 + signed[2] * np.float32(config.saturation)))
    if config.hue:
        pixels = _clip(_turn_hue(pixels, signed[3] * np.float32(config.hue)))
    return np.ascontiguousarray((pixels * np.float32(255.0)).round().astype(np.uint8).transpose(1, 2, 0))


def _clip(pixels: np.ndarray) -> np.ndarray:
    return pixels.clip(0.0, 1.0)


def _crop(pixels: np.ndarray, side: float, from_top: float, from_left: float) -> np.ndarray:
    """Crop ``[3, H, W]`` to a fraction ``side`` of its height and width, then resize it back bilinearly with aligned corners."""
    for axis, place in ((1, from_top), (2, from_left)):
        last = pixels.shape[axis] - 1
        places = (place * (1.0 - side) + np.linspace(0.0, side, last + 1)) * last
        low = np.floor(places).astype(np.int64)
        weight = (places - low).astype(np.float32).reshape((-1, 1) if axis == 1 else -1)
        above, below = pixels.take(low, axis), pixels.take(np.minimum(low + 1, last), axis)
        pixels = above + (below - above) * weight
    return pixels


def _value_and_span(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the HSV value (the maximum channel) and its difference from the minimum channel, ``[H, W]`` each."""
    red, green, blue = pixels
    value = np.maximum(np.maximum(red, green), blue)
    return value, value - np.minimum(np.minimum(red, green), blue)


def _saturate(pixels: np.ndarray, factor: np.float32) -> np.ndarray:
    """Multiply the HSV saturation by ``factor``, up to 1, by scaling each channel's distance from the maximum channel."""
    value, span = _value_and_span(pixels)
    most = np.divide(value, span, out=np.full_like(value, np.inf), where=span > 0)
    return value - (value - pixels) * np.minimum(factor, most)


def _turn_hue(pixels: np.ndarray, turn: np.float32) -> np.ndarray:
    """Rotate the HSV hue by ``turn`` full rotations."""
    red, green, blue = pixels
    value, span = _value_and_span(pixels)
    numerator = np.where(value == red, green - blue, np.where(value == green, blue - red, red - green))
    sixths = np.divide(numerator, span, out=np.zeros_like(span), where=span > 0)
    sixths += np.where(value == red, np.float32(0), np.where(value == green, np.float32(2), np.float32(4)))
    sixths += np.float32(6) * turn
    channels = []
    # Convert HSV to RGB, which is piecewise linear; offsets 5, 3 and 1 select R, G and B.
    for offset in (5, 3, 1):
        place = np.mod(sixths + np.float32(offset), np.float32(6))
        channels.append(value - span * np.minimum(place, np.float32(4) - place).clip(0, 1))
    return np.stack(channels)
