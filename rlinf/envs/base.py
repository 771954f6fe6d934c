"""The environment contract. One base class owns chunks, auto-reset, truncation, reward modes and episode statistics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rlinf.envs.config import EnvConfig
from rlinf.envs.episodes import drawn_episodes, select_tasks
from rlinf.errors import ConfigError, did_you_mean
from rlinf.seeding import derive_seed
from rlinf.types import ChunkStep, EpisodeResult, EpisodeSpec, Observation


class SimulatorStep(NamedTuple):
    """What a simulator reports of one env step of ``K`` envs.

    Attributes:
        dense_reward: float32 ``[K]``; used by the reward modes "shaped" and "relative".
        success: bool ``[K]``: the goal is reached in the present state.
        terminated: bool ``[K]``: the episode is over for another reason than success (failure); None: never.
    """

    dense_reward: np.ndarray
    success: np.ndarray
    terminated: np.ndarray | None = None


class VectorEnv(gymnasium.vector.VectorEnv):
    """``B`` environments stepped together: a gymnasium vector env whose observations are ``rlinf.types.Observation``.

    A simulator's file sets the class attributes, and implements ``all_task_names``, ``_reset_env``, ``_step_envs``,
    ``_observe`` and, if it can, ``expert_actions`` and ``render_frames``. An episode must be a function of its
    ``EpisodeSpec`` and of the actions alone: not of ``num_envs``, the row, or what ran before in that row.

    Actions are clipped to ``[action_low, action_high]`` before the simulator sees them.

    Attributes:
        config_class: Dataclass of its configuration (``EnvConfig`` or a subclass).
        suite: ``EpisodeSpec.suite`` of its episodes.
        num_envs: ``B``.
        action_dim: ``D``.
        action_low, action_high: float32 ``[D]``.
        task_names: Tasks of the suite that ``config.tasks`` leaves, in the suite's order; ``EpisodeSpec.task_id``
            is an index into this list.
        max_episode_steps: Env steps of the longest possible episode.
        metadata: ``metadata["autoreset_mode"]`` is gymnasium's ``SAME_STEP`` with auto-reset, else ``DISABLED``.

    Args:
        config: Settings.
        num_envs: ``B``.
        auto_reset: True: a finished episode is followed at once (at the end of its chunk) by the next one.
            False: a finished row freezes: last observation, zero reward, ``executed`` false.
        action_low: float32 ``[D]``, given by the subclass.
        action_high: float32 ``[D]``, given by the subclass.

    Raises:
        ConfigError: Unknown task, config of another class, or fewer than one env.
    """

    config_class: ClassVar[type[EnvConfig]] = EnvConfig
    suite: ClassVar[str] = ""

    def __init__(
        self, config: EnvConfig, num_envs: int, auto_reset: bool, action_low: np.ndarray, action_high: np.ndarray
    ) -> None:
        if not isinstance(config, self.config_class):
            raise ConfigError(
                f"{type(self).__name__} got a {type(config).__name__}; it needs a {self.config_class.__name__}. "
                f"Compose the config with `env={self.suite}`."
            )
        if num_envs < 1:
            raise ConfigError(f"num_envs is {num_envs}; at least 1 is needed.")
        self.config, self.num_envs, self.auto_reset = config, int(num_envs), bool(auto_reset)
        self.action_low = np.asarray(action_low, dtype=np.float32)
        self.action_high = np.asarray(action_high, dtype=np.float32)
        self.action_dim = len(self.action_low)
        self.task_names = select_tasks(self.all_task_names(config), config.tasks)
        self._task_horizons = [self.horizon_of(config, task) for task in self.task_names]
        self.max_episode_steps = max(self._task_horizons)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP if auto_reset else AutoresetMode.DISABLED}
        self.single_action_space = gymnasium.spaces.Box(self.action_low, self.action_high, dtype=np.float32)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.single_observation_space = self._make_observation_space()
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._specs: list[EpisodeSpec] | None = None
        self._next_episode: Callable[[int], EpisodeSpec] | None = None
        self._observation: Observation | None = None
        self._num_steps = np.zeros(self.num_envs, dtype=np.int64)
        self._returns = np.zeros(self.num_envs, dtype=np.float64)
        self._success = np.zeros(self.num_envs, dtype=bool)
        self._finished = np.zeros(self.num_envs, dtype=bool)
        self._previous_dense = np.zeros(self.num_envs, dtype=np.float32)
        self._horizons = np.ones(self.num_envs, dtype=np.int64)

    # What a simulator's file implements.

    @classmethod
    @abstractmethod
    def all_task_names(cls, config: EnvConfig) -> list[str]:
        """Return the names of all tasks of the suite, without the ``config.tasks`` filter."""
        raise NotImplementedError(f"{cls.__name__} does not implement all_task_names")

    @abstractmethod
    def _reset_env(self, index: int, spec: EpisodeSpec) -> None:
        """Put env ``index`` into the first state of ``spec``, whatever state it is in."""
        raise NotImplementedError(f"{type(self).__name__} does not implement _reset_env")

    @abstractmethod
    def _step_envs(self, ids: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        """Advance the envs ``ids`` (int64 ``[K]``) by one step with ``actions`` (float32 ``[K, D]``, within bounds)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement _step_envs")

    @abstractmethod
    def _observe(self, ids: np.ndarray) -> Observation:
        """Return what the envs ``ids`` show now, in fresh arrays of ``K`` rows."""
        raise NotImplementedError(f"{type(self).__name__} does not implement _observe")

    @property
    @abstractmethod
    def state_dim(self) -> int:
        """``S``, width of ``Observation.state``, 0 when it is None; a function of ``self.config`` alone."""
        raise NotImplementedError(f"{type(self).__name__} does not implement state_dim")

    def expert_actions(self, aim_offset_m: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
        """Return what a scripted expert would do now.

        Args:
            aim_offset_m: Metres (x, y) by which its aim is off.

        Returns:
            float32 ``[B, D]``, within bounds.

        Raises:
            ConfigError: The environment has no scripted expert.
        """
        raise ConfigError(
            f"Environment '{self.suite}' has no scripted expert (asked with aim_offset_m={aim_offset_m})."
        )

    def render_frames(self, ids: Sequence[int], size: int) -> np.ndarray:
        """Return pictures for videos.

        Args:
            ids: Rows.
            size: Height and width in pixels.

        Returns:
            uint8 ``[K, size, size, 3]``.

        Raises:
            ConfigError: The environment cannot draw.
        """
        raise ConfigError(f"Environment '{self.suite}' cannot draw frames (asked for {len(ids)} of {size} pixels).")

    def offload(self) -> None:
        """Free what the next reset can rebuild (graphics contexts, GPU memory); nothing by default."""

    def instruction_of(self, task_id: int) -> str | None:
        """Return the instruction of a task where all its episodes share one, else None."""
        return None

    @classmethod
    def state_width(cls, config: EnvConfig) -> int | None:
        """Return what ``state_dim`` will be under ``config``, so that it can be checked early; None: not known."""
        return None

    @classmethod
    def horizon_of(cls, config: EnvConfig, task: str) -> int:
        """Return the env steps after which an episode of the task named ``task`` is truncated."""
        return config.max_episode_steps

    @classmethod
    def longest_horizon(cls, config: EnvConfig) -> int:
        """Return the largest ``horizon_of`` of the tasks that ``config.tasks`` leaves."""
        return max(cls.horizon_of(config, task) for task in select_tasks(cls.all_task_names(config), config.tasks))

    def episode_specs(self, split: str) -> Sequence[EpisodeSpec]:
        """Return the episodes of a split, round robin over the tasks; the splits share no (init_state_id, seed).

        Args:
            split: "train" or "eval".

        Raises:
            ConfigError: Unknown split.
        """
        return drawn_episodes(self.suite, len(self.task_names), self.config, split)

    # What the base class owns.

    def action_statistics(self) -> dict[str, Any]:
        """Return normalisation statistics that correspond to the bounds, in OpenVLA's ``norm_stats`` format.

        Returns:
            ``{"action": {"q01", "q99", "mask", "min", "max", "mean", "std"}}``, each a list of ``D`` numbers, and the
            same under ``"proprio"`` for the state, where ``state_bounds`` gives any; mean and std are those of a uniform
            distribution between the bounds.
        """
        statistics = {"action": _uniform_statistics(self.action_low, self.action_high)}
        if self.state_bounds() is not None:
            statistics["proprio"] = _uniform_statistics(*self.state_bounds())
        return statistics

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the usual lowest and highest values of ``Observation.state``, ``[S]`` each; None where unknown."""
        return None

    def current_specs(self) -> list[EpisodeSpec]:
        """Return the episode of each row (of a frozen row: the one that ended)."""
        self._check_reset()
        return list(self._specs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode in every row.

        Args:
            seed: Seed of the draw from the training split, where ``options`` leave something open; None: 0.
            options: ``episodes``: one ``EpisodeSpec`` per row; without it, training episodes are drawn.
                ``next_episode``: called with the row for each next episode under auto-reset, in row order; without
                it, training episodes are drawn.

        Returns:
            Observation of ``B`` rows, and infos (empty).

        Raises:
            ConfigError: Unknown option, wrong number of episodes, or an episode of another suite.
        """
        options = dict(options or {})
        episodes, next_episode = options.pop("episodes", None), options.pop("next_episode", None)
        if options:
            name = next(iter(options))
            raise ConfigError(f"Unknown reset option '{name}'.{did_you_mean(name, ('episodes', 'next_episode'))}")
        draw = self._episode_sampler(0 if seed is None else seed)
        specs = [draw(row) for row in range(self.num_envs)] if episodes is None else list(episodes)
        if len(specs) != self.num_envs:
            raise ConfigError(f"reset got {len(specs)} episodes for {self.num_envs} envs; it needs one per env.")
        self._next_episode = next_episode or draw
        self._specs = specs
        for index, spec in enumerate(specs):
            self._start(index, spec)
        self._observation = self._observe(np.arange(self.num_envs))
        return self._observation, {}

    def chunk_step(self, actions: np.ndarray) -> ChunkStep:
        """Apply up to ``C`` actions per env; the rest of a chunk after an episode's end is not executed.

        Observations are made once, after the chunk. Under auto-reset the next episode begins after the chunk.

        Args:
            actions: ``[B, C, D]`` in env units; clipped to the bounds.

        Returns:
            A ``ChunkStep``; do not write into its arrays.

        Raises:
            ConfigError: Wrong shape, or a number that is not finite.
        """
        actions = self._checked_actions(actions)
        num_envs, chunk_len, _ = actions.shape
        rewards = np.zeros((num_envs, chunk_len), dtype=np.float32)
        executed = np.zeros((num_envs, chunk_len), dtype=bool)
        terminated, truncated = np.zeros(num_envs, dtype=bool), np.zeros(num_envs, dtype=bool)
        active = ~self._finished
        stepped = np.flatnonzero(active)
        for position in range(chunk_len):
            ids = np.flatnonzero(active)
            if not len(ids):
                break
            step = self._step_envs(ids, actions[ids, position])
            rewards[ids, position] = self._rewards_of(ids, step)
            executed[ids, position] = True
            self._num_steps[ids] += 1
            over = step.success & self.config.terminate_on_success
            if step.terminated is not None:
                over = over | step.terminated
            late = ~over & (self._num_steps[ids] >= self._horizons[ids])
            terminated[ids], truncated[ids] = over, late
            active[ids] = ~(over | late)
        self._returns += rewards.sum(1, dtype=np.float64)

        success = self._success.copy()
        final_ids = np.flatnonzero(terminated | truncated)
        self._show(stepped)
        final_observation = self._observation.select(final_ids) if len(final_ids) else None
        episodes = [self._result_of(index) for index in final_ids]
        if self.auto_reset:
            for index in final_ids:
                self._start(index, self._next_episode(int(index)))
            self._show(final_ids)
        else:
            self._finished[final_ids] = True
        return ChunkStep(
            self._observation, rewards, executed, terminated, truncated, success, final_ids, final_observation, episodes
        )

    def step(self, actions: np.ndarray) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Apply one action per env, ``[B, D]``; gymnasium's five results.

        Returns:
            Observation of ``B`` rows; rewards float32 ``[B]``; terminated and truncated bool ``[B]``; infos with
            ``success`` bool ``[B]``, and, where an episode ended, ``final_obs`` (object ``[B]``: observation of one
            row, or None), its mask ``_final_obs``, and ``episodes`` (object ``[B]``: ``EpisodeResult`` or None).

        Raises:
            ConfigError: Wrong shape, or a number that is not finite.
        """
        actions = np.asarray(actions)
        if actions.ndim != 2:
            raise ConfigError(f"Actions have shape {actions.shape}; step needs [{self.num_envs}, {self.action_dim}].")
        result = self.chunk_step(actions[:, None])
        infos: dict[str, Any] = {"success": result.success}
        if len(result.final_env_ids):
            final, episodes = np.full(self.num_envs, None, object), np.full(self.num_envs, None, object)
            for row, index in enumerate(result.final_env_ids):
                final[index], episodes[index] = result.final_observation.select([row]), result.episodes[row]
            infos |= {"final_obs": final, "_final_obs": result.terminated | result.truncated, "episodes": episodes}
        return result.observation, result.rewards[:, 0], result.terminated, result.truncated, infos

    def _show(self, ids: np.ndarray) -> None:
        """Renew the rows ``ids`` of the current observation, leaving arrays that were handed out alone."""
        if not len(ids):
            return
        seen = self._observe(ids)
        if len(ids) == self.num_envs:
            self._observation = seen
            return
        old = self._observation
        images = {name: image.copy() for name, image in old.images.items()}
        for name, image in images.items():
            image[ids] = seen.images[name]
        state = None if old.state is None else old.state.copy()
        if state is not None:
            state[ids] = seen.state
        instruction = list(old.instruction)
        for row, index in enumerate(ids):
            instruction[index] = seen.instruction[row]
        self._observation = Observation(images, state, instruction)

    def _start(self, index: int, spec: EpisodeSpec) -> None:
        if spec.suite != self.suite or not 0 <= spec.task_id < len(self.task_names):
            raise ConfigError(f"{spec} is no episode of '{self.suite}' with the tasks {', '.join(self.task_names)}.")
        self._specs[index] = spec
        self._num_steps[index], self._returns[index], self._previous_dense[index] = 0, 0.0, 0.0
        self._success[index] = self._finished[index] = False
        self._horizons[index] = self._task_horizons[spec.task_id]
        self._reset_env(int(index), spec)

    def _rewards_of(self, ids: np.ndarray, step: SimulatorStep) -> np.ndarray:
        """Combine dense reward and bonus; the bonus is paid once, at the first step of success."""
        rewards = np.zeros(len(ids), dtype=np.float32)
        if self.config.reward_mode == "shaped":
            rewards += step.dense_reward
        elif self.config.reward_mode == "relative":
            rewards += step.dense_reward - self._previous_dense[ids]
        self._previous_dense[ids] = step.dense_reward
        rewards[step.success & ~self._success[ids]] += self.config.success_bonus
        self._success[ids] |= step.success
        return rewards

    def _result_of(self, index: int) -> EpisodeResult:
        spec = self._specs[index]
        return EpisodeResult(
            spec,
            self.task_names[spec.task_id],
            bool(self._success[index]),
            float(self._returns[index]),
            int(self._num_steps[index]),
        )

    def _episode_sampler(self, seed: int) -> Callable[[int], EpisodeSpec]:
        specs = self.episode_specs("train")
        generator = np.random.default_rng(derive_seed(seed, "env", "episodes"))
        return lambda _row: specs[int(generator.integers(len(specs)))]

    def _checked_actions(self, actions: np.ndarray) -> np.ndarray:
        self._check_reset()
        actions = np.asarray(actions, dtype=np.float32)
        if (
            actions.ndim != 3
            or actions.shape[0] != self.num_envs
            or actions.shape[2] != self.action_dim
            or not actions.shape[1]
        ):
            raise ConfigError(
                f"Actions have shape {actions.shape}; needed is [{self.num_envs}, chunk >= 1, {self.action_dim}]."
            )
        if not np.isfinite(actions).all():
            row = int(np.flatnonzero(~np.isfinite(actions).all((1, 2)))[0])
            raise ConfigError(f"The action of env {row} is not finite: {actions[row].tolist()}.")
        return np.clip(actions, self.action_low, self.action_high)

    def _check_reset(self) -> None:
        if self._specs is None:
            raise ConfigError("The environment has no episode yet; call reset() first.")

    def _make_observation_space(self) -> gymnasium.spaces.Dict:
        size = self.config.image_size
        image = gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8)
        spaces: dict[str, gymnasium.Space] = {
            "images": gymnasium.spaces.Dict({name: image for name in self.config.cameras}),
            "instruction": gymnasium.spaces.Text(512),
        }
        if self.state_dim:
            spaces["state"] = gymnasium.spaces.Box(-np.inf, np.inf, (self.state_dim,), np.float32)
        return gymnasium.spaces.Dict(spaces)


def _uniform_statistics(low: np.ndarray, high: np.ndarray) -> dict[str, list]:
    low, high = low.astype(np.float64), high.astype(np.float64)
    return {
        "q01": low.tolist(),
        "q99": high.tolist(),
        "mask": [True] * len(low),
        "min": low.tolist(),
        "max": high.tolist(),
        "mean": ((low + high) / 2).tolist(),
        "std": ((high - low) / 12**0.5).tolist(),
    }
