"""Envs with gym's older interface as envs of gymnasium."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from rlinf.errors import ConfigError

ID = f"{__name__}:OldApi-v0"
SIZES = {"Box": ("low", "high"), "Discrete": ("n",), "MultiBinary": ("n",), "MultiDiscrete": ("nvec",)}


class OldApi(gymnasium.Env):
    """Steps the env of a registered id ``old`` whose ``reset()`` returns an observation, and whose ``step`` observation, reward, done, info.

    Its ``seed(seed)`` is called before each episode; without, gymnasium seeds its ``np_random``. ``info["TimeLimit.truncated"]`` makes
    the end a truncation. ``kwargs`` are its arguments.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, old: str, **kwargs: Any) -> None:
        spec = _registered(old)
        maker = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        self.old = maker(**{**spec.kwargs, **kwargs})
        self.observation_space, self.action_space = _space(self.old.observation_space), _space(self.old.action_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.old.seed(seed) if hasattr(self.old, "seed") else gymnasium.Env.reset(self.old, seed=seed)
        result = self.old.reset()
        has_info = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        return result if has_info else (result, {})

    def step(self, action: Any) -> tuple[Any, ...]:
        if len(result := self.old.step(action)) != 4:
            return result
        is_cut = result[3].get("TimeLimit.truncated", False)
        return *result[:2], result[2] and not is_cut, result[2] and is_cut, result[3]


def _registered(env_id: str) -> EnvSpec:
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name)


def _space(space: Any) -> gymnasium.Space:
    """Return a space of the package gym as one of gymnasium."""
    if isinstance(space, gymnasium.Space):
        return space
    kind = type(space).__name__
    more = {"dtype": space.dtype.type} if kind == "Box" else {}
    return getattr(gymnasium.spaces, kind)(*(getattr(space, name) for name in SIZES[kind]), **more)


def old_interface_error(env_id: str, kwargs: Mapping[str, Any], seen: str) -> ConfigError:
    """Return the error for an env with gym's older interface, with the overrides that wrap it."""
    given = ", ".join(f"{key}: {json.dumps(value)}" for key, value in {"old": env_id, **kwargs}.items())
    return ConfigError(
        f"env.id={env_id} has gym's older interface ({seen}); required: gymnasium's, reset(*, seed, options) -> (observation, info) and "
        "step(action) -> (observation, reward, terminated, truncated, info). Wrap it without pictures. "
        f"Set env.id={ID} 'env.kwargs={{{given}}}' env.max_episode_steps={_registered(env_id).max_episode_steps or 200}"
    )


gymnasium.register(ID.partition(":")[2], OldApi)
