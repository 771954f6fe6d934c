"""The env type `rlinf` of lerobot: any vectorised environment of rlinf."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs import EnvConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

if TYPE_CHECKING:  # lerobot imports this module in each of its commands
    from rlinf.envs.base import VectorEnv
    from rlinf.types import Observation

FRAME_SIZE = 224
"""Width and height of a video frame in pixels."""


@EnvConfig.register_subclass("rlinf")
@dataclass
class RLinfEnv(EnvConfig):
    """An environment of rlinf. Its shapes are known when it is made, so ``features`` are empty before.

    Attributes:
        task: Name of the env, as in ``env=...`` of rlinf's commands; unused with ``checkpoint``.
        checkpoint: A run, checkpoint or export: its env, with its settings.
        overrides: Settings as on rlinf's command line: ``["env.tasks=[reach]"]``.
        split: Which episodes a seed numbers: ``eval`` (held out) or ``train``.
    """

    task: str | None = "tabletop"
    checkpoint: str | None = None
    overrides: list[str] = field(default_factory=list)
    split: str = "eval"

    @property
    def gym_kwargs(self) -> dict:
        """Return nothing: the env is not in gymnasium's registry."""
        return {}

    def create_envs(
        self, n_envs: int, use_async_envs: bool = False
    ) -> dict[str, dict[int, gymnasium.vector.VectorEnv]]:
        """Build ``n_envs`` env slots; simulators start their own processes, so ``use_async_envs`` has no effect."""
        from rlinf.api import run_config
        from rlinf.checkpoints.folders import resolve_checkpoint
        from rlinf.commands.open_checkpoint import read_config
        from rlinf.envs import make_env

        if self.checkpoint is None:
            settings = run_config(self.task, self.overrides).env
        else:
            settings = read_config(resolve_checkpoint(self.checkpoint), self.overrides).env
        env = make_env(settings, n_envs, auto_reset=False)
        image = PolicyFeature(FeatureType.VISUAL, (settings.image_size, settings.image_size, 3))
        self.features = {f"{OBS_IMAGES}.{name}": image for name in settings.cameras}
        self.features_map = {name: name for name in (*self.features, ACTION)} | {"agent_pos": OBS_STATE}
        self.features[ACTION] = PolicyFeature(FeatureType.ACTION, (env.action_dim,))
        if env.state_dim:
            self.features["agent_pos"] = PolicyFeature(FeatureType.STATE, (env.state_dim,))
        self.fps = round(env.metadata.get("render_fps", self.fps))
        return {self.type: {0: NumberedEpisodes(env, self.split, self.fps)}}


class NumberedEpisodes(gymnasium.vector.VectorEnv):
    """Rows of an environment of rlinf with lerobot's names of observations; a seed is the number of an episode.

    A row whose episode has ended shows its last observation, with reward 0, until ``reset``.
    """

    def __init__(self, env: "VectorEnv", split: str, fps: int) -> None:
        self._env, self._episodes = env, env.episode_specs(split)
        self.num_envs = env.num_envs
        self.single_action_space, self.action_space = env.single_action_space, env.action_space
        self.metadata = {**env.metadata, "render_fps": fps}
        self._sentences: list[str] = []

    def reset(
        self, *, seed: Sequence[int] | int | None = None, options: dict | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the episodes with the indices ``seed`` in the list of the split; an integer is the index of the first env slot."""
        seeds = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed
        if seeds is None or min(seeds) < 0 or max(seeds) >= len(self._episodes):
            found = "no seed" if seeds is None else f"the seeds {min(seeds)} to {max(seeds)}"
            raise ValueError(
                f"The env got {found}; expected numbers of its {len(self._episodes)} episodes, from 0. Type --seed=0 and an "
                "--eval.batch_size that divides --eval.n_episodes, or raise env.num_eval_init_states in --env.overrides"
            )
        observation, _ = self._env.reset(options={"episodes": [self._episodes[number] for number in seeds]})
        self._over = np.zeros(self.num_envs, dtype=bool)
        return self._theirs(observation), {}

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Apply one action per env slot, ``[B, D]``; infos hold ``is_success``, which is only true at or after the end."""
        observation, rewards, terminated, truncated, infos = self._env.step(actions)
        if "lost_env_ids" in infos:
            raise RuntimeError(f"The simulators of the rows {infos['lost_env_ids']} were lost. Start the command again")
        self._over |= terminated | truncated
        return self._theirs(observation), rewards, terminated, truncated, {"is_success": infos["success"] & self._over}

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple:
        """Return an attribute or image of each env slot for lerobot."""
        if name == "render":
            return tuple(self._env.render_frames(np.arange(self.num_envs), FRAME_SIZE))
        if name == "task_description":
            return tuple(self._sentences)
        if name == "task":
            return tuple(self._env.task_names[spec.task_id] for spec in self._env.current_specs())
        if name == "_max_episode_steps":
            return (self._env.max_episode_steps,) * self.num_envs
        raise AttributeError(name)

    get_attr = call

    def close_extras(self, **kwargs: Any) -> None:
        """End the simulators."""
        self._env.close()

    def _theirs(self, observation: "Observation") -> dict[str, Any]:
        self._sentences = observation.instruction
        named: dict[str, Any] = {"pixels": observation.images} if observation.images else {}
        return named if observation.state is None else {**named, "agent_pos": observation.state}
