"""SO-101: tasks of a small arm that people own, from the package so101-nexus (MuJoCo), which brings the arm's meshes."""

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
from rlinf.envs.graphics.renderer import StateRenderer
from rlinf.envs.process.env import ProcessVectorEnv
from rlinf.envs.process.simulator import Simulator, SingleStep, View
from rlinf.envs.so101.expert import wanted_joints
from rlinf.envs.so101.meshes import lighten
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.imports import import_string
from rlinf.options import option
from rlinf.seeding import derive_seed

if TYPE_CHECKING:
    from rlinf.types import EpisodeSpec


class Task(NamedTuple):
    """A task of the package: its class, its sentence for cubes of one colour, its time limit in control steps.

    ``pays_nearness``: its reward pays for being near at each step, so that waiting would earn more than success.
    """

    env_class: str
    sentence: str
    horizon: int
    pays_nearness: bool = False


PLACE_INSTRUCTION = "Pick up the {} cube and place it on the blue circle."
TASKS = {
    "PickLift": Task("so101_nexus.mujoco.pick_env:PickLiftEnv", "Pick up the {} cube.", 1024),
    "PickAndPlace": Task("so101_nexus.mujoco.pick_and_place:PickAndPlaceEnv", PLACE_INSTRUCTION, 1024),
    "Touch": Task("so101_nexus.mujoco.touch_env:TouchEnv", "Touch the {} cube.", 512, pays_nearness=True),
}
"""Task by the package's name."""
COLOURS = ("red", "orange", "yellow", "green", "purple", "black", "white")
"""Of cubes; the goal of PickAndPlace is blue."""
CAMERAS = ("wrist", "overhead", "side")
CONTROL_FREQ_HZ = 50
LOW = np.array([-1.91986, -1.7453293, -1.69, -1.65806, -2.7438473, -0.17453])
HIGH = np.array([1.91986, 1.7453293, 1.69, 1.65806, 2.7438473, 1.7453292])
"""Joint limits in radians: shoulder_pan, shoulder_lift, elbow_flex, wrist_flex, wrist_roll, gripper (closed to open)."""
DELTA = np.array([0.05, 0.05, 0.05, 0.05, 0.05, 0.2])
"""Radians by which an action of 1 moves the joints' targets in a control step."""
SHARED_STATE = 36
FULL_STATE = SHARED_STATE + 6 + len(TASKS)
MAX_GEOMS = 200
DRAWN = ("body_pos", "geom_contype", "geom_conaffinity", "geom_rgba", "mat_rgba")
"""Arrays of the model that a reset of the package writes: the goal's place, which cubes are there, colours."""


@dataclass
class SO101Config(ProcessEnvConfig):
    """SO-101, of the package so101-nexus (MuJoCo)."""

    usual_cameras: ClassVar[tuple[str, ...]] = ("overhead",)

    name: str = option("so101", "Registered environment.")
    max_episode_steps: int | None = option(
        None,
        "Env steps after which a running episode is truncated; null: the package's 512 control steps (Touch) or 1024.",
        minimum=1,
    )
    cameras: list[str] | None = option(
        None,
        f"Cameras to render, in the order in which the policy gets them: {', '.join(CAMERAS)}; null: as many as the model reads.",
    )
    state: str = option(
        "full",
        "full: 45 numbers, docs/lerobot.md; proprio: the positions of the six joints, in env.units; none.",
        choices=("full", "proprio", "none"),
    )
    control: str = option(
        "delta",
        "delta: numbers from -1 to 1 move the targets of the joints by up to 0.05 rad (gripper: 0.2) a control step; joints: the "
        "targets themselves, in env.units.",
        choices=("delta", "joints"),
    )
    units: str = option(
        "radians",
        "Units of joint positions in state=proprio and control=joints. radians; lerobot: degrees, and 0 (closed) to 100 (open) for the "
        "gripper, as LeRobot's SO-101 with use_degrees.",
        choices=("radians", "lerobot"),
    )
    action_repeat: int = option(
        1, "Control steps (0.02 s) of one env step, all with the same action; a success ends the repetition.", minimum=1
    )
    colours: list[str] = option(["red"], f"Colours of the cubes that a task may name: {', '.join(COLOURS)}.")
    num_distractors: int = option(0, "Cubes of the other colours that lie around.", minimum=0)
    rendering: str = option(
        "fast",
        "fast: few triangles, no shadows and no antialiasing; full: the package's meshes and settings, 30 times slower.",
        choices=("fast", "full"),
    )


class SO101VectorEnv(ProcessVectorEnv):
    """Tasks of the SO-101 arm by sentence.

    Dense reward: the package's; of Touch, whose own pays for being near, its change. Success is the package's. Raises
    MissingDependencyError without so101-nexus, which needs Python 3.12 or 3.13, or without a GL for its images.
    """

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
                f"`{'PYTHON=python3.12 RLINF_VENV=.venv312 ' if too_old else ''}bash scripts/setup.sh --arms`, or set another env=..."
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
        """Check tasks, cameras, and the colours of cubes."""
        super().check_names(config)
        unknown = [colour for colour in config.colours if colour not in COLOURS]
        if unknown or not config.colours or len(set(config.colours)) < len(config.colours):
            raise ConfigError(
                f"env.colours=[{','.join(config.colours)}]; required: one or more of {', '.join(COLOURS)}, each once. Set "
                "env.colours=[red]"
            )
        if config.num_distractors >= len(config.colours):
            raise ConfigError(
                f"env.num_distractors={config.num_distractors} with {len(config.colours)} colours; required: fewer, because a "
                f"distractor has a colour of its own. Set env.colours=[{','.join(COLOURS[: config.num_distractors + 1])}]"
            )

    @classmethod
    def state_width(cls, config: SO101Config) -> int:
        """Return 45 (full), 6 (proprio) or 0 (none)."""
        return {"full": FULL_STATE, "proprio": 6, "none": 0}[config.state]

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the joint limits (proprio); None for other states."""
        return joint_limits(self.config) if self.config.state == "proprio" else None

    @classmethod
    def horizon_of(cls, config: SO101Config, task: str) -> int:
        return config.max_episode_steps or -(-TASKS[task].horizon // config.action_repeat)

    def instruction_of(self, task_id: int) -> str | None:
        """Return the sentence of a task with one cube; None with cubes of several colours."""
        colours = self.config.colours
        return TASKS[self.task_names[task_id]].sentence.format(colours[0]) if len(colours) == 1 else None


class SO101Simulator(Simulator):
    """One arm. A scene takes 0.7 s and 90 MB, so the simulators of a thread share one per task, each with its own state."""

    config: SO101Config

    def __init__(self, config: SO101Config, task_names: Sequence[str]) -> None:
        super().__init__(config, task_names)
        import_mujoco()  # reports a missing package or GL, before so101-nexus imports it
        self._envs: dict[str, Any] = {}
        self._task, self._env = "", None
        self._own: dict[str, np.ndarray] = {}
        self._numbers = np.zeros(0, dtype=np.float32)
        self._paid = 0.0

    def reset(self, spec: EpisodeSpec) -> None:
        """Draw and place the cubes and the arm's first pose from a seed of ``spec``."""
        self._task = self.task_names[spec.task_id]
        if self._task not in self._envs:
            settings = self.config.control, tuple(self.config.colours), self.config.num_distractors
            self._envs[self._task] = own_state(scene_of(threading.get_ident(), self._task, *settings))
        self._env = self._envs[self._task]
        seed = derive_seed(spec.seed, "so101", self._task, spec.init_state_id) % 2**31
        self._numbers, info = self._env.reset(seed=seed)
        self._own = {name: getattr(self._env.model, name).copy() for name in DRAWN}
        self._paid = float(self._env._compute_reward(dict(info))) if TASKS[self._task].pays_nearness else 0.0

    def step(self, action: np.ndarray) -> SingleStep:
        self._enter()
        taken = action if self.config.control == "delta" else from_units(self.config, action)
        total = 0.0
        for _ in range(self.config.action_repeat):
            self._numbers, reward, _, _, info = self._env.step(taken)
            total += float(reward) - self._paid
            if TASKS[self._task].pays_nearness:
                self._paid = float(reward)
            if info["success"]:
                break
        return SingleStep(total, info["success"])

    def observe(self) -> View:
        images = {camera: self._draw(camera, self.config.image_size) for camera in self.config.cameras}
        return View(images, self._state(), self._env.task_description)

    def expert_action(self, aim_offset_m: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
        """Return the action of a scripted expert that takes the cube to be off by ``aim_offset_m`` (x, y)."""
        self._enter()
        wanted = np.clip(wanted_joints(self._env, self._task, np.asarray(aim_offset_m)), LOW, HIGH)
        now = self._env.data.ctrl[self._env._actuator_ids]  # the targets that the motors hold
        way = (wanted - now) / DELTA / self.config.action_repeat
        if self.config.control == "delta":
            return np.clip(way, -1.0, 1.0).astype(np.float32)
        target = now + np.clip(way, -1.0, 1.0) * DELTA * self.config.action_repeat
        return in_units(self.config, target).astype(np.float32)

    def render(self, size: int) -> np.ndarray:
        """Return an image of the first camera, or from the side."""
        return self._draw(next(iter(self.config.cameras), "side"), size)

    def poses(self) -> dict[str, list[float]]:
        """Return position and quaternion of the fingers and of every cube."""
        env = self._env
        found = {"fingers": env._get_tcp_pose().tolist()}
        for index, slot in enumerate(env._slots):
            found[f"cube {index}"] = env.data.qpos[slot.qpos_addr : slot.qpos_addr + 7].tolist()
        return found

    def _enter(self) -> None:
        """Put what the episode's reset has drawn into the model, which other simulators share."""
        for name, values in self._own.items():
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

    def _draw(self, camera: str, size: int) -> np.ndarray:
        key = self._task, size, self.config.rendering, self.config.num_distractors, *self.config.colours
        with _renderers_lock:
            if key not in _renderers:
                model, is_fast = (
                    copy.copy(self._env.model),
                    self.config.rendering == "fast",
                )  # physics keeps every vertex
                if is_fast:
                    lighten(model)
                _renderers[key] = StateRenderer(model, size, MAX_GEOMS, fast=is_fast)
            renderer = _renderers[key]
            for name in ("mat_rgba", "geom_rgba"):
                getattr(renderer.model, name)[:] = self._own[name]
            return renderer.render([self._env.data], [camera_of(self._env, camera)])[0, 0]


_renderers: dict[tuple, StateRenderer] = {}
"""This process's renderers by task, size and scene: arms of one task share one."""
_renderers_lock = threading.Lock()


def camera_of(env: Any, name: str) -> Any:
    """Return the id of the camera in the arm's hand, or a free camera where the package places it."""
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


def own_state(scene: Any) -> Any:
    """Return the package's env with the model of ``scene`` and a state of its own."""
    env = copy.copy(scene)
    env.data = import_mujoco().MjData(env.model)
    env._obj_geom_mask = env._obj_geom_mask.copy()
    return env


@functools.lru_cache(maxsize=16)
def scene_of(thread: int, task: str, control: str, colours: tuple[str, ...], num_distractors: int) -> Any:
    """Return the package's env of ``task`` for the simulators of a ``thread`` (0.7 s)."""
    from so101_nexus import objects, observations

    pool = [objects.CubeObject(color=colour) for colour in colours]
    names = [
        "JointPositions", "JointVelocities", "EndEffectorPose", "GraspState", "ObjectPose", "ObjectVelocity",
        "ObjectOffset",
    ]  # fmt: skip
    options: dict[str, Any] = {"objects": pool, "n_distractors": num_distractors}
    if task == "PickAndPlace":
        names += ["TargetPosition", "TargetOffset"]
        if num_distractors:  # this task draws them from a pool of their own
            options |= {"objects": pool[:-num_distractors], "distractors": pool[-num_distractors:]}
    env_class = import_string(TASKS[task].env_class)
    config = env_class.default_config_cls(observations=[getattr(observations, name)() for name in names], **options)
    return env_class(config, control_mode="pd_joint_target_delta_pos" if control == "delta" else "pd_joint_pos")


def in_units(config: SO101Config, joints: np.ndarray) -> np.ndarray:
    """Return joint positions ``[6]`` in radians in ``env.units``."""
    if config.units == "radians":
        return joints
    return np.append(np.degrees(joints[:5]), 100 * (joints[5] - LOW[5]) / (HIGH[5] - LOW[5]))


def joint_limits(config: SO101Config) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and highest joint positions in ``env.units``."""
    return in_units(config, LOW), in_units(config, HIGH)


def from_units(config: SO101Config, joints: np.ndarray) -> np.ndarray:
    """Return joint positions ``[6]`` in ``env.units`` in radians."""
    if config.units == "radians":
        return joints
    return np.append(np.radians(joints[:5]), LOW[5] + joints[5] / 100 * (HIGH[5] - LOW[5]))
