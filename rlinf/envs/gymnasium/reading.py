"""Read cameras, state, instruction and success from a gymnasium env's observations and infos."""

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
"""Keys of ``info`` that probably mean success."""
NO_FLAG = re.compile(r"num|count|rate|mean", re.IGNORECASE)

Path = tuple[str | int, ...]
"""Keys (or tuple indices) that lead from an observation of nested Dict and Tuple spaces to one of its parts."""


@dataclass
class ObservationParts:
    """The parts of an observation, in the space's order (gymnasium sorts the keys of a plain dict).

    ``cameras`` maps the name of each uint8 ``[H, W, 3]`` Box to its path; nested keys are joined by dots (tuples: ``item0``, ...).
    ``instruction`` is the path of the Text space, if any; ``state`` contains the paths and spaces of everything else.
    """

    cameras: dict[str, Path] = field(default_factory=dict)
    instruction: Path | None = None
    state: list[tuple[Path, gymnasium.Space]] = field(default_factory=list)

    def flattened(self, observation: Any, env_id: str) -> np.ndarray:
        """Flatten and concatenate the state parts of an observation, float32 ``[S]``."""
        parts = [_numbers_of(space, path, observation, env_id) for path, space in self.state]
        return np.concatenate(parts).astype(np.float32)

    def bounds(self, env_id: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds of ``flattened``, float64 ``[S]``; raise ConfigError for a part that is not numeric."""
        flat = [_flat(space, path, env_id) for path, space in self.state]
        ends = [np.concatenate([np.zeros(0), *(getattr(box, end) for box in flat)]) for end in ("low", "high")]
        return ends[0], ends[1]


def part(observation: Any, path: Path) -> Any:
    return reduce(getitem, path, observation)


def _named(path: Path) -> str:
    return f"observation{''.join(f'[{key!r}]' for key in path)}"


def _numbers_of(space: gymnasium.Space, path: Path, observation: Any, env_id: str) -> np.ndarray:
    """Flatten a part of the state; raise ConfigError for a wrong shape or type. Values may exceed the bounds of a Box."""
    value = observation
    with suppress(ValueError, TypeError, LookupError):
        value = part(observation, path)
        if np.shape(value) == space.shape if isinstance(space, Box) else space.contains(value):
            return gymnasium.spaces.flatten(space, value)
    raise ConfigError(f"{_named(path)} of env.id={env_id} is {value!r:.80}; expected an element of its space {space}")


def parts_of(space: gymnasium.Space, env_id: str) -> ObservationParts:
    """Classify the parts of an observation space; raise ConfigError if it has two Text spaces."""
    parts = ObservationParts()
    for path, leaf in _leaves(space, ()):
        if isinstance(leaf, Text):
            if parts.instruction is not None:
                texts = " and ".join(f"'{_dotted(text)}'" for text in (parts.instruction, path))
                raise ConfigError(
                    f"The observation of env.id={env_id} has two instructions, {texts}; expected at most one Text space. "
                    "Register a version with one of them (gymnasium.wrappers.FilterObservation), and name it in env.id"
                )
            parts.instruction = path
        elif isinstance(leaf, Box) and leaf.dtype == np.uint8 and len(leaf.shape) == 3 and leaf.shape[2] == 3:
            parts.cameras[_dotted(path) or "image"] = path
        else:
            parts.state.append((path, leaf))
    return parts


def _leaves(space: gymnasium.Space, path: Path) -> Iterator[tuple[Path, gymnasium.Space]]:
    if not isinstance(space, Dict | Tuple):
        yield path, space
        return
    for key, child in space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces):
        yield from _leaves(child, (*path, key))


def _dotted(path: Path) -> str:
    return ".".join(key if isinstance(key, str) else f"item{key}" for key in path)


def _flat(space: gymnasium.Space, path: Path, env_id: str) -> Box:
    name = f"{_named(path)} of env.id={env_id} is {space}"
    if isinstance(space, Box) and len(space.shape) > 2:
        raise ConfigError(
            f"{name}, neither a camera (uint8, [H, W, 3]) nor part of a state (one or two axes). Register a version "
            "with a gymnasium.ObservationWrapper that converts or removes it, and use its id as env.id; or set env.state=none"
        )
    with suppress(NotImplementedError):
        if isinstance(flat := gymnasium.spaces.flatten_space(space), Box):
            return flat
    raise ConfigError(
        f"{name}, which has no fixed size. Set env.state=none, or name a version of it with an observation wrapper in env.id"
    )


def old_interface_error(env_id: str, problem: str, fix: str) -> ConfigError:
    """Return the error for an env that uses gym's older interface."""
    return ConfigError(f"env.id={env_id} uses gym's older interface: {problem}; expected gymnasium's. Write {fix}")


def reset(env: gymnasium.Env, env_id: str, seed: int) -> tuple[Any, Mapping[str, Any]]:
    """Reset ``env`` and return its observation and info; raise ConfigError for gym's older interface."""
    problem = "reset() takes no seed"
    try:
        result = env.reset(seed=seed)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            return result
        problem = f"reset() returns {result!r:.60} without info"
    except TypeError as error:
        if "unexpected keyword argument 'seed'" not in str(error):
            raise
    line = "def reset(self, *, seed=None, options=None): gymnasium.Env.reset(self.unwrapped, seed=seed); return self.env.reset(), {}"
    raise old_interface_error(env_id, problem, f"`{line}` in a gymnasium.Wrapper around it")


def step(env: gymnasium.Env, env_id: str, action: Any) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
    """Step ``env`` and return its five values; raise ConfigError for gym's older interface or a value of the wrong type."""
    result, source = env.step(action), f"of env.id={env_id}"
    if not isinstance(result, tuple | list) or len(result) != 5:
        line = "def step(self, action): seen, reward, done, info = self.env.step(action); return seen, reward, done, False, info"
        raise old_interface_error(
            env_id, f"step() returns {result!r:.60}, not 5 values", f"`{line}` in a gymnasium.Wrapper around it"
        )
    observation, reward, terminated, truncated, info = result
    if not isinstance(info, Mapping):
        raise ConfigError(f"`info` {source} is {info!r:.80}; expected a dict, which may be empty")
    ends = flag_of(terminated, f"`terminated` {source}"), flag_of(truncated, f"`truncated` {source}")
    return observation, number_of(reward, f"`reward` {source}"), *ends, info


def read_success(info: Mapping[str, Any], env_id: str, rejects: bool = True) -> bool | None:
    """Return the success flag in ``info`` (None: not reported). A similar unknown key is an error, or a warning if not ``rejects``."""
    for key in SUCCESS_KEYS:
        if key in info:
            return flag_of(info[key], f"info['{key}'] of env.id={env_id}")
    for key, value in info.items():
        # Consider only flags, because numbers may be reward terms, such as ``success_reward``.
        if isinstance(value, bool | np.bool_) and OTHER_SUCCESS.search(str(key)) and not NO_FLAG.search(str(key)):
            known = ", ".join(f"info['{name}']" for name in SUCCESS_KEYS)
            text = (
                f"env.id={env_id} seems to report success in info['{key}'], which is not read; expected one of {known}. Register "
                "a version with a gymnasium.Wrapper that renames it, or set env.success_return=<minimum return of a success>"
            )
            if rejects:
                raise ConfigError(text)
            warnings.warn(text, stacklevel=2)  # shown once
    return None


def instruction_of(parts: ObservationParts, observation: Any, info: Mapping[str, Any], env_id: str) -> str | None:
    """Return the instruction from an observation or ``info``, or None; raise ConfigError if there are two or it is not a str."""
    text, from_info = (
        None if parts.instruction is None else part(observation, parts.instruction),
        info.get(INSTRUCTION_KEY),
    )
    if text is not None and from_info is not None:
        raise ConfigError(
            f"env.id={env_id} has two instructions, the Text space '{_dotted(parts.instruction)}' and info['{INSTRUCTION_KEY}']; expected "
            "one instruction. Register a version that omits one with a gymnasium.Wrapper, and name it in env.id"
        )
    instruction = text if from_info is None else from_info
    if instruction is not None and not isinstance(instruction, str):
        raise ConfigError(
            f"The instruction of env.id={env_id} is {instruction!r} ({type(instruction).__name__}); expected a str. "
            "Return one from reset and step"
        )
    return instruction
