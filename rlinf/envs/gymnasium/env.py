"""Any environment that is registered with gymnasium and acts with bounded or whole numbers."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np

from rlinf.envs.config import ProcessEnvConfig, check_cameras
from rlinf.envs.graphics.backend import choose_backend, import_mujoco
from rlinf.envs.gymnasium.reading import Parts, part, parts_of, sentence_of, success_of
from rlinf.envs.process.env import ProcessVectorEnv
from rlinf.envs.process.simulator import Simulator, SingleStep, View
from rlinf.envs.spaces import checked_picture, resized
from rlinf.errors import ConfigError, MissingDependencyError, did_you_mean
from rlinf.options import option
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec

CAMERA = "render"
MAKE_ERRORS = TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError, RuntimeError, OSError
"""Errors of an env's constructor for arguments that it does not take."""


@dataclass
class GymnasiumConfig(ProcessEnvConfig):
    """A gymnasium environment by its id."""

    usual_cameras: ClassVar[tuple[str, ...]] = ()

    name: str = option("gymnasium", "Registered environment.")
    max_episode_steps: int | None = option(
        None, "Env steps after which a running episode is truncated; null: as the id is registered.", minimum=1
    )
    cameras: list[str] | None = option(
        None,
        f"Cameras, stretched to a square: boxes of uint8 [H, W, 3] in the observation, by their keys, and {CAMERA}, the picture of "
        "render_mode=rgb_array; null: the observation's, as many as the model reads.",
    )
    success_bonus: float = option(0.0, "Reward added at the step of success.")
    terminate_on_success: bool = option(False, "End the episode at success.")
    id: str = option(
        "Pendulum-v1", "Id for gymnasium.make; 'module:Id' imports the module first, which registers the id."
    )
    kwargs: dict[str, Any] = option({}, "Arguments for gymnasium.make besides render_mode.")
    new_each_episode: bool = option(
        True,
        "Make the env again for each episode: some keep things over a reset (Box2D's contacts, where MuJoCo's camera looks), and "
        "an episode would depend on what ran before; false: reset it only, for envs that are slow to make.",
    )
    state: str = option("full", "full: the flattened rest of the observation; none.", choices=("full", "none"))
    instruction: str = option("do the task", "What a policy of language is told, if the env has no own sentence.")
    reward_scale: float = option(1.0, "Factor of the env's rewards; returns of some units or tens are learnt fastest.")
    success_return: float | None = option(
        None,
        "Sum of rewards (before the factor) from which an episode counts as a success when it ends; null: what the env says in "
        "info['success'], info['is_success'] or info['succeed'], at any step.",
    )

    def default_cameras(self) -> list[str]:
        """Return the cameras in the observation. Makes one env once."""
        return list(spaces_of(self).parts.cameras)


class Spaces(NamedTuple):
    """Facts of an env that are known before its first step.

    Attributes:
        state_low, state_high: ``[S]``; infinite if unbounded.
        horizon: ``max_episode_steps`` of the registration, or None.
        can_draw: Whether it has render_mode=rgb_array.
        uses_mujoco: Whether MuJoCo draws its pictures, which needs a GL.
        render_fps: Env steps per second of simulated time, or None if unknown.
        packages: Distributions of its code and of its imports, such as the physics engine.
        acts_in_choices: Its actions are whole numbers.
    """

    action_low: np.ndarray
    action_high: np.ndarray
    parts: Parts
    state_low: np.ndarray
    state_high: np.ndarray
    horizon: int | None
    can_draw: bool
    uses_mujoco: bool
    render_fps: float | None
    packages: tuple[str, ...]
    acts_in_choices: bool


def make_single(config: GymnasiumConfig, render_mode: str | None) -> gymnasium.Env:
    """Make the env of ``config``, without the time limit of its registration (``VectorEnv`` truncates).

    Raise ConfigError for a wrong id, module or ``env.kwargs``; MissingDependencyError for a missing package or GL.
    """
    options = {"max_episode_steps": -1, "disable_env_checker": True, "render_mode": render_mode}
    try:
        return gymnasium.make(config.id, **options, **config.kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingDependencyError(f"env.id={config.id} needs a package that is missing: {error}") from error
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.VersionNotFound) as error:
        hint = did_you_mean(config.id, list(gymnasium.registry))
        raise ConfigError(
            f"There is no environment '{config.id}' in gymnasium ({error}).{hint} An id of your own needs the module that "
            "registers it: env.id=my_package.my_module:MyEnv-v0"
        ) from error
    except ImportError as error:
        module = config.id.rpartition(":")[0]
        missing = getattr(error.__cause__ or error, "name", None)  # gymnasium stores the name in the cause
        if module and missing and f"{module}.".startswith(f"{missing}."):
            raise ConfigError(
                f"The module of env.id={config.id} cannot be imported ({error}). It must be installed or on PYTHONPATH."
            ) from error
        raise MissingDependencyError(
            f"env.id={config.id} needs a package that is missing or too old: {error}. Install it, or set another env.id=..."
        ) from error
    except (*MAKE_ERRORS, gymnasium.error.Error) as error:
        if importlib.util.find_spec("mujoco") is not None:
            import_mujoco()  # raises if the GL fails, which MuJoCo loads at import
        raise ConfigError(
            f"gymnasium.make('{config.id}') fails with env.kwargs={config.kwargs}: {type(error).__name__}: {error}. "
            "Set env.kwargs={...} with arguments that the environment takes"
        ) from error


def spaces_of(config: GymnasiumConfig) -> Spaces:
    """Return the spaces of the env of ``config``. Makes one env once, without pictures."""
    return _spaces_of(*_key(config))


def _key(config: GymnasiumConfig) -> tuple[str, str, str]:
    return config.id, json.dumps(config.kwargs, sort_keys=True), config.state


@functools.cache
def _spaces_of(env_id: str, kwargs: str, state: str) -> Spaces:
    env = make_single(GymnasiumConfig(id=env_id, kwargs=json.loads(kwargs)), None)
    try:
        low, high = action_bounds(env.action_space, env_id)
        parts = parts_of(env.observation_space, env_id)
        bounds = parts.bounds(env_id) if state == "full" else (np.zeros(0), np.zeros(0))
        horizon, can_draw = gymnasium.spec(env.spec.id).max_episode_steps, "rgb_array" in env.metadata["render_modes"]
        uses_mujoco = any("mujoco" in cls.__module__ for cls in type(env.unwrapped).__mro__)
        fps, packages = env.metadata.get("render_fps"), _packages_behind(type(env.unwrapped))
        acts_in_choices = np.issubdtype(env.action_space.dtype, np.integer)
        return Spaces(low, high, parts, *bounds, horizon, can_draw, uses_mujoco, fps, packages, acts_in_choices)
    finally:
        env.close()


def action_bounds(space: gymnasium.Space, env_id: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the float32 bounds ``[D]`` of the numbers that encode an action of ``space``.

    A choice among ``n`` is one number, which ``action_of`` rounds. Its bounds lie 0.5 beyond the first and the last
    choice, so that each choice has an equal share of the range.
    """
    match space:
        case gymnasium.spaces.Discrete():
            low, high = space.start, space.start + space.n - 1
        case gymnasium.spaces.MultiDiscrete():
            low, high = space.start, space.start + space.nvec - 1
        case gymnasium.spaces.MultiBinary():
            low, high = np.zeros(space.shape), np.ones(space.shape)
        case gymnasium.spaces.Box() if space.is_bounded("both"):
            low, high = space.low, space.high
        case _:
            raise ConfigError(
                f"env.id={env_id} acts in {space}; required: a Box with finite bounds, Discrete, MultiDiscrete or "
                "MultiBinary. Register a version with a gymnasium.ActionWrapper that has one, and name it in env.id"
            )
    margin = 0.5 if np.issubdtype(space.dtype, np.integer) else 0.0
    return np.float32(np.ravel(low) - margin), np.float32(np.ravel(high) + margin)


def action_of(space: gymnasium.Space, numbers: np.ndarray) -> Any:
    """Decode ``numbers`` (float32 ``[D]``, within ``action_bounds``) into an action of ``space``."""
    if np.issubdtype(space.dtype, np.integer):
        low, high = action_bounds(space, "")
        numbers = np.clip(np.rint(numbers), low + 0.5, high - 0.5)
    action = numbers.reshape(space.shape).astype(space.dtype)
    return action[()]  # a scalar for Discrete: an env may use it as a dictionary key


def _packages_behind(env_class: type) -> tuple[str, ...]:
    """Return the distributions of the modules of ``env_class`` and its bases, and of their imports."""
    modules = [sys.modules[cls.__module__] for cls in env_class.__mro__]
    modules += [value for module in modules for value in vars(module).values() if isinstance(value, ModuleType)]
    roots = {module.__name__.partition(".")[0] for module in modules}
    distributions = packages_distributions()
    return tuple(sorted({name for root in roots for name in distributions.get(root, ())}))


class GymnasiumVectorEnv(ProcessVectorEnv):
    """Envs of one gymnasium id: observation as state, picture as image, reward as dense reward.

    The env's ``terminated``, and its ``truncated`` before the time limit, end an episode. ``VectorEnv`` truncates.
    """

    config_class = GymnasiumConfig
    suite: ClassVar[str] = "gymnasium"
    packages: ClassVar[tuple[str, ...]] = ("gymnasium",)
    simulator_class: ClassVar[str] = "rlinf.envs.gymnasium.env:GymnasiumSimulator"
    config: GymnasiumConfig

    def __init__(self, config: GymnasiumConfig, num_envs: int, auto_reset: bool) -> None:
        self.check_names(config)
        spaces = spaces_of(config)
        if not set(config.cameras) <= set(spaces.parts.cameras):
            if not spaces.can_draw:
                raise ConfigError(f"env.id={config.id} has no render_mode=rgb_array. Set env.cameras=[]")
            _draw_once(*_key(config))
        super().__init__(config, num_envs, auto_reset, spaces.action_low, spaces.action_high)
        if spaces.render_fps is not None:
            self.metadata["render_fps"] = spaces.render_fps

    @classmethod
    def all_task_names(cls, config: GymnasiumConfig) -> list[str]:
        return [config.id]

    @classmethod
    def check_names(cls, config: GymnasiumConfig) -> None:
        """Check tasks and cameras, and play one step, whose observation and ``info`` must be readable."""
        super().check_names(config)
        check_cameras(config.cameras, [*config.default_cameras(), CAMERA])
        _said_by(*_key(config), config.success_return is None)

    @classmethod
    def tells_success(cls, config: GymnasiumConfig) -> bool:
        """Return whether ``info`` of a step tells success, or a return counts as one."""
        return config.success_return is not None or _said_by(*_key(config), True)[0]

    @classmethod
    def acts_in_choices(cls, config: GymnasiumConfig) -> bool:
        return spaces_of(config).acts_in_choices

    @classmethod
    def packages_of(cls, config: GymnasiumConfig) -> tuple[str, ...]:
        """Return gymnasium, and the packages of the env of ``config.id`` (``mujoco``, ``box2d``, ...)."""
        return spaces_of(config).packages

    @classmethod
    def check_drawing(cls, config: GymnasiumConfig) -> None:
        """Check that the env can be drawn by drawing a picture, except with MuJoCo, which would open a GL in this process."""
        spaces = spaces_of(config)
        if not spaces.can_draw and not spaces.parts.cameras:
            raise ConfigError(
                f"env.id={config.id} has no render_mode=rgb_array, which videos need. Set evaluation.num_videos_per_task=0"
            )
        if not spaces.uses_mujoco:
            _draw_once(*_key(config))

    @classmethod
    def state_width(cls, config: GymnasiumConfig) -> int:
        """Return how many numbers the flattened observation has, 0 for ``state=none``."""
        return len(spaces_of(config).state_low)

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the bounds of the observation, if all are finite."""
        spaces = spaces_of(self.config)
        finite = np.isfinite(spaces.state_low).all() and np.isfinite(spaces.state_high).all()
        return (spaces.state_low, spaces.state_high) if self.state_dim and finite else None

    @classmethod
    def horizon_of(cls, config: GymnasiumConfig, task: str) -> int:
        horizon = config.max_episode_steps or spaces_of(config).horizon
        if horizon is None:
            raise ConfigError(f"env.id={config.id} is registered without a time limit. Set env.max_episode_steps=200")
        return horizon

    def instruction_of(self, task_id: int) -> str | None:
        """Return ``config.instruction``; None if the env has sentences of its own."""
        has_sentence = _said_by(*_key(self.config), self.config.success_return is None)[1]
        return None if has_sentence else self.config.instruction


class GymnasiumSimulator(Simulator):
    """One gymnasium env."""

    config: GymnasiumConfig

    def __init__(self, config: GymnasiumConfig, task_names: Sequence[str]) -> None:
        super().__init__(config, task_names)
        self._spaces = spaces_of(config)
        self._env: Any = None
        self._horizon = GymnasiumVectorEnv.horizon_of(config, config.id)
        self._observation: Any = None
        self.sentence: str | None = None
        self.told_success = False  # since the simulator was made
        self.is_trial = False  # nothing has begun that an error would end
        self._num_steps, self._return = 0, 0.0

    def reset(self, spec: EpisodeSpec) -> None:
        """Reset a new env, or with ``new_each_episode=false`` the same one, with a seed of ``spec``."""
        seed = derive_seed(spec.seed, "gymnasium", self.config.id, spec.init_state_id) % 2**31
        if self._env is None or self.config.new_each_episode:
            self.close()
            self._env = make_single(self.config, "rgb_array" if self._spaces.can_draw else None)
        self._observation, info = self._env.reset(seed=seed)
        self.sentence = sentence_of(self._spaces.parts, self._observation, info, self.config.id)
        self._num_steps, self._return = 0, 0.0

    def step(self, action: np.ndarray) -> SingleStep:
        taken = action_of(self._env.action_space, action)
        self._observation, reward, terminated, truncated, info = self._env.step(taken)
        self._num_steps, self._return = self._num_steps + 1, self._return + float(reward)
        over = bool(terminated or (truncated and self._num_steps < self._horizon))
        if self.config.success_return is None:
            success = success_of(info, self.config.id, refuses=self.is_trial)
            self.told_success |= success is not None
        else:
            success = (over or self._num_steps >= self._horizon) and self._return >= self.config.success_return
        self.sentence = sentence_of(self._spaces.parts, self._observation, info, self.config.id) or self.sentence
        return SingleStep(self.config.reward_scale * float(reward), success, over)

    def observe(self) -> View:
        state = self._spaces.parts.flattened(self._observation) if len(self._spaces.state_low) else None
        images = {camera: self._picture(camera, self.config.image_size) for camera in self.config.cameras}
        return View(images, state, self.config.instruction if self.sentence is None else self.sentence)

    def _picture(self, camera: str, size: int) -> np.ndarray:
        """Return the picture of a camera, uint8 ``[size, size, 3]``."""
        path = self._spaces.parts.cameras.get(camera)
        if path is None:
            return self.render(size)
        seen = part(self._observation, path)
        return resized(checked_picture(seen, f"env.id={self.config.id}", "env.cameras=[]"), size)

    def render(self, size: int) -> np.ndarray:
        """Return the env's picture, or without render_mode=rgb_array its first camera's; raise as ``make_single`` does."""
        cameras = list(self._spaces.parts.cameras)
        if cameras and not self._spaces.can_draw:
            return self._picture(cameras[0], size)
        if self._spaces.uses_mujoco:
            choose_backend()
        viewer = getattr(getattr(self._env.unwrapped, "mujoco_renderer", None), "viewer", None)
        if viewer is not None:
            viewer.make_context_current()  # another row's context may still be current
        without = "env.cameras=[] evaluation.num_videos_per_task=0"
        try:
            picture = self._env.render() if self._spaces.can_draw else None
        except gymnasium.error.DependencyNotInstalled as error:
            raise MissingDependencyError(
                f"Pictures of env.id={self.config.id} need a package that is missing: {error}. Or set {without}"
            ) from error
        if not isinstance(picture, np.ndarray) or picture.ndim != 3:
            raise ConfigError(f"env.id={self.config.id} gives no picture under render_mode=rgb_array. Set {without}")
        return resized(checked_picture(picture, f"env.id={self.config.id}", without), size)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None


@functools.cache
def _said_by(env_id: str, kwargs: str, state: str, reads_success: bool) -> tuple[bool, bool]:
    """Play one step of an episode; return whether the env tells success, and whether it has sentences."""
    options = {"kwargs": json.loads(kwargs), "state": state, "success_return": None if reads_success else 0.0}
    simulator = GymnasiumSimulator(GymnasiumConfig(id=env_id, max_episode_steps=2, **options), [env_id])
    simulator.is_trial = True
    try:
        simulator.reset(EpisodeSpec("gymnasium", 0, 0, 0))
        spaces = spaces_of(simulator.config)
        simulator.step((spaces.action_low + spaces.action_high) / 2)
        return simulator.told_success, simulator.sentence is not None
    finally:
        simulator.close()


@functools.cache
def _draw_once(env_id: str, kwargs: str, state: str) -> None:
    """Draw a picture, so that a missing package or GL is reported before a run starts."""
    config = GymnasiumConfig(id=env_id, kwargs=json.loads(kwargs), state=state, max_episode_steps=1)
    simulator = GymnasiumSimulator(config, [env_id])
    simulator.reset(EpisodeSpec("gymnasium", 0, 0, 0))
    simulator.render(16)
    simulator.close()
