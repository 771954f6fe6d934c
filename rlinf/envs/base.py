"""The env interface: a base class that handles chunks, auto-reset, truncation, reward modes and episode statistics."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from PIL import Image

from rlinf.envs.config import EnvConfig, check_listed
from rlinf.envs.episodes import drawn_episodes
from rlinf.envs.steps import EpisodeStats, SimulatorChunk, SimulatorStep, chunk_of_steps
from rlinf.envs.success_override import SuccessOverride, check_success_classifier
from rlinf.errors import ConfigError, NonFiniteError, did_you_mean, reject
from rlinf.options import override_text
from rlinf.seeding import derive_seed
from rlinf.types import ChunkStep, EpisodeSpec, Observation, Statistics

ROUNDING = 1e-3
"""Fraction of the range by which an action may exceed its bounds before it is reported as clipped, to allow for rounding."""


class VectorEnv(gymnasium.vector.VectorEnv, ABC):
    """``B`` parallel environments: a gymnasium vector env whose observations are ``rlinf.types.Observation``.

    A subclass sets the class attributes and implements ``all_task_names``, ``state_dim``, ``_reset_env``, ``_step_envs``,
    ``_observe`` and, optionally, ``expert_actions`` and ``render_frames``. An episode must be a function of its
    ``EpisodeSpec`` and the actions only, not of ``num_envs``, the env slot, or earlier episodes.

    Actions are clipped to ``[action_low, action_high]`` before they reach the simulator.

    Attributes:
        config_class: Dataclass of the env's configuration (``EnvConfig`` or a subclass).
        suite: Value of ``EpisodeSpec.suite`` for the env's episodes.
        camera_names: Valid names for ``config.cameras``, or None if any name is valid.
        packages: Distributions whose exact versions affect results, such as ``("mujoco",)``; recorded in the manifest.
        free_settings: Config fields that do not affect episodes and are therefore omitted from the manifest.
        action_dim: ``D``, the length of ``action_low`` and ``action_high`` (float32), which the subclass passes.
        auto_reset: If True, the next episode starts after the chunk in which one ended. If False, a finished env freezes (last
            observation, zero reward, ``executed`` false), and envs may be idle.
        task_names: The suite's tasks selected by ``config.tasks``, in order; ``EpisodeSpec.task_id`` is an index into them.
        num_restarts: Number of simulators lost and replaced so far.
        on_gpu: Whether all envs run in one GPU simulation, in which case a rollout uses one thread.
        metadata: ``autoreset_mode`` is gymnasium's ``SAME_STEP`` with auto-reset, otherwise ``DISABLED``. ``render_fps``, if known, is
            the number of env steps per second of simulated time.
    """

    config_class: ClassVar[type[EnvConfig]] = EnvConfig
    suite: ClassVar[str] = ""
    camera_names: ClassVar[tuple[str, ...] | None] = None
    packages: ClassVar[tuple[str, ...]] = ()
    num_restarts: int = 0
    on_gpu: ClassVar[bool] = False
    without_expert: ClassVar[str] = "its class does not override expert_actions"
    free_settings: ClassVar[tuple[str, ...]] = (
        "tasks", "reward_mode", "success_bonus", "num_train_init_states", "num_eval_init_states",
    )  # fmt: skip

    def __init__(
        self, config: EnvConfig, num_envs: int, auto_reset: bool, action_low: np.ndarray, action_high: np.ndarray
    ) -> None:
        if not isinstance(config, self.config_class):
            name, wanted = type(self).__name__, self.config_class.__name__
            raise ConfigError(
                f"{name} was called with a {type(config).__name__}; expected a {wanted}. "
                f"Pass {wanted}(...), or set env={self.suite} on the command line"
            )
        if num_envs < 1:
            raise ConfigError(f"num_envs={num_envs}; expected at least 1.")
        for names in (("_reset_env", "_reset_envs"), ("_step_envs", "_step_chunk")):
            if all(getattr(type(self), name) is getattr(VectorEnv, name) for name in names):
                raise NotImplementedError(f"{type(self).__name__} overrides neither {names[0]} nor {names[1]}.")
        self.check_names(config)
        self.config, self.num_envs, self.auto_reset = config, int(num_envs), bool(auto_reset)
        self.action_low = np.asarray(action_low, dtype=np.float32)
        self.action_high = np.asarray(action_high, dtype=np.float32)
        self.action_dim = len(self.action_low)
        self.task_names = self.selected_tasks(config)
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
        self._success_override = None if config.success_classifier is None else SuccessOverride(self)

    # Methods for subclasses to implement.

    @classmethod
    @abstractmethod
    def all_task_names(cls, config: EnvConfig) -> list[str]:
        """Return the names of all tasks of the suite, ignoring ``config.tasks``."""

    @cached_property
    def state_dim(self) -> int:
        """``S``, the width of ``Observation.state``, or 0 if the state is None. Override this or ``state_width``."""
        if (width := self.state_width(self.config)) is None:
            raise NotImplementedError(f"{type(self).__name__} overrides neither state_dim nor state_width.")
        return width

    @abstractmethod
    def _observe(self, ids: np.ndarray) -> Observation:
        """Return the current observations of the envs ``ids``, in new arrays of ``K`` rows."""

    def _reset_env(self, index: int, spec: EpisodeSpec) -> None:
        """Reset env ``index`` to the first state of ``spec``, whatever its current state. Override this or ``_reset_envs``."""
        raise NotImplementedError

    def _step_envs(self, ids: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        """Step the envs ``ids`` (int64 ``[K]``) once with ``actions`` (float32 ``[K, D]``). Override this or ``_step_chunk``."""
        raise NotImplementedError

    def _reset_envs(self, ids: np.ndarray, specs: Sequence[EpisodeSpec]) -> None:
        for index, spec in zip(ids, specs, strict=True):
            self._reset_env(int(index), spec)

    def _step_chunk(self, ids: np.ndarray, actions: np.ndarray, steps_left: np.ndarray) -> SimulatorChunk:
        """Step the envs ``ids`` up to ``C`` times with ``actions [K, C, D]``, each until its episode ends.

        ``steps_left``, int64 ``[K]``, is the number of env steps until truncation, at least 1. If an override of this or any other
        method loses a simulator, it must return the env to the first state of ``self._specs[env]`` and set ``self._lost[env]``.
        """
        return chunk_of_steps(self._step_envs, ids, actions, steps_left, self.config.terminate_on_success)

    def expert_actions(self) -> np.ndarray:
        """Return the scripted expert's actions in the current state, float32 ``[B, D]``, within bounds.

        Entries for idle and finished envs are unused. An override may accept keyword options (``expert_options``), set by keys of
        ``sft.expert``. Raise ConfigError if the env has no expert.
        """
        raise ConfigError(f"Environment '{self.suite}' has no scripted expert.")

    def uninstructed_actions(self) -> np.ndarray:
        """Return the actions of a scripted policy that reads the state but not the instruction, float32 ``[B, D]``, within bounds.

        It is a baseline: how often an episode succeeds by chance. Raise ConfigError if the env has none for a running episode.
        """
        raise ConfigError(f"Environment '{self.suite}' has no scripted policy without the instruction.")

    def render_frames(self, ids: Sequence[int], size: int) -> np.ndarray:
        """Return video frames of the envs ``ids``, uint8 ``[K, size, size, 3]``; raise ConfigError if unsupported."""
        raise ConfigError(f"Environment '{self.suite}' cannot render frames (requested {len(ids)} of {size} pixels).")

    def chunk_paths(self, ids: Sequence[int], chunks: np.ndarray, size: int) -> np.ndarray | None:
        """Predict the hands' paths under ``chunks [K, C, D]`` in the images from ``render_frames``; None if unknown.

        The result, ``[K, C + 1, 2]``, is the hand's position now and after each action, in pixels to the right of and below the
        upper left corner, or NaN behind the camera. The envs' states do not change.
        """
        return None

    @classmethod
    def has_expert(cls, config: EnvConfig) -> bool:
        return cls.expert_actions is not VectorEnv.expert_actions

    @classmethod
    def expert_options(cls) -> list[str]:
        """Return the names of the keyword options of ``expert_actions``."""
        return list(inspect.signature(cls.expert_actions).parameters)[1:]

    @classmethod
    def check_expert(cls, config: EnvConfig, options: Mapping[str, Any], instead: str) -> None:
        """Check that a scripted expert exists and accepts ``options`` from ``sft.expert``; ``instead``: overrides that avoid it."""
        if not cls.has_expert(config):
            raise ConfigError(f"env.name={config.name} has no scripted expert ({cls.without_expert}). Set {instead}")
        for name in options.keys() - cls.expert_options():
            raise ConfigError(
                f"sft.expert.{name}={override_text(options[name])}, but the scripted expert of env.name={config.name} does "
                f"not support this option. Remove it, or set {instead}"
            )

    def poses(self, ids: Sequence[int]) -> list[dict[str, list[float]]]:
        """Map each env's objects to their position (3, metres) and quaternion (4), for the fingerprint; empty if unknown."""
        return [{} for _ in ids]

    def rows_lost_with(self, ids: np.ndarray) -> np.ndarray:
        """Return ``ids`` and all envs that lose their simulator if one of ``ids`` does; all envs by default."""
        return np.arange(self.num_envs) if len(ids) else ids

    def num_finished_calls(self) -> int:
        """Return a counter of simulator calls in worker processes, as a sign of progress; 0 without workers. Thread-safe."""
        return 0

    def offload(self) -> None:
        """Free graphics contexts, GPU memory and processes until the next ``reset``, which must be the next call."""

    @classmethod
    def reports_success(cls, config: EnvConfig) -> bool:
        """Return whether the env reports success; otherwise evaluations show only returns."""
        return True

    @classmethod
    def acts_in_choices(cls, config: EnvConfig) -> bool:
        """Return whether any action dimension is a discrete choice, which the env obtains by rounding."""
        return False

    def instruction_of(self, task_id: int) -> str | None:
        """Return a task's instruction, or None if its episodes have different instructions."""
        return None

    @classmethod
    def packages_of(cls, config: EnvConfig) -> tuple[str, ...]:
        return cls.packages

    @classmethod
    def state_width(cls, config: EnvConfig) -> int | None:
        """Return ``state_dim`` under ``config``, for checks before an env is built, or None if unknown."""
        return None

    @classmethod
    def is_registered(cls, config: EnvConfig) -> bool:
        """Return whether user code has registered the env of ``config`` elsewhere, e.g. with gymnasium."""
        return False

    @classmethod
    def action_width(cls, config: EnvConfig) -> int | None:
        """Return ``action_dim`` under ``config`` before an env is built, or None if unknown."""
        return None

    @classmethod
    def moved(cls, config: EnvConfig, what: str) -> EnvConfig | None:
        """For ``rlinf audit``, return settings that move ``objects`` or ``cameras`` in the same episodes; None if unsupported."""
        return None

    @classmethod
    def check_statistics(cls, config: EnvConfig, statistics: Statistics) -> None:
        """Raise ConfigError if a checkpoint's ``norm_stats`` were computed for actions with a different meaning; accept all by default."""

    @classmethod
    def check_drawing(cls, config: EnvConfig) -> None:
        """Raise an error if videos (``render_frames``) cannot be rendered, before a simulator starts."""

    @classmethod
    def check_names(cls, config: EnvConfig) -> None:
        """Raise ConfigError if a task or camera of ``config`` is unknown or repeated, or no task is left."""
        cls.selected_tasks(config)
        check_listed("camera", config.cameras, cls.camera_names)
        if config.success_classifier is not None:
            check_success_classifier(config)

    @classmethod
    def selected_tasks(cls, config: EnvConfig) -> list[str]:
        """Return the tasks that ``config.tasks`` selects (None: all), in the suite's order. Reject unknown or repeated names."""
        names = cls.all_task_names(config)
        if config.tasks is None:
            return list(names)
        check_listed("task", config.tasks, names)
        if not config.tasks:
            reject("env.tasks is []", "at least one task, or null for all", f"env.tasks=[{names[0]}]")
        return [name for name in names if name in config.tasks]

    @classmethod
    def horizon_of(cls, config: EnvConfig, task: str) -> int:
        """Return the number of env steps after which an episode of ``task`` is truncated."""
        return config.max_episode_steps

    @classmethod
    def twin_of(cls, config: EnvConfig, task: str) -> tuple[str, str] | None:
        """Return the kind of a perturbed task's perturbation, and the task without it; None for other tasks."""
        return None

    @classmethod
    def caveats(cls, config: EnvConfig) -> list[str]:
        """Return what to know about every result on these tasks."""
        return []

    @property
    def stream_names(self) -> list[str]:
        """The task names that seed the policy's random numbers: a perturbed task has the same numbers as its twin."""
        return [(self.twin_of(self.config, task) or ("", task))[1] for task in self.task_names]

    @classmethod
    def longest_horizon(cls, config: EnvConfig) -> int:
        """Return the maximum ``horizon_of`` over the selected tasks."""
        return max(cls.horizon_of(config, task) for task in cls.selected_tasks(config))

    @classmethod
    def num_init_states(cls, config: EnvConfig, split: str) -> int:
        return config.num_eval_init_states if split == "eval" else config.num_train_init_states

    @classmethod
    def observation_bytes(cls, config: EnvConfig) -> int:
        """Return the size of one observation's images and state, in bytes."""
        return len(config.cameras) * config.image_size**2 * 3 + 4 * (cls.state_width(config) or 0)

    def episode_specs(self, split: str) -> Sequence[EpisodeSpec]:
        """Return the episodes of a split ("train" or "eval"), round robin over tasks. Their (init_state_id, seed) pairs are disjoint."""
        return drawn_episodes(self.suite, len(self.task_names), self.config, split)

    # Methods of the base class.

    def action_statistics(self) -> Statistics:
        """Return statistics of uniform actions within their bounds (and state as ``proprio``), in OpenVLA's ``norm_stats`` format."""
        statistics = {"action": uniform_statistics(self.action_low, self.action_high)}
        if self.state_bounds() is not None:
            statistics["proprio"] = uniform_statistics(*self.state_bounds())
        return statistics

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the usual minimum and maximum values of ``Observation.state``, ``[S]`` each, or None if unknown."""
        return None

    def current_specs(self) -> list[EpisodeSpec | None]:
        """Return each env's episode: the one that ended for a frozen env, and None for an idle env."""
        self._check_reset()
        return list(self._specs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode in every env; return the observation of ``B`` envs and an empty info dictionary.

        Raise ConfigError for invalid options or episodes, or an image or state of the wrong dtype or shape; raise NonFiniteError
        for a state with NaN or infinity.

        Args:
            seed: Seed for drawing training episodes. None continues the previous draw, as in gymnasium; the first reset, and each
                reset with ``episodes``, starts a draw with seed 0.
            options: ``episodes``: one ``EpisodeSpec`` per env; by default, training episodes are drawn. Without auto-reset, None
                makes an env idle: its simulator is neither reset nor stepped, it has no result, and its observation repeats
                the observation of the first active env. ``next_episode``: called with the env index for each next episode under
                auto-reset, in order; by default, training episodes are drawn.
        """
        options = dict(options or {})
        episodes, next_episode = options.pop("episodes", None), options.pop("next_episode", None)
        if options:
            name = next(iter(options))
            raise ConfigError(f"Unknown reset option '{name}'.{did_you_mean(name, ('episodes', 'next_episode'))}")
        if seed is not None or episodes is not None or self._draw is None:
            split = self.episode_specs("train")
            # All envs draw from one generator, so the sequence depends only on the seed and the order in which episodes end.
            generator = np.random.default_rng(derive_seed(seed or 0, "env", "episodes"))
            self._draw = lambda _row: split[int(generator.integers(len(split)))]
        specs = [self._draw(row) for row in range(self.num_envs)] if episodes is None else list(episodes)
        if len(specs) != self.num_envs:
            raise ConfigError(f"reset was given {len(specs)} episodes for {self.num_envs} envs; expected one per env.")
        if all(spec is None for spec in specs):
            raise ConfigError(f"reset was given None for all {self.num_envs} envs; expected at least one episode.")
        self._next_episode = next_episode or self._draw
        self._start(np.arange(self.num_envs), specs)
        self._lost[:] = False
        used = self._rows_in_use()
        self._observation = self._observe_checked(used)
        if len(used) < self.num_envs:
            # Callers may concatenate rows of all envs, so idle envs repeat an existing observation.
            shown = np.zeros(self.num_envs, dtype=np.int64)
            shown[used] = np.arange(len(used))
            self._observation = self._observation.select(shown)
        return self._observation, {}

    def chunk_step(self, actions: np.ndarray) -> ChunkStep:
        """Apply up to ``C`` actions per env, ``[B, C, D]`` in env units. Actions after the end of an episode are not executed.

        Observations are read once, after the chunk; with auto-reset, the next episode then starts. Do not write into the
        result's arrays. Raise ConfigError for invalid actions, images or states, and NonFiniteError for a reward or a state with
        NaN or infinity.
        """
        running = ~self._finished
        rewards, executed, terminated, truncated = self._execute(actions, running)
        # A success override has already observed every step. If a worker was lost after its env's episode ended, observing again
        # would return the first state of that episode instead of the last.
        if self._success_override is None:
            self._update_observation(np.flatnonzero(running))
        final_ids = np.flatnonzero(terminated | truncated)
        # Copied before `_start` clears the statistics of envs whose next episode starts.
        success = self._stats.success.copy()
        last = self._observation.select(final_ids) if len(final_ids) else None
        ended = [(int(row), self._specs[row]) for row in final_ids]
        episodes = [self._stats.result_of(row, spec, self.task_names[spec.task_id]) for row, spec in ended]
        if not self.auto_reset:
            self._finished[final_ids] = True
        elif ended:
            self._start(final_ids, [self._next_episode(row) for row, _ in ended])
        # An env whose episode ended in this chunk is not lost: its result is complete, and the next episode resets it anyway.
        lost_ids = np.flatnonzero(self._lost & running & ~(terminated | truncated))
        if len(lost_ids):
            rewards[lost_ids], executed[lost_ids], success[lost_ids] = 0.0, False, False
            self._reset_statistics(lost_ids)  # their simulators are already in the first state of the episode
        # Cleared before the last observation, which may itself lose a simulator and set the flag for the next chunk.
        self._lost[:] = False
        # Without auto-reset, a finished env keeps its last observation.
        restarted_ids = np.sort(np.concatenate([final_ids, lost_ids])) if self.auto_reset else lost_ids
        self._update_observation(restarted_ids)
        return ChunkStep(
            self._observation, rewards, executed, terminated, truncated, success, final_ids, last, episodes, lost_ids
        )

    def _execute(
        self, actions: np.ndarray, running: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step the envs with a running episode; return rewards and executed actions ``[B, C]``, terminated and truncated envs ``[B]``."""
        unclipped, actions = np.asarray(actions, dtype=np.float32), self._checked_actions(actions)
        was_clipped = np.abs(unclipped - actions) > ROUNDING * (self.action_high - self.action_low)
        num_envs, chunk_len, _ = actions.shape
        rewards = np.zeros((num_envs, chunk_len), dtype=np.float32)
        executed = np.zeros((num_envs, chunk_len), dtype=bool)
        terminated, truncated = np.zeros(num_envs, dtype=bool), np.zeros(num_envs, dtype=bool)
        # A simulator that was lost before this chunk (by render_frames, for example) already is in the first state of its episode: its
        # env skips the chunk and restarts after it, because the caller's action was for a different state.
        ids = np.flatnonzero(running & ~self._lost)
        if len(ids):
            # A success override must inspect every step, so it runs the chunk one action at a time.
            step_chunk = self._step_chunk if self._success_override is None else self._success_override.step_chunk
            chunk = step_chunk(ids, actions[ids], (self._stats.horizons - self._stats.num_steps)[ids])
            executed[ids] = chunk.executed
            self._stats.add_actions(ids, unclipped[ids], was_clipped[ids], chunk.executed)
            rewards[ids], terminated[ids], truncated[ids] = self._stats.add(ids, chunk)
            # Checked before the envs' state changes, so that the error refers to the current episode.
            if not np.isfinite(rewards).all():
                row, position = np.argwhere(~np.isfinite(rewards))[0]
                what = f"the reward for action {position} of its chunk (from 0) is {rewards[row, position]}"
                raise self._not_finite(int(row), what)
        return rewards, executed, terminated, truncated

    def step(self, actions: np.ndarray) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Apply one action per env, ``[B, D]``, and return gymnasium's five results. Errors are as in ``chunk_step``.

        Infos contain ``success`` bool ``[B]``. If an episode ended, they also contain ``final_obs`` (object ``[B]``: one env's
        observation or None), its mask ``_final_obs``, and ``episodes`` (object ``[B]``: ``EpisodeResult`` or None). If a simulator
        was lost, they contain ``lost_env_ids`` as in ``ChunkStep``.
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

    def _update_observation(self, ids: np.ndarray) -> None:
        """Update the envs ``ids`` in the current observation without modifying arrays already returned to callers."""
        if len(ids):
            observed = self._observe_checked(ids)
            self._observation = observed if len(ids) == self.num_envs else self._observation.replaced(ids, observed)

    def _observe_checked(self, ids: np.ndarray) -> Observation:
        observed = checked_observation(self._observe(ids), len(ids), self.state_dim)
        if observed.state is not None and not np.isfinite(observed.state).all():
            row, place = np.argwhere(~np.isfinite(observed.state))[0]
            raise self._not_finite(
                int(ids[row]), f"value {place} of the state (from 0) is {observed.state[row, place]}"
            )
        return observed

    def _not_finite(self, row: int, what: str) -> NonFiniteError:
        spec = self._specs[row]
        return NonFiniteError(
            f"env.name={self.config.name} has values that are not finite: env {row}, task '{self.task_names[spec.task_id]}', "
            f"{spec}, env step {self._stats.num_steps[row]}: {what}. Fix the environment, or exclude the task with "
            "env.tasks=[...]"
        )

    def _start(self, ids: np.ndarray, specs: Sequence[EpisodeSpec | None]) -> None:
        """Start the episode ``specs[k]`` in env ``ids[k]``; None leaves the env idle."""
        for index, spec in zip(ids, specs, strict=True):
            if spec is None and self.auto_reset:
                raise ConfigError(f"Env {index} has None as its episode; only auto_reset=False allows idle envs.")
            if spec is not None and (spec.suite != self.suite or not 0 <= spec.task_id < len(self.task_names)):
                raise ConfigError(
                    f"{spec} is not an episode of '{self.suite}' with the tasks {', '.join(self.task_names)}."
                )
        if len(ids) == self.num_envs:
            self._specs = list(specs)
        for index, spec in zip(ids, specs, strict=True):
            self._specs[index] = spec
        self._reset_statistics(ids)
        used = [k for k, spec in enumerate(specs) if spec is not None]
        self._reset_envs(ids[used], [specs[k] for k in used])

    def _reset_statistics(self, ids: np.ndarray) -> None:
        """Reset the statistics of the envs ``ids``; their new episodes are ``self._specs``."""
        specs = [self._specs[index] for index in ids]
        self._finished[ids] = [spec is None for spec in specs]
        self._stats.start(ids, [0 if spec is None else self._task_horizons[spec.task_id] for spec in specs])

    def _rows_in_use(self) -> np.ndarray:
        return np.array([index for index, spec in enumerate(self._specs) if spec is not None], dtype=np.int64)

    def _checked_actions(self, actions: np.ndarray) -> np.ndarray:
        self._check_reset()
        return checked_actions(actions, self.num_envs, self.action_low, self.action_high)

    def _check_reset(self) -> None:
        if self._specs is None:
            raise ConfigError("The environment has no episode yet; call reset() first.")


def options_of_expert(expert: Any) -> dict[str, Any]:
    """Return the keyword options in ``sft.expert`` for ``VectorEnv.expert_actions``, omitting those without effect."""
    options: dict[str, Any] = {"aim_offset_m": tuple(expert.aim_offset_m)} if any(expert.aim_offset_m) else {}
    options |= {"aim_offset_rule": expert.aim_offset_rule} if expert.aim_offset_rule != "constant" else {}
    return options | ({"aim_turn_deg": expert.aim_turn_deg} if expert.aim_turn_deg else {})


def observation_space(config: EnvConfig, state_dim: int) -> gymnasium.spaces.Dict:
    """Return the space of one env's ``rlinf.types.Observation``."""
    image = gymnasium.spaces.Box(0, 255, (config.image_size, config.image_size, 3), np.uint8)
    spaces: dict[str, gymnasium.Space] = {
        "images": gymnasium.spaces.Dict({name: image for name in config.cameras}),
        "instruction": gymnasium.spaces.Text(512),
    }
    if state_dim:
        spaces["state"] = gymnasium.spaces.Box(-np.inf, np.inf, (state_dim,), np.float32)
    return gymnasium.spaces.Dict(spaces)


def checked_actions(actions: np.ndarray, num_envs: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return actions as float32 ``[B, C, D]``, clipped to the bounds ``[D]``; raise ConfigError for non-finite values or a wrong shape."""
    actions = np.asarray(actions, dtype=np.float32)
    if actions.ndim != 3 or actions.shape[0] != num_envs or actions.shape[2] != len(low) or not actions.shape[1]:
        raise ConfigError(f"Actions have shape {actions.shape}; expected [{num_envs}, chunk >= 1, {len(low)}].")
    if not np.isfinite(actions).all():
        row = int(np.flatnonzero(~np.isfinite(actions).all((1, 2)))[0])
        raise ConfigError(f"The action of env {row} is not finite: {actions[row].tolist()}.")
    return np.clip(actions, low, high)


def checked_observation(observation: Observation, num_rows: int, state_dim: int) -> Observation:
    """Return ``observation`` after checking that images are uint8 ``[K, H, W, 3]`` and the state is float32 ``[K, S]``."""
    for name, image in observation.images.items():
        if image.dtype != np.uint8 or image.ndim != 4 or image.shape[::3] != (num_rows, 3):
            raise ConfigError(
                f"Images of '{name}' are {image.dtype} {image.shape}; they must be uint8 [{num_rows}, height, width, 3]"
            )
    state = observation.state
    if state_dim and (state is None or state.dtype != np.float32 or state.shape != (num_rows, state_dim)):
        actual = "None" if state is None else f"{state.dtype} {state.shape}"
        raise ConfigError(f"`state` is {actual}; it must be float32 [{num_rows}, {state_dim}]")
    return observation


def checked_image(image: np.ndarray, env: str, instead: str) -> np.ndarray:
    """Return ``env``'s images ``[..., H, W, 3]``; raise ConfigError unless uint8 and RGB. ``instead``: overrides that disable images."""
    # Do not cast, because values from 0 to 1 would become black.
    if image.dtype != np.uint8 or image.ndim < 3 or image.shape[-1] != 3:
        extremes = f" from {image.min():g} to {image.max():g}" if image.size else ""
        raise ConfigError(
            f"{env} renders images of {image.dtype} {image.shape} with values{extremes}; expected uint8 (height, "
            f"width, 3) from 0 to 255. Register a version of it with a wrapper that converts them, or set {instead}"
        )
    return image


def resized(image: np.ndarray, size: int) -> np.ndarray:
    """Resize an image ``[H, W, 3]`` to ``[size, size, 3]``, ignoring its aspect ratio."""
    return np.asarray(Image.fromarray(image).resize((size, size)))


def uniform_statistics(low: np.ndarray, high: np.ndarray) -> dict[str, list]:
    """Return q01, q99, mask, min, max, mean and std for uniform distributions between the bounds ``[D]``."""
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
