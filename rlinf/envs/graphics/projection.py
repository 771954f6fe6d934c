"""Where points of a MuJoCo scene are seen in a picture of one of its cameras."""

from __future__ import annotations

from typing import Any

import numpy as np


def project(model: Any, data: Any, camera_id: int, points: np.ndarray, size: int) -> np.ndarray:
    """Return where a square picture shows points.

    Args:
        model: ``mujoco.MjModel``.
        data: ``mujoco.MjData`` with up-to-date kinematics.
        camera_id: A perspective camera of the model.
        points: ``[N, 3]`` in metres.
        size: Side of the picture in pixels.

    Returns:
        ``[N, 2]``: pixels to the right of and below the upper left corner; NaN behind the camera.
    """
    right, up, back = ((points - data.cam_xpos[camera_id]) @ data.cam_xmat[camera_id].reshape(3, 3)).T
    focal = size / 2 / np.tan(np.deg2rad(model.cam_fovy[camera_id]) / 2)
    depth = np.where(back < 0, -back, np.nan)
    return np.stack([size / 2 + focal * right / depth, size / 2 - focal * up / depth], axis=1)
