"""PushT: a disc pushes a T onto its outline (Florence et al. 2021, arXiv:2109.00137; as in Chi et al. 2023, arXiv:2303.04137).

The simulator is the package gym-pusht; observations, rewards and successes are bit-identical to it.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlinf.envs.config import ProcessEnvConfig
from rlinf.envs.process.env import ProcessVectorEnv
from rlinf.envs.process.simulator import Simulator, SingleStep, View
from rlinf.errors import MissingDependencyError
from rlinf.options import option
from rlinf.seeding import derive_seed

if TYPE_CHECKING:
    from rlinf.types import EpisodeSpec

INSTRUCTION = "Push the T-shaped block onto the T-shaped target."
BOARD = 512
"""Width of the square board, in the package's pixels."""
DISTANCE_UNIT = 128
"""Distance in pixels that reduces the reward by 1 under ``env.dense=keypoints``."""
CONTROL_FREQ_HZ = 10
STATE_HIGH = {"full": (BOARD,) * 4 + (2 * np.pi,), "keypoints": (BOARD,) * 18, "proprio": (BOARD, BOARD), "none": ()}
"""Usual upper bounds for each ``env.state``; the lower bounds are 0."""


@dataclass
class PushTConfig(ProcessEnvConfig):
    """PushT, from the package gym-pusht."""

    usual_cameras: ClassVar[tuple[str, ...]] = ("top",)

    name: str = option("pusht", "Name of the registered environment.")
    max_episode_steps: int = option(300, "Env steps (0.1 s) after which an episode is truncated.", minimum=1)
    image_size: int = option(96, "Height and width of camera images in pixels.", minimum=16)
    cameras: list[str] | None = option(None, "Cameras to render: top; null: as many as the model uses.")
    reward_mode: str = option(
        "relative",
        "sparse: success bonus; shaped: plus dense reward (0 to 1); relative: plus its change.",
        choices=("sparse", "shaped", "relative"),
    )
    state: str = option(
        "keypoints",
        "keypoints: the T's corners and the disc; full: disc, T, angle; proprio: disc; none.",
        choices=tuple(STATE_HIGH),
    )
    dense: str = option(
        "coverage",
        "coverage: covered fraction / 0.95; keypoints: also minus the corners' distance.",
        choices=("coverage", "keypoints"),
    )
    action_repeat: int = option(1, "Simulator steps per env step, repeating the action until success.", minimum=1)
    action: str = option(
        "target",
        "The disc's target. target: on the board (0 to 512); step: relative, in [-1, 1].",
        choices=("target", "step"),
    )
    step_size: float = option(64.0, "Pixels per unit action with env.action=step.", minimum=1)


class PushTVectorEnv(ProcessVectorEnv):
    """Push the T onto the green outline. An action is the position towards which the disc is pulled for 0.1 s.

    The dense reward is the outline's covered fraction / 0.95, at most 1; success is above 0.95. Raises MissingDependencyError.
    """

    config_class = PushTConfig
    suite: ClassVar[str] = "pusht"
    camera_names: ClassVar[tuple[str, ...]] = ("top",)
    simulator_class: ClassVar[str] = "rlinf.envs.pusht.env:PushTSimulator"
    packages: ClassVar[tuple[str, ...]] = ("gym-pusht", "pymunk", "shapely")
    config: PushTConfig

    def __init__(self, config: PushTConfig, num_envs: int, auto_reset: bool) -> None:
        if importlib.util.find_spec("gym_pusht") is None:
            raise MissingDependencyError(
                "The package 'gym-pusht' is missing, and env.name=pusht needs it. Install it with "
                "`bash scripts/setup.sh --arms`, or set a different env=..."
            )
        bounds = (np.zeros(2), np.full(2, BOARD)) if config.action == "target" else (-np.ones(2), np.ones(2))
        super().__init__(config, num_envs, auto_reset, *bounds)
        self.metadata["render_fps"] = CONTROL_FREQ_HZ / config.action_repeat

    @classmethod
    def all_task_names(cls, config: PushTConfig) -> list[str]:
        return ["push_t"]

    @classmethod
    def state_width(cls, config: PushTConfig) -> int:
        return len(STATE_HIGH[config.state])

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        high = np.array(STATE_HIGH[self.config.state], dtype=np.float64)
        return (np.zeros_like(high), high) if len(high) else None

    def instruction_of(self, task_id: int) -> str:
        return INSTRUCTION


class PushTSimulator(Simulator):
    """One board."""

    config: PushTConfig

    def __init__(self, config: PushTConfig, task_names: Sequence[str]) -> None:
        super().__init__(config, task_names)
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        from gym_pusht.envs.pusht import PushTEnv

        self._env: Any = PushTEnv(obs_type="state", render_mode="rgb_array")

    def reset(self, spec: EpisodeSpec) -> None:
        self._env.reset(seed=derive_seed(spec.seed, "pusht", spec.init_state_id) % 2**31)

    def step(self, action: np.ndarray) -> SingleStep:
        for _ in range(self.config.action_repeat):
            _, reward, _, _, info = self._env.step(self._target(action))
            if info["is_success"]:
                break
        distance = self._distance() if self.config.dense == "keypoints" else 0.0
        return SingleStep(float(reward) - distance / DISTANCE_UNIT, info["is_success"])

    def observe(self) -> View:
        images = {camera: self.render(self.config.image_size) for camera in self.config.cameras}
        return View(images, self._state(), INSTRUCTION)

    def render(self, size: int) -> np.ndarray:
        """Return the board as the package renders it for observations, without the marker of the last action."""
        return np.ascontiguousarray(self._env._get_img(self._env._draw(), size, size))

    def poses(self) -> dict[str, list[float]]:
        bodies = {"disc": self._env.agent, "T": self._env.block}
        return {
            name: [*body.position, 0.0, math.cos(body.angle / 2), 0.0, 0.0, math.sin(body.angle / 2)]
            for name, body in bodies.items()
        }

    def _distance(self) -> float:
        """Return the mean distance between the T's corners and their goal positions, in pixels."""
        goal = self._env.get_goal_pose_body(self._env.goal_pose)
        wanted = [goal.local_to_world(corner) for shape in self._env._block_shapes for corner in shape.get_vertices()]
        return float(np.linalg.norm(self._env.get_keypoints(self._env._block_shapes) - np.array(wanted), axis=1).mean())

    def _target(self, action: np.ndarray) -> np.ndarray:
        if self.config.action == "target":
            return action.astype(np.float64)
        return np.clip(np.array(self._env.agent.position) + self.config.step_size * action, 0.0, BOARD)

    def _state(self) -> np.ndarray | None:
        env = self._env
        if self.config.state == "none":
            return None
        if self.config.state == "full":
            return env.get_obs().astype(np.float32)
        disc = np.array(env.agent.position)
        if self.config.state == "keypoints":
            return np.concatenate([env.get_keypoints(env._block_shapes).ravel(), disc]).astype(np.float32)
        return disc.astype(np.float32)
