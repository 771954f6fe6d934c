"""The spaces of a vector env, the check of actions against them, and statistics that correspond to bounds."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium
import numpy as np

from rlinf.config.options import closest, override_text
from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError, did_you_mean


def observation_space(config: EnvConfig, state_dim: int) -> gymnasium.spaces.Dict:
    """Return the space of one row of ``rlinf.types.Observation``."""
    image = gymnasium.spaces.Box(0, 255, (config.image_size, config.image_size, 3), np.uint8)
    spaces: dict[str, gymnasium.Space] = {
        "images": gymnasium.spaces.Dict({name: image for name in config.cameras}),
        "instruction": gymnasium.spaces.Text(512),
    }
    if state_dim:
        spaces["state"] = gymnasium.spaces.Box(-np.inf, np.inf, (state_dim,), np.float32)
    return gymnasium.spaces.Dict(spaces)


def check_cameras(cameras: Sequence[str], known: Sequence[str] | None = None) -> None:
    """Check ``env.cameras``.

    Args:
        cameras: Names.
        known: What the environment has; None: any name.

    Raises:
        ConfigError: Unknown camera, or one named twice; with the override that fits.
    """
    for camera in cameras:
        if known is not None and camera not in known:
            mended = dict.fromkeys(closest(name, known) or known[0] for name in cameras)
            raise ConfigError(
                f"Unknown camera '{camera}' in env.cameras.{did_you_mean(camera, known)} "
                f"Type env.cameras={override_text(list(mended))}"
            )
    once = list(dict.fromkeys(cameras))
    if len(once) < len(cameras):
        raise ConfigError(
            f"env.cameras={override_text(list(cameras))} names a camera twice. Type env.cameras={override_text(once)}"
        )


def checked_actions(actions: np.ndarray, num_envs: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return actions as float32 ``[B, C, D]``, clipped to the bounds ``[D]``.

    Raises:
        ConfigError: Wrong shape, or a number that is not finite.
    """
    actions = np.asarray(actions, dtype=np.float32)
    if actions.ndim != 3 or actions.shape[0] != num_envs or actions.shape[2] != len(low) or not actions.shape[1]:
        raise ConfigError(f"Actions have shape {actions.shape}; needed is [{num_envs}, chunk >= 1, {len(low)}].")
    if not np.isfinite(actions).all():
        row = int(np.flatnonzero(~np.isfinite(actions).all((1, 2)))[0])
        raise ConfigError(f"The action of env {row} is not finite: {actions[row].tolist()}.")
    return np.clip(actions, low, high)


def uniform_statistics(low: np.ndarray, high: np.ndarray) -> dict[str, list]:
    """Return q01, q99, mask, min, max, mean and std of uniform distributions between the bounds ``[D]``."""
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
