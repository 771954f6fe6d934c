"""A robot as lerobot's interface has it, and one that is an env of ours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError, RLinfError
from rlinf.robot.config import RobotConfig
from rlinf.seeding import derive_seed
from rlinf.types import EnvSpec, EpisodeResult, EpisodeSpec, Observation

LOST = OSError
"""Errors of a device that cost one reading or action, not the episode: TimeoutError, ConnectionError, others of a pulled cable."""


class EpisodeVoidError(Exception):
    """The robot was lost in an episode, and has come back; the episode must start again."""


class Robot(Protocol):
    """The members of lerobot's ``Robot`` that are used here.

    Features are names of numbers, with the type ``float``, and names of cameras, with the shape ``(H, W, 3)`` of uint8 images.
    """

    @property
    def observation_features(self) -> dict[str, Any]:
        """Features of ``get_observation``."""
        ...

    @property
    def action_features(self) -> dict[str, Any]:
        """Features of ``send_action``."""
        ...

    @property
    def is_calibrated(self) -> bool:
        """Whether its numbers have a meaning."""
        ...

    def get_observation(self) -> dict[str, Any]:
        """Return the newest observation; raise TimeoutError or ConnectionError without one."""
        ...

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        """Send an action, and return it as it was sent."""
        ...


class EpisodicRobot(Robot, Protocol):
    """A robot whose scene is put back, and whose success somebody tells."""

    @property
    def num_restarts(self) -> int:
        """How often it was lost and has come back."""
        ...

    def begin(self, spec: EpisodeSpec) -> str:
        """Put the scene into the first state of an episode; return the instruction."""
        ...

    def position(self) -> dict[str, float]:
        """Return the action that would leave it where it is, by the names of its actions."""
        ...

    @property
    def result(self) -> EpisodeResult | None:
        """How the episode ended; None: it continues."""
        ...


def check_fits(robot: Robot, spec: EnvSpec, action_dim: int) -> None:
    """Raise ConfigError unless a robot has the cameras, states and joints of the env that a policy was made for."""
    seen = robot.observation_features
    cameras, numbers = cameras_of(robot), [name for name in seen if name not in cameras_of(robot)]
    missing = [name for name in spec.cameras if name not in cameras]
    if missing:
        raise ConfigError(
            f"The robot has the cameras {cameras or 'none'}; required: {list(spec.cameras)} (missing: {', '.join(missing)}). "
            f"Name the cameras of the robot as the policy's, or set env.cameras={cameras}"
        )
    if spec.state_dim is not None and spec.state_dim != len(numbers):
        raise ConfigError(
            f"The robot tells {len(numbers)} numbers of its state ({', '.join(numbers) or 'none'}); required: {spec.state_dim}, which the "
            "policy reads. Set env.state to the state that the policy was trained with"
        )
    joints = list(robot.action_features)
    if len(joints) != action_dim:
        raise ConfigError(
            f"The robot has {len(joints)} joints ({', '.join(joints)}) and the policy acts with {action_dim} numbers; required: as many. "
            "Choose the robot that the policy was trained for"
        )
    if not robot.is_calibrated:
        raise ConfigError("The robot is not calibrated; required: a calibration. Run lerobot-calibrate")


def cameras_of(robot: Robot) -> list[str]:
    """Return the names of a robot's cameras."""
    return [name for name, kind in robot.observation_features.items() if isinstance(kind, tuple)]


def answer_of(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a device answers; raise ConnectionError where its driver raises something else, as for a pulled cable."""
    try:
        return call(*arguments)
    except (LOST, RLinfError):
        raise
    except Exception as error:  # drivers raise what they like: RuntimeError, termios.error, cv2.error
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def numbers_of(values: Mapping[str, Any], names: Iterable[str]) -> np.ndarray:
    """Return numbers of a reading, float32 ``[D]``; raise ConnectionError for NaN and infinity, ConfigError for text and the like."""
    numbers = []
    for name in names:
        value = _part(values, name)
        try:
            numbers.append(float("text" if isinstance(value, (str, bytes)) else value))
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{name} is {value!r}; required: a number. Correct the driver of the device") from None
        if not abs(numbers[-1]) < 1e38:  # beyond it float32 is infinite; NaN is not below it either
            raise ConnectionError(f"{name} is {value}; required: a finite number")
    return np.array(numbers, np.float32)


def _part(values: Any, name: str) -> Any:
    """Return one value of a reading; anything else that a driver returns is returned as it is."""
    return values.get(name) if isinstance(values, Mapping) else values


def image_of(robot: Robot, values: Mapping[str, Any], name: str) -> np.ndarray:
    """Return the image of a camera, uint8 ``[H, W, 3]``; raise ConfigError unless type and size are as its feature declares them."""
    image, shape = np.asarray(_part(values, name)), robot.observation_features[name]
    fits = image.ndim == 3 and all(size in (None, given) for size, given in zip(shape, image.shape, strict=True))
    if image.dtype != np.uint8 or not fits:
        raise ConfigError(
            f"The camera {name} gives {image.dtype} {list(image.shape)}; required: uint8 {list(shape)}. Correct its settings or driver"
        )
    return image


def row_of(robot: Robot, values: Mapping[str, Any], cameras: Sequence[str], instruction: str) -> Observation:
    """Return an observation of a robot as one row, whose numbers are in the order of its features; raise as the functions above."""
    shown = cameras_of(robot)
    state = numbers_of(values, [name for name in robot.observation_features if name not in shown])
    images = {name: image_of(robot, values, name)[None] for name in cameras}
    return Observation(images, state[None] if len(state) else None, [instruction])


class EnvRobot:
    """One row of an env as a robot (an ``EpisodicRobot``): an action is one env step, and nothing moves between two of them.

    Args:
        env: A single env, made with ``auto_reset=False``.
        settings: Its delays, lost frames and noise; their random numbers depend on the episode alone.
    """

    is_calibrated = True

    def __init__(self, env: VectorEnv, settings: RobotConfig) -> None:
        self.env, self.settings = env, settings
        self.result: EpisodeResult | None = None
        self.num_begun = 0
        self._seen: deque[Observation] = deque(maxlen=settings.delay_steps + 1)
        self._state_dim = env.state_dim
        self.action_features = {f"action_{index}": float for index in range(env.action_dim)}

    @property
    def observation_features(self) -> dict[str, Any]:
        config = self.env.config
        numbers: dict[str, Any] = {f"state_{index}": float for index in range(self._state_dim)}
        return numbers | {name: (config.image_size, config.image_size, 3) for name in config.cameras}

    @property
    def num_restarts(self) -> int:
        return self.env.num_restarts

    def begin(self, spec: EpisodeSpec) -> str:
        observation, _ = self.env.reset(options={"episodes": [spec]})
        self.result = None
        self.num_begun += 1
        self._seen.clear()
        self._seen.append(observation)
        self._random = np.random.default_rng(derive_seed(spec.seed, "robot", spec.task_id, spec.init_state_id))
        return observation.instruction[0]

    def position(self) -> dict[str, float]:
        """Return 0 for each number, within the bounds: an env of positions does not tell where it is."""
        return dict(zip(self.action_features, self._bounded(np.zeros(self.env.action_dim)).tolist(), strict=True))

    def get_observation(self) -> dict[str, Any]:
        if self._random.random() < self.settings.drop_frames:
            raise TimeoutError("no frame came in time")
        seen = self._seen[0]
        numbers = () if seen.state is None else seen.state[0].tolist()
        return {f"state_{index}": number for index, number in enumerate(numbers)} | {
            name: image[0] for name, image in seen.images.items()
        }

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        numbers = np.array([action[name] for name in self.action_features], np.float32)
        half = (self.env.action_high - self.env.action_low) / 2
        moved = numbers
        if self.settings.noise:
            moved = numbers + self.settings.noise * half * self._random.standard_normal(len(numbers))
        step = self.env.chunk_step(moved[None, None].astype(np.float32))
        if len(step.lost_env_ids):
            raise EpisodeVoidError("the simulator was lost")
        self._seen.append(step.observation)
        if step.episodes:
            self.result = step.episodes[0]
        return dict(zip(self.action_features, self._bounded(numbers).tolist(), strict=True))

    def _bounded(self, numbers: np.ndarray) -> np.ndarray:
        return np.clip(numbers, self.env.action_low, self.env.action_high)
