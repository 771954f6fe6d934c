"""Compares our vector env with gymnasium's synchronous and asynchronous vector envs on the same scene.

Each variant steps the tabletop task "reach" with random actions, resets envs in the step in which their episodes end, and
renders a 64 px image of every env at every step. The peers use single envs that call the simulator directly, each with
its own ``mujoco.Renderer`` and the same fast settings (no shadows, reflections, sky, antialiasing). Rounds alternate
between variants, and the best round of each is reported. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlinf.envs import make_env
from rlinf.envs.graphics.backend import choose_backend, import_mujoco
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.envs.tabletop.env import REWARD_PER_METRE
from rlinf.envs.tabletop.scene import TabletopSimulator
from rlinf.envs.tabletop.tasks import FAMILIES

IMAGE_SIZE = 64
TASK = FAMILIES["reach"]
FIRST = np.array([0])


class SingleTabletop(gymnasium.Env):
    """One tabletop env as a gymnasium user would write it: its own simulator state and its own renderer."""

    def __init__(self) -> None:
        choose_backend()
        mujoco = import_mujoco()
        self._simulator = TabletopSimulator(1)
        self._simulator.model.vis.quality.offsamples = 0
        self._renderer = mujoco.Renderer(self._simulator.model, IMAGE_SIZE, IMAGE_SIZE)
        self._slow_flags = [getattr(mujoco.mjtRndFlag, f"mjRND_{name}") for name in ("SHADOW", "REFLECTION", "SKYBOX")]
        self._generator = np.random.default_rng(0)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Box(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)

    def _image(self) -> np.ndarray:
        self._renderer.update_scene(self._simulator.states[0], camera="front")
        for flag in self._slow_flags:
            self._renderer.scene.flags[flag] = 0
        return self._renderer.render()

    def _distance(self) -> float:
        pusher, _, blocks = self._simulator.read(FIRST)
        return float(np.linalg.norm(pusher[0] - blocks[0, self._goal]))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        layout = TASK.sample(self._generator, distractors=False)
        self._simulator.place(0, layout.pusher, TASK.height, layout.blocks, layout.zones)
        self._goal, self._num_steps = layout.first, 0
        self._to_go = self._distance()
        return self._image(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._simulator.step(FIRST, action[None])
        before, self._to_go = self._to_go, self._distance()
        self._num_steps += 1
        success = self._to_go < 0.045
        late = not success and self._num_steps >= TASK.horizon
        return self._image(), REWARD_PER_METRE * (before - self._to_go) + success, success, late, {}

    def close(self) -> None:
        self._renderer.close()


def steps_per_second(step: Callable[[np.ndarray], object], actions: np.ndarray) -> float:
    """Time one round; ``actions [T, B, 2]``."""
    begin = time.perf_counter()
    for row in actions:
        step(row)
    return actions.shape[0] * actions.shape[1] / (time.perf_counter() - begin)


def compare(num_envs: int, num_rounds: int, num_steps: int) -> dict[str, float]:
    """Return env steps per second of each variant for one number of envs."""
    makers = [SingleTabletop] * num_envs
    sides = {
        "ours": make_env(
            TabletopConfig(tasks=["reach"], image_size=IMAGE_SIZE, state="none"), num_envs, auto_reset=True
        ),
        "sync": SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP),
        "async": AsyncVectorEnv(
            makers, shared_memory=True, autoreset_mode=AutoresetMode.SAME_STEP, context="forkserver"
        ),
    }
    actions = np.random.default_rng(0).uniform(-1, 1, (num_steps, num_envs, 2)).astype(np.float32)
    best = dict.fromkeys(sides, 0.0)
    for env in sides.values():
        env.reset(seed=0)
        steps_per_second(env.step, actions[:3])
    for _ in range(num_rounds):
        for name, env in sides.items():
            best[name] = max(best[name], steps_per_second(env.step, actions))
    for env in sides.values():
        env.close()
    return best


def main() -> None:
    """Print one line per size, and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32], help="numbers of envs")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=25, help="vector steps per round")
    arguments = parser.parse_args()
    multiprocessing.set_forkserver_preload(["gymnasium.vector", "rlinf.envs.base"])  # slow imports, but no GL
    sizes, worst = {}, None
    for num_envs in arguments.sizes:
        result = compare(num_envs, arguments.rounds, arguments.steps)
        peer = max(result["sync"], result["async"])
        sizes[num_envs] = {name: round(rate, 1) for name, rate in result.items()} | {
            "ratio": round(result["ours"] / peer, 3)
        }
        print(f"{num_envs} envs: " + ", ".join(f"{name} {rate:.0f} steps/s" for name, rate in result.items()))
        if worst is None or result["ours"] / peer < worst[0]:
            worst = (result["ours"] / peer, result["ours"], peer)
    ratio, ours, peer = worst
    report = {
        "name": "vector_env",
        "ours": round(ours, 1),
        "peer": round(peer, 1),
        "ratio": round(ratio, 3),
        "sizes": sizes,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
