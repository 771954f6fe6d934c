"""A vector env's spaces, checks of its inputs and outputs, and statistics derived from its bounds."""

import gymnasium
import numpy as np
from PIL import Image

from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError
from rlinf.types import Observation


def observation_space(config: EnvConfig, state_dim: int) -> gymnasium.spaces.Dict:
    """Return the space of one env's ``rlinf.types.Observation``."""
    image = gymnasium.spaces.Box(0, 255, (config.image_size, config.image_size, 3), np.uint8)
    spaces: dict[str, gymnasium.Space] = {
        "images": gymnasium.spaces.Dict({name: image for name in config.cameras}),
        "instruction": gymnasium.spaces.Text(512),
    }
    if state_dim:
        spaces["state"] = gymnasium.spaces.Box(-np.inf, np.inf, (state_dim,), np.float32)
    return gymnasium.spaces.Dict(spaces)


def checked_actions(actions: np.ndarray, num_envs: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return actions as float32 ``[B, C, D]``, clipped to the bounds ``[D]``; raise ConfigError for non-finite values or a wrong shape."""
    actions = np.asarray(actions, dtype=np.float32)
    if actions.ndim != 3 or actions.shape[0] != num_envs or actions.shape[2] != len(low) or not actions.shape[1]:
        raise ConfigError(f"Actions have shape {actions.shape}; expected [{num_envs}, chunk >= 1, {len(low)}].")
    if not np.isfinite(actions).all():
        row = int(np.flatnonzero(~np.isfinite(actions).all((1, 2)))[0])
        raise ConfigError(f"The action of env {row} is not finite: {actions[row].tolist()}.")
    return np.clip(actions, low, high)


def checked_observation(observation: Observation, num_rows: int, state_dim: int) -> Observation:
    """Return ``observation`` after checking that images are uint8 ``[K, H, W, 3]`` and the state is float32 ``[K, S]``."""
    for name, image in observation.images.items():
        if image.dtype != np.uint8 or image.ndim != 4 or image.shape[::3] != (num_rows, 3):
            raise ConfigError(
                f"Images of '{name}' are {image.dtype} {image.shape}; they must be uint8 [{num_rows}, height, width, 3]"
            )
    state = observation.state
    if state_dim and (state is None or state.dtype != np.float32 or state.shape != (num_rows, state_dim)):
        actual = "None" if state is None else f"{state.dtype} {state.shape}"
        raise ConfigError(f"`state` is {actual}; it must be float32 [{num_rows}, {state_dim}]")
    return observation


def checked_image(image: np.ndarray, env: str, instead: str) -> np.ndarray:
    """Return ``env``'s images ``[..., H, W, 3]``; raise ConfigError unless uint8 and RGB. ``instead``: overrides that disable images."""
    # Do not cast, because values from 0 to 1 would become black.
    if image.dtype != np.uint8 or image.ndim < 3 or image.shape[-1] != 3:
        extremes = f" from {image.min():g} to {image.max():g}" if image.size else ""
        raise ConfigError(
            f"{env} renders images of {image.dtype} {image.shape} with values{extremes}; expected uint8 (height, "
            f"width, 3) from 0 to 255. Register a version of it with a wrapper that converts them, or set {instead}"
        )
    return image


def resized(image: np.ndarray, size: int) -> np.ndarray:
    """Resize an image ``[H, W, 3]`` to ``[size, size, 3]``, ignoring its aspect ratio."""
    return np.asarray(Image.fromarray(image).resize((size, size)))


def uniform_statistics(low: np.ndarray, high: np.ndarray) -> dict[str, list]:
    """Return q01, q99, mask, min, max, mean and std for uniform distributions between the bounds ``[D]``."""
    low, high = low.astype(np.float64), high.astype(np.float64)
    return {
        "q01": low.tolist(),
        "q99": high.tolist(),
        "mask": [True] * len(low),
        "min": low.tolist(),
        "max": high.tolist(),
        "mean": ((low + high) / 2).tolist(),
        "std": ((high - low) / 12**0.5).tolist(),
    }
