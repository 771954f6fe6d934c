"""Read cameras, state, sentence and success from the observations and infos of a gymnasium env."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Text, Tuple

from rlinf.errors import ConfigError
from rlinf.flags import flag_of, number_of

SUCCESS_KEYS = ("success", "is_success", "succeed")
INSTRUCTION_KEY = "instruction"
OTHER_SUCCESS = re.compile(r"succe|solved|goal_reached|goal_achieved|reached_goal|task_complete", re.IGNORECASE)
"""Words in a key of ``info`` that probably means success."""
NO_FLAG = re.compile(r"num|count|rate|mean", re.IGNORECASE)

Path = tuple[str | int, ...]
"""Keys, and numbers in tuples, from an observation of nested Dict and Tuple spaces to one of its parts."""


@dataclass
class TrainerContext:
    """The parts of an observation, in the order of the space (gymnasium sorts the keys of a plain dict).

    Attributes:
        cameras: Name to place of each Box of uint8 ``[H, W, 3]``; keys of nested spaces are joined by dots, ``item0`` in a tuple.
        sentence: Place of the Text space, if there is one.
        state: Places and spaces of everything else.
    """

    cameras: dict[str, Path] = field(default_factory=dict)
    sentence: Path | None = None
    state: list[tuple[Path, gymnasium.Space]] = field(default_factory=list)

    def flattened(self, observation: Any, env_id: str) -> np.ndarray:
        """Return the state of an observation, its parts flattened and joined: float32 ``[S]``."""
        parts = [_numbers_of(space, path, observation, env_id) for path, space in self.state]
        return np.concatenate(parts).astype(np.float32)

    def bounds(self, env_id: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds of ``flattened``, float64 ``[S]``; raise ConfigError for a part of another kind than numbers."""
        flat = [_flat(space, path, env_id) for path, space in self.state]
        ends = [np.concatenate([np.zeros(0), *(getattr(box, end) for box in flat)]) for end in ("low", "high")]
        return ends[0], ends[1]


def part(observation: Any, path: Path) -> Any:
    """Return the part of an observation at ``path``."""
    return reduce(getitem, path, observation)


def _named(path: Path) -> str:
    return f"observation{''.join(f'[{key!r}]' for key in path)}"


def _numbers_of(space: gymnasium.Space, path: Path, observation: Any, env_id: str) -> np.ndarray:
    """Return a part of the state, flattened; raise ConfigError for another shape or kind. Numbers may lie beyond a Box."""
    value = observation
    with suppress(ValueError, TypeError, LookupError):
        value = part(observation, path)
        if np.shape(value) == space.shape if isinstance(space, Box) else space.contains(value):
            return gymnasium.spaces.flatten(space, value)
    raise ConfigError(f"{_named(path)} of env.id={env_id} is {value!r:.80}; required: an element of its space {space}")


def parts_of(space: gymnasium.Space, env_id: str) -> TrainerContext:
    """Sort the parts of an observation space; raise ConfigError if it has two sentences."""
    found = TrainerContext()
    for path, leaf in _leaves(space, ()):
        if isinstance(leaf, Text):
            if found.sentence is not None:
                texts = " and ".join(f"'{_name(each)}'" for each in (found.sentence, path))
                raise ConfigError(
                    f"The observation of env.id={env_id} has two sentences, {texts}; required: at most one Text space, the instruction. "
                    "Register a version without the other one (gymnasium.wrappers.FilterObservation), and name it in env.id"
                )
            found.sentence = path
        elif isinstance(leaf, Box) and leaf.dtype == np.uint8 and len(leaf.shape) == 3 and leaf.shape[2] == 3:
            found.cameras[_name(path) or "image"] = path
        else:
            found.state.append((path, leaf))
    return found


def _leaves(space: gymnasium.Space, path: Path) -> Iterator[tuple[Path, gymnasium.Space]]:
    if not isinstance(space, Dict | Tuple):
        yield path, space
        return
    for key, each in space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces):
        yield from _leaves(each, (*path, key))


def _name(path: Path) -> str:
    return ".".join(key if isinstance(key, str) else f"item{key}" for key in path)


def _flat(space: gymnasium.Space, path: Path, env_id: str) -> Box:
    """Return the flattened space of a part of the state."""
    name = f"{_named(path)} of env.id={env_id} is {space}"
    if isinstance(space, Box) and len(space.shape) > 2:
        raise ConfigError(
            f"{name}: neither a camera (uint8, [H, W, 3]) nor the numbers of a state (one or two axes). Register a version "
            "with a gymnasium.ObservationWrapper that converts it or leaves it out, and name it in env.id; or set env.state=none"
        )
    with suppress(NotImplementedError):
        if isinstance(flat := gymnasium.spaces.flatten_space(space), Box):
            return flat
    raise ConfigError(
        f"{name}, which has no fixed size. Set env.state=none, or name a version of it with an observation wrapper in env.id"
    )


def old_interface(env_id: str, seen: str, fix: str) -> ConfigError:
    """Return the error for an env with gym's older interface."""
    return ConfigError(f"env.id={env_id} has gym's older interface: {seen}; required: gymnasium's. Write {fix}")


def reset_of(env: gymnasium.Env, env_id: str, seed: int) -> tuple[Any, Mapping[str, Any]]:
    """Reset ``env``, and return observation and info; raise ConfigError for gym's older interface."""
    seen = "reset() takes no seed"
    try:
        result = env.reset(seed=seed)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            return result
        seen = f"reset() returns {result!r:.60} without info"
    except TypeError as error:
        if "unexpected keyword argument 'seed'" not in str(error):
            raise
    line = "def reset(self, *, seed=None, options=None): gymnasium.Env.reset(self.unwrapped, seed=seed); return self.env.reset(), {}"
    raise old_interface(env_id, seen, f"`{line}` in a gymnasium.Wrapper around it")


def step_of(env: gymnasium.Env, env_id: str, action: Any) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
    """Step ``env`` and return its five values; raise ConfigError for gym's older interface, or a value of another kind."""
    result, of = env.step(action), f"of env.id={env_id}"
    if not isinstance(result, tuple | list) or len(result) != 5:
        line = "def step(self, action): seen, reward, done, info = self.env.step(action); return seen, reward, done, False, info"
        raise old_interface(
            env_id, f"step() returns {result!r:.60}, not 5 values", f"`{line}` in a gymnasium.Wrapper around it"
        )
    observation, reward, terminated, truncated, info = result
    if not isinstance(info, Mapping):
        raise ConfigError(f"`info` {of} is {info!r:.80}; required: a dict, which may be empty")
    ends = flag_of(terminated, f"`terminated` {of}"), flag_of(truncated, f"`truncated` {of}")
    return observation, number_of(reward, f"`reward` {of}"), *ends, info


def success_of(info: Mapping[str, Any], env_id: str, rejects: bool = True) -> bool | None:
    """Return the success that ``info`` of a step tells (None: nothing); raise ConfigError if another key seems to tell it.

    Without ``rejects``, such a key is a warning: a run that has started is not ended by it.
    """
    for key in SUCCESS_KEYS:
        if key in info:
            return flag_of(info[key], f"info['{key}'] of env.id={env_id}")
    for key, value in info.items():
        # Numbers may be terms of the reward, such as ``success_reward``.
        if isinstance(value, bool | np.bool_) and OTHER_SUCCESS.search(str(key)) and not NO_FLAG.search(str(key)):
            known = ", ".join(f"info['{name}']" for name in SUCCESS_KEYS)
            text = (
                f"env.id={env_id} seems to tell success in info['{key}'], which is not read; required: one of {known}. Register a version "
                "with a gymnasium.Wrapper that renames it, or set env.success_return=<sum of rewards that counts as a success>"
            )
            if rejects:
                raise ConfigError(text)
            warnings.warn(text, stacklevel=2)  # once for each line of code
    return None


def sentence_of(parts: TrainerContext, observation: Any, info: Mapping[str, Any], env_id: str) -> str | None:
    """Return the sentence of an observation or of ``info`` (None: neither); raise ConfigError for two, or if it is not a str."""
    shown = None if parts.sentence is None else part(observation, parts.sentence)
    said = info.get(INSTRUCTION_KEY)
    if shown is not None and said is not None:
        raise ConfigError(
            f"env.id={env_id} has two sentences, the Text space '{_name(parts.sentence)}' and info['{INSTRUCTION_KEY}']; required: "
            "one instruction. Register a version that leaves one out with a gymnasium.Wrapper, and name it in env.id"
        )
    found = shown if said is None else said
    if found is not None and not isinstance(found, str):
        raise ConfigError(
            f"The instruction of env.id={env_id} is {found!r} ({type(found).__name__}); required: one sentence, a str. "
            "Return one from reset and step"
        )
    return found
