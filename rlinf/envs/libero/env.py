"""LIBERO: 130 language-conditioned manipulation tasks in five suites (Liu et al., 2023, arXiv:2306.03310).

Tasks run as in the published evaluations of vision-language-action models.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlinf.envs.config import ProcessEnvConfig
from rlinf.envs.episodes import EpisodeList, check_split
from rlinf.envs.graphics.backend import choose_backend
from rlinf.envs.libero.assets import check_assets, check_originals, find_assets
from rlinf.envs.libero.expert import BowlExpert, is_solved
from rlinf.envs.libero.noise import SIZE, SensorNoise
from rlinf.envs.libero.plus import CATEGORIES, PlusSuite, seen_from
from rlinf.envs.libero.scene import CAMERAS, CONTROL_FREQ_HZ, Scene, SceneState
from rlinf.envs.libero.tasks import HORIZONS, SUITES, Suite, check_packages
from rlinf.envs.process.env import ProcessVectorEnv
from rlinf.envs.process.simulator import Simulator, SingleStep, View
from rlinf.errors import ConfigError, MissingDependencyError, did_you_mean, reject
from rlinf.options import PathText, option, override_text
from rlinf.seeding import derive_seed
from rlinf.types import Statistics

if TYPE_CHECKING:
    from rlinf.types import EpisodeSpec

DRAWN_OFFSET = 1000
"""First ``init_state_id`` of drawn states; lower ids are recorded states."""
EVAL_SEED, TRAIN_SEED = 0, 1
"""Seeds of the splits. The evaluation scripts of OpenVLA and OpenVLA-OFT seed each task's env with 0."""
THROWN_M, MAX_DRAWS = 0.05, 20
"""A state is drawn again if an object moves farther while settling: in the first task of LIBERO-Spatial, draws let objects
overlap, which throws them up to 30 cm; its recorded states do not."""
SETTLING_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
STATE_LOW = np.array([-0.6, -0.5, 0.0, -4.0, -4.0, -4.0, 0.0, -0.04])
STATE_HIGH = np.array([0.3, 0.5, 1.6, 4.0, 4.0, 4.0, 0.04, 0.0])


@dataclass
class LiberoConfig(ProcessEnvConfig):
    """LIBERO (robosuite, MuJoCo)."""

    usual_cameras: ClassVar[tuple[str, ...]] = ("agentview", "wrist")

    name: str = option("libero", "Name of the registered environment.")
    suite: str = option("libero_spatial", "Suite of LIBERO, LIBERO-PRO or LIBERO-Plus.", choices=tuple(SUITES))
    categories: list[str] | None = option(
        None, f"Kinds of perturbation in suites of LIBERO-Plus: {', '.join(CATEGORIES)}; null: all; []: none."
    )
    max_episode_steps: int | None = option(
        None,
        "Env steps after which an episode is truncated; null: as published ("
        + ", ".join(f"{suite} {steps}" for suite, steps in HORIZONS.items())
        + ").",
        minimum=1,
    )
    image_size: int = option(256, "Height and width of camera images in pixels; published data uses 256.", minimum=16)
    cameras: list[str] | None = option(
        None, f"Cameras to render, in order: {', '.join(CAMERAS)}; null: as many as the model uses."
    )
    reward_mode: str = option("sparse", "All use only the success bonus.", choices=("sparse", "shaped", "relative"))
    num_eval_init_states: int = option(
        Suite.num_recorded, "Initial states per task in evaluation.", minimum=1, maximum=Suite.num_recorded
    )
    train_init_states: str = option(
        "drawn",
        "drawn: random states; recorded: the evaluation's 50 states, as in published RL results.",
        choices=("drawn", "recorded"),
    )
    gripper: str = option(
        "env",
        "Gripper convention. env: -1 opens, 1 closes (LIBERO, pi0); openvla: 1 opens, 0 closes.",
        choices=("env", "openvla"),
    )
    state: str = option("proprio", "proprio: hand pose and finger joints; none.", choices=("proprio", "none"))
    num_settling_steps: int = option(10, "Env steps, not counted, in which objects settle at the start.", minimum=0)
    rendering: str = option(
        "full", "full: robosuite's exact images; fast: without shadows and antialiasing.", choices=("full", "fast")
    )
    max_scenes: int = option(10, "Cached tasks per worker process, about 0.5 GB each.", minimum=1)
    assets_dir: PathText | None = option(
        None, "Folder with LIBERO's assets; null: RLINF_LIBERO_ASSETS or the installed wheels."
    )
    modified_assets: bool = option(
        False, "Accept assets that differ from LIBERO's, whose images are the published ones."
    )


class LiberoVectorEnv(ProcessVectorEnv):
    """One LIBERO suite.

    An action consists of a displacement of the hand (x, y, z; 1 is 5 cm) and a rotation (1 is 0.5 rad), both over 50 ms, and a
    gripper command.

    Evaluation uses each task's recorded initial states 0 to 49 in order, cycling through the tasks. Instructions, horizons,
    settling, image orientation, fixtures and sensor timing match OpenVLA's evaluation script. Raises MissingDependencyError if
    LIBERO, a package of the right version, the assets or a GL for images is missing.
    """

    config_class = LiberoConfig
    suite: ClassVar[str] = "libero"
    camera_names: ClassVar[tuple[str, ...]] = tuple(CAMERAS)
    simulator_class: ClassVar[str] = "rlinf.envs.libero.env:LiberoSimulator"
    packages: ClassVar[tuple[str, ...]] = ("mujoco", "robosuite", "hf-libero", "bddl")
    free_settings: ClassVar[tuple[str, ...]] = (
        *ProcessVectorEnv.free_settings, "categories", "train_init_states", "max_scenes", "assets_dir",
    )  # fmt: skip
    without_expert: ClassVar[str] = "its expert puts bowls on plates, as all tasks of env.suite=libero_spatial do"
    config: LiberoConfig

    def __init__(self, config: LiberoConfig, num_envs: int, auto_reset: bool) -> None:
        check_packages()
        self.check_names(config)
        assets = find_assets(config.assets_dir)
        check_assets(assets, SUITES[config.suite], self.selected_tasks(config))
        if config.cameras and not config.modified_assets:
            check_originals(assets)
        choose_backend()
        self.suite = config.suite
        low, high = -np.ones(7), np.ones(7)
        if config.gripper == "openvla":
            low[6] = 0.0
        super().__init__(config, num_envs, auto_reset, action_low=low, action_high=high)
        self.metadata["render_fps"] = CONTROL_FREQ_HZ

    @classmethod
    def all_task_names(cls, config: LiberoConfig) -> list[str]:
        if config.suite not in SUITES:
            raise ConfigError(f"Unknown suite '{config.suite}' in env.suite.{did_you_mean(config.suite, SUITES)}")
        suite = SUITES[config.suite]
        if isinstance(suite, PlusSuite):
            suite.check_present(config.tasks or ())
        if config.categories is None:
            return list(suite.tasks)
        if not isinstance(suite, PlusSuite) or not set(config.categories) <= set(CATEGORIES):
            kinds = [kind for kind in config.categories if kind in CATEGORIES] or list(CATEGORIES)
            fix = f"env.suite=libero_plus_spatial env.categories={override_text(kinds)}"
            actual = f"env.categories={override_text(config.categories)} with env.suite={config.suite}"
            reject(actual, f"kinds among {', '.join(CATEGORIES)} and a suite of LIBERO-Plus", fix)
        kinds = ["", *config.categories]
        return [task for task in suite.tasks if cls._kind_of(config, task) in kinds]

    @classmethod
    def selected_tasks(cls, config: LiberoConfig) -> list[str]:
        """Select with an unperturbed task all its variants, unless ``config.tasks`` names some of them."""
        tasks, named = cls.all_task_names(config), set(super().selected_tasks(config))
        task_of = {task: twin[1] for task in tasks if (twin := cls.twin_of(config, task)) is not None}
        complete = named - {task_of.get(task) for task in named}
        return [task for task in tasks if task in named or task_of.get(task) in complete]

    @classmethod
    def check_names(cls, config: LiberoConfig) -> None:
        """Also reject missing files, and sensor noise on images of a size for which it is not defined."""
        super().check_names(config)
        tasks, suite = cls.selected_tasks(config), SUITES[config.suite]
        if missing := [path for task in tasks for path in suite.files(task) if not path.is_file()]:
            raise MissingDependencyError(f"{missing[0]} is missing, and {suite.name} needs it. {suite.install}")
        if SIZE % config.image_size and any(cls._kind_of(config, task) == "noise" for task in tasks):
            kinds = [kind for kind in config.categories or CATEGORIES if kind != "noise"]
            fix = f"env.image_size=64, or env.categories={override_text(kinds)}"
            reject(f"env.image_size={config.image_size} with sensor noise", f"a divisor of {SIZE}", fix)

    @classmethod
    def _kind_of(cls, config: LiberoConfig, task: str) -> str:
        """Return the kind of a LIBERO-Plus task's perturbation; "" for other tasks."""
        variant = SUITES[config.suite].variant(task)
        return "" if variant is None else variant.category

    @classmethod
    def twin_of(cls, config: LiberoConfig, task: str) -> tuple[str, str] | None:
        variant = SUITES[config.suite].variant(task)
        return (variant.category, variant.task) if variant is not None and variant.category else None

    @classmethod
    def caveats(cls, config: LiberoConfig) -> list[str]:
        """Return how much of LIBERO-Plus's official list the suite covers."""
        suite = SUITES[config.suite]
        return [suite.coverage()] if isinstance(suite, PlusSuite) else []

    @classmethod
    def has_expert(cls, config: LiberoConfig) -> bool:
        """Return whether the selected tasks put a bowl on a plate."""
        suite = SUITES[config.suite]
        return all(is_solved(suite.bddl_file(task)) for task in cls.selected_tasks(config))

    @classmethod
    def check_statistics(cls, config: LiberoConfig, statistics: Statistics) -> None:
        """Reject a mismatched gripper convention: the minimum value is negative for ``env`` and at least 0 for ``openvla``."""
        action = statistics["action"]
        numbers = action.get("min", action.get("q01"))
        if numbers is None or len(numbers) != 7:
            return  # mean and std do not reveal the convention; a different width is rejected elsewhere
        lowest = float(numbers[6])
        needed = "openvla" if lowest >= 0.0 else "env"
        if needed != config.gripper:
            actual = f"env.gripper={config.gripper}, but the minimum gripper value in the policy's action statistics is {lowest:g}"
            reject(actual, "the policy's convention", f"env.gripper={needed}")

    @classmethod
    def horizon_of(cls, config: LiberoConfig, task: str) -> int:
        return config.max_episode_steps or SUITES[config.suite].horizon

    def episode_specs(self, split: str) -> Sequence[EpisodeSpec]:
        """Return a split's episodes, cycling through the tasks; "eval" uses the recorded states in order."""
        check_split(split)
        first = DRAWN_OFFSET if split == "train" and self.config.train_init_states == "drawn" else 0
        seed = EVAL_SEED if split == "eval" else TRAIN_SEED
        return EpisodeList(self.suite, len(self.task_names), self.num_init_states(self.config, split), first, seed)

    @classmethod
    def num_init_states(cls, config: LiberoConfig, split: str) -> int:
        recorded = split == "eval" or config.train_init_states == "recorded"
        most = SUITES[config.suite].num_recorded if recorded else sys.maxsize
        return min(super().num_init_states(config, split), most)

    @classmethod
    def state_width(cls, config: LiberoConfig) -> int:
        return {"proprio": 8, "none": 0}[config.state]

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return bounds for the hand over all suites; checkpoints contain tighter ones."""
        return (STATE_LOW, STATE_HIGH) if self.state_dim else None

    def instruction_of(self, task_id: int) -> str:
        return SUITES[self.suite].instruction(self.task_names[task_id])


class LiberoSimulator(Simulator):
    """One env of a suite, which switches scenes when the task changes."""

    config: LiberoConfig

    def __init__(self, config: LiberoConfig, task_names: Sequence[str]) -> None:
        super().__init__(config, task_names)
        self._assets = find_assets(config.assets_dir)
        self._suite = SUITES[config.suite]
        self._task = ""
        self._scene: Scene | None = None
        self._state: SceneState | None = None
        self._noise: SensorNoise | None = None
        self._noise_generator = np.random.RandomState()
        self._noise_draws: Any = None
        self._expert: BowlExpert | None = None

    def reset(self, spec: EpisodeSpec) -> None:
        """Start at a recorded state (``init_state_id`` below 50) or a drawn one (from 1000), and let objects settle."""
        task, suite, number = self.task_names[spec.task_id], self._suite, spec.init_state_id
        states = suite.recorded_states(task)
        if len(states) <= number < DRAWN_OFFSET:
            raise ConfigError(
                f"{spec} refers to recorded state {number} of {task}, which has only {len(states)}; drawn states start at "
                f"{DRAWN_OFFSET}."
            )
        scene = _scene_of(suite, task, self._assets, self.config.rendering == "fast", self.config.max_scenes)
        # Envs of this process may use the scene at the same time; each has its own `SceneState`.
        with scene.lock:
            if scene is not self._scene:
                self._scene, self._state = scene, scene.new_state()
            self._task = task
            variant, start = suite.variant(task), suite.start_joints(task)
            self._state.view = None if variant is None else seen_from(*scene.compiled_view, variant.view)
            self._noise = SensorNoise(variant.noise) if variant is not None and variant.noise else None
            if number < DRAWN_OFFSET:
                self._noise_generator = scene.restore(self._state, states[number], spec.seed, number, start)
                self._settle()
                return
            name = task if variant is None else variant.task  # so that a perturbed task starts as its twin
            for attempt in range(MAX_DRAWS):
                parts = (spec.seed, suite.name, name, number, *([attempt] if attempt else []))
                self._noise_generator = scene.draw(self._state, derive_seed(*parts) & 0xFFFFFFFF, start)
                before = scene.poses(self._state)
                self._settle()
                after = scene.poses(self._state)
                if max(np.hypot(*np.subtract(after[key][:2], before[key][:2])) for key in before) < THROWN_M:
                    return
            logging.getLogger("rlinf").warning("Objects of %s moved in all %d draws; the last is used", task, MAX_DRAWS)

    def _settle(self) -> None:
        self._draw_noise()  # for the image of the public code's reset
        for _ in range(self.config.num_settling_steps):
            self._scene.step(self._state, SETTLING_ACTION)
            self._draw_noise()

    def step(self, action: np.ndarray) -> SingleStep:
        with self._scene.lock:
            success = self._scene.step(self._state, self._libero_action(action))
        self._draw_noise()
        return SingleStep(0.0, success)

    def _draw_noise(self) -> None:
        """Draw the numbers for the noise of the next image, which the public code renders after every env step."""
        if self._noise is not None:
            self._noise_draws = self._noise.draw(self._noise_generator)

    def expert_action(self, aim_offset_m: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
        with self._scene.lock:
            if self._expert is None or self._expert.scene is not self._scene:
                self._expert = BowlExpert(self._scene)
            action = self._expert.action(self._state, np.array(aim_offset_m))
        if self.config.gripper == "openvla":
            action[6] = (1.0 - action[6]) / 2.0
        return action.astype(np.float32)

    def _libero_action(self, action: np.ndarray) -> np.ndarray:
        """Return the action in LIBERO's gripper convention, float64 ``[7]``."""
        numbers = np.asarray(action, dtype=np.float64).copy()
        if self.config.gripper == "openvla":
            numbers[6] = -np.sign(2.0 * numbers[6] - 1.0)
        return numbers

    def observe(self) -> View:
        with self._scene.lock:
            images = self._scene.render(self._state, self.config.cameras, self.config.image_size)
            state = self._scene.proprioception(self._state) if self.config.state == "proprio" else None
        seen = dict(zip(self.config.cameras, images, strict=True))
        if self._noise is not None and "agentview" in seen:
            seen["agentview"] = self._noise.apply(seen["agentview"], self._noise_draws)
        return View(seen, state, self._suite.instruction(self._task))

    def render(self, size: int) -> np.ndarray:
        with self._scene.lock:
            return self._scene.render(self._state, ["agentview"], size)[0]

    def chunk_path(self, chunk: np.ndarray, size: int) -> np.ndarray:
        actions = np.stack([self._libero_action(action) for action in chunk])
        with self._scene.lock:
            return self._scene.path(self._state, actions, "agentview", size)

    def poses(self) -> dict[str, list[float]]:
        return self._scene.poses(self._state)

    def close(self) -> None:
        self._task, self._scene, self._state, self._expert = "", None, None, None


# Shared by all envs of a process, because a scene takes 0.5 GB; `SceneState` separates the envs.
_scenes: OrderedDict[tuple[Any, ...], Scene] = OrderedDict()
_scenes_lock = threading.Lock()


def _scene_of(suite: Suite, task: str, assets: Path, fast: bool, max_scenes: int) -> Scene:
    """Return this process's scene for a task, dropping the least recently used scenes if necessary."""
    key = suite.bddl_file(task), assets, fast
    with _scenes_lock:
        if key not in _scenes:
            while len(_scenes) >= max_scenes:
                _scenes.popitem(last=False)
                gc.collect()  # robosuite's env refers to itself, and Python does not count its 0.4 GB of C memory
            _scenes[key] = Scene(*key)
        _scenes.move_to_end(key)
        return _scenes[key]
