"""lerobot's robot interface, and an adapter that gives an env this interface."""

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
"""Device errors that lose one reading or action but not the episode: TimeoutError, ConnectionError, errors from pulled cables."""


class EpisodeVoidError(Exception):
    """Raised if the episode must be run again, because the robot was lost and has come back, or the operator repeats it."""


class Robot(Protocol):
    """lerobot's ``Robot``, as used here; features map scalars to ``float``, and cameras to ``(H, W, 3)`` (uint8 images)."""

    @property
    def observation_features(self) -> dict[str, Any]:
        """Features of ``get_observation``."""

    @property
    def action_features(self) -> dict[str, Any]:
        """Features of ``send_action``."""

    @property
    def is_calibrated(self) -> bool:
        """Whether the robot is calibrated."""

    def get_observation(self) -> dict[str, Any]:
        """Return the newest observation; raise TimeoutError or ConnectionError if it cannot be read."""

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        """Send an action; return the action actually sent."""


class EpisodicRobot(Robot, Protocol):
    """A robot with resettable scenes and success labels."""

    @property
    def num_restarts(self) -> int:
        """How many times the robot was lost and came back."""

    def begin(self, spec: EpisodeSpec) -> str:
        """Reset the scene to the initial state of an episode; return the instruction."""

    def position(self) -> dict[str, float]:
        """Return the action that would leave the robot where it is, by action feature."""

    @property
    def result(self) -> EpisodeResult | None:
        """Result of the episode, or None while it continues."""


def check_fits(robot: Robot, spec: EnvSpec, action_dim: int) -> None:
    """Raise ConfigError unless a robot's cameras, state dimensions and joints match the policy's env."""
    cameras = camera_names(robot)
    state_names = [name for name in robot.observation_features if name not in cameras]
    missing = [name for name in spec.cameras if name not in cameras]
    if missing:
        raise ConfigError(
            f"The robot has the cameras {cameras or 'none'}; expected {list(spec.cameras)} (missing: {', '.join(missing)}). "
            f"Rename the robot's cameras to match the policy's, or set env.cameras={cameras}"
        )
    if spec.state_dim is not None and spec.state_dim != len(state_names):
        raise ConfigError(
            f"The robot has {len(state_names)} state dimensions ({', '.join(state_names) or 'none'}); expected {spec.state_dim}, which "
            "the policy reads. Set env.state to the state that the policy was trained with"
        )
    joints = list(robot.action_features)
    if len(joints) != action_dim:
        raise ConfigError(
            f"The robot has {len(joints)} joints ({', '.join(joints)}), but the policy's action_dim is {action_dim}; expected equal "
            "numbers. Choose the robot for which the policy was trained"
        )
    if not robot.is_calibrated:
        raise ConfigError("The robot is not calibrated; expected a calibrated robot. Run lerobot-calibrate")


def camera_names(robot: Robot) -> list[str]:
    """Return the names of a robot's cameras."""
    return [name for name, kind in robot.observation_features.items() if isinstance(kind, tuple)]


def call_device(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a device; convert unexpected driver errors, for example from a pulled cable, to ConnectionError."""
    try:
        return call(*arguments)
    except (LOST, RLinfError):
        raise
    except Exception as error:  # drivers may raise anything: RuntimeError, termios.error, cv2.error
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def to_vector(values: Mapping[str, Any], names: Iterable[str]) -> np.ndarray:
    """Return named values of a reading, float32 ``[D]``; raise ConnectionError for NaN and infinity, ConfigError for non-numbers."""
    vector = []
    for name in names:
        value = _get(values, name)
        try:
            vector.append(float("text" if isinstance(value, (str, bytes)) else value))
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{name} is {value!r}; expected a number. Correct the driver of the device") from None
        # Larger values become infinite in float32; the negation also catches NaN.
        if not abs(vector[-1]) < 1e38:
            raise ConnectionError(f"{name} is {value}; expected a finite number")
    return np.array(vector, np.float32)


def _get(values: Any, name: str) -> Any:
    """Return one value of a reading; if the driver's reply is not a mapping, return it unchanged."""
    return values.get(name) if isinstance(values, Mapping) else values


def to_image(robot: Robot, values: Mapping[str, Any], name: str) -> np.ndarray:
    """Return a camera's image, uint8 ``[H, W, 3]``; raise ConfigError unless dtype and shape match its feature."""
    image, shape = np.asarray(_get(values, name)), robot.observation_features[name]
    fits = image.ndim == 3 and all(size in (None, actual) for size, actual in zip(shape, image.shape, strict=True))
    if image.dtype != np.uint8 or not fits:
        raise ConfigError(
            f"The camera {name} returns {image.dtype} {list(image.shape)}; expected uint8 {list(shape)}. Correct its settings or driver"
        )
    return image


def observation_of(robot: Robot, values: Mapping[str, Any], cameras: Sequence[str], instruction: str) -> Observation:
    """Convert a robot's reading to a batch of one observation; state dimensions follow the order of the robot's features."""
    all_cameras = camera_names(robot)
    state = to_vector(values, [name for name in robot.observation_features if name not in all_cameras])
    images = {name: to_image(robot, values, name)[None] for name in cameras}
    return Observation(images, state[None] if len(state) else None, [instruction])


class EnvRobot:
    """A single env (``auto_reset=False``) as an ``EpisodicRobot``: each action is one env step, with simulated faults."""

    is_calibrated = True

    def __init__(self, env: VectorEnv, settings: RobotConfig) -> None:
        self.env, self.settings = env, settings
        self.result: EpisodeResult | None = None
        self.num_started = 0
        self._seen: deque[Observation] = deque(maxlen=settings.delay_steps + 1)
        self._state_dim = env.state_dim
        self.action_features = {f"action_{index}": float for index in range(env.action_dim)}

    @property
    def observation_features(self) -> dict[str, Any]:
        config = self.env.config
        features: dict[str, Any] = {f"state_{index}": float for index in range(self._state_dim)}
        return features | {name: (config.image_size, config.image_size, 3) for name in config.cameras}

    @property
    def num_restarts(self) -> int:
        return self.env.num_restarts

    def begin(self, spec: EpisodeSpec) -> str:
        observation, _ = self.env.reset(options={"episodes": [spec]})
        self.result = None
        self.num_started += 1
        self._seen.clear()
        self._seen.append(observation)
        self._random = np.random.default_rng(derive_seed(spec.seed, "robot", spec.task_id, spec.init_state_id))
        return observation.instruction[0]

    def position(self) -> dict[str, float]:
        """Return 0 for each dimension, clipped to its bounds, because an env with absolute actions does not report its pose."""
        return dict(zip(self.action_features, self._bounded(np.zeros(self.env.action_dim)).tolist(), strict=True))

    def get_observation(self) -> dict[str, Any]:
        if self._random.random() < self.settings.drop_frames:
            raise TimeoutError("no frame came in time")
        observation = self._seen[0]  # the oldest one, `delay_steps` behind
        state = () if observation.state is None else observation.state[0].tolist()
        images = {name: image[0] for name, image in observation.images.items()}
        return {f"state_{index}": value for index, value in enumerate(state)} | images

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        sent = np.array([action[name] for name in self.action_features], np.float32)
        half_range = (self.env.action_high - self.env.action_low) / 2
        executed = sent
        if self.settings.noise:
            executed = sent + self.settings.noise * half_range * self._random.standard_normal(len(sent))
        step = self.env.chunk_step(executed[None, None].astype(np.float32))
        if len(step.lost_env_ids):
            raise EpisodeVoidError("the simulator was lost")
        self._seen.append(step.observation)
        if step.episodes:
            self.result = step.episodes[0]
        # A real robot reports the commanded action, not the error of its motors: leave the noise out.
        return dict(zip(self.action_features, self._bounded(sent).tolist(), strict=True))

    def _bounded(self, action: np.ndarray) -> np.ndarray:
        return np.clip(action, self.env.action_low, self.env.action_high)
