"""A simulator that runs one environment per object: a dial that has to be turned to zero (docs/adding_an_env.md)."""

from dataclasses import dataclass

import numpy as np

from rlinf.envs import register_env
from rlinf.envs.config import ProcessEnvConfig
from rlinf.envs.process.env import ProcessVectorEnv
from rlinf.envs.process.simulator import Simulator, SingleStep, View
from rlinf.options import option
from rlinf.seeding import derive_seed


@dataclass
class DialConfig(ProcessEnvConfig):
    """A dial."""

    name: str = option("dial", "Registered environment.")
    step_size: float = option(0.2, "Turn of an action of 1, in radians.", minimum=0.01)


class DialVectorEnv(ProcessVectorEnv):
    """Turn the dial to zero; this class lives in the process of the policy."""

    config_class = DialConfig
    suite = "dial"
    simulator_class = "dial_env:DialSimulator"

    def __init__(self, config: DialConfig, num_envs: int, auto_reset: bool) -> None:
        super().__init__(config, num_envs, auto_reset, action_low=-np.ones(1), action_high=np.ones(1))

    @classmethod
    def all_task_names(cls, config: DialConfig) -> list[str]:
        return ["zero"]

    @property
    def state_dim(self) -> int:
        return 1

    def instruction_of(self, task_id: int) -> str:
        return f"turn the dial to {self.task_names[task_id]}"


class DialSimulator(Simulator):
    """One dial; this class lives in a worker process."""

    def reset(self, spec):
        generator = np.random.default_rng(derive_seed(spec.seed, "dial", spec.init_state_id))
        self.angle, self.task = generator.uniform(-1.0, 1.0), self.task_names[spec.task_id]

    def step(self, action):
        self.angle += self.config.step_size * float(action[0])
        return SingleStep(
            dense_reward=-abs(self.angle), success=abs(self.angle) < 0.1, terminated=abs(self.angle) > 2.0
        )

    def observe(self):
        images = {camera: self.render(self.config.image_size) for camera in self.config.cameras}
        return View(images, np.array([self.angle], np.float32), f"turn the dial to {self.task}")

    def expert_action(self):
        return np.clip([-self.angle / self.config.step_size], -1.0, 1.0).astype(np.float32)

    def render(self, size):
        image = np.zeros((size, size, 3), np.uint8)
        image[:, int((self.angle + 3.0) / 6.0 * (size - 1))] = 255
        return image


register_env("dial", DialVectorEnv)
