"""A robot of lerobot, real or simulated by a package of its own, whose scene a person puts back."""

from __future__ import annotations

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
from rlinf.robot.robot import Robot, answer_of, cameras_of
from rlinf.types import EpisodeResult, EpisodeSpec

logger = logging.getLogger("rlinf")


class Arm:
    """A robot of lerobot (an ``EpisodicRobot``); its actions are positions, and an episode ends after the env's number of them.

    Args:
        robot: Connected.
        env: A single env, which names tasks and instructions; nothing moves in it.
        repeat_s: Time after which a camera must have another image.
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
        """Return where its joints are, which are also its actions."""
        seen = self._observe()
        return {name: seen[name] for name in self.action_features if name in seen}

    def get_observation(self) -> dict[str, Any]:
        """Return the robot's; raise TimeoutError for an image that is not new: lerobot's cameras return the last one for 0.5 s."""
        seen, now = self._observe(), time.monotonic()
        for name in cameras_of(self.robot):
            image, since = self._images.get(name, (None, now))
            if seen.get(name) is not image:
                self._images[name] = (seen.get(name), now)
            elif now - since > self.repeat_s:
                raise TimeoutError(f"the camera {name} has no new image")
        return seen

    def _observe(self) -> dict[str, Any]:
        return answer_of(lambda: dict(self.robot.get_observation()))

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        self._num_sent += 1  # also if it does not reach the robot, or the episode of a dead bus would not end
        if self._num_sent == self.env.horizon_of(self.env.config, self.task):
            self.result = EpisodeResult(self.spec, self.task, False, 0.0, self._num_sent)
        return answer_of(self.robot.send_action, action)


def connected_robot(path: str) -> Any:
    """Connect the robot of a file of lerobot's configuration (YAML with ``type``), as lerobot's commands take it.

    Raise MissingDependencyError without lerobot; ConfigError for a file that it does not read, and a robot that does not connect.
    """
    return _connected("arm", path, ("lerobot.robots", "RobotConfig", "make_robot_from_config"), "get_observation")


def connected_teleoperator(path: str) -> Any:
    """Connect the teleoperator of such a file; raise as ``connected_robot``."""
    kind = ("lerobot.teleoperators", "TeleoperatorConfig", "make_teleoperator_from_config")
    return _connected("teleoperator", path, kind, "get_action")


def _connected(key: str, path: str, kind: tuple[str, str, str], try_out: str) -> Any:
    """Make and connect the device of a file; ``kind`` names package, class of the configuration and maker, ``try_out`` a method."""
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
            f"{key}={path} needs the package lerobot, which does not import ({error}). Run bash scripts/setup.sh --lerobot, and take its Python"
        ) from error
    missing = [each for group in (package, "lerobot.cameras") for each in _import_all(group)]
    known = sorted(getattr(lerobot, config).get_known_choices())
    name = values.get("type") if isinstance(values, dict) else None
    if name not in known:
        lacking = f" (not importable: {', '.join(missing)})" if missing else ""
        raise ConfigError(
            f"{key}={path} has type {name}; required: {', '.join(known)}{lacking}. Add the module that registers another one: "
            "plugins=[<module>]"
        )
    try:
        decoded = draccus.decode(getattr(lerobot, config), values)
        device = getattr(lerobot, make)(decoded)
    except Exception as error:  # draccus and lerobot raise what they like
        raise ConfigError(
            f"{key}={path}: lerobot rejects it ({type(error).__name__}: {error}). Set other fields in it"
        ) from error
    try:
        can_calibrate = "calibrate" in inspect.signature(device.connect).parameters
        device.connect(**({"calibrate": False} if can_calibrate else {}))
        getattr(device, try_out)()
    except Exception as error:  # buses, cameras and simulators, too
        with suppress(Exception):
            device.disconnect()
        raise ConfigError(
            f"{key}={path}: it does not connect ({type(error).__name__}: {error}). Look at port, power and calibration "
            "(lerobot-calibrate)"
        ) from error
    if getattr(decoded, "disable_torque_on_disconnect", False):
        logger.warning(
            "%s=%s: the arm goes limp when the command ends, also by an error or Ctrl-C. Set disable_torque_on_disconnect: false in the file "
            "to let it stay where it is",
            key, path,
        )  # fmt: skip
    return device


def disconnect(device: Any) -> None:
    """Disconnect a device; warn where its driver cannot, as without its cable."""
    try:
        answer_of(device.disconnect)
    except OSError as error:
        logger.warning("%s is not disconnected (%s)", type(device).__name__, error)


def _import_all(package: str) -> list[str]:
    """Import the modules of a package, which register their configurations; return the names of those that lack another package."""
    missing = []
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        try:
            importlib.import_module(module.name)
        except ImportError:
            missing.append(module.name)
    return missing
