"""Env ``so101``: tasks of the low-cost arm SO-101 in MuJoCo, from the package so101-nexus, with joint targets or their changes as actions."""

from __future__ import annotations

import copy
import functools
import importlib.util
import platform
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from rlinf.envs.config import ProcessEnvConfig
from rlinf.envs.graphics.backend import choose_backend, import_mujoco
from rlinf.envs.graphics.renderer import StateRenderer, lighten
from rlinf.envs.process.env import ProcessVectorEnv
from rlinf.envs.process.simulator import Simulator, SingleStep, View
from rlinf.envs.so101.expert import wanted_joints
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.options import option
from rlinf.seeding import derive_seed

if TYPE_CHECKING:
    from rlinf.types import EpisodeSpec

CELL_M = 0.004
"""Edge length of a cube within which vertices are merged; a pixel of a 64 px image covers 10 mm of the table."""


class Task(NamedTuple):
    """A task: instruction, time limit in control steps, and whether its reward is paid for proximity at every step."""

    instruction: str
    horizon: int
    pays_nearness: bool = False


PLACE_INSTRUCTION = "Pick up the {} cube and place it on the blue circle."
TASKS = {
    "PickLift": Task("Pick up the {} cube.", 1024),
    "PickAndPlace": Task(PLACE_INSTRUCTION, 1024),
    "Touch": Task("Touch the {} cube.", 512, pays_nearness=True),
}
"""Tasks by their names in the package."""
COLOURS = ("red", "orange", "yellow", "green", "purple", "black", "white")
"""Colours of cubes; the goal of PickAndPlace is blue."""
CAMERAS = ("wrist", "overhead", "side")
CONTROL_FREQ_HZ = 50
LOW = np.array([-1.91986, -1.7453293, -1.69, -1.65806, -2.7438473, -0.17453])
HIGH = np.array([1.91986, 1.7453293, 1.69, 1.65806, 2.7438473, 1.7453292])
"""Joint limits in radians: shoulder_pan, shoulder_lift, elbow_flex, wrist_flex, wrist_roll, gripper (closed to open)."""
DELTA = np.array([0.05, 0.05, 0.05, 0.05, 0.05, 0.2])
"""Change of the joint targets per control step for an action of 1, in radians."""
SHARED_STATE = 36
FULL_STATE = SHARED_STATE + 6 + len(TASKS)
MAX_GEOMS = 200
DRAWN = ("body_pos", "geom_contype", "geom_conaffinity", "geom_rgba", "mat_rgba")
"""Model arrays written by the package's reset: the goal's position, visible cubes, colours."""


@dataclass
class SO101Config(ProcessEnvConfig):
    """SO-101, from the package so101-nexus (MuJoCo)."""

    usual_cameras: ClassVar[tuple[str, ...]] = ("overhead",)

    name: str = option("so101", "Name of the registered environment.")
    max_episode_steps: int | None = option(None, "Env steps until truncation; null: 512 (Touch) or 1024.", minimum=1)
    cameras: list[str] | None = option(
        None, f"Cameras to render, in order: {', '.join(CAMERAS)}; null: as many as the model uses."
    )
    state: str = option(
        "full",
        "full: 45 values (docs/lerobot.md); proprio: joint positions; none.",
        choices=("full", "proprio", "none"),
    )
    control: str = option(
        "delta",
        "delta: moves joint targets by up to 0.05 rad (gripper 0.2); joints: targets.",
        choices=("delta", "joints"),
    )
    units: str = option(
        "radians",
        "Units of joint positions; lerobot: degrees, gripper 0 (closed) to 100 (open).",
        choices=("radians", "lerobot"),
    )
    action_repeat: int = option(1, "Control steps (0.02 s) per env step, fewer at success.", minimum=1)
    colours: list[str] = option(["red"], f"Possible colours of the target cube: {', '.join(COLOURS)}.")
    num_distractors: int = option(0, "Number of additional cubes in other colours.", minimum=0)
    rendering: str = option(
        "fast",
        "fast: few triangles, no shadows; full: the package's images, 30 times slower.",
        choices=("fast", "full"),
    )


class SO101VectorEnv(ProcessVectorEnv):
    """Language-conditioned tasks for the SO-101 arm, with the package's rewards and success. Needs Python 3.12 or 3.13."""

    config_class = SO101Config
    suite: ClassVar[str] = "so101"
    camera_names: ClassVar[tuple[str, ...]] = CAMERAS
    simulator_class: ClassVar[str] = "rlinf.envs.so101.env:SO101Simulator"
    packages: ClassVar[tuple[str, ...]] = ("so101-nexus", "mujoco")
    config: SO101Config

    def __init__(self, config: SO101Config, num_envs: int, auto_reset: bool) -> None:
        if importlib.util.find_spec("so101_nexus") is None:
            too_old = sys.version_info < (3, 12)
            needs = f" It needs Python 3.12 or 3.13, and this is Python {platform.python_version()}." if too_old else ""
            raise MissingDependencyError(
                f"The package 'so101-nexus' is missing, and env.name=so101 needs it.{needs} Type "
                f"`{'PYTHON=python3.12 RLINF_VENV=.venv312 ' if too_old else ''}bash scripts/setup.sh --arms`, or set a different env=..."
            )
        if config.cameras:
            choose_backend()
        bounds = (-np.ones(6), np.ones(6)) if config.control == "delta" else joint_limits(config)
        super().__init__(config, num_envs, auto_reset, *bounds)
        self.metadata["render_fps"] = CONTROL_FREQ_HZ / config.action_repeat

    @classmethod
    def all_task_names(cls, config: SO101Config) -> list[str]:
        return list(TASKS)

    @classmethod
    def check_names(cls, config: SO101Config) -> None:
        super().check_names(config)
        unknown = [colour for colour in config.colours if colour not in COLOURS]
        if unknown or not config.colours or len(set(config.colours)) < len(config.colours):
            raise ConfigError(
                f"env.colours=[{','.join(config.colours)}]; expected one or more of {', '.join(COLOURS)}, without repetition. Set "
                "env.colours=[red]"
            )
        if config.num_distractors >= len(config.colours):
            raise ConfigError(
                f"env.num_distractors={config.num_distractors} with {len(config.colours)} colours; expected fewer, because each "
                f"distractor has its own colour. Set env.colours=[{','.join(COLOURS[: config.num_distractors + 1])}]"
            )

    @classmethod
    def state_width(cls, config: SO101Config) -> int:
        return {"full": FULL_STATE, "proprio": 6, "none": 0}[config.state]

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        return joint_limits(self.config) if self.config.state == "proprio" else None

    @classmethod
    def horizon_of(cls, config: SO101Config, task: str) -> int:
        return config.max_episode_steps or -(-TASKS[task].horizon // config.action_repeat)

    def instruction_of(self, task_id: int) -> str | None:
        """Return a task's instruction, or None if there are several colours."""
        colours = self.config.colours
        return TASKS[self.task_names[task_id]].instruction.format(colours[0]) if len(colours) == 1 else None


class SO101Simulator(Simulator):
    """One arm. A scene takes 0.7 s and 90 MB, so a thread's simulators use one scene per task, each with its own state."""

    config: SO101Config

    def __init__(self, config: SO101Config, task_names: Sequence[str]) -> None:
        super().__init__(config, task_names)
        import_mujoco()  # reports a missing package or GL before so101-nexus imports it
        self._envs: dict[str, Any] = {}
        self._task, self._env = "", None
        self._drawn: dict[str, np.ndarray] = {}
        self._numbers = np.zeros(0, dtype=np.float32)
        self._paid = 0.0

    def reset(self, spec: EpisodeSpec) -> None:
        self._task = self.task_names[spec.task_id]
        if self._task not in self._envs:
            settings = self.config.control, tuple(self.config.colours), self.config.num_distractors
            self._envs[self._task] = with_separate_state(scene_of(threading.get_ident(), self._task, *settings))
        self._env = self._envs[self._task]
        seed = derive_seed(spec.seed, "so101", self._task, spec.init_state_id) % 2**31
        self._numbers, info = self._env.reset(seed=seed)
        self._drawn = {name: getattr(self._env.model, name).copy() for name in DRAWN}
        self._paid = float(self._env._compute_reward(dict(info))) if TASKS[self._task].pays_nearness else 0.0

    def step(self, action: np.ndarray) -> SingleStep:
        self._enter()
        taken = action if self.config.control == "delta" else from_units(self.config, action)
        total = 0.0
        for _ in range(self.config.action_repeat):
            self._numbers, reward, _, _, info = self._env.step(taken)
            total += float(reward) - self._paid
            # Touch rewards proximity at every step. Use the change in its reward, so that waiting near the cube earns no reward.
            if TASKS[self._task].pays_nearness:
                self._paid = float(reward)
            if info["success"]:
                break
        return SingleStep(total, info["success"])

    def observe(self) -> View:
        images = {camera: self._render_camera(camera, self.config.image_size) for camera in self.config.cameras}
        return View(images, self._state(), self._env.task_description)

    def expert_action(self, aim_offset_m: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
        self._enter()
        wanted = np.clip(wanted_joints(self._env, self._task, np.asarray(aim_offset_m)), LOW, HIGH)
        now = self._env.data.ctrl[self._env._actuator_ids]  # the motors' current targets
        way = (wanted - now) / DELTA / self.config.action_repeat
        if self.config.control == "delta":
            return np.clip(way, -1.0, 1.0).astype(np.float32)
        target = now + np.clip(way, -1.0, 1.0) * DELTA * self.config.action_repeat
        return in_units(self.config, target).astype(np.float32)

    def render(self, size: int) -> np.ndarray:
        return self._render_camera(next(iter(self.config.cameras), "side"), size)

    def poses(self) -> dict[str, list[float]]:
        env = self._env
        poses = {"fingers": env._get_tcp_pose().tolist()}
        for index, slot in enumerate(env._slots):
            poses[f"cube {index}"] = env.data.qpos[slot.qpos_addr : slot.qpos_addr + 7].tolist()
        return poses

    def _enter(self) -> None:
        """Restore the values drawn for this episode in the model, which other simulators also use."""
        # A different episode's reset may have overwritten these arrays of the common model.
        for name, values in self._drawn.items():
            getattr(self._env.model, name)[:] = values

    def _state(self) -> np.ndarray | None:
        if self.config.state == "none":
            return None
        if self.config.state == "proprio":
            return in_units(self.config, self._env._get_current_qpos()).astype(np.float32)
        numbers = np.zeros(FULL_STATE, dtype=np.float32)
        numbers[: len(self._numbers)] = self._numbers
        numbers[SHARED_STATE + 6 + list(TASKS).index(self._task)] = 1.0
        return numbers

    def _render_camera(self, camera: str, size: int) -> np.ndarray:
        key = self._task, size, self.config.rendering, self.config.num_distractors, *self.config.colours
        with _renderers_lock:
            if key not in _renderers:
                # A copy, because the physics needs every vertex.
                model, is_fast = copy.copy(self._env.model), self.config.rendering == "fast"
                if is_fast:
                    lighten(model, CELL_M)
                _renderers[key] = StateRenderer(model, size, MAX_GEOMS, fast=is_fast)
            renderer = _renderers[key]
            for name in ("mat_rgba", "geom_rgba"):
                getattr(renderer.model, name)[:] = self._drawn[name]
            return renderer.render([self._env.data], [camera_of(self._env, camera)])[0, 0]


_renderers: dict[tuple, StateRenderer] = {}
"""This process's renderers by task, size and scene, for all arms of a task."""
_renderers_lock = threading.Lock()


def camera_of(env: Any, name: str) -> Any:
    """Return the id of the wrist camera, or a free camera at the package's pose."""
    from so101_nexus.camera_utils import compute_angled_camera_params, compute_overhead_camera_params

    if name == "wrist":
        return env._wrist_cam_id
    where = {"spawn_center": env.config.spawn_center, "spawn_max_radius": env.config.spawn_max_radius, "aspect": 1.0}
    if name == "overhead":
        place = compute_overhead_camera_params(**where)
    else:
        render = env.config.render
        angles = {"elevation": render.side_elevation_deg, "azimuth": render.side_azimuth_deg}
        arc = env.config.spawn_angle_half_range_deg
        place = compute_angled_camera_params(**where, **angles, spawn_angle_half_range_deg=arc)
    camera = import_mujoco().MjvCamera()
    for key, value in place.items():
        setattr(camera, key, value)
    return camera


def with_separate_state(scene: Any) -> Any:
    """Return the package's env with the model of ``scene`` and a separate state."""
    env = copy.copy(scene)
    env.data = import_mujoco().MjData(env.model)
    env._obj_geom_mask = env._obj_geom_mask.copy()
    return env


@functools.lru_cache(maxsize=16)
def scene_of(thread: int, task: str, control: str, colours: tuple[str, ...], num_distractors: int) -> Any:
    """Build (0.7 s) and cache one so101-nexus env per thread and set of task settings."""
    from so101_nexus import objects, observations
    from so101_nexus.mujoco.pick_and_place import PickAndPlaceEnv
    from so101_nexus.mujoco.pick_env import PickLiftEnv
    from so101_nexus.mujoco.touch_env import TouchEnv

    pool = [objects.CubeObject(color=colour) for colour in colours]
    names = [
        "JointPositions", "JointVelocities", "EndEffectorPose", "GraspState", "ObjectPose", "ObjectVelocity",
        "ObjectOffset",
    ]  # fmt: skip
    options: dict[str, Any] = {"objects": pool, "n_distractors": num_distractors}
    if task == "PickAndPlace":
        names += ["TargetPosition", "TargetOffset"]
        if num_distractors:  # this task has a separate pool for them
            options |= {"objects": pool[:-num_distractors], "distractors": pool[-num_distractors:]}
    env_class = {"PickLift": PickLiftEnv, "PickAndPlace": PickAndPlaceEnv, "Touch": TouchEnv}[task]
    config = env_class.default_config_cls(observations=[getattr(observations, name)() for name in names], **options)
    return env_class(config, control_mode="pd_joint_target_delta_pos" if control == "delta" else "pd_joint_pos")


def in_units(config: SO101Config, joints: np.ndarray) -> np.ndarray:
    """Convert joint positions ``[6]`` from radians to ``env.units``."""
    if config.units == "radians":
        return joints
    return np.append(np.degrees(joints[:5]), 100 * (joints[5] - LOW[5]) / (HIGH[5] - LOW[5]))


def joint_limits(config: SO101Config) -> tuple[np.ndarray, np.ndarray]:
    """Return the minimum and maximum joint positions in ``env.units``."""
    return in_units(config, LOW), in_units(config, HIGH)


def from_units(config: SO101Config, joints: np.ndarray) -> np.ndarray:
    """Convert joint positions ``[6]`` from ``env.units`` to radians."""
    if config.units == "radians":
        return joints
    return np.append(np.radians(joints[:5]), LOW[5] + joints[5] / 100 * (HIGH[5] - LOW[5]))
