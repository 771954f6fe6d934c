"""Meta-World: 50 manipulation tasks for one arm, with scripted experts (Yu et al., 2019, arXiv:1910.10897; version 3)."""

from __future__ import annotations

import copy
import importlib.util
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlinf.envs.config import ProcessEnvConfig
from rlinf.envs.graphics.backend import choose_backend, import_mujoco
from rlinf.envs.graphics.renderer import StateRenderer, lighten, project
from rlinf.envs.process.env import ProcessVectorEnv
from rlinf.envs.process.simulator import Simulator, SingleStep, View
from rlinf.errors import MissingDependencyError
from rlinf.options import option
from rlinf.seeding import derive_seed

if TYPE_CHECKING:
    from rlinf.types import EpisodeSpec

INSTRUCTIONS = {
    "assembly-v3": "put the ring of the wrench over the peg",
    "basketball-v3": "throw the basketball into the hoop",
    "bin-picking-v3": "move the block from the right bin into the left bin",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button from above",
    "button-press-v3": "press the button from the front",
    "button-press-wall-v3": "reach over the wall and press the button from the front",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "lift the ring of the wrench off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "hand-insert-v3": "put the gripper into the hole",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-open-v3": "turn the faucet on",
    "faucet-close-v3": "turn the faucet off",
    "hammer-v3": "drive the nail in with the hammer",
    "handle-press-side-v3": "press the handle on the side down",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle on the side up",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "pick-place-wall-v3": "carry the puck over the wall to the goal",
    "pick-out-of-hole-v3": "take the puck out of the hole and bring it to the goal",
    "pick-place-v3": "pick up the puck and bring it to the goal",
    "plate-slide-v3": "slide the plate into the cabinet",
    "plate-slide-side-v3": "slide the plate sideways into the cabinet",
    "plate-slide-back-v3": "slide the plate back out of the cabinet",
    "plate-slide-back-side-v3": "slide the plate back sideways out of the cabinet",
    "peg-insert-side-v3": "insert the peg into the hole from the side",
    "peg-unplug-side-v3": "pull the peg out of the hole sideways",
    "soccer-v3": "kick the ball into the goal",
    "stick-push-v3": "push the flask to the goal with the stick",
    "stick-pull-v3": "pull the flask to the goal with the stick",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck around the wall to the goal",
    "push-back-v3": "pull the puck back to the goal",
    "reach-v3": "reach the goal",
    "reach-wall-v3": "reach the goal behind the wall",
    "shelf-place-v3": "put the puck on the shelf",
    "sweep-into-v3": "sweep the puck into the hole",
    "sweep-v3": "sweep the puck off the table",
    "window-open-v3": "open the window",
    "window-close-v3": "close the window",
}
"""Maps tasks to instructions, in Meta-World's order."""

UPSIDE_DOWN_CAMERAS = ("corner", "corner2", "corner3", "corner4")
CAMERAS = (*UPSIDE_DOWN_CAMERAS, "topview", "behindGripper", "gripperPOV")
REWARD_SCALE = 0.1
CONTROL_FREQ_HZ = 80
MAX_IDLE_SCENES = 16
MIN_RENDERERS = 4
MAX_GEOMS = 400
CELL_M = 0.008
"""Edge length of a cube within which vertices are merged; a pixel of a 64 px image of a corner camera covers more."""
HAND_LOW, HAND_HIGH = (-0.525, 0.348, -0.0525), (0.525, 1.025, 0.7)


@dataclass
class MetaWorldConfig(ProcessEnvConfig):
    """Meta-World, version 3 (MuJoCo)."""

    usual_cameras: ClassVar[tuple[str, ...]] = ("corner4",)

    name: str = option("metaworld", "Name of the registered environment.")
    max_episode_steps: int = option(200, "Env steps after which an episode is truncated.", minimum=1)
    image_size: int = option(128, "Height and width of camera images in pixels.", minimum=16)
    cameras: list[str] | None = option(
        None, f"Cameras to render, in order: {', '.join(CAMERAS)}; null: as many as the model uses."
    )
    reward_mode: str = option(
        "relative",
        "sparse: success bonus; shaped: plus dense reward (0 to 1); relative: plus its change.",
        choices=("sparse", "shaped", "relative"),
    )
    state: str = option(
        "proprio",
        "proprio: hand position and gripper; full: 39 values and the one-hot task; none.",
        choices=("full", "proprio", "none"),
    )
    action_repeat: int = option(1, "Simulator steps per env step, repeating the action until success.", minimum=1)
    rendering: str = option(
        "full", "full: the package's meshes; fast: few triangles, also in videos.", choices=("full", "fast")
    )
    upright: bool = option(True, "Rotate the corner cameras' images by 180 degrees, so that they are upright.")


class MetaWorldVectorEnv(ProcessVectorEnv):
    """Meta-World's tasks with instructions. An action moves the hand by up to 1 cm per step along (x, y, z), and the gripper.

    Goals are visible and part of the state. The dense reward is 0.1 times Meta-World's (0 to 10). Raises MissingDependencyError.
    """

    config_class = MetaWorldConfig
    suite: ClassVar[str] = "metaworld"
    camera_names: ClassVar[tuple[str, ...]] = CAMERAS
    simulator_class: ClassVar[str] = "rlinf.envs.metaworld.env:MetaWorldSimulator"
    packages: ClassVar[tuple[str, ...]] = ("metaworld", "mujoco")
    config: MetaWorldConfig

    def __init__(self, config: MetaWorldConfig, num_envs: int, auto_reset: bool) -> None:
        if importlib.util.find_spec("metaworld") is None:
            raise MissingDependencyError(
                "The package 'metaworld' is missing, and env.name=metaworld needs it. Install it with "
                "`bash scripts/setup.sh --sims`, or with `pip install metaworld==3.1.1`."
            )
        if config.cameras:
            choose_backend()
        super().__init__(config, num_envs, auto_reset, action_low=-np.ones(4), action_high=np.ones(4))
        self.metadata["render_fps"] = CONTROL_FREQ_HZ / config.action_repeat

    @classmethod
    def all_task_names(cls, config: MetaWorldConfig) -> list[str]:
        return list(INSTRUCTIONS)

    @classmethod
    def state_width(cls, config: MetaWorldConfig) -> int:
        """Return 4 (proprio), 39 plus one for each of the 50 tasks (full), or 0 (none)."""
        return {"full": 39 + len(INSTRUCTIONS), "proprio": 4, "none": 0}[config.state]

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        if self.config.state != "proprio":
            return None
        return np.array([*HAND_LOW, 0.0]), np.array([*HAND_HIGH, 1.0])

    def instruction_of(self, task_id: int) -> str:
        return INSTRUCTIONS[self.task_names[task_id]]


class MetaWorldSimulator(Simulator):
    """One Meta-World env, which switches scenes when the task changes."""

    config: MetaWorldConfig

    def __init__(self, config: MetaWorldConfig, task_names: Sequence[str]) -> None:
        super().__init__(config, task_names)
        # The experts warn about almost every action, because they clip it.
        warnings.filterwarnings("ignore", message=r"Constant\(s\) may be too high")
        self._task = ""
        self._env: Any = None
        self._numbers = np.zeros(39)
        _simulators.add(self)

    def reset(self, spec: EpisodeSpec) -> None:
        task = self.task_names[spec.task_id]
        if task != self._task:
            self.close()
            self._task, self._env = task, _take_scene(task)
        self._numbers = _restart(self._env, derive_seed(spec.seed, "metaworld", task, spec.init_state_id))

    def step(self, action: np.ndarray) -> SingleStep:
        for _ in range(self.config.action_repeat):
            self._numbers, reward, _, _, info = self._env.step(action)
            if info["success"]:
                break
        return SingleStep(REWARD_SCALE * float(reward), info["success"])

    def observe(self) -> View:
        images = {camera: self._render_camera(camera, self.config.image_size) for camera in self.config.cameras}
        return View(images, self._state(), INSTRUCTIONS[self._task])

    def expert_action(self, aim_offset_m: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
        from metaworld.policies import ENV_POLICY_MAP

        numbers = self._numbers.copy()
        numbers[:2] -= aim_offset_m
        return np.clip(ENV_POLICY_MAP[self._task]().get_action(numbers), -1.0, 1.0).astype(np.float32)

    def render(self, size: int) -> np.ndarray:
        return self._render_camera(self._video_camera, size)

    def chunk_path(self, chunk: np.ndarray, size: int) -> np.ndarray:
        """Return the simulated path of the fingers, assuming that success does not cut an action's repetitions short."""
        mujoco, env, camera, data = import_mujoco(), self._env, self._video_camera, self._env.data
        positions = [env.tcp_center]
        # Temporarily replace the env's data with a copy, because Meta-World's methods always step `env.data`.
        try:
            env.data = copy.copy(data)
            for action in np.repeat(chunk, self.config.action_repeat, axis=0):
                env.set_xyz_action(action[:3])
                env.do_simulation([action[-1], -action[-1]], n_frames=env.frame_skip)
                mujoco.mj_forward(env.model, env.data)
                positions.append(env.tcp_center)
        finally:
            env.data = data
        points = np.stack(positions[:: self.config.action_repeat])
        path = project(env.model, data, env.model.camera(camera).id, points, size)
        return size - path if self._is_rotated(camera) else path

    def poses(self) -> dict[str, list[float]]:
        model, data = self._env.model, self._env.data
        arm = model.body("base").id
        bodies = [model.body(index) for index in range(1, model.nbody)]
        movable = [body for body in bodies if body.name == "hand" or (body.name and body.rootid[0] != arm)]
        return {body.name: [*data.xpos[body.id].tolist(), *data.xquat[body.id].tolist()] for body in movable}

    def close(self) -> None:
        # Return scenes to a pool, because building one takes 0.1 s and tasks change often.
        if self._env is not None:
            with _idle_scenes_lock:
                _idle_scenes.append((self._task, self._env))
                del _idle_scenes[:-MAX_IDLE_SCENES]
        self._task, self._env = "", None

    def _state(self) -> np.ndarray | None:
        if self.config.state == "none":
            return None
        if self.config.state == "proprio":
            return self._numbers[:4].astype(np.float32)
        task = np.array(list(INSTRUCTIONS)) == self._task
        return np.concatenate([self._numbers, task]).astype(np.float32)

    @property
    def _video_camera(self) -> str:
        return next(iter(self.config.cameras), "corner4")

    def _is_rotated(self, camera: str) -> bool:
        return self.config.upright and camera in UPSIDE_DOWN_CAMERAS

    def _render_camera(self, camera: str, size: int) -> np.ndarray:
        _show_goal(self._env)
        renderer = _renderer_of(self._env.fullpath, size, self.config.rendering == "fast")
        image = renderer.render([self._env.data], [renderer.model.camera(camera).id])[0, 0]
        if self._is_rotated(camera):
            image = image[::-1, ::-1]
        return np.ascontiguousarray(image)


_idle_scenes: list[tuple[str, Any]] = []
_idle_scenes_lock = threading.Lock()


def _take_scene(task: str) -> Any:
    """Return an idle Meta-World env of this process, or build one (0.1 s, 15 MB)."""
    with _idle_scenes_lock:
        for index in reversed(range(len(_idle_scenes))):
            if _idle_scenes[index][0] == task:
                return _idle_scenes.pop(index)[1]
    import_mujoco()  # reports a missing package or GL before Meta-World imports it
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    env = ALL_V3_ENVIRONMENTS[task]()
    env._set_task_called = env.seeded_rand_vec = True
    env._partially_observable = False
    del env.sawyer_observation_space  # cached while the goal was still hidden
    env.max_path_length = sys.maxsize  # VectorEnv truncates
    return env


def _restart(env: Any, seed: int) -> np.ndarray:
    """Reset ``env`` to an initial state that depends only on ``seed``, and return its 39 values."""
    # Meta-World's own reset(seed) draws from NumPy's global generator or ignores the seed.
    mujoco = import_mujoco()
    env.np_random = np.random.default_rng(seed)
    env._freeze_rand_vec = False
    for _ in range(2):  # The first pass draws and moves parts of the model; the second measures the moved parts.
        mujoco.mj_resetData(env.model, env.data)
        env.reset_model()
        env._freeze_rand_vec = True
    env.curr_path_length = 0
    mujoco.mj_fwdPosition(env.model, env.data)
    observed = env._prev_obs = env._get_curr_obs_combined_no_goal()
    return np.concatenate([observed, observed, env._get_pos_goal()])


def _show_goal(env: Any) -> None:
    """Move the goal markers into place, which Meta-World omits in some tasks."""
    # The first site marks the goal. Use the goal position, because pick-out-of-hole-v3 configures this site at the puck.
    for index, (site, position) in enumerate(env._target_site_config):
        env._set_pos_site(site, env._target_pos if index == 0 else position)


_simulators: weakref.WeakSet[MetaWorldSimulator] = weakref.WeakSet()
_renderers: dict[tuple[int, bool], OrderedDict[str, StateRenderer]] = {}
_renderers_lock = threading.Lock()


def _renderer_of(model_path: str, size: int, is_fast: bool) -> StateRenderer:
    """Return this process's renderer for all envs with a model; it uses its own copy of the model."""
    with _renderers_lock:
        renderers = _renderers.setdefault((size, is_fast), OrderedDict())
        if model_path not in renderers:
            # A renderer takes 150 MB and a second to build. Allow one per env, so that tasks do not evict each other's.
            while len(renderers) >= max(MIN_RENDERERS, len(_simulators)):
                renderers.popitem(last=False)[1].close()
            model = import_mujoco().MjModel.from_xml_path(model_path)
            if is_fast:
                lighten(model, CELL_M)
            renderers[model_path] = StateRenderer(model, size, MAX_GEOMS)
        renderers.move_to_end(model_path)
        return renderers[model_path]
