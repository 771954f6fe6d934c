"""An operator at a browser: which commands count, how they move positions, and the episodes that are recorded."""

import json
import math
import threading
import time
from contextlib import closing
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from run_results import run_config

from rlinf.cli import main
from rlinf.data.lerobot_dataset import open_dataset
from rlinf.errors import ConfigError
from rlinf.preflight.validation import validate
from rlinf.robot import browser, demonstrate, evaluation
from rlinf.robot.browser import NO_GAMEPAD, TWO_BROWSERS, BrowserTeleoperator, TeleoperationPage, displacement
from rlinf.robot.command import robot
from rlinf.robot.config import DemonstrationConfig, RobotConfig
from rlinf.robot.human import WatchedRobot
from rlinf.robot.teleoperator import TakeOver
from tests.unit.test_robot import WORDS


def page_of(num_axes=2, expires_s=60.0, image=None):
    names = [f"action_{index}" for index in range(num_axes)]
    return TeleoperationPage(names, lambda: image, expires_s, "127.0.0.1", 0)


def command(number=1, browser="a", **values):
    return {"browser": browser, "number": number, "held": True, "axes": [0.5, -1], "gone": False, "end": None} | values


def post(url, message):
    try:
        return json.load(urlopen(f"{url}command", json.dumps(message).encode(), timeout=10))
    except HTTPError as error:
        return error.code


def test_only_the_newest_command_of_one_browser_counts():
    with closing(page_of(image=np.full((4, 4, 3), 90, np.uint8))) as page:
        with pytest.raises(TimeoutError):
            page.read()
        assert post(page.url, command(2))["read"] is None, "received, but not read yet"
        is_held, axes = page.read()
        assert is_held and axes.tolist() == [0.5, -1]
        assert post(page.url, command(1, held=False))["read"] == 2 and page.read()[0], "overtaken by a newer one"
        invalid = [{"axes": [1]}, {"axes": [math.nan, 0]}, {"axes": [1.1, 0]}, {"number": "x"}, {"end": "maybe"}]
        for values in invalid:
            assert post(page.url, command(3) | values) == 404 and page.read()[1].tolist() == [0.5, -1]
        assert post(page.url, {}) == post(page.url, []) == 404
        assert json.loads(urlopen(f"{page.url}setup").read())["names"] == ["action_0", "action_1"]
        assert urlopen(page.url).read().startswith(b"<!doctype") and urlopen(f"{page.url}now").read()[:2] == b"\xff\xd8"
        root = page.url.replace(page.path, "/")
        for url in (root, f"{root}guess/", f"{root}{page.path.strip('/')}x/"):
            assert post(url, command(9)) == 403
            with pytest.raises(HTTPError, match="403"):
                urlopen(url)
        assert post(page.url, command(3, gone=True))["problem"] == NO_GAMEPAD
        with pytest.raises(ConnectionError, match="gamepad"):
            page.read()
        assert post(page.url, command(4, end="done"))["problem"] is None
        assert [page.take_end(), page.take_end()] == ["done", None]


def test_a_second_browser_and_silence_stop_all_motion(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(browser, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with closing(page_of(expires_s=0.3)) as page:
        page.take(command(1))
        assert page.take(command(1, browser="b", axes=[1, 1]))["problem"] == TWO_BROWSERS
        assert page.take(command(2))["problem"] == TWO_BROWSERS
        with pytest.raises(ConnectionError, match="two browsers"):
            page.read()
        now[0] += 0.25
        assert page.take(command(3))["problem"] == TWO_BROWSERS
        now[0] += 0.1
        assert page.take(command(4))["problem"] is None and page.read()[0], "the second one is closed"
        now[0] += 0.31
        with pytest.raises(TimeoutError):
            page.read()
        assert page.take(command(1, browser="b", held=False))["problem"] is None and not page.read()[0], "the next one"


def test_an_axis_is_a_fraction_of_the_bounds():
    low, high = np.array([-1, -2, 0, 3.0]), np.array([1, 4, 1, 5.0])
    assert displacement(np.array([0.5, 0.5, -1, 0]), low, high).tolist() == [0.5, 2, 0, 3]
    assert displacement(np.array([-1, -0.5, 1, 1]), low, high).tolist() == [-1, -1, 1, 5]


class Arm:
    """A robot with a displacement and a position."""

    action_features, observation_features = {"action_0": float, "action_1": float}, {}

    def begin(self, spec):
        return "move"

    def position(self):
        return {"action_0": 0.0, "action_1": 40.0}


def test_a_position_starts_where_the_robot_is():
    """The policy has moved it to 7; each action of the operator moves it by up to 2, and an episode starts at its pose."""
    watched, is_relative = WatchedRobot(Arm()), np.array([True, False])
    with closing(page_of()) as page:
        operator = BrowserTeleoperator(page, watched, is_relative, -np.ones(2), np.ones(2), 2.0)
        take_over = TakeOver(operator, watched, is_relative, 2.0)
        actions = []

        def step(number, last, **values):
            page.take(command(number, **values))
            take_over.update(np.array(last, np.float32))
            take_over.show(np.array(last, np.float32))
            actions.append(None if take_over.action is None else take_over.action.tolist())

        watched.begin(None)
        step(1, [0, 7], held=False)
        step(2, [0, 7])
        step(3, [0, 5])
        step(4, [0, 3], gone=True)
        assert not take_over.policy_acts
        watched.begin(None)
        take_over.begin()
        step(5, [0, 40], axes=[0, 1])
    assert actions == [None, [0.5, 5], [0.5, 3], None, [0, 42]]


class Driver(threading.Thread):
    """Sends the commands of a browser to a page at 100 Hz, as a script of (is over, command) says."""

    def __init__(self, page, script):
        super().__init__(daemon=True)
        self.page, self.script = page, script

    def run(self):
        number = 0
        for is_over, values in self.script:
            for end in (values.pop("end", None), *[None] * 3000):
                number += 1
                state = self.page.take(command(number, end=end, **values))
                if is_over(state):
                    break
                time.sleep(0.01)


def test_an_operator_records_done_and_discarded_episodes(tmp_path, monkeypatch, capsys):
    """Two steps are discarded; the switch must be released; then three steps are done, and 5 of the next run into the time limit."""

    def has(text):
        return lambda state: text in state["text"]

    script = [
        (has("0 steps"), {"held": False}),
        (has("2 steps"), {"axes": [1, 0]}),
        (has("release"), {"axes": [1, 0], "end": "discard"}),
        (has("0 steps"), {"axes": [1, 0], "held": False}),
        (has("3 steps"), {"axes": [0, 0.25]}),
        (has("of 2: "), {"axes": [0, 0.25], "held": False, "end": "done"}),
        (has("episode 2 of 2"), {"held": False}),
        (has("0 steps"), {"held": False}),
        (has("5 steps"), {"axes": [0.125, 0]}),
    ]

    class Driven(TeleoperationPage):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            Driver(self, script).start()

    monkeypatch.setattr(demonstrate, "TeleoperationPage", Driven)
    keys = [
        "env.image_size=16",
        "env.max_episode_steps=5",
        "env.tolerance_m=0.001",
        "collect.fps=2",
    ]  # slow, so that a busy machine adds no step
    data = tmp_path / "data"
    arguments = ["collect", "teleoperator=browser", "page_port=0", "env=tabletop", f"dataset={data}", *keys]
    assert main([*arguments, "collect.num_episodes=2", "collect.only_success=false"]) == 0
    dataset = open_dataset(data, {"front": "observation.images.front"}, None, outcomes=True)
    assert dataset.actions.tolist() == [[0, 0.25]] * 3 + [[0.125, 0]] * 5
    assert dataset.outcomes.success.tolist() == [False, False, True] + [False] * 5
    about = json.loads((data / "meta" / "rlinf.json").read_text())
    assert about["demonstrator"] == "human" and [e["num_env_steps"] for e in about["episodes"]] == [3, 5]
    assert "teleoperation: http://127.0.0.1:" in capsys.readouterr().out


def test_the_operator_takes_over_in_the_command(tmp_path, monkeypatch):
    """Nothing moves before a browser shows the page; then the policy acts, then the operator to the end."""
    script = [(lambda state: state["read"], {"held": False}), (lambda state: False, {"axes": [0, 0]})]

    class Driven(TeleoperationPage):
        def read(self):
            if not hasattr(self, "driver"):
                self.driver = Driver(self, script)
                threading.Timer(0.1, self.driver.start).start()
            return super().read()

    monkeypatch.setattr(evaluation, "TeleoperationPage", Driven)
    words = [*WORDS, "env.max_episode_steps=40", "evaluation.num_episodes=1"]
    outcome = robot(run_config(tmp_path, *words), RobotConfig(teleoperator="browser", page_port=0, fps=20))
    timing = json.loads((tmp_path / "timing.json").read_text())
    assert len(outcome.results) == 1 and timing["teleop_lost_steps"] >= 2 and timing["intervention_steps"] >= 3
    assert timing["teleop_lost_steps"] + timing["intervention_steps"] < timing["steps"]


def test_what_an_operator_at_a_browser_needs(tmp_path):
    for settings, message in (({"real_time": False}, "real_time=true"), ({"fps": 9}, "Set fps=10")):
        with pytest.raises(ConfigError, match=message):
            robot(run_config(tmp_path, *WORDS), RobotConfig(teleoperator="browser", page_port=0, **settings))
    with pytest.raises(ConfigError, match=r"env\.cameras=null"):
        demonstrate.demonstrate(run_config(tmp_path, "env.cameras=[]"), DemonstrationConfig())
    config = run_config(tmp_path, "env=gymnasium", "env.id=Pendulum-v1", f"dataset={tmp_path / 'new'}")
    validate(config, "demonstrate")
    with pytest.raises(ConfigError, match="no scripted expert"):
        validate(config, "collect")
