"""LIBERO-Plus's sensor noise on the agentview camera: blurs and fog of ImageNet-C (arXiv:1903.12261) in ten strengths each.

Equals the public code, which reads random numbers once per env step from NumPy's global generator.
"""

from typing import Any

import numpy as np

SIZE = 256
"""Height and width of the images for which the strengths are defined."""
SHUFFLED = 224
"""Glass blur moves pixels only in the first rows and columns, as published."""
KINDS = ("motion blur", "Gaussian blur", "zoom blur", "fog", "glass blur")
"""The kind of levels 1 to 10, 11 to 20, and so on."""
MOTION = ((5, 2), (8, 3), (10, 4), (12, 5), (15, 6), (18, 8), (20, 10), (25, 12), (30, 15), (35, 20))
"""Radius and sigma in pixels, by strength."""
ZOOM = (
    (1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03),
    (1.36, 0.01), (1.41, 0.01), (1.46, 0.02), (1.51, 0.02), (1.56, 0.03),
)  # fmt: skip
"""End and step of the zoom factors, which start at 1."""
FOG = (
    (0.5, 3.0), (1.0, 2.8), (1.5, 2.5), (2.0, 2.2), (2.5, 2.0), (3.0, 1.8), (3.5, 1.6), (4.0, 1.5), (4.5, 1.4), (5.0, 1.3),
)  # fmt: skip
"""Amount, and factor by which the random part of the fog decreases from a scale to the next."""
GLASS = (
    (0.5, 1, 3), (0.7, 1, 3), (0.9, 2, 3), (1.0, 2, 2), (1.1, 3, 2), (1.3, 3, 2), (1.5, 4, 2), (1.8, 4, 2), (2.2, 5, 1), (2.5, 5, 1),
)  # fmt: skip
"""Sigma in pixels, largest displacement in pixels, and number of passes."""


class SensorNoise:
    """The noise of one level, 1 to 50 (``_noise_<level>`` in the names of variants)."""

    def __init__(self, level: int) -> None:
        kind, self._strength = divmod(level - 1, 10)
        self.kind = KINDS[kind]

    def draw(self, generator: np.random.RandomState) -> Any:
        """Return the random numbers of one image, which also advances the generator by as much as the public code does."""
        if self.kind == "motion blur":
            return generator.uniform(-45, 45)
        if self.kind == "fog":
            return generator.random_sample(SIZE * SIZE - 1)
        if self.kind == "glass blur":
            _, most, passes = GLASS[self._strength]
            return generator.randint(-most, most, size=(passes, (SHUFFLED - 2 * most) ** 2, 2))
        return None

    def apply(self, image: np.ndarray, draws: Any) -> np.ndarray:
        """Return the image with noise, uint8 ``[S, S, 3]`` with ``S`` a divisor of 256, from numbers returned by ``draw``.

        A smaller image is enlarged by repeating pixels, and the result averaged, so that noise has the same relative size.
        """
        factor = SIZE // len(image)
        # The public code sees robosuite's image, whose rows are reversed; policies see it rotated by 180 degrees.
        large = image[::-1, ::-1].repeat(factor, 0).repeat(factor, 1)
        noisy = self._apply(large, draws)[::-1, ::-1]
        blocks = noisy.reshape(len(image), factor, len(image), factor, 3)
        return noisy if factor == 1 else (blocks.mean((1, 3)) + 0.5).astype(np.uint8)

    def _apply(self, image: np.ndarray, draws: Any) -> np.ndarray:
        if self.kind == "motion blur":
            return motion_blur(image, *MOTION[self._strength], draws)
        if self.kind == "Gaussian blur":
            return _bytes(_gaussian(image / 255.0, self._strength + 1))
        if self.kind == "zoom blur":
            return zoom_blur(image, *ZOOM[self._strength])
        if self.kind == "fog":
            return fog(image, *FOG[self._strength], draws)
        return glass_blur(image, *GLASS[self._strength], draws)


def motion_blur(image: np.ndarray, radius: int, sigma: float, degrees: float) -> np.ndarray:
    """Average along a line that starts at each pixel, as ImageMagick's ``MotionBlurImage`` with 16 bits per channel."""
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2.0 * sigma**2))
    weights /= weights.sum()
    right = np.ceil(steps * np.cos(np.radians(degrees)) - 0.5).astype(int)
    down = np.ceil(steps * np.sin(np.radians(degrees)) - 0.5).astype(int)
    reach = len(steps)
    padded = np.pad(image, ((reach, reach), (reach, reach), (0, 0)), mode="edge") * 257.0
    height, width, _ = image.shape
    total = np.zeros(image.shape)
    for weight, x, y in zip(weights, right + reach, down + reach, strict=True):
        total += weight * padded[y : y + height, x : x + width]
    return ((total + 0.5).astype(np.int64) // 257).astype(np.uint8)


def zoom_blur(image: np.ndarray, end: float, step: float) -> np.ndarray:
    """Average the image with its centre at increasing magnifications."""
    from scipy.ndimage import zoom

    sharp, factors = (image / 255.0).astype(np.float32), np.arange(1, end, step)
    total = np.zeros_like(sharp)
    for factor in factors:
        side = int(np.ceil(SIZE / factor))
        top = (SIZE - side) // 2
        larger = zoom(sharp[top : top + side, top : top + side], (factor, factor, 1), order=1)
        trim = (len(larger) - SIZE) // 2
        total += larger[trim : trim + SIZE, trim : trim + SIZE]
    return _bytes((sharp + total) / (len(factors) + 1))


def fog(image: np.ndarray, amount: float, decay: float, draws: np.ndarray) -> np.ndarray:
    """Add a random field of clouds."""
    sharp = image / 255.0
    largest = sharp.max()
    return _bytes((sharp + amount * clouds(decay, draws)[..., None]) * largest / (largest + amount))


def clouds(decay: float, draws: np.ndarray) -> np.ndarray:
    """Return a field from 0 to 1, float64 ``[256, 256]``: midpoint displacement by the diamond-square algorithm, on a torus."""
    field, stride, spread, used = np.zeros((SIZE, SIZE)), SIZE, 100.0, 0

    def displaced(total: np.ndarray) -> np.ndarray:
        nonlocal used
        chosen = draws[used : used + total.size].reshape(total.shape)
        used += total.size
        return total / 4 + spread * (-spread + 2 * spread * chosen)

    while stride >= 2:
        half = stride // 2
        corners = field[::stride, ::stride]
        pairs = corners + np.roll(corners, -1, 0)
        field[half::stride, half::stride] = displaced(pairs + np.roll(pairs, -1, 1))
        centres = field[half::stride, half::stride]
        beside = corners + np.roll(corners, -1, 1)
        field[::stride, half::stride] = displaced(centres + np.roll(centres, 1, 0) + beside)
        below = corners + np.roll(corners, -1, 0)
        field[half::stride, ::stride] = displaced(centres + np.roll(centres, 1, 1) + below)
        stride, spread = half, spread / decay
    field -= field.min()
    return field / field.max()


def glass_blur(image: np.ndarray, sigma: float, most: int, passes: int, draws: np.ndarray) -> np.ndarray:
    """Blur, copy to each pixel one at most ``most`` pixels away, ``passes`` times, and blur again."""
    pixels = (_gaussian(image / 255.0, sigma) * 255).astype(np.uint8)
    for number in range(passes):
        pixels = pixels.reshape(-1, 3)[copied_from(most, draws[number])].reshape(pixels.shape)
    return _bytes(_gaussian(pixels / 255.0, sigma))


def copied_from(most: int, draws: np.ndarray) -> np.ndarray:
    """Return the flat index of the pixel whose value each pixel has after one pass, int64 ``[65536]``.

    The pass copies pixels in turn, from the bottom right to the top left; ``draws`` are the displacements (x, y), so a source
    that the pass has already changed leads to the source's source.
    """
    span = np.arange(SHUFFLED - most, most, -1)
    rows, columns = (grid.ravel() for grid in np.meshgrid(span, span, indexing="ij"))
    targets, sources = rows * SIZE + columns, (rows + draws[:, 1]) * SIZE + columns + draws[:, 0]
    turn = np.full(SIZE * SIZE, len(targets))
    turn[targets] = np.arange(len(targets))
    changed = turn[sources] < turn[targets]
    origin, leader = np.arange(SIZE * SIZE), np.arange(SIZE * SIZE)
    origin[targets[~changed]] = sources[~changed]
    leader[targets[changed]] = sources[changed]
    while (leader[leader] != leader).any():
        leader = leader[leader]
    return origin[leader]


def _gaussian(image: np.ndarray, sigma: float) -> np.ndarray:
    from scipy.ndimage import gaussian_filter

    return gaussian_filter(image, (sigma, sigma, 0), mode="nearest")


def _bytes(image: np.ndarray) -> np.ndarray:
    return (np.clip(image, 0, 1) * 255).astype(np.uint8)
