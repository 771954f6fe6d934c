"""A lerobot robot, real or simulated by its own package, in a scene that a human resets."""

import importlib
import inspect
import logging
import pkgutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.robot.robot import Robot, call_device, camera_names
from rlinf.types import EpisodeResult, EpisodeSpec

logger = logging.getLogger("rlinf")


class Arm:
    """A lerobot robot (an ``EpisodicRobot``) with absolute actions; each episode ends at the env's horizon.

    Args:
        env: A single env, used only for its tasks, instructions and horizon.
        repeat_s: Time after which a repeated camera image counts as missing.
    """

    num_restarts = 0

    def __init__(self, robot: Robot, env: VectorEnv, repeat_s: float = 0.025) -> None:
        self.robot, self.env, self.repeat_s = robot, env, repeat_s
        self._images: dict[str, tuple[Any, float]] = {}
        self.result: EpisodeResult | None = None

    @property
    def observation_features(self) -> dict[str, Any]:
        return self.robot.observation_features

    @property
    def action_features(self) -> dict[str, Any]:
        return self.robot.action_features

    @property
    def is_calibrated(self) -> bool:
        return self.robot.is_calibrated

    def begin(self, spec: EpisodeSpec) -> str:
        self.spec, self.task, self.result, self._num_sent = spec, self.env.task_names[spec.task_id], None, 0
        return self.env.reset(options={"episodes": [spec]})[0].instruction[0]

    def position(self) -> dict[str, float]:
        """Return the joint positions; sent as an action, they hold the robot in place."""
        reading = self._read()
        return {name: reading[name] for name in self.action_features if name in reading}

    def get_observation(self) -> dict[str, Any]:
        """Return the robot's observation; raise TimeoutError if a camera has no new image."""
        reading, now = self._read(), time.monotonic()
        # After a failure, lerobot's cameras return their last image for 0.5 s, which is too long to keep acting on.
        for name in camera_names(self.robot):
            image, since = self._images.get(name, (None, now))
            if reading.get(name) is not image:
                self._images[name] = (reading.get(name), now)
            elif now - since > self.repeat_s:
                raise TimeoutError(f"the camera {name} has no new image")
        return reading

    def _read(self) -> dict[str, Any]:
        return call_device(lambda: dict(self.robot.get_observation()))

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        # Include undelivered actions; otherwise an episode on a dead bus would never end.
        self._num_sent += 1
        if self._num_sent == self.env.horizon_of(self.env.config, self.task):
            self.result = EpisodeResult(self.spec, self.task, False, 0.0, self._num_sent)
        return call_device(self.robot.send_action, action)


def connected_robot(path: str) -> Any:
    """Connect the robot described by a lerobot configuration file; raise MissingDependencyError without lerobot, ConfigError on failure."""
    return _connected("arm", path, ("lerobot.robots", "RobotConfig", "make_robot_from_config"), "get_observation")


def connected_teleoperator(path: str) -> Any:
    """Connect the teleoperator described by a lerobot configuration file; raise as ``connected_robot`` does."""
    kind = ("lerobot.teleoperators", "TeleoperatorConfig", "make_teleoperator_from_config")
    return _connected("teleoperator", path, kind, "get_action")


def _connected(key: str, path: str, kind: tuple[str, str, str], try_out: str) -> Any:
    """Create and connect a device; ``kind``: package, config class and factory; ``try_out``: method for a first reading."""
    file = Path(path).expanduser()
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{key}={path} cannot be read: {error}. Set {key}=<YAML file with type, port, ...>"
        ) from error
    package, config, make = kind
    try:
        import draccus

        lerobot = importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"{key}={path} needs lerobot, which cannot be imported ({error}). Run bash scripts/setup.sh --lerobot, and use its Python"
        ) from error
    missing = [module for group in (package, "lerobot.cameras") for module in _import_all(group)]
    known = sorted(getattr(lerobot, config).get_known_choices())
    name = values.get("type") if isinstance(values, dict) else None
    if name not in known:
        not_importable = f" (not importable: {', '.join(missing)})" if missing else ""
        raise ConfigError(
            f"{key}={path} has type {name}; expected {', '.join(known)}{not_importable}. Set plugins=[<module>] to register a "
            "different type"
        )
    try:
        decoded = draccus.decode(getattr(lerobot, config), values)
        device = getattr(lerobot, make)(decoded)
    except Exception as error:  # draccus and lerobot may raise any exception
        raise ConfigError(
            f"{key}={path}: lerobot rejects it ({type(error).__name__}: {error}). Correct the fields of the file"
        ) from error
    try:
        # Calibration prompts on the terminal, which is also read for success labels, so check `is_calibrated` instead.
        can_calibrate = "calibrate" in inspect.signature(device.connect).parameters
        device.connect(**({"calibrate": False} if can_calibrate else {}))
        getattr(device, try_out)()
    except Exception as error:  # exceptions of buses, cameras and simulators
        with suppress(Exception):
            device.disconnect()
        raise ConfigError(
            f"{key}={path}: it cannot be connected ({type(error).__name__}: {error}). Check port, power and calibration "
            "(lerobot-calibrate)"
        ) from error
    if getattr(decoded, "disable_torque_on_disconnect", False):
        logger.warning(
            "%s=%s: the arm goes limp when the command ends, even after an error or Ctrl-C. Set "
            "disable_torque_on_disconnect: false in the file to keep it in place",
            key, path,
        )  # fmt: skip
    return device


def disconnect(device: Any) -> None:
    """Disconnect a device; warn if its driver fails, for example because a cable was pulled."""
    try:
        call_device(device.disconnect)
    except OSError as error:
        logger.warning("%s could not be disconnected (%s)", type(device).__name__, error)


def _import_all(package: str) -> list[str]:
    """Import the modules of a package, which register their configurations; return the names that cannot be imported."""
    missing = []
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        try:
            importlib.import_module(module.name)
        except ImportError:
            missing.append(module.name)
    return missing
