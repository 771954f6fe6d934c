"""ManiSkill 3 on the CPU: one simulation per env, in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rlinf.envs.config import ProcessEnvConfig
from rlinf.envs.graphics.backend import VULKAN_DEVICES, choose_vulkan
from rlinf.envs.maniskill.scene import TASKS, ManiSkillOptions, ManiSkillSuite, Scene, seed_of
from rlinf.envs.process.env import ProcessVectorEnv
from rlinf.envs.process.simulator import Simulator, SingleStep, View
from rlinf.options import option

if TYPE_CHECKING:
    from rlinf.types import EpisodeSpec

FIRST_ROW = np.array([0])


@dataclass
class ManiSkillConfig(ManiSkillOptions, ProcessEnvConfig):
    """ManiSkill 3, simulated on the CPU."""

    name: str = option("maniskill", "Name of the registered environment.")
    render_device: str = option("cpu", "Image renderer: cpu (Mesa's lavapipe) or gpu (NVIDIA).", choices=("cpu", "gpu"))


class ManiSkillVectorEnv(ManiSkillSuite, ProcessVectorEnv):
    """ManiSkill's language-conditioned tabletop tasks. Raises MissingDependencyError without ManiSkill or a working Vulkan."""

    config_class = ManiSkillConfig
    simulator_class: ClassVar[str] = "rlinf.envs.maniskill.env:ManiSkillSimulator"
    config: ManiSkillConfig

    def __init__(self, config: ManiSkillConfig, num_envs: int, auto_reset: bool) -> None:
        super().__init__(config, num_envs, auto_reset)
        choose_vulkan(config.render_device)


class ManiSkillSimulator(Simulator):
    """One ManiSkill env. The scene is rebuilt for each episode (0.03 s) and replaced when the task changes."""

    config: ManiSkillConfig

    def __init__(self, config: ManiSkillConfig, task_names: Sequence[str]) -> None:
        super().__init__(config, task_names)
        self._scene: Scene | None = None

    def reset(self, spec: EpisodeSpec) -> None:
        task = self.task_names[spec.task_id]
        if self._scene is None or self._scene.task != task:
            # SAPIEN frees its renderer (7 s to build in software) once no scene exists, so build the next scene first.
            previous, device = self._scene, VULKAN_DEVICES[self.config.render_device]
            self._scene = Scene(self.config, task, 1, "physx_cpu", device)
            if previous is not None:
                previous.close()
        self._scene.reset(FIRST_ROW, [seed_of(task, spec.init_state_id, spec.seed)])

    def step(self, action: np.ndarray) -> SingleStep:
        reward, success, failure = self._scene.step(FIRST_ROW, action[None])
        return SingleStep(reward[0], success[0], failure[0])

    def observe(self) -> View:
        images = {name: image[0] for name, image in self._scene.images(FIRST_ROW).items()}
        state = self._scene.state(FIRST_ROW)
        return View(images, None if state is None else state[0], TASKS[self._scene.task].instruction)

    def render(self, size: int) -> np.ndarray:
        return self._scene.frames([0], size)[0]

    def poses(self) -> dict[str, list[float]]:
        return self._scene.poses(0)

    def close(self) -> None:
        if self._scene is not None:
            self._scene.close()
        self._scene = None
