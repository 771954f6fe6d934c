"""The environment contract. One base class owns chunks, auto-reset, truncation, reward modes and episode statistics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rlinf.envs.config import EnvConfig
from rlinf.envs.episode_stats import EpisodeStats
from rlinf.envs.episodes import drawn_episodes, select_tasks
from rlinf.envs.spaces import (
    check_cameras,
    checked_actions,
    checked_observation,
    observation_space,
    uniform_statistics,
)
from rlinf.envs.steps import SimulatorChunk, SimulatorStep, chunk_of_steps
from rlinf.errors import ConfigError, NonFiniteError, did_you_mean
from rlinf.seeding import derive_seed
from rlinf.types import ChunkStep, EpisodeSpec, Observation


class VectorEnv(gymnasium.vector.VectorEnv):
    """``B`` environments stepped together: a gymnasium vector env whose observations are ``rlinf.types.Observation``.

    A simulator's file sets the class attributes, and implements ``all_task_names``, ``_reset_env``, ``_step_envs``,
    ``_observe`` and, if it can, ``expert_actions`` and ``render_frames``. An episode must be a function of its
    ``EpisodeSpec`` and of the actions alone: not of ``num_envs``, the row, or what ran before in that row.

    Actions are clipped to ``[action_low, action_high]`` before the simulator sees them.

    Attributes:
        config_class: Dataclass of its configuration (``EnvConfig`` or a subclass).
        suite: ``EpisodeSpec.suite`` of its episodes.
        packages: Distributions whose exact versions its results depend on, e.g. ``("mujoco",)``; the manifest records
            them.
        free_settings: Fields of the config that do not change a single episode; the manifest leaves them out.
        num_envs: ``B``.
        action_dim: ``D``.
        action_low, action_high: float32 ``[D]``.
        task_names: Tasks of the suite that ``config.tasks`` leaves, in the suite's order; ``EpisodeSpec.task_id``
            is an index into this list.
        max_episode_steps: Env steps of the longest possible episode.
        num_restarts: Simulators that were lost and replaced so far.
        on_gpu: All rows are one simulation on a GPU; a rollout then plays them in one thread.
        metadata: ``metadata["autoreset_mode"]`` is gymnasium's ``SAME_STEP`` with auto-reset, else ``DISABLED``;
            ``metadata["render_fps"]``, where it is known, is the number of env steps in a second of simulated time.

    Args:
        config: Settings.
        num_envs: ``B``.
        auto_reset: True: a finished episode is followed at once (at the end of its chunk) by the next one.
            False: a finished row freezes: last observation, zero reward, ``executed`` false; rows may be idle.
        action_low: float32 ``[D]``, given by the subclass.
        action_high: float32 ``[D]``, given by the subclass.

    Raises:
        ConfigError: Unknown task, a camera named twice, config of another class, or fewer than one env.
    """

    config_class: ClassVar[type[EnvConfig]] = EnvConfig
    suite: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    num_restarts: int = 0
    on_gpu: ClassVar[bool] = False
    free_settings: ClassVar[tuple[str, ...]] = (
        "tasks", "reward_mode", "success_bonus", "num_train_init_states", "num_eval_init_states",
    )  # fmt: skip

    def __init__(
        self, config: EnvConfig, num_envs: int, auto_reset: bool, action_low: np.ndarray, action_high: np.ndarray
    ) -> None:
        if not isinstance(config, self.config_class):
            raise ConfigError(
                f"{type(self).__name__} got a {type(config).__name__}; required: a {self.config_class.__name__}. "
                f"Set {self.config_class.__name__}(...), or env={self.suite} on the command line"
            )
        if num_envs < 1:
            raise ConfigError(f"num_envs is {num_envs}; at least 1 is needed.")
        check_cameras(config.cameras)
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
        self.single_observation_space = observation_space(config, self.state_dim)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._specs: list[EpisodeSpec | None] | None = None
        self._next_episode: Callable[[int], EpisodeSpec] | None = None
        self._draw: Callable[[int], EpisodeSpec] | None = None
        self._observation: Observation | None = None
        self._stats = EpisodeStats(self.num_envs, config)
        self._finished = np.zeros(self.num_envs, dtype=bool)
        self._lost = np.zeros(self.num_envs, dtype=bool)

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

    def _reset_envs(self, ids: np.ndarray, specs: Sequence[EpisodeSpec]) -> None:
        """Put each of the envs ``ids`` (int64 ``[K]``) into the first state of its episode."""
        for index, spec in zip(ids, specs, strict=True):
            self._reset_env(int(index), spec)

    def _step_chunk(self, ids: np.ndarray, actions: np.ndarray, steps_left: np.ndarray) -> SimulatorChunk:
        """Advance the envs ``ids`` by up to ``C`` steps, each until its episode ends.

        A subclass that overrides this and finds that the simulator of a row is lost puts it back into the first state
        of ``self._specs[row]`` and sets ``self._lost[row]``, here as well as in any other call.

        Args:
            ids: int64 ``[K]``.
            actions: float32 ``[K, C, D]``, within bounds.
            steps_left: int64 ``[K]``: env steps until the episode is truncated, at least 1.
        """
        return chunk_of_steps(self._step_envs, ids, actions, steps_left, self.config.terminate_on_success)

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
            float32 ``[B, D]``, within bounds; of idle and finished rows unused.

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

    @classmethod
    def has_expert(cls) -> bool:
        """Whether ``expert_actions`` are there."""
        return cls.expert_actions is not VectorEnv.expert_actions

    def poses(self, ids: Sequence[int]) -> list[dict[str, list[float]]]:
        """Return where the objects are now, for the simulator's fingerprint (``rlinf.evaluation.fingerprint``).

        Args:
            ids: Rows.

        Returns:
            For each row, object name to position (3 numbers, metres) and orientation (quaternion, 4 numbers); empty
            where the environment does not tell.
        """
        return [{} for _ in ids]

    def rows_lost_with(self, ids: np.ndarray) -> np.ndarray:
        """Return ``ids`` and the rows whose simulators are lost whenever one of theirs is; unless told otherwise, all."""
        return np.arange(self.num_envs) if len(ids) else ids

    def offload(self) -> None:
        """Free what the next reset can rebuild (graphics contexts, GPU memory, processes); nothing by default.

        The episodes may be gone: call ``reset`` before anything else.
        """

    def instruction_of(self, task_id: int) -> str | None:
        """Return the instruction of a task where all its episodes share one, else None."""
        return None

    @classmethod
    def packages_of(cls, config: EnvConfig) -> tuple[str, ...]:
        """Return ``packages``, and those that the results depend on under ``config`` only."""
        return cls.packages

    @classmethod
    def state_width(cls, config: EnvConfig) -> int | None:
        """Return what ``state_dim`` will be under ``config``, so that it can be checked early; None: not known."""
        return None

    @classmethod
    def check_statistics(cls, config: EnvConfig, statistics: Mapping[str, Any]) -> None:
        """Refuse a checkpoint whose action statistics show that it means other actions than this env under ``config``.

        Args:
            config: Settings.
            statistics: ``norm_stats`` of the data that the checkpoint was trained on, see ``action_statistics``.

        Raises:
            ConfigError: It does; with the override that fits.
        """

    @classmethod
    def check_drawing(cls, config: EnvConfig) -> None:
        """Refuse an env whose videos (``render``) would fail, as far as that shows before a simulator starts; accepts all by default.

        Raises:
            ConfigError: It has no pictures.
            MissingDependencyError: It needs a package for them that is not installed.
        """

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
            same under ``"proprio"`` for the state, where ``state_bounds`` gives any; mean and std are those of a
            uniform distribution between the bounds.
        """
        statistics = {"action": uniform_statistics(self.action_low, self.action_high)}
        if self.state_bounds() is not None:
            statistics["proprio"] = uniform_statistics(*self.state_bounds())
        return statistics

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the usual lowest and highest values of ``Observation.state``, ``[S]`` each; None where unknown."""
        return None

    def current_specs(self) -> list[EpisodeSpec | None]:
        """Return the episode of each row (of a frozen row: the one that ended; of an idle row: None)."""
        self._check_reset()
        return list(self._specs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode in every row.

        Args:
            seed: Seed of the draw from the training split, where ``options`` leave something open; None: the draw goes on,
                as in gymnasium, and begins with 0 at the first reset and where ``episodes`` are given.
            options: ``episodes``: one ``EpisodeSpec`` per row; without it, training episodes are drawn. Without
                auto-reset a row may get None: it is idle. Its simulator is neither reset nor stepped, nothing is
                executed, it has no result, and its observation repeats the first row that has an episode.
                ``next_episode``: called with the row for each next episode under auto-reset, in row order; without
                it, training episodes are drawn.

        Returns:
            Observation of ``B`` rows, and infos (empty).

        Raises:
            ConfigError: Unknown option, wrong number of episodes, none at all, or an episode of another suite; an image or a
                state of another number format than promised.
            NonFiniteError: A number of the state is NaN or infinite.
        """
        options = dict(options or {})
        episodes, next_episode = options.pop("episodes", None), options.pop("next_episode", None)
        if options:
            name = next(iter(options))
            raise ConfigError(f"Unknown reset option '{name}'.{did_you_mean(name, ('episodes', 'next_episode'))}")
        draw = self._draw
        if seed is not None or episodes is not None or draw is None:
            draw = self._draw = self._episode_sampler(0 if seed is None else seed)
        specs = [draw(row) for row in range(self.num_envs)] if episodes is None else list(episodes)
        if len(specs) != self.num_envs:
            raise ConfigError(f"reset got {len(specs)} episodes for {self.num_envs} envs; it needs one per env.")
        if all(spec is None for spec in specs):
            raise ConfigError(f"reset got None for each of {self.num_envs} envs; at least one needs an episode.")
        self._next_episode = next_episode or draw
        self._start(np.arange(self.num_envs), specs)
        self._lost[:] = False
        used = self._rows_in_use()
        self._observation = self._seen(used)
        if len(used) < self.num_envs:
            shown = np.zeros(self.num_envs, dtype=np.int64)
            shown[used] = np.arange(len(used))
            self._observation = self._observation.select(shown)
        return self._observation, {}

    def chunk_step(self, actions: np.ndarray) -> ChunkStep:
        """Apply up to ``C`` actions per env; the rest of a chunk after an episode's end is not executed.

        Observations are made once, after the chunk. Under auto-reset the next episode begins after the chunk.

        Args:
            actions: ``[B, C, D]`` in env units; clipped to the bounds.

        Returns:
            A ``ChunkStep``; do not write into its arrays.

        Raises:
            ConfigError: Wrong shape, or a number that is not finite; an image or a state of another number format than promised.
            NonFiniteError: A reward or a number of the state is NaN or infinite.
        """
        actions = self._checked_actions(actions)
        num_envs, chunk_len, _ = actions.shape
        rewards = np.zeros((num_envs, chunk_len), dtype=np.float32)
        executed = np.zeros((num_envs, chunk_len), dtype=bool)
        terminated, truncated = np.zeros(num_envs, dtype=bool), np.zeros(num_envs, dtype=bool)
        running = ~self._finished
        ids = np.flatnonzero(running & ~self._lost)
        if len(ids):
            chunk = self._step_chunk(ids, actions[ids], (self._stats.horizons - self._stats.num_steps)[ids])
            executed[ids] = chunk.executed
            rewards[ids], terminated[ids], truncated[ids] = self._stats.add(ids, chunk)
            if not np.isfinite(rewards).all():
                row, position = np.argwhere(~np.isfinite(rewards))[0]
                raise self._not_finite(
                    int(row), f"the reward of action {position} of its chunk (from 0) is {rewards[row, position]}"
                )

        self._show(np.flatnonzero(running))
        final_ids = np.flatnonzero(terminated | truncated)
        success = self._stats.success.copy()
        last = self._observation.select(final_ids) if len(final_ids) else None
        ended = [(int(row), self._specs[row]) for row in final_ids]
        episodes = [self._stats.result_of(row, spec, self.task_names[spec.task_id]) for row, spec in ended]
        if self.auto_reset:
            self._start(final_ids, [self._next_episode(row) for row, _ in ended])
        else:
            self._finished[final_ids] = True
        lost_ids = np.flatnonzero(self._lost & running & ~(terminated | truncated))
        rewards[lost_ids], executed[lost_ids], success[lost_ids] = 0.0, False, False
        self._begin(lost_ids)
        self._lost[:] = False
        self._show(np.union1d(final_ids, lost_ids) if self.auto_reset else lost_ids)
        return ChunkStep(
            self._observation, rewards, executed, terminated, truncated, success, final_ids, last, episodes, lost_ids
        )

    def step(self, actions: np.ndarray) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Apply one action per env, ``[B, D]``; gymnasium's five results.

        Returns:
            Observation of ``B`` rows; rewards float32 ``[B]``; terminated and truncated bool ``[B]``; infos with
            ``success`` bool ``[B]``, and, where an episode ended, ``final_obs`` (object ``[B]``: observation of one
            row, or None), its mask ``_final_obs``, and ``episodes`` (object ``[B]``: ``EpisodeResult`` or None).
            ``lost_env_ids`` as in ``ChunkStep``, where there are any.

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
        if len(result.lost_env_ids):
            infos["lost_env_ids"] = result.lost_env_ids
        return result.observation, result.rewards[:, 0], result.terminated, result.truncated, infos

    def _show(self, ids: np.ndarray) -> None:
        """Renew the rows ``ids`` of the current observation, leaving arrays that were handed out alone."""
        if not len(ids):
            return
        seen = self._seen(ids)
        self._observation = seen if len(ids) == self.num_envs else self._observation.replaced(ids, seen)

    def _seen(self, ids: np.ndarray) -> Observation:
        """Return what the rows ``ids`` show, checked."""
        seen = checked_observation(self._observe(ids), len(ids), self.state_dim)
        if seen.state is not None and not np.isfinite(seen.state).all():
            row, place = np.argwhere(~np.isfinite(seen.state))[0]
            number = seen.state[row, place]
            raise self._not_finite(int(ids[row]), f"number {place} of the state (from 0) is {number}")
        return seen

    def _not_finite(self, row: int, what: str) -> NonFiniteError:
        spec = self._specs[row]
        return NonFiniteError(
            f"env.name={self.config.name} gives numbers that are not finite: env {row}, task '{self.task_names[spec.task_id]}', "
            f"{spec}, env step {self._stats.num_steps[row]}: {what}. Nothing can be learnt from it; mend the environment, or "
            "leave the task out with env.tasks=[...]"
        )

    def _start(self, ids: np.ndarray, specs: Sequence[EpisodeSpec | None]) -> None:
        """Begin the episode ``specs[k]`` in the row ``ids[k]``, which is idle where that is None."""
        for index, spec in zip(ids, specs, strict=True):
            if spec is None and not self.auto_reset:
                continue
            if spec is None:
                raise ConfigError(f"Row {index} got None for an episode; rows stay idle only where auto_reset=False.")
            if spec.suite != self.suite or not 0 <= spec.task_id < len(self.task_names):
                raise ConfigError(
                    f"{spec} is not an episode of '{self.suite}' with the tasks {', '.join(self.task_names)}."
                )
        if len(ids) == self.num_envs:
            self._specs = list(specs)
        for index, spec in zip(ids, specs, strict=True):
            self._specs[index] = spec
        self._begin(ids)
        used = [k for k, spec in enumerate(specs) if spec is not None]
        self._reset_envs(ids[used], [specs[k] for k in used])

    def _begin(self, ids: np.ndarray) -> None:
        """Forget what the rows ``ids`` did; their episodes are ``self._specs``."""
        specs = [self._specs[index] for index in ids]
        self._finished[ids] = [spec is None for spec in specs]
        self._stats.begin(ids, [0 if spec is None else self._task_horizons[spec.task_id] for spec in specs])

    def _rows_in_use(self) -> np.ndarray:
        """Return the rows that are not idle, int64 ``[K]``."""
        return np.array([index for index, spec in enumerate(self._specs) if spec is not None], dtype=np.int64)

    def _episode_sampler(self, seed: int) -> Callable[[int], EpisodeSpec]:
        specs = self.episode_specs("train")
        generator = np.random.default_rng(derive_seed(seed, "env", "episodes"))
        return lambda _row: specs[int(generator.integers(len(specs)))]

    def _checked_actions(self, actions: np.ndarray) -> np.ndarray:
        self._check_reset()
        return checked_actions(actions, self.num_envs, self.action_low, self.action_high)

    def _check_reset(self) -> None:
        if self._specs is None:
            raise ConfigError("The environment has no episode yet; call reset() first.")
