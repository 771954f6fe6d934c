"""A robot of lerobot, real or simulated by a package of its own, whose scene a person puts back."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import yaml

from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.robot.robot import Robot
from rlinf.types import EpisodeResult, EpisodeSpec


class Arm:
    """A robot of lerobot (an ``EpisodicRobot``); its actions are positions, and an episode ends after the env's number of them.

    Args:
        robot: Connected.
        env: A single env, which names tasks and instructions; nothing moves in it.
    """

    num_restarts = 0

    def __init__(self, robot: Robot, env: VectorEnv) -> None:
        self.robot, self.env = robot, env
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
        seen = self.robot.get_observation()
        return {name: float(seen[name]) for name in self.action_features}

    def get_observation(self) -> dict[str, Any]:
        return self.robot.get_observation()

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        sent = self.robot.send_action(action)
        self._num_sent += 1
        if self._num_sent == self.env.horizon_of(self.env.config, self.task):
            self.result = EpisodeResult(self.spec, self.task, False, 0.0, self._num_sent)
        return sent


def connected_robot(path: str) -> Any:
    """Connect the robot of a file of lerobot's configuration (YAML with ``type``), as lerobot's commands take it.

    Raise MissingDependencyError without lerobot; ConfigError for a file that it does not read, and a robot that is not calibrated.
    """
    file = Path(path).expanduser()
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"arm={path} cannot be read: {error}. Set arm=<YAML file with type, port, cameras>"
        ) from error
    try:
        import draccus
        from lerobot.robots import RobotConfig, make_robot_from_config
    except ImportError as error:
        raise MissingDependencyError(
            f"arm={path} needs the package lerobot, which does not import ({error}). Run bash scripts/setup.sh --lerobot, and take its Python"
        ) from error
    missing = [each for group in ("lerobot.robots", "lerobot.cameras") for each in _import_all(group)]
    known = sorted(RobotConfig.get_known_choices())
    name = values.get("type") if isinstance(values, dict) else None
    if name not in known:
        lacking = f" (not importable: {', '.join(missing)})" if missing else ""
        raise ConfigError(
            f"arm={path} has type {name}; required: {', '.join(known)}{lacking}. Add the module that registers another one: "
            "plugins=[<module>]"
        )
    try:
        robot = make_robot_from_config(draccus.decode(RobotConfig, values))
    except Exception as error:  # draccus and lerobot raise what they like
        raise ConfigError(
            f"arm={path}: lerobot refuses it ({type(error).__name__}: {error}). Set other fields in it"
        ) from error
    try:
        robot.connect(calibrate=False)
        robot.get_observation()
    except Exception as error:  # buses, cameras and simulators, too
        raise ConfigError(
            f"arm={path}: the robot does not connect ({type(error).__name__}: {error}). Look at port, power and calibration "
            "(lerobot-calibrate)"
        ) from error
    return robot


def _import_all(package: str) -> list[str]:
    """Import the modules of a package, which register their configurations; return the names of those that lack another package."""
    missing = []
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        try:
            importlib.import_module(module.name)
        except ImportError:
            missing.append(module.name)
    return missing
