"""ManiSkill 3's tabletop tasks (Tao et al., 2024, arXiv:2410.00425), and a simulation of one task with any number of envs."""

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rlinf.envs.base import VectorEnv, checked_image, resized
from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.options import option
from rlinf.seeding import derive_seed

PACKAGES = ("mani_skill", "sapien")
CAMERAS = ("base_camera", "hand_camera")
ACTION_DIMS = {"pd_ee_delta_pose": 7, "pd_ee_delta_pos": 4, "pd_joint_delta_pos": 8}
PROPRIO_DIM = 25
CONTROL_FREQ_HZ = 20
FIXED_ACTORS = ("ground", "table-workspace")


class Task(NamedTuple):
    """A ManiSkill task: instruction, registered time limit, and width of an observation in mode "state"."""

    instruction: str
    horizon: int
    state_dim: int


TASKS = {
    "PickCube-v1": Task("pick up the red cube and move it to the green sphere", 50, 42),
    "PushCube-v1": Task("push the cube onto the target in front of it", 50, 35),
    "PullCube-v1": Task("pull the cube onto the target", 50, 35),
    "PokeCube-v1": Task("pick up the peg and poke the cube onto the target with it", 50, 54),
    "StackCube-v1": Task("put the red cube on top of the green cube", 50, 48),
    "StackPyramid-v1": Task("put the red cube beside the green cube, and the blue cube on top of both", 250, 64),
    "LiftPegUpright-v1": Task("set the peg upright", 50, 32),
    "PegInsertionSide-v1": Task("insert the orange end of the peg into the hole of the box", 100, 43),
    "PlugCharger-v1": Task("plug the charger into the receptacle", 200, 46),
    "PlaceSphere-v1": Task("put the blue sphere into the bin", 50, 39),
    "PullCubeTool-v1": Task("pull the cube closer with the L-shaped tool", 100, 39),
    "RollBall-v1": Task("push the ball so that it rolls into the target", 80, 44),
}
"""Tasks for one Panda arm at a table whose models are included in the package, so that no downloads are needed."""


@dataclass
class ManiSkillOptions(EnvConfig):
    """ManiSkill settings, for both CPU and GPU."""

    usual_cameras: ClassVar[tuple[str, ...]] = ("base_camera",)

    tasks: list[str] | None = option(["PickCube-v1"], "Task names; null: all twelve.")
    max_episode_steps: int | None = option(None, "Env steps until truncation; null: ManiSkill's limit.", minimum=1)
    image_size: int = option(128, "Height and width of camera images in pixels.", minimum=16)
    cameras: list[str] | None = option(None, "Cameras: base_camera, hand_camera; null: as many as the model uses.")
    reward_mode: str = option(
        "relative",
        "sparse: success bonus; shaped: plus dense reward (0 to 1); relative: plus its change.",
        choices=("sparse", "shaped", "relative"),
    )
    control_mode: str = option(
        "pd_ee_delta_pose",
        "Hand pose (1 is 0.1 m or rad), hand position or joints, and gripper (1 open).",
        choices=tuple(ACTION_DIMS),
    )
    state: str = option(
        "proprio",
        "proprio: joint positions, velocities, hand pose; full: ManiSkill's 'state'; none.",
        choices=("full", "proprio", "none"),
    )
    show_goals: bool = option(False, "Render goals that ManiSkill hides from its cameras (in PickCube-v1).")


class ManiSkillSuite(VectorEnv):
    """Base class for ManiSkill on the CPU and the GPU."""

    suite: ClassVar[str] = "maniskill"
    camera_names: ClassVar[tuple[str, ...]] = CAMERAS
    packages: ClassVar[tuple[str, ...]] = PACKAGES
    config: ManiSkillOptions

    def __init__(self, config: ManiSkillOptions, num_envs: int, auto_reset: bool) -> None:
        for package in PACKAGES:
            if find_spec(package) is None:
                raise MissingDependencyError(
                    f"The package '{package}' is missing, and env.name={config.name} needs it. "
                    "Install it, and Vulkan, with `bash scripts/setup.sh --sims`."
                )
        high = np.ones(ACTION_DIMS[config.control_mode])
        super().__init__(config, num_envs, auto_reset, action_low=-high, action_high=high)
        self.metadata["render_fps"] = CONTROL_FREQ_HZ

    @classmethod
    def all_task_names(cls, config: ManiSkillOptions) -> list[str]:
        return list(TASKS)

    @classmethod
    def horizon_of(cls, config: ManiSkillOptions, task: str) -> int:
        return config.max_episode_steps or TASKS[task].horizon

    @classmethod
    def state_width(cls, config: ManiSkillOptions) -> int:
        """Return ``state_dim`` under ``config``; raise ConfigError if the tasks' full states differ in width."""
        if config.state != "full":
            return PROPRIO_DIM if config.state == "proprio" else 0
        widths = {task: TASKS[task].state_dim for task in cls.selected_tasks(config)}
        if len(set(widths.values())) > 1:
            raise ConfigError(
                f"env.state=full has a different width for each task ({widths}), but a policy needs a fixed width. "
                "Set env.state=proprio, or one task: env.tasks=[PickCube-v1]"
            )
        return next(iter(widths.values()))

    def instruction_of(self, task_id: int) -> str:
        return TASKS[self.task_names[task_id]].instruction


def seed_of(task: str, init_state_id: int, seed: int) -> int:
    return derive_seed(seed, "maniskill", task, init_state_id) % 2**31


class Scene:
    """A simulation of a task with ``num_envs`` envs (1 with "physx_cpu", any number with "physx_cuda")."""

    def __init__(
        self, config: ManiSkillOptions, task: str, num_envs: int, sim_backend: str, render_device: str
    ) -> None:
        import gymnasium
        import mani_skill.envs  # registers the tasks
        from mani_skill.utils.registration import REGISTERED_ENVS

        mani_skill.logger.setLevel(logging.ERROR)  # it warns about its own tasks for each scene
        if sim_backend == "physx_cpu" and not gc.get_freeze_count():
            # ManiSkill collects garbage for each scene, which takes 8/9 of the reset time unless imported objects are frozen.
            gc.collect()
            gc.freeze()

        self.config, self.task = config, task
        rewards = REGISTERED_ENVS[task].cls.SUPPORTED_REWARD_MODES
        robot = {"robot_uids": "panda_wristcam"} if "hand_camera" in config.cameras else {}
        self._env = gymnasium.make(
            task, num_envs=num_envs, obs_mode="state", control_mode=config.control_mode,
            reward_mode="normalized_dense" if "normalized_dense" in rewards else "sparse",
            sensor_configs={"width": config.image_size, "height": config.image_size},
            sim_backend=sim_backend, render_backend=render_device, **robot,
        ).unwrapped  # fmt: skip
        self._state = np.zeros((num_envs, TASKS[task].state_dim), np.float32)
        self._num_envs, self._on_cpu = num_envs, sim_backend == "physx_cpu"
        if num_envs > 1:
            self._seeds = draw_each_row_by_its_seed(self._env)

    def reset(self, rows: np.ndarray, seeds: Sequence[int]) -> None:
        """Reset the envs ``rows`` (int64 ``[K]``) to the initial states of ``seeds``, in one call to ManiSkill."""
        # PhysX retains contacts across resets, so on the CPU the simulation is rebuilt.
        options: dict[str, Any] = {"reconfigure": True} if self._on_cpu else {}
        seed: list[int] | None = [seeds[0]]
        if self._num_envs > 1:
            import torch

            options["env_idx"] = torch.as_tensor(rows, device=self._env.device)
            self._seeds.update(zip(np.asarray(rows).tolist(), seeds, strict=True))
            seed = None  # otherwise ManiSkill would create two generators per env
        observation, _ = self._env.reset(seed=seed, options=options)
        self._state[rows] = _array(observation)[rows]

    def step(self, rows: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Step only the envs ``rows`` (int64 ``[K]``); return reward float32 ``[K]``, success and failure bool ``[K]``."""
        idle = np.setdiff1d(np.arange(self._num_envs), rows)
        # ManiSkill steps all envs, so the state of idle ones is restored afterwards.
        before = self._env.get_state_dict() if len(idle) else None
        padded = np.zeros((self._num_envs, actions.shape[1]), np.float32)
        padded[rows] = actions
        observation, reward, _, _, info = self._env.step(padded)
        self._state[rows] = _array(observation)[rows]
        if len(idle):
            import torch

            index = torch.as_tensor(idle, device=self._env.device)
            self._env.set_state_dict(_select(before, index), index)
        failure = _array(info["fail"])[rows] if "fail" in info else np.zeros(len(rows), bool)
        return _array(reward)[rows].astype(np.float32), _array(info["success"])[rows], failure

    def images(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return uint8 ``[K, H, W, 3]`` for each camera in the config."""
        if not self.config.cameras:
            return {}
        env = self._env
        for thing in env._hidden_objects:
            thing.show_visual() if self.config.show_goals else thing.hide_visual()
        env.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        images = {}
        for name in self.config.cameras:
            camera = env.scene.sensors[name]
            camera.capture()
            seen = camera.get_obs(rgb=True, depth=False, position=False, segmentation=False, normal=False, albedo=False)
            image = _array(seen["rgb"])[rows]
            images[name] = checked_image(image, f"ManiSkill's camera '{name}'", "env.cameras=[]")
        return images

    def state(self, rows: np.ndarray) -> np.ndarray | None:
        """Return float32 ``[K, S]`` under ``config.state``, or None."""
        if self.config.state == "none":
            return None
        if self.config.state == "full":
            return self._state[rows]
        agent = self._env.agent
        parts = (agent.robot.get_qpos(), agent.robot.get_qvel(), agent.tcp_pose.raw_pose)
        return np.concatenate([_array(part)[rows] for part in parts], axis=1).astype(np.float32)

    def frames(self, rows: Sequence[int], size: int) -> np.ndarray:
        """Return uint8 ``[K, size, size, 3]`` from ManiSkill's camera for human viewers, with all goals visible."""
        images = _array(self._env.render_rgb_array())[list(rows)]
        images = checked_image(images, "ManiSkill", "evaluation.num_videos_per_task=0")
        return np.stack([resized(image, size) for image in images])

    def poses(self, row: int) -> dict[str, list[float]]:
        """Return position and quaternion (w, x, y, z) of the hand, the movable objects and the goals."""
        things = {name: actor.pose for name, actor in self._env.scene.actors.items() if name not in FIXED_ACTORS}
        things["hand"] = self._env.agent.tcp_pose
        return {name: _array(pose.raw_pose)[row].astype(float).tolist() for name, pose in things.items()}

    def close(self) -> None:
        self._env.close()


class EqualGenerators(Sequence):
    """A generator for each of ``count`` envs, all with the same seed. Created on demand, because an env uses only one or two."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._made: list[np.random.RandomState] = []
        self._of_row: dict[int, np.random.RandomState] = {}

    def seed(self, seed: int) -> None:
        """Restart all generators with a new seed."""
        self._seed = seed
        self._of_row.clear()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: Any) -> np.random.RandomState:
        row = range(self.count)[row]  # like a list, including negative indices
        if row not in self._of_row:
            if len(self._made) == len(self._of_row):
                self._made.append(np.random.RandomState(0))
            generator = self._of_row[row] = self._made[len(self._of_row)]
            generator.seed(self._seed)  # equivalent to a new generator, but ten times faster
        return self._of_row[row]


def draw_each_row_by_its_seed(env: Any) -> dict[int, int]:
    """Make the initial state of each env depend only on its own seed. Return a map from env to seed, to be filled before each reset.

    ManiSkill's tasks draw for all envs together, from torch's generator with the first env's seed or from the envs' generators.
    Here each env is initialised separately, with all generators set to its seed. The expensive parts of a reset (moving states to
    and from the GPU, observing all envs) still happen only once.
    """
    import torch
    from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG

    initialize, seeds, generators = env._initialize_episode, {}, EqualGenerators(env.num_envs)

    def initialize_each(env_idx: torch.Tensor, options: dict) -> None:
        mask = env.scene._reset_mask
        gpus = [env.device] if env.device.type == "cuda" else []
        env._episode_seed, env._batched_episode_rng = np.zeros(env.num_envs, np.int64), BatchedRNG.from_rngs(generators)
        with torch.random.fork_rng(gpus):  # the policy also draws from these generators
            for k, row in enumerate(env_idx.tolist()):
                generators.seed(seeds[row])
                env._episode_seed[:] = seeds[row]
                env._episode_rng = generators[0]
                torch.manual_seed(seeds[row])
                env.scene._reset_mask = torch.zeros_like(mask)
                env.scene._reset_mask[row] = True  # a task writes only to the envs in this mask
                initialize(env_idx[k : k + 1], options)
        env.scene._reset_mask = mask

    env._initialize_episode = initialize_each
    return seeds


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _select(tree: Any, index: Any) -> Any:
    return {name: _select(value, index) for name, value in tree.items()} if isinstance(tree, dict) else tree[index]
