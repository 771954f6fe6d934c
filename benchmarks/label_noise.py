"""Env `noisy_tabletop`: the tabletop with planted false successes, for the rewards "planted false positives" in docs/results.md.

    rlinf train experiment=tabletop_ppo_mlp 'plugins=[benchmarks/label_noise.py]' env=noisy_tabletop env.success_label_noise=0.03

Evaluations and audits report the simulator's success next to the planted one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinf.envs import register_env
from rlinf.envs.steps import SimulatorStep
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.envs.tabletop.env import TabletopVectorEnv
from rlinf.options import option
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec


@dataclass
class NoisyTabletopConfig(TabletopConfig):
    """The tabletop with planted false successes."""

    success_label_noise: float = option(0.1, "Fraction of failures with a false success.", minimum=0, maximum=1)


class NoisyTabletopEnv(TabletopVectorEnv):
    """Reports success at a random env step of a fraction of the episodes. `EpisodeResult.true_success` is the simulator's."""

    config_class = NoisyTabletopConfig
    config: NoisyTabletopConfig

    def __init__(self, config: NoisyTabletopConfig, num_envs: int, auto_reset: bool) -> None:
        super().__init__(config, num_envs, auto_reset)
        self._steps_to_go = np.zeros(num_envs, dtype=np.int64)  # until the planted success; 0: none

    def _reset_env(self, index: int, spec: EpisodeSpec) -> None:
        super()._reset_env(index, spec)
        # Seeded by the episode, so that its error does not depend on the env slot, the run or the number of envs.
        task = self.task_names[spec.task_id]
        generator = np.random.default_rng(
            derive_seed(spec.seed, "false positive", spec.suite, task, spec.init_state_id)
        )
        step = int(generator.integers(1, self.horizon_of(self.config, task) + 1))
        self._steps_to_go[index] = step if generator.random() < self.config.success_label_noise else 0

    def _step_envs(self, ids: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        step = super()._step_envs(ids, actions)
        self._stats.true_success[ids] = np.maximum(self._stats.true_success[ids], step.success)
        self._steps_to_go[ids] -= 1
        return step._replace(success=step.success | (self._steps_to_go[ids] == 0))


register_env("noisy_tabletop", NoisyTabletopEnv)
