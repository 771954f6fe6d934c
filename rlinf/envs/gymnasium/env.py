"""Environments registered with gymnasium that have bounded or discrete actions."""

import functools
import importlib.util
import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import packages_distributions
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np

from rlinf.envs.base import checked_image, resized
from rlinf.envs.config import ProcessEnvConfig, check_listed
from rlinf.envs.graphics.backend import choose_backend, import_mujoco
from rlinf.envs.gymnasium import reading
from rlinf.envs.gymnasium.reading import ObservationParts
from rlinf.envs.process.env import ProcessVectorEnv
from rlinf.envs.process.simulator import Simulator, SingleStep, View
from rlinf.envs.process.trial import Trial, run_in_child, run_trial
from rlinf.errors import ConfigError, MissingDependencyError, did_you_mean
from rlinf.imports import import_string
from rlinf.options import option
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec

CAMERA = "render"
MAKE_ERRORS = TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError, RuntimeError, OSError
"""Errors that env constructors raise for invalid arguments."""


@dataclass
class GymnasiumConfig(ProcessEnvConfig):
    """A gymnasium environment, selected by its id."""

    usual_cameras: ClassVar[tuple[str, ...]] = ()

    name: str = option("gymnasium", "Name of the registered environment.")
    max_episode_steps: int | None = option(None, "Env steps until truncation; null: as registered.", minimum=1)
    cameras: list[str] | None = option(None, f"Observation keys that contain images, or {CAMERA}; null: all such keys.")
    success_bonus: float = option(0.0, "Reward added at the first step of success.")
    terminate_on_success: bool = option(False, "End the episode at success.")
    id: str = option("Pendulum-v1", "Id for gymnasium.make; 'module:Id' imports the module first.")
    kwargs: dict[str, Any] = option({}, "Arguments for gymnasium.make, except render_mode.")
    new_each_episode: bool = option(True, "Rebuild the env for each episode, because a reset may not clear all state.")
    state: str = option("full", "full: the flattened rest of the observation; none.", choices=("full", "none"))
    instruction: str = option("do the task", "Instruction, if the env itself has none.")
    reward_scale: float = option(1.0, "Scale for the env's rewards; returns of 1 to 100 are learnt fastest.")
    success_return: float | None = option(None, "Minimum return (unscaled) of a successful episode; null: use `info`.")
    expert: str | None = option(
        None, "Expert function(observation, env) as 'module:function'; null: env.expert_action()."
    )

    def default_cameras(self) -> list[str]:
        """Return the cameras in the observation, after trying the env once."""
        return list(spaces_of(self).parts.cameras)

    def __getstate__(self) -> dict[str, Any]:
        """Include how user code registered the id in this process: the module to import and gymnasium's spec."""
        spec, module, pickled = gymnasium.registry.get(self.id), _module_of(self.id), None
        with suppress(pickle.PicklingError, AttributeError, TypeError):  # raised for a lambda
            pickled = None if spec is None else pickle.dumps(spec)
        return {**vars(self), "registration": (module, pickled) if module != "__main__" else (None, None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module, pickled = state.pop("registration")
        vars(self).update(state)
        if module is not None:
            importlib.import_module(module)
        if pickled is not None and self.id not in gymnasium.registry:
            gymnasium.registry[self.id] = pickle.loads(pickled)


class Spaces(NamedTuple):
    """Properties of an env, determined by building it and running one step.

    ``state_low`` and ``state_high``, ``[S]``, may be infinite; ``horizon`` and ``render_fps`` may be None. ``packages`` are the
    distributions of its code and imports. ``uses_mujoco`` is True if it renders with MuJoCo, which needs a GL.
    """

    action_low: np.ndarray
    action_high: np.ndarray
    parts: ObservationParts
    state_low: np.ndarray
    state_high: np.ndarray
    horizon: int | None
    can_draw: bool
    uses_mujoco: bool
    render_fps: float | None
    packages: tuple[str, ...]
    acts_in_choices: bool
    has_expert: bool
    reports_success: bool = False
    has_instruction: bool = False


def make_single(config: GymnasiumConfig, render_mode: str | None) -> gymnasium.Env:
    """Build the env without its registered time limit; raise ConfigError, or MissingDependencyError for a missing package or GL."""
    options = {"max_episode_steps": -1, "disable_env_checker": True}
    options |= (
        {} if render_mode is None else {"render_mode": render_mode}
    )  # an env that cannot render may not accept it
    try:
        return gymnasium.make(config.id, **options, **config.kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingDependencyError(f"env.id={config.id} needs a package that is missing: {error}") from error
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.VersionNotFound) as error:
        hint = did_you_mean(config.id, list(gymnasium.registry))
        raise ConfigError(
            f"There is no environment '{config.id}' in gymnasium ({error}).{hint} For your own id, load the code that "
            "registers it: plugins=[<file or module>], or env.id=my_package.my_module:MyEnv-v0"
        ) from error
    except ImportError as error:
        module = config.id.rpartition(":")[0]
        missing = getattr(error.__cause__ or error, "name", None)  # gymnasium stores the name in the cause
        if module and missing and f"{module}.".startswith(f"{missing}."):
            raise ConfigError(
                f"The module of env.id={config.id} cannot be imported ({error}). It must be installed or on PYTHONPATH."
            ) from error
        raise MissingDependencyError(
            f"env.id={config.id} needs a package that is missing or too old: {error}. Install it, or set a different env.id=..."
        ) from error
    except (*MAKE_ERRORS, gymnasium.error.Error) as error:
        if "gymnasium.Env class" in str(error) or "`gymnasium.Env`" in str(error):
            raise reading.old_interface_error(
                config.id, "its class is not a gymnasium.Env", "`class MyEnv(gymnasium.Env):`"
            ) from error
        if importlib.util.find_spec("mujoco") is not None:
            import_mujoco()  # raises if the GL fails, which MuJoCo loads at import
        raise ConfigError(
            f"gymnasium.make('{config.id}') fails with env.kwargs={config.kwargs}: {type(error).__name__}: {error}. "
            "Fix the environment, or set env.kwargs={...} with valid arguments"
        ) from error


def spaces_of(config: GymnasiumConfig) -> Spaces:
    """Return the env's spaces, after trying it once in a child process; errors are as in ``run_in_child``."""
    return _tried(replace(config, cameras=[]))


_results: dict[tuple[Any, ...], Spaces] = {}


def _tried(config: GymnasiumConfig) -> Spaces:
    """Return the cached result of ``trial``. An env defined in the main script with ``num_processes=0`` is tried in this process."""
    if (key := (*_key(config), config.success_return is None, *config.cameras)) not in _results:
        is_here = config.num_processes == 0 and _module_of(config.id) == "__main__"
        what = f"env.id={config.id}"
        _results[key] = run_trial(trial(config)) if is_here else run_in_child(trial, config, what)
    return _results[key]


def _module_of(env_id: str) -> str | None:
    """Return the module of the class or function registered for an id, or None for a string or an unregistered id."""
    return getattr(getattr(gymnasium.registry.get(env_id), "entry_point", None), "__module__", None)


def trial(config: GymnasiumConfig) -> Trial:
    """Build the env, run one step of an episode and render ``config.cameras``; return its ``Spaces`` in picklable form."""
    yield "construction"
    spaces = _spaces_here(*_key(config))
    simulator = GymnasiumSimulator(replace(config, max_episode_steps=2, success_return=0.0), [config.id])
    yield "reset"
    simulator.reset(EpisodeSpec("gymnasium", 0, 0, 0))
    simulator.observe()
    yield "step"
    simulator.step((spaces.action_low + spaces.action_high) / 2)
    simulator.observe()
    reports_success = config.success_return is None and reading.read_success(simulator.info, config.id) is not None
    simulator.close()
    parts, has_instruction = replace(spaces.parts, state=[]), simulator.instruction is not None
    return spaces._replace(parts=parts, reports_success=reports_success, has_instruction=has_instruction)


def _key(config: GymnasiumConfig) -> tuple[str, str, str]:
    return config.id, json.dumps(config.kwargs, sort_keys=True), config.state


# Cached, because building an env may take seconds and several checks need these properties.
@functools.cache
def _spaces_here(env_id: str, kwargs: str, state: str) -> Spaces:
    """Build an env in this process and return its properties, without images. ``parts`` includes its spaces."""
    env = make_single(GymnasiumConfig(id=env_id, kwargs=json.loads(kwargs)), None)
    try:
        low, high = action_bounds(env.action_space, env_id)
        parts, about = reading.parts_of(env.observation_space, env_id), env.metadata or {}
        bounds = parts.bounds(env_id) if state == "full" else (np.zeros(0), np.zeros(0))
        horizon, fps = gymnasium.spec(env.spec.id).max_episode_steps, about.get("render_fps")
        can_draw, has_expert = "rgb_array" in (about.get("render_modes") or ()), env.has_wrapper_attr("expert_action")
        uses_mujoco = any("mujoco" in cls.__module__ for cls in type(env.unwrapped).__mro__)
        acts_in_choices = bool(np.issubdtype(env.action_space.dtype, np.integer))
        behind = _packages_behind(type(env.unwrapped))
        return Spaces(
            low, high, parts, *bounds, horizon, can_draw, uses_mujoco, fps, behind, acts_in_choices, has_expert
        )
    finally:
        env.close()


def action_bounds(space: gymnasium.Space, env_id: str) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 bounds ``[D]`` of encoded actions. A discrete choice takes one dimension, which ``action_of`` rounds."""
    # Half a unit beyond the first and last choice, so that all choices cover equal parts of the range.
    margin = 0.5 if np.issubdtype(space.dtype, np.integer) else 0.0
    low, high = _limits(space)
    with np.errstate(over="ignore"):
        bounds = np.float32(np.ravel(low) - margin), np.float32(np.ravel(high) + margin)
    if not (bounds[0].size and np.isfinite(bounds).all()):
        raise ConfigError(
            f"env.id={env_id} has the action space {space}; expected a Box with finite bounds, Discrete, MultiDiscrete or "
            "MultiBinary. Register a version with a gymnasium.ActionWrapper, and name it in env.id"
        )
    return bounds


def _limits(space: gymnasium.Space) -> tuple[Any, Any]:
    """Return the minimum and maximum action in the space's own dtype; infinite for an unsupported space."""
    match space:
        case gymnasium.spaces.Discrete():
            return space.start, space.start + space.n - 1
        case gymnasium.spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
        case gymnasium.spaces.MultiBinary():
            return np.zeros(space.shape), np.ones(space.shape)
        case gymnasium.spaces.Box():
            return space.low, space.high
    return -np.inf, np.inf


def action_of(space: gymnasium.Space, numbers: np.ndarray) -> Any:
    """Decode ``numbers`` (float32 ``[D]``) to an action of ``space``, clipped in its dtype: 0.1 in float32 exceeds 0.1 in float64."""
    numbers = np.rint(numbers) if np.issubdtype(space.dtype, np.integer) else numbers
    # Use long double, which represents both float32 values and integer limits exactly.
    action = np.clip(numbers.reshape(space.shape).astype(np.longdouble), *_limits(space)).astype(space.dtype)
    return action[()]  # a scalar for Discrete: an env may use it as a dictionary key


def _packages_behind(env_class: type) -> tuple[str, ...]:
    """Return the distributions of the modules of ``env_class`` and its bases, and of their imports."""
    modules = [sys.modules[cls.__module__] for cls in env_class.__mro__]
    modules += [value for module in modules for value in vars(module).values() if isinstance(value, ModuleType)]
    roots = {module.__name__.partition(".")[0] for module in modules}
    distributions = packages_distributions()
    return tuple(sorted({name for root in roots for name in distributions.get(root, ())}))


class GymnasiumVectorEnv(ProcessVectorEnv):
    """Envs with one gymnasium id. Episodes end on the env's own ``terminated`` or ``truncated``, or at the time limit."""

    config_class = GymnasiumConfig
    suite: ClassVar[str] = "gymnasium"
    packages: ClassVar[tuple[str, ...]] = ("gymnasium",)
    free_settings: ClassVar[tuple[str, ...]] = (*ProcessVectorEnv.free_settings, "expert")
    simulator_class: ClassVar[str] = "rlinf.envs.gymnasium.env:GymnasiumSimulator"
    without_expert: ClassVar[str] = "neither a method expert_action() nor env.expert=<module:function>"
    config: GymnasiumConfig

    def __init__(self, config: GymnasiumConfig, num_envs: int, auto_reset: bool) -> None:
        self.check_names(config)
        spaces = spaces_of(config)
        if not set(config.cameras) <= set(spaces.parts.cameras):
            if not spaces.can_draw:
                raise ConfigError(f"env.id={config.id} has no render_mode=rgb_array. Set env.cameras=[]")
            _tried(replace(config, cameras=[CAMERA]))
        super().__init__(config, num_envs, auto_reset, spaces.action_low, spaces.action_high)
        if spaces.render_fps is not None:
            self.metadata["render_fps"] = spaces.render_fps

    @classmethod
    def all_task_names(cls, config: GymnasiumConfig) -> list[str]:
        return [config.id]

    @classmethod
    def check_names(cls, config: GymnasiumConfig) -> None:
        """Check tasks and cameras, and try one step to verify that its observation and ``info`` are readable."""
        super().check_names(config)
        check_listed("camera", config.cameras, [*config.default_cameras(), CAMERA])

    @classmethod
    def reports_success(cls, config: GymnasiumConfig) -> bool:
        return config.success_return is not None or spaces_of(config).reports_success

    @classmethod
    def acts_in_choices(cls, config: GymnasiumConfig) -> bool:
        return spaces_of(config).acts_in_choices

    @classmethod
    def packages_of(cls, config: GymnasiumConfig) -> tuple[str, ...]:
        """Return gymnasium and the packages used by the env ``config.id`` (``mujoco``, ``box2d``, ...)."""
        return spaces_of(config).packages

    @classmethod
    def check_drawing(cls, config: GymnasiumConfig) -> None:
        """Check rendering by producing one image, except with MuJoCo, whose GL takes seconds to open."""
        spaces = spaces_of(config)
        if not spaces.can_draw and not spaces.parts.cameras:
            raise ConfigError(
                f"env.id={config.id} has no render_mode=rgb_array, which videos need. Set evaluation.num_videos_per_task=0"
            )
        if not spaces.uses_mujoco:
            _tried(replace(config, cameras=[CAMERA]))

    @classmethod
    def has_expert(cls, config: GymnasiumConfig) -> bool:
        return config.expert is not None or spaces_of(config).has_expert

    @classmethod
    def state_width(cls, config: GymnasiumConfig) -> int:
        return len(spaces_of(config).state_low)

    @classmethod
    def is_registered(cls, config: GymnasiumConfig) -> bool:
        entry = getattr(gymnasium.registry.get(config.id), "entry_point", "")
        return not (_module_of(config.id) or str(entry)).startswith("gymnasium.")

    @classmethod
    def action_width(cls, config: GymnasiumConfig) -> int:
        return len(spaces_of(config).action_low)

    def state_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
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
        """Return ``config.instruction``, or None if the env provides its own instructions."""
        return None if spaces_of(self.config).has_instruction else self.config.instruction


class GymnasiumSimulator(Simulator):
    """One gymnasium env."""

    config: GymnasiumConfig

    def __init__(self, config: GymnasiumConfig, task_names: Sequence[str]) -> None:
        super().__init__(config, task_names)
        self._spaces = _spaces_here(*_key(config))
        self._env: Any = None
        self._horizon = config.max_episode_steps or self._spaces.horizon
        self._observation: Any = None
        self.info: Mapping[str, Any] = {}  # of the last step
        self.instruction: str | None = None
        self._num_steps, self._return = 0, 0.0

    def reset(self, spec: EpisodeSpec) -> None:
        """Reset a new env, or the existing one if ``new_each_episode=false``, with a seed derived from ``spec``."""
        seed = derive_seed(spec.seed, "gymnasium", self.config.id, spec.init_state_id) % 2**31
        if self._env is None or self.config.new_each_episode:
            self.close()
            # The render mode is fixed at construction, and any episode may be rendered later.
            self._env = make_single(self.config, "rgb_array" if self._spaces.can_draw else None)
        self._observation, info = reading.reset(self._env, self.config.id, seed)
        self.instruction = reading.instruction_of(self._spaces.parts, self._observation, info, self.config.id)
        self._num_steps, self._return = 0, 0.0

    def step(self, action: np.ndarray) -> SingleStep:
        result = reading.step(self._env, self.config.id, action_of(self._env.action_space, action))
        self._observation, reward, terminated, truncated, self.info = result
        self._num_steps, self._return = self._num_steps + 1, self._return + reward
        if self.config.success_return is None:
            success = reading.read_success(self.info, self.config.id, rejects=False)
        else:
            has_ended = terminated or truncated or self._num_steps >= self._horizon
            success = has_ended and self._return >= self.config.success_return
        instruction = reading.instruction_of(self._spaces.parts, self._observation, self.info, self.config.id)
        self.instruction = instruction or self.instruction
        return SingleStep(self.config.reward_scale * reward, success, terminated, truncated)

    def observe(self) -> View:
        state = self._spaces.parts.flattened(self._observation, self.config.id) if len(self._spaces.state_low) else None
        images = {camera: self._image(camera, self.config.image_size) for camera in self.config.cameras}
        return View(images, state, self.config.instruction if self.instruction is None else self.instruction)

    def _image(self, camera: str, size: int) -> np.ndarray:
        path = self._spaces.parts.cameras.get(camera)
        if path is None:
            return self.render(size)
        image = np.asarray(reading.part(self._observation, path))
        return resized(checked_image(image, f"env.id={self.config.id}", "env.cameras=[]"), size)

    def expert_action(self) -> np.ndarray:
        expert, action = f"env.expert={self.config.expert}", None
        if self.config.expert is None:
            expert, action = "expert_action()", self._env.get_wrapper_attr("expert_action")()
        else:
            try:
                function = import_string(self.config.expert)
            except (ImportError, AttributeError) as error:
                raise ConfigError(f"{expert} cannot be imported ({error}); expected module:function") from error
            action = function(self._observation, self._env)
        with suppress(ValueError, TypeError):
            numbers = np.asarray(action, np.float32).ravel()
            if numbers.shape == self._spaces.action_low.shape and np.isfinite(numbers).all():
                return np.clip(numbers, self._spaces.action_low, self._spaces.action_high)
        raise ConfigError(f"{expert} returns {action!r:.80}; expected an action of {self._env.action_space}")

    def render(self, size: int) -> np.ndarray:
        """Return the env's image, or its first camera's if it lacks render_mode=rgb_array; errors are as in ``make_single``."""
        cameras = list(self._spaces.parts.cameras)
        if cameras and not self._spaces.can_draw:
            return self._image(cameras[0], size)
        if self._spaces.uses_mujoco:
            choose_backend()
        viewer = getattr(getattr(self._env.unwrapped, "mujoco_renderer", None), "viewer", None)
        if viewer is not None:
            viewer.make_context_current()  # a different env's context may still be current
        without = "env.cameras=[] evaluation.num_videos_per_task=0"
        try:
            image = self._env.render() if self._spaces.can_draw else None
        except gymnasium.error.DependencyNotInstalled as error:
            raise MissingDependencyError(
                f"Rendering env.id={self.config.id} needs a package that is missing: {error}. Alternatively, set {without}"
            ) from error
        if not isinstance(image, np.ndarray) or image.ndim != 3:
            raise ConfigError(f"env.id={self.config.id} returns no image under render_mode=rgb_array. Set {without}")
        return resized(checked_image(image, f"env.id={self.config.id}", without), size)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None
