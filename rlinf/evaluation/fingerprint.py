"""Fingerprint of a simulator: images, object poses and states in a few fixed episodes.

The versions in a manifest show that something changed; the fingerprint shows whether the change matters. It is recorded when a
checkpoint is saved and again when it is evaluated, before and after some fixed actions. Differences only cause a warning.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from rlinf.errors import SimulatorError
from rlinf.files import Json
from rlinf.types import Observation

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv

NUM_EPISODES = 4
NUM_ACTIONS = 12
MAX_TRIES = 3
"""Maximum number of attempts; the run fails if a simulator is lost in each of them."""
HOLD_STEPS = 3
"""Number of env steps for which each action is repeated; random actions that change at every step would cancel out."""
THUMBNAIL_SIZE = 8

MAX_GREY_GAP = 3.0
"""Maximum difference in a thumbnail cell (0 to 255) that a different rasteriser can explain; above it, the scene has changed."""
MAX_POSITION_GAP_M = 0.001
MAX_ANGLE_GAP_DEG = 1.0
MAX_STATE_GAP = 0.01
"""Maximum difference in a state dimension, absolute for values below 1 and relative above."""


def take_fingerprint(env: VectorEnv) -> Json:
    """Run the first steps of the first ``NUM_EPISODES`` evaluation episodes, at most one per env slot, and return the fingerprint.

    Args:
        env: Created with ``auto_reset=False``; reset it before further use.

    Returns:
        JSON values: ``num_actions``, and one item per episode with ``task``, ``init_state_id``, ``seed``,
        ``instruction``, ``start`` and ``end`` (after the actions). The last two contain ``images`` (for each camera its
        ``shape``, the SHA-256 of the pixels, and ``thumbnail``, the mean colours of 8 x 8 cells as hexadecimal bytes),
        ``poses`` (each object's position and quaternion) and ``state``.
    """
    episodes = env.episode_specs("eval")
    rows = range(min(NUM_EPISODES, env.num_envs, len(episodes)))
    specs = [episodes[row] for row in rows]
    for _ in range(MAX_TRIES):
        observation, _ = env.reset(options={"episodes": specs + [None] * (env.num_envs - len(specs))})
        start = [_snapshot(observation, row, poses) for row, poses in zip(rows, env.poses(rows), strict=True)]
        instructions = observation.instruction
        step = env.chunk_step(fixed_actions(env.action_low, env.action_high, env.num_envs))
        if not len(step.lost_env_ids):
            break
    else:
        raise SimulatorError(
            f"The simulators of env={env.config.name} were lost {MAX_TRIES} times within the first {NUM_ACTIONS} env steps of the first "
            "evaluation episodes, see the log. To debug them in this process, set env.num_processes=0"
        )
    end = [_snapshot(step.observation, row, poses) for row, poses in zip(rows, env.poses(rows), strict=True)]
    return {
        "num_actions": NUM_ACTIONS,
        "episodes": [
            {
                "task": env.task_names[spec.task_id], "init_state_id": spec.init_state_id, "seed": spec.seed,
                "instruction": instructions[row], "start": start[row], "end": end[row],
            }
            for row, spec in zip(rows, specs, strict=True)
        ],
    }  # fmt: skip


def fixed_actions(low: np.ndarray, high: np.ndarray, num_envs: int) -> np.ndarray:
    """Return random actions, float32 ``[num_envs, NUM_ACTIONS, D]``, which are identical for every env."""
    uniforms = np.random.default_rng(0).random((-(-NUM_ACTIONS // HOLD_STEPS), len(low)))
    held = np.repeat(uniforms, HOLD_STEPS, axis=0)[:NUM_ACTIONS]
    return np.broadcast_to(low + held * (high - low), (num_envs, *held.shape)).astype(np.float32)


def compare_fingerprints(saved: Json | None, present: Json | None) -> list[str]:
    """Return one line per difference beyond the tolerances above, or a single line if a fingerprint cannot be read.

    Only episodes and cameras found in both are compared, and only the start if the number of actions differs. None: not recorded.
    """
    if saved is None or present is None:
        return []
    try:
        return _compare(saved, present)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return [f"unknown, because a fingerprint cannot be read ({type(error).__name__}: {error})"]


def _compare(saved: Json, present: Json) -> list[str]:
    moments = ["start", "end"] if saved["num_actions"] == present["num_actions"] else ["start"]
    later = {_key(episode): episode for episode in present["episodes"]}
    lines = []
    for before in saved["episodes"]:
        now = later.get(_key(before))
        if now is None:
            continue
        name = f"{before['task']}, init state {before['init_state_id']}"
        if before["instruction"] != now["instruction"]:
            lines.append(f"{name}: the instruction is '{now['instruction']}', was '{before['instruction']}'")
        for moment in moments:
            when = "at the start" if moment == "start" else f"after {saved['num_actions']} fixed actions"
            lines += [f"{name}, {when}: {line}" for line in _differences(before[moment], now[moment])]
    return lines


def _key(episode: Json) -> tuple[str, int, int]:
    return episode["task"], episode["init_state_id"], episode["seed"]


def _snapshot(observation: Observation, row: int, poses: dict[str, list[float]]) -> Json:
    images = {
        name: {
            "shape": list(image[row].shape),
            "sha256": hashlib.sha256(np.ascontiguousarray(image[row]).tobytes()).hexdigest(),
            "thumbnail": thumbnail(image[row]).tobytes().hex(),
        }
        for name, image in observation.images.items()
    }
    state = None if observation.state is None else [float(number) for number in observation.state[row]]
    return {"images": images, "poses": poses, "state": state}


def thumbnail(image: np.ndarray) -> np.ndarray:
    """Divide an image ``[H, W, 3]`` into 8 x 8 cells and return their mean colours, uint8 ``[8, 8, 3]``."""
    rows = np.array_split(image.astype(np.float64), THUMBNAIL_SIZE, axis=0)
    cells = [[cell.mean((0, 1)) for cell in np.array_split(row, THUMBNAIL_SIZE, axis=1)] for row in rows]
    return np.array(cells).round().astype(np.uint8)


def _differences(before: Json, now: Json) -> list[str]:
    lines = []
    for camera, old in before["images"].items():
        new = now["images"].get(camera)
        if new is None or old["shape"] != new["shape"] or old["sha256"] == new["sha256"]:
            continue
        cells = (np.frombuffer(bytes.fromhex(side["thumbnail"]), np.uint8) for side in (new, old))
        gap = np.subtract(*cells, dtype=np.float64)
        if np.abs(gap).max() > MAX_GREY_GAP:
            largest, brightness = np.abs(gap).max(), f"brightness {gap.mean():+.1f} on average"
            lines.append(f"camera {camera} differs by up to {largest:.0f} of 255 grey levels ({brightness})")
    for name, old in before["poses"].items():
        new = now["poses"].get(name)
        if new is None:
            lines.append(f"the object {name} is missing")
            continue
        moved, turned = pose_gap(old, new)
        if not (moved <= MAX_POSITION_GAP_M and turned <= MAX_ANGLE_GAP_DEG):  # NaN is treated as moved
            lines.append(f"{name} is {1000 * moved:.1f} mm and {turned:.1f} degrees from its earlier pose")
    lines += [f"there is a new object {name}" for name in now["poses"] if name not in before["poses"]]
    return lines + _state_differences(before["state"], now["state"])


def pose_gap(before: list[float], now: list[float]) -> tuple[float, float]:
    """Return the distance (metres) and the angle (degrees) between two poses (position and quaternion)."""
    old, new = np.array(before, np.float64), np.array(now, np.float64)
    lengths = np.linalg.norm(old[3:]) * np.linalg.norm(new[3:])
    # The angle is 2 arccos |<q, r>|, because q and -q represent the same orientation.
    cosine = np.minimum(1.0, abs(old[3:] @ new[3:]) / lengths) if lengths else 1.0  # NaN stays NaN
    return float(np.linalg.norm(new[:3] - old[:3])), float(np.degrees(2 * np.arccos(cosine)))


def _state_differences(before: list[float] | None, now: list[float] | None) -> list[str]:
    if before is None or now is None or len(before) != len(now):
        return []
    old, new = np.array(before), np.array(now)
    gap = np.nan_to_num(np.abs(new - old) / np.maximum(1.0, np.abs(old)), nan=np.inf)
    worst = int(gap.argmax()) if len(gap) else 0
    if not len(gap) or gap[worst] <= MAX_STATE_GAP:
        return []
    return [f"{int((gap > MAX_STATE_GAP).sum())} of {len(gap)} state dimensions differ, most dimension {worst}: "
            f"{old[worst]:.4g}, now {new[worst]:.4g}"]  # fmt: skip
