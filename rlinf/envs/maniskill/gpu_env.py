"""ManiSkill 3 on an NVIDIA GPU, with all envs in one simulation."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlinf.envs.graphics.backend import choose_vulkan
from rlinf.envs.maniskill.scene import ManiSkillOptions, ManiSkillSuite, Scene, seed_of
from rlinf.envs.steps import SimulatorStep
from rlinf.errors import ConfigError
from rlinf.options import option
from rlinf.types import EpisodeSpec, Observation


@dataclass
class ManiSkillGpuConfig(ManiSkillOptions):
    """ManiSkill 3, simulated and rendered on an NVIDIA GPU."""

    name: str = option("maniskill_gpu", "Name of the registered environment.")


class ManiSkillGpuVectorEnv(ManiSkillSuite):
    """One ManiSkill task, with ``B`` envs in one simulation on the GPU.

    Envs are reset together, each with its own seed, so that an episode's initial state depends only on its spec. PhysX on the GPU
    is not bit-reproducible, so equal actions lead to nearly but not exactly equal trajectories. If an env's episode ends inside a
    chunk, its state is restored after each step of the running envs. Raises ConfigError for more than one task, and
    MissingDependencyError without ManiSkill, a GPU or its Vulkan driver.
    """

    config_class = ManiSkillGpuConfig
    devices: ClassVar[tuple[str, str]] = ("physx_cuda", "gpu")
    """Simulation backend and render device."""
    on_gpu: ClassVar[bool] = True
    config: ManiSkillGpuConfig

    def __init__(self, config: ManiSkillGpuConfig, num_envs: int, auto_reset: bool) -> None:
        super().__init__(config, num_envs, auto_reset)
        if len(self.task_names) != 1:
            raise ConfigError(
                f"env.name={config.name} simulates only one task, but env.tasks selects {len(self.task_names)}. "
                "Set env.tasks=[PickCube-v1], or env=maniskill for several tasks on the CPU."
            )
        self._render_device = choose_vulkan(self.devices[1])
        self._scene: Scene | None = None

    def _reset_envs(self, ids: np.ndarray, specs: Sequence[EpisodeSpec]) -> None:
        if not len(ids):
            return
        task = self.task_names[0]
        if self._scene is None:
            self._scene = Scene(self.config, task, self.num_envs, self.devices[0], self._render_device)
        self._scene.reset(ids, [seed_of(task, spec.init_state_id, spec.seed) for spec in specs])

    def _step_envs(self, ids: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        return SimulatorStep(*self._scene.step(ids, actions))

    def _observe(self, ids: np.ndarray) -> Observation:
        return Observation(self._scene.images(ids), self._scene.state(ids), [self.instruction_of(0)] * len(ids))

    def render_frames(self, ids: Sequence[int], size: int) -> np.ndarray:
        return self._scene.frames(ids, size)

    def poses(self, ids: Sequence[int]) -> list[dict[str, list[float]]]:
        return [self._scene.poses(int(row)) for row in ids]

    def offload(self) -> None:
        self.close_extras()
        self._specs = None

    def close_extras(self, **kwargs: object) -> None:
        if self._scene is not None:
            import torch

            self._scene.close()
            self._scene = None
            # Reference cycles may contain the scene and would retain its GPU memory until a later garbage collection.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
