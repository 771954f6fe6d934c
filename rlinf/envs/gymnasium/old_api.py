"""Envs with gym's older interface as envs of gymnasium."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator

from rlinf.errors import ConfigError

ID = f"{__name__}:OldApi-v0"


class OldApi(gymnasium.Env):
    """Steps an env whose ``reset()`` returns an observation, and whose ``step(action)`` returns observation, reward, done, info.

    ``old`` is its class, or a registered id such as ``"my_module:MyEnv-v0"``; ``kwargs`` are its arguments. Its ``seed(seed)`` is called
    before each episode; in an env without, gymnasium seeds ``np_random``. ``info["TimeLimit.truncated"]`` makes the end a truncation.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}

    def __init__(self, old: str | Callable[..., Any], render_mode: str | None = None, **kwargs: Any) -> None:
        if isinstance(old, str):
            spec = _registered(old)
            old, kwargs = spec.entry_point, {**spec.kwargs, **kwargs}
        self.old = (load_env_creator(old) if isinstance(old, str) else old)(**kwargs)
        self.observation_space, self.action_space = _space(self.old.observation_space), _space(self.old.action_space)
        about = getattr(self.old, "metadata", None) or {}
        modes = [mode for mode in about.get("render.modes", ()) if mode == "rgb_array"]
        self.metadata, self.render_mode = {**about, "render_modes": modes}, render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if hasattr(self.old, "seed"):
            self.old.seed(seed)
        elif isinstance(self.old, gymnasium.Env):
            gymnasium.Env.reset(self.old, seed=seed)
        result = self.old.reset()
        has_info = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        return result if has_info else (result, {})

    def step(self, action: Any) -> tuple[Any, ...]:
        result = self.old.step(action)
        if len(result) != 4:
            return result
        observation, reward, done, info = result
        is_cut = info.get("TimeLimit.truncated", False)
        return observation, reward, done and not is_cut, done and is_cut, info

    def render(self) -> np.ndarray:
        return self.old.render(mode="rgb_array")

    def close(self) -> None:
        if hasattr(self.old, "close"):
            self.old.close()


def _registered(env_id: str) -> EnvSpec:
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name)


def _space(space: Any) -> gymnasium.Space:
    """Return a space of the package gym as one of gymnasium."""
    if isinstance(space, gymnasium.Space):
        return space
    match type(space).__name__:
        case "Box":
            return gymnasium.spaces.Box(space.low, space.high, dtype=space.dtype.type)
        case "Discrete" | "MultiBinary":
            return getattr(gymnasium.spaces, type(space).__name__)(space.n)
        case "MultiDiscrete":
            return gymnasium.spaces.MultiDiscrete(space.nvec)
        case "Dict":
            return gymnasium.spaces.Dict({key: _space(part) for key, part in space.spaces.items()})
        case "Tuple":
            return gymnasium.spaces.Tuple([_space(part) for part in space.spaces])
    raise ConfigError(f"{space} is no space of gymnasium or gym. Give the env gymnasium's spaces")


def old_interface_error(env_id: str, kwargs: Mapping[str, Any], seen: str) -> ConfigError:
    """Return the error for an env with gym's older interface, with the overrides that wrap it."""
    given = ", ".join(f"{key}: {json.dumps(value)}" for key, value in {"old": env_id, **kwargs}.items())
    steps = _registered(env_id).max_episode_steps or 200
    return ConfigError(
        f"env.id={env_id} has gym's older interface ({seen}); required: gymnasium's, reset(*, seed, options) -> (observation, info) and "
        "step(action) -> (observation, reward, terminated, truncated, info). Wrap it. "
        f"Set env.id={ID} 'env.kwargs={{{given}}}' env.max_episode_steps={steps}, or in Python "
        "register rlinf.envs.gymnasium.old_api.OldApi(MyEnv)"
    )


gymnasium.register(ID.partition(":")[2], OldApi)
