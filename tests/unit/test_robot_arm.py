"""A robot of lerobot in place of a row of the env."""

import sys
import termios
from types import SimpleNamespace

import numpy as np
import pytest
from run_results import run_config

from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.robot.arm import Arm, connected_robot, disconnect
from rlinf.robot.command import _check_arm, robot
from rlinf.robot.config import RobotConfig
from rlinf.types import EpisodeSpec, Observation

SPEC = EpisodeSpec("table", 1, 2, 3)


class Joints:
    """Two joints, which jump to where they are sent."""

    is_calibrated = True
    action_features = {"lift.pos": float, "turn.pos": float}
    observation_features = {**action_features, "front": (4, 4, 3)}

    def __init__(self):
        self.at = {"lift.pos": 10.0, "turn.pos": -5.0}

    def get_observation(self):
        return {**self.at, "front": np.zeros((4, 4, 3), np.uint8), "environment_state": [1]}

    def send_action(self, action):
        self.at = dict(action)
        return action


class Table:
    """An env of two tasks whose episodes have three actions; a step in it fails."""

    config, task_names = SimpleNamespace(), ["lift", "turn"]

    def reset(self, options):
        assert options["episodes"] == [SPEC]
        return Observation({}, None, ["turn it round"]), {}

    def horizon_of(self, config, task):
        return {"lift": 9, "turn": 3}[task]


def test_a_picture_that_stays_the_same_object_is_lost(monkeypatch):
    """A camera that is gone has its last image for half a second; one that is asked twice at once has not failed."""
    joints, now = Joints(), [0.0]
    monkeypatch.setattr("rlinf.robot.arm.time.monotonic", lambda: now[0])
    arm, images = Arm(joints, Table(), repeat_s=0.025), [np.zeros((4, 4, 3), np.uint8) for _ in range(2)]
    joints.get_observation = lambda: {**joints.at, "front": image}
    image = images[0]
    arm.get_observation()
    now[0] = 0.02
    assert arm.get_observation()["front"] is image
    now[0] = 0.05
    with pytest.raises(TimeoutError, match="front"):
        arm.get_observation()
    image = images[1]  # equal, and new
    assert arm.get_observation()["front"] is image


def test_an_episode_ends_after_the_actions_of_the_env():
    arm = Arm(Joints(), Table())
    for _ in range(2):
        assert arm.begin(SPEC) == "turn it round" and arm.result is None
        for number in range(3):
            assert arm.result is None
            arm.send_action({"lift.pos": float(number), "turn.pos": 0.5})
        assert arm.position() == {"lift.pos": 2.0, "turn.pos": 0.5}
        assert (arm.result.task, arm.result.num_env_steps, arm.result.success) == ("turn", 3, False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "success=env.*no env reports it.*Set success=human"),
        ({"success": "human"}, r"relative_dims=null.*positions.*Set relative_dims=\[\]"),
        ({"success": "human", "relative_dims": [], "noise": 0.1}, "noise=0.1.*simulated robot.*Set noise=0.0"),
        ({"success": "human", "relative_dims": [], "teleoperator": "scripted"}, "Set teleoperator=none"),
        ({"success": "human", "relative_dims": []}, "max_relative_target=null .*may jump.*Set max_relative_target="),
    ],
)
def test_what_an_env_alone_can_do_is_refused(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        robot(run_config(tmp_path), RobotConfig(arm="arm.yaml", **given))


@pytest.mark.parametrize(("control", "units", "message"), [
    ("delta", "lerobot", "env.control=delta.*Set env.control=joints"), ("joints", "radians", "env.units=radians.*Set env.units=lerobot"),
])  # fmt: skip
def test_actions_in_other_units_are_refused(control, units, message):
    config = SimpleNamespace(env=SimpleNamespace(control=control, units=units))
    with pytest.raises(ConfigError, match=message):
        _check_arm(config, RobotConfig(arm="arm.yaml", success="human", relative_dims=[], max_relative_target=2.0))


def test_an_arm_of_an_env_with_other_actions_is_refused_by_name(tmp_path):
    """The tabletop's actions are displacements, and no setting of it says so. What the message says to type is accepted."""
    words = {"success": "human", "relative_dims": [], "max_relative_target": 2.0}
    with pytest.raises(ConfigError, match="env.name=tabletop.*joint positions") as error:
        robot(run_config(tmp_path, "env=tabletop"), RobotConfig(arm="arm.yaml", **words))
    typed = str(error.value).partition(" Set ")[2].split()
    _check_arm(run_config(tmp_path, *typed), RobotConfig(arm="arm.yaml", **words))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("the thread of the camera has ended"), termios.error(5, "Input/output error"), OSError(5, "cable")],
)
def test_an_unplugged_camera_or_bus_is_a_lost_reading(error, caplog):
    """A serial port without its cable raises termios.error, which is no OSError."""

    def gone(*action):
        raise error

    joints = Joints()
    joints.get_observation = joints.send_action = joints.disconnect = gone
    arm = Arm(joints, Table())
    arm.begin(SPEC)
    for call in (arm.get_observation, arm.position, lambda: arm.send_action({})):
        with pytest.raises(OSError, match=str(error.args[-1])):
            call()
    disconnect(joints)
    assert str(error.args[-1]) in caplog.text


def test_a_robot_that_cannot_be_had_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="cannot be read.*Set arm="):
        connected_robot(str(tmp_path / "nothing.yaml"))
    path = tmp_path / "arm.yaml"
    path.write_text("type: so101_follower\nport: /dev/nothing\n")
    monkeypatch.setitem(sys.modules, "lerobot.robots", None)
    with pytest.raises(MissingDependencyError, match="setup.sh --lerobot"):
        connected_robot(str(path))
