"""Tiny HDF5 files in the exact layouts of robomimic and of LIBERO, and random episodes to put into them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Episode = dict[str, Any]
"""``obs``: key to array; ``actions``, ``rewards``, ``dones``, ``states``; ``attrs`` of the group."""


def robomimic_episode(seed: int, length: int, size: tuple[int, int] = (12, 16)) -> Episode:
    """Random numbers with the keys of an image dataset of robosuite; the last reward is 1."""
    rng = np.random.default_rng(seed)
    ends = np.arange(length) == length - 1
    return {
        "obs": {
            "agentview_image": rng.integers(0, 256, (length, *size, 3), np.uint8),
            "robot0_eye_in_hand_image": rng.integers(0, 256, (length, *size, 3), np.uint8),
            "robot0_eef_pos": rng.normal(size=(length, 3)),
            "robot0_eef_quat": rng.normal(size=(length, 4)),
            "robot0_gripper_qpos": rng.normal(size=(length, 2)),
            "object": rng.normal(size=(length, 10)),
        },
        "actions": rng.uniform(-1, 1, (length, 7)),
        "rewards": ends.astype(np.float64),
        "dones": ends.astype(np.int64),
        "states": rng.normal(size=(length, 32)),
        "attrs": {"model_file": "<mujoco/>"},
    }


def robomimic_file(
    path: Path, episodes: Mapping[str, Episode], masks: Mapping[str, list[str]] | None = None, **kwargs
) -> Path:
    """Write a file as robomimic's ``dataset_states_to_obs.py`` does; ``kwargs`` are ``env_kwargs``."""
    env_args = {"env_name": "Lift", "type": 1, "env_kwargs": kwargs}
    return _write(path, episodes, {"env_args": json.dumps(env_args)}, masks)


def libero_episode(seed: int, length: int, size: int = 16, seen_after_action: bool = True) -> Episode:
    """An arm that moves steadily; its sensors are read after the action of their row (LIBERO's own script) or before it."""
    rng = np.random.default_rng(seed)
    arm = np.cumsum(rng.uniform(0.01, 0.05, (length + 1, 7)), axis=0)  # before each action, and after the last
    ends = (np.arange(length) == length - 1).astype(np.uint8)
    return {
        "obs": {
            "agentview_rgb": rng.integers(0, 256, (length, size, size, 3), np.uint8),
            "eye_in_hand_rgb": rng.integers(0, 256, (length, size, size, 3), np.uint8),
            "ee_ori": rng.normal(size=(length, 3)),
            "ee_pos": rng.normal(size=(length, 3)),
            "ee_states": rng.normal(size=(length, 6)),
            "gripper_states": rng.normal(size=(length, 2)),
            "joint_states": arm[1:] if seen_after_action else arm[:-1],
        },
        "actions": np.concatenate([rng.uniform(-1, 1, (length, 6)), rng.choice([-1.0, 1.0], (length, 1))], axis=1),
        "rewards": ends,
        "dones": ends,
        "states": np.concatenate([np.arange(length)[:, None] * 0.05, arm[:-1], rng.normal(size=(length, 20))], axis=1),
        "robot_states": rng.normal(size=(length, 9)),
        "attrs": {"model_file": "<mujoco/>", "init_state": np.zeros(28)},
    }


def libero_file(path: Path, episodes: Mapping[str, Episode], language: str | None = "Turn on the stove now") -> Path:
    """Write a file as LIBERO's ``create_dataset.py`` does; without ``language``, as those that others made again: no attributes."""
    attrs: dict[str, Any] = {}
    if language is not None:
        problem = {
            "problem_name": "libero_tabletop_manipulation",
            "domain_name": "robosuite",
            "language_instruction": language,
        }
        env_args = {"type": 1, "env_name": "Libero_Tabletop_Manipulation", "env_kwargs": {"control_freq": 20}}
        attrs = {
            "problem_info": json.dumps(problem), "macros_image_convention": "opengl", "env_args": json.dumps(env_args),
            "num_demos": len(episodes), "bddl_file_name": "turn_on_the_stove.bddl",
        }  # fmt: skip
    return _write(path, episodes, attrs, None)


def _write(path: Path, episodes: Mapping[str, Episode], attrs: dict, masks: Mapping[str, list[str]] | None) -> Path:
    import h5py

    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(np.size(episode.get("actions", ())) // 7 for episode in episodes.values())
        data.attrs.update(attrs)
        for name, episode in episodes.items():
            demo = data.create_group(name)
            demo.attrs["num_samples"] = np.size(episode.get("actions", ())) // 7
            demo.attrs.update(episode.get("attrs", {}))
            for key, values in episode.items():
                if key not in ("obs", "attrs"):
                    demo.create_dataset(key, data=values)
            for key, values in episode.get("obs", {}).items():
                demo.create_dataset(f"obs/{key}", data=values, compression="gzip" if values.dtype == np.uint8 else None)
        for key, names in (masks or {}).items():
            file.create_dataset(f"mask/{key}", data=np.array(names, dtype="S"))
    return path
