"""A LIBERO task as robosuite builds it, stepped without robosuite's redundant computations but with bit-identical results."""

import contextlib
import copy
import functools
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rlinf.envs.graphics.backend import choose_backend, import_mujoco
from rlinf.envs.graphics.renderer import StateRenderer, project
from rlinf.envs.libero.assets import INSTALL_ASSETS, OBJECT_VARIANTS
from rlinf.errors import ConfigError, MissingDependencyError

CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
"""Maps names in ``env.cameras`` to robosuite's names."""

CONTROL_FREQ_HZ = 20
SIM_STEPS = 25
"""Number of 2 ms simulator steps per env step."""
SEEN_SIM_STEP = 23
"""Simulator step (from 0) within an env step at which robosuite reads its sensors, after ``reset`` and ``set_init_state``.

Bodies and cameras are read at the start of that step, the gripper's joints at its end, and sites (the flame of the stove) as
the previous env step left them.
"""
START_NOISE_RAD = 0.02
"""Std of the arm's joints at the start: robosuite's default, and measured in recorded states of all suites."""
GEOM_GROUPS = np.array([[0, 1, 1, 0, 0, 0]], dtype=np.uint8)
"""As in robosuite, show visual geoms (group 1 and MuJoCo's 2) but not collision geoms (group 0)."""
MAX_GEOMS = 1000


@dataclass
class SceneState:
    """State of one env; several envs of a process share a scene.

    ``controller`` is robosuite's arm controller with its goal; ``gripper`` is the gripper's current command, which changes by a fixed
    amount per simulator step. ``fixtures`` maps body ids to (position, quaternion), because the model can store only one env's.
    ``sites`` are the colours of the model's sites, including flames. ``seen_*``: joints, ``sites`` and fingers as last sensed.
    ``view`` is the pose (position, quaternion) of the camera agentview; None: LIBERO's.
    """

    data: Any
    controller: Any = None
    gripper: np.ndarray = field(default_factory=lambda: np.zeros(1))
    fixtures: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    sites: np.ndarray = field(default_factory=lambda: np.zeros((0, 4)))
    seen_qpos: np.ndarray = field(default_factory=lambda: np.zeros(0))
    seen_sites: np.ndarray = field(default_factory=lambda: np.zeros((0, 4)))
    seen_gripper: np.ndarray = field(default_factory=lambda: np.zeros(2))
    view: tuple[Sequence[float], Sequence[float]] | None = None


class _SimulationView:
    """The controller's view of the simulation, whose kinematics are updated by ``Scene.step``."""

    def __init__(self, mujoco: Any, sim: Any) -> None:
        self._mujoco, self.model, self.data = mujoco, sim.model, sim.data

    def forward(self) -> None:
        """Solve for accelerations again. Because the solver is warm-started, every call changes the result."""
        self._mujoco.mj_forwardSkip(self.model._model, self.data._data, self._mujoco.mjtStage.mjSTAGE_VEL, 1)


class Scene:
    """One task: model, controller and goal. Takes about 0.5 GB with textures and a renderer, and 2 to 7 s to build."""

    def __init__(self, bddl_file: Path, assets: Path, fast_rendering: bool) -> None:
        env_class = _import_libero(assets)
        mujoco = import_mujoco()
        self._mujoco, self._fast_rendering = mujoco, fast_rendering
        self.lock = threading.RLock()
        try:
            with _numpy_seed(np.random.get_state()):  # robosuite draws random positions, which every episode overwrites
                self._env = env_class(
                    bddl_file_name=str(bddl_file), use_camera_obs=False, has_offscreen_renderer=False,
                    control_freq=CONTROL_FREQ_HZ, hard_reset=False,
                ).env  # fmt: skip
        except (OSError, ValueError) as error:
            raise MissingDependencyError(
                f"The task {bddl_file.stem} cannot be built from the assets in {assets}: {error}. Run "
                f"`{INSTALL_ASSETS}`, or set env.assets_dir=<LIBERO's folder libero/libero/assets>"
            ) from error
        self._sim, self._robot = self._env.sim, self._env.robots[0]
        self.model = self._sim.model._model
        self._env.visualize({name: False for name in self._env._visualizations})  # hide gripper and region markers
        self._compiled_sites = self.model.site_rgba.copy()
        self._view_id = self.model.camera(CAMERAS["agentview"]).id
        self.compiled_view = self.model.cam_pos[self._view_id].copy(), self.model.cam_quat[self._view_id].copy()
        self._joint_samplers = list(self._env.object_property_initializers)
        self._bodies = dict(self._env.obj_body_id)
        self._fixture_ids = [self._bodies[name] for name in self._env.fixtures_dict]
        for body in self._fixture_ids:  # undo robosuite's random placement
            self.model.body_pos[body], self.model.body_quat[body] = np.zeros(3), (1.0, 0.0, 0.0, 0.0)
        self._compiled_fixtures = self._fixtures()
        self._published: dict[int, list[tuple[Any, int]]] = {}
        self._sensor_data = mujoco.MjData(self.model)
        self._renderers: dict[int, StateRenderer] = {}

    def new_state(self) -> SceneState:
        """Return an empty state for one env, to be filled by ``restore`` or ``draw``."""
        return SceneState(self._mujoco.MjData(self.model))

    def restore(
        self, state: SceneState, recorded: np.ndarray, seed: int, index: int, start: np.ndarray | None = None
    ) -> np.random.RandomState:
        """Overwrite ``state`` with the ``recorded`` state number ``index``, float64 ``[1 + nq + nv]``.

        A recorded state does not include the poses of the fixtures (cabinet, stove), which LIBERO draws within about a centimetre
        at each reset. Here they match episode ``index`` of a script that calls ``env.seed(seed)`` once, and then ``env.reset()`` and
        ``env.set_init_state(recorded)`` for each episode (seed 0 in OpenVLA's evaluation). Return NumPy's generator as such a script
        has it then. ``start``: joint positions of the arm at the reset, float64 ``[7]``; None: LIBERO's.
        """
        if len(recorded) != 1 + self.model.nq + self.model.nv:
            raise ConfigError(
                f"The recorded initial state has {len(recorded)} values, but the task's model has 1 + {self.model.nq} + "
                f"{self.model.nv}: packages and assets have different versions. Run `bash scripts/setup.sh --sims`, or unset "
                "env.assets_dir"
            )
        generator = self._reset(state, *self._published_draw(state, seed, index), start)
        self._sim.set_state_from_flattened(recorded)
        self._start(state)
        return generator

    def draw(self, state: SceneState, seed: int, start: np.ndarray | None = None) -> np.random.RandomState:
        """Start at a state that LIBERO draws from ``seed`` (32 bits), including fixtures. Objects then fall into place.

        The arm's joints get robosuite's default noise: LIBERO's own reset switches it off, but its recorded states have it.
        ``start`` and the returned generator are as in ``restore``.
        """
        generator = self._reset(state, seed, 1, start)
        joints = self._robot._ref_joint_pos_indexes
        self._sim.data.qpos[joints] += START_NOISE_RAD * generator.randn(len(joints))
        self._start(state)
        return generator

    def step(self, state: SceneState, action: np.ndarray) -> bool:
        """Advance by one env step (50 ms) and return whether the goal is reached.

        The result equals robosuite's ``env.step``. Positions and velocities are computed once per simulator step instead of three
        times; accelerations are still computed three times. ``action`` is float64 ``[7]`` in LIBERO's convention (gripper: -1
        opens, 1 closes).
        """
        mujoco, model, data, robot = self._mujoco, self.model, state.data, self._robot
        self._activate(state)
        torque_low, torque_high = robot.torque_limits
        for number in range(SIM_STEPS):
            mujoco.mj_step1(model, data)
            mujoco.mj_forwardSkip(model, data, mujoco.mjtStage.mjSTAGE_VEL, 1)
            if number == 0:
                state.controller.set_goal(action[:6])
            torques = state.controller.run_controller()
            data.ctrl[robot._ref_joint_actuator_indexes] = np.clip(torques, torque_low, torque_high)
            robot.grip_action(robot.gripper, action[6:])
            # The sensors read camera poses before this simulator step, and finger positions after it.
            if number == SEEN_SIM_STEP:
                state.seen_qpos, state.seen_sites = data.qpos.copy(), state.sites
            mujoco.mj_step2(model, data)
            if number == SEEN_SIM_STEP:
                state.seen_gripper = data.qpos[robot._ref_gripper_joint_pos_indexes].copy()
        state.gripper = robot.gripper.current_action
        self._env._post_process()
        # robosuite changes sites (flames) after the physics, so they appear only in the next env step's images.
        state.sites = model.site_rgba.copy()
        return bool(self._env._check_success())

    def proprioception(self, state: SceneState) -> np.ndarray:
        """Return float32 ``[8]``: hand position (metres), rotation (axis times radians) and both finger positions (metres)."""
        self._restore_sensors(state)
        hand = self._sensor_data.body(self._robot.robot_model.eef_name)
        position = self._sensor_data.site_xpos[self._robot.eef_site_id]
        return np.concatenate([position, axis_angle(hand.xquat), state.seen_gripper]).astype(np.float32)

    def render(self, state: SceneState, cameras: list[str], size: int) -> list[np.ndarray]:
        """Return uint8 ``[size, size, 3]`` per camera, rotated by 180 degrees as in published datasets (upright but mirrored)."""
        if not cameras:
            return []
        self._restore_sensors(state)
        if size not in self._renderers:
            self._renderers[size] = StateRenderer(self.model, size, MAX_GEOMS, fast=self._fast_rendering)
        ids = [self.model.camera(CAMERAS[name]).id for name in cameras]
        images = self._renderers[size].render([self._sensor_data], ids, GEOM_GROUPS)[:, 0]
        return [np.ascontiguousarray(image[:, ::-1]) for image in images]

    def path(self, state: SceneState, actions: np.ndarray, camera: str, size: int) -> np.ndarray:
        """Simulate a copy under ``actions [C, 7]``; return the hand's path in an image from ``render``, ``[C + 1, 2]`` pixels."""
        sim = state.controller.sim  # shared with `state`
        # Deep-copy all but the simulation, so that only the controller's goal and interpolation may differ.
        controller = copy.deepcopy(state.controller, {id(sim): sim})
        simulated = replace(state, data=copy.copy(state.data), controller=controller, gripper=state.gripper.copy())
        camera_id, positions = self.model.camera(CAMERAS[camera]).id, []
        for action in [None, *actions]:
            if action is not None:
                self.step(simulated, action)
            self._restore_sensors(simulated)
            positions.append(self._sensor_data.site_xpos[self._robot.eef_site_id].copy())
        self._restore_sensors(state)
        path = project(self.model, self._sensor_data, camera_id, np.stack(positions), size)
        path[:, 0] = size - path[:, 0]
        return path

    def poses(self, state: SceneState) -> dict[str, list[float]]:
        data = state.data
        return {name: [*data.xpos[body].tolist(), *data.xquat[body].tolist()] for name, body in self._bodies.items()}

    def _activate(self, state: SceneState) -> None:
        """Make robosuite's objects operate on ``state``."""
        self._sim.data._data = state.data
        self._robot.controller = state.controller
        self._robot.gripper.current_action = state.gripper
        for body, (position, quaternion) in state.fixtures.items():
            self.model.body_pos[body], self.model.body_quat[body] = position, quaternion
        self.model.site_rgba[:] = state.sites
        position, quaternion = state.view or self.compiled_view
        self.model.cam_pos[self._view_id], self.model.cam_quat[self._view_id] = position, quaternion

    def _start(self, state: SceneState) -> None:
        self._sim.forward()
        self._env._post_process()
        state.controller = self._robot.controller
        state.controller.sim = _SimulationView(self._mujoco, self._sim)
        state.gripper = np.zeros(self._robot.gripper.dof)
        state.sites = state.seen_sites = self.model.site_rgba.copy()
        state.seen_qpos = state.data.qpos.copy()
        state.seen_gripper = state.data.qpos[self._robot._ref_gripper_joint_pos_indexes].copy()

    def _restore_sensors(self, state: SceneState) -> None:
        """Set ``_sensor_data`` to the state last read by the sensors of ``state``."""
        self._activate(state)
        self.model.site_rgba[:] = state.seen_sites
        self._sensor_data.qpos[:] = state.seen_qpos
        self._mujoco.mj_kinematics(self.model, self._sensor_data)
        self._mujoco.mj_comPos(self.model, self._sensor_data)
        self._mujoco.mj_camlight(self.model, self._sensor_data)

    def _fixtures(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        return {
            body: (self.model.body_pos[body].copy(), self.model.body_quat[body].copy()) for body in self._fixture_ids
        }

    def _published_draw(self, state: SceneState, seed: int, index: int) -> tuple[Any, int]:
        """Return the generator state and ``num_loads`` after ``env.seed(seed)`` and ``index`` calls to ``env.reset()``."""
        known = self._published.setdefault(seed, [])
        with _numpy_seed(known[-1][0] if known else seed):
            if not known:  # robosuite loads the model at construction and at each reset
                known.append((np.random.get_state(), 2))
            while len(known) <= index:
                num_loads = self._draw(state, known[-1][1])
                known.append((np.random.get_state(), num_loads + 1))
        return known[index]

    def _reset(self, state: SceneState, seed: Any, num_loads: int, start: np.ndarray | None) -> np.random.RandomState:
        """Call ``_draw`` with NumPy's generator at ``seed`` (an integer or a state), and return the generator afterwards."""
        usual, after = self._robot.init_qpos, np.random.RandomState()
        self._robot.init_qpos = usual if start is None else start
        try:
            with _numpy_seed(seed):
                self._draw(state, num_loads)
                after.set_state(np.random.get_state())
        finally:
            self._robot.init_qpos = usual
        return after

    def _draw(self, state: SceneState, num_loads: int) -> int:
        """Reset the simulation as LIBERO's ``env.reset()`` does, using NumPy's global generator.

        Return ``num_loads``: how often LIBERO has loaded the model (its list of joints to draw grows each time) plus failed draws.
        """
        from robosuite.utils.errors import RandomizationError

        while True:
            self._env.object_property_initializers = self._joint_samplers * num_loads
            state.fixtures, state.sites = self._compiled_fixtures, self._compiled_sites
            self._activate(state)
            self._sim.reset()
            for _ in range(2):  # LIBERO calls it twice, and each call changes the solver's warm start
                self._sim.forward()
            try:
                self._env._reset_internal()
                break
            except RandomizationError:
                num_loads += 1
        self._sim.forward()
        state.fixtures = self._fixtures()
        return num_loads


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Convert a quaternion (w, x, y, z) to axis times angle (0 to 2 pi), as expected by published policies."""
    w = float(np.clip(quaternion[0], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    return np.zeros(3) if np.isclose(sine, 0.0) else np.asarray(quaternion[1:]) * (2.0 * np.arccos(w) / sine)


@contextlib.contextmanager
def _numpy_seed(seed: Any) -> Iterator[None]:
    """Temporarily set NumPy's global generator, which LIBERO uses, to ``seed`` (an integer or a state)."""
    before = np.random.get_state()
    np.random.seed(seed) if isinstance(seed, int) else np.random.set_state(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


_import_lock = threading.Lock()


def _import_libero(assets: Path) -> Any:
    """Import LIBERO and set its assets folder. Without a settings file, the import would prompt on stdin."""
    choose_backend()  # otherwise robosuite sets MUJOCO_GL itself
    with _import_lock, tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.yaml").touch()
        # robosuite rejects an EGL device that is not in CUDA_VISIBLE_DEVICES, but EGL numbers devices differently.
        before = {name: os.environ.pop(name, None) for name in ("LIBERO_CONFIG_PATH", "MUJOCO_EGL_DEVICE_ID")}
        os.environ["LIBERO_CONFIG_PATH"] = folder
        logging.disable(logging.WARNING)  # robosuite warns about an optional file
        try:
            import libero.libero
            from libero.libero.envs import base_object
            from libero.libero.envs.env_wrapper import ControlEnv
        finally:
            logging.disable(logging.NOTSET)
            del os.environ["LIBERO_CONFIG_PATH"]
            os.environ.update({name: value for name, value in before.items() if value is not None})
        _register_variants(base_object)
    libero.libero._assets_path_cache = str(assets)  # skips LIBERO's own search and download
    return ControlEnv


def _register_variants(base_object: ModuleType) -> None:
    """Register ``OBJECT_VARIANTS`` with LIBERO as subclasses with a different model file."""
    for variant, base in OBJECT_VARIANTS.items():
        if variant in base_object.OBJECTS_DICT:
            continue
        parent = base_object.OBJECTS_DICT[base]
        created = functools.partialmethod(parent.__init__, obj_name=variant)
        variant_class = type(variant.title().replace("_", ""), (parent,), {"__init__": created})
        base_object.register_object(variant_class)
        if base in base_object.VISUAL_CHANGE_OBJECTS_DICT:
            base_object.register_visual_change_object(variant_class)
