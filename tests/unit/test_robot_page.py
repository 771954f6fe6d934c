"""The web page on which a person tells success."""

import io
import json
import threading
import time
from contextlib import closing
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image
from run_results import run_config

from rlinf.errors import ConfigError
from rlinf.robot.command import robot as robot_command
from rlinf.robot.config import RobotConfig
from rlinf.robot.human import HumanLabelledRobot
from rlinf.robot.page import BROWSER_TIMEOUT_S, Page, PageTeleoperator
from rlinf.robot.teleoperator import TakeOver
from rlinf.types import EpisodeResult, EpisodeSpec

SPEC = EpisodeSpec("table", 1, 2, 3)


class Camera:
    """A robot that sees one grey value, in one thread only."""

    observation_features, action_features = {"front": (4, 6, 3)}, {"joint": float}

    def __init__(self, grey):
        self.grey, self.result, self.thread = grey, None, None

    def begin(self, spec):
        self.result = None
        return "pick it up"

    def get_observation(self):
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident(), "no other thread asks it"
        return {"front": np.full((4, 6, 3), self.grey, np.uint8)}


def get(url):
    with urlopen(url, timeout=10) as reply:
        return reply.read()


def state_with(url, text):
    """Wait until the page shows a text."""
    until = time.monotonic() + 10
    while text not in (state := json.loads(get(f"{url}state")))["text"]:
        assert time.monotonic() < until, state
        time.sleep(0.01)
    return state


def post(url, **values):
    try:
        return urlopen(f"{url}choice", json.dumps(values).encode(), timeout=10).status
    except HTTPError as error:
        return error.code


def grey_of(content):
    return round(float(np.asarray(Image.open(io.BytesIO(content))).mean()))


def test_an_episode_on_the_page(tmp_path):
    """It shows the wanted start and the present image; each question takes one answer, once."""
    (tmp_path / "wanted").mkdir()
    Image.new("RGB", (6, 4), (200, 200, 200)).save(tmp_path / "wanted" / "1_2_3.png")
    robot, told = Camera(40), []
    person = HumanLabelledRobot(robot, tmp_path / "starts", tmp_path / "wanted")
    person.number, person.num_episodes = 2, 30

    def loop():
        person.begin(SPEC)
        robot.result = EpisodeResult(SPEC, "pick", False, 0.0, 5)
        told.append(person.result.success)

    with closing(Page(person, "127.0.0.1", 0)) as page:
        acting = threading.Thread(target=loop)
        acting.start()
        first = state_with(page.url, "pick it up")
        assert first["choices"] == {"": "ready"} and first["wanted"] is True
        assert grey_of(get(f"{page.url}wanted")) == 200 and b"<html" in get(page.url)
        robot.grey, until = 90, time.monotonic() + 10
        while grey_of(get(f"{page.url}now")) != 90:  # it follows what the person moves
            assert time.monotonic() < until
        assert [post(page.url, number=first["number"], choice=choice) for choice in ("y", "", "")] == [404, 200, 404]
        second = state_with(page.url, "succeed")
        assert "3 of 30: pick it up" in second["text"], "two were played by an earlier process"
        assert post(page.url, number=first["number"], choice="y") == 404, "that question is over"
        assert post(page.url, number=second["number"], choice="y") == 200
        acting.join(10)
        assert told == [True] and json.loads(get(f"{page.url}state"))["choices"] == {}
        assert not (tmp_path / "starts" / "overlay.png").exists(), "the browser lays them over each other"

        root = page.url.replace(page.path, "/")
        for url, status in ((f"{page.url}nothing", "404"), (root, "403"), (f"{root}guess/state", "403")):
            with pytest.raises(HTTPError, match=status):
                get(url)
        assert post(f"{root}guess/", number=second["number"], choice="y") == 403
        taken = int(page.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match="Set page_port=0"):
            Page(person, "127.0.0.1", taken)
        with pytest.raises(ConfigError, match="Set page_port=0"):  # before a policy is loaded, here none
            robot_command(run_config(tmp_path, "checkpoint=nothing"), RobotConfig(success="page", page_port=taken))
    with pytest.raises(OSError):
        get(page.url)


class Leader:
    """A leader arm as lerobot has it: no button, and it cannot follow."""

    action_features, is_calibrated = {"joint": float}, True

    def get_action(self):
        return {"joint": 7.0}

    def send_feedback(self, feedback):
        raise NotImplementedError


def test_who_has_a_leader_arm_takes_over_on_the_page(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="Set success=page"):
        TakeOver(Leader(), Camera(40), np.array([False]), 1.0)
    person, last = HumanLabelledRobot(Camera(40), tmp_path, None), np.array([5.5], np.float32)
    with closing(Page(person, "127.0.0.1", 0)) as page:
        assert post(page.url, takes_over=True) == 404, "there is no teleoperator yet"
        who = TakeOver(PageTeleoperator(Leader(), page), Camera(40), np.array([False]), 1.0)
        who.update(last)
        assert not who.policy_acts and who.action is None, "nobody looks at the page, so the robot holds"
        acting = []
        for takes_over in (None, True, False):
            if takes_over is not None:
                assert post(page.url, takes_over=takes_over) == 200
            assert json.loads(get(f"{page.url}state"))["takes_over"] is bool(takes_over)
            who.update(last)
            who.show(last)
            acting.append((who.policy_acts, None if who.action is None else who.action.tolist()))
        assert acting == [(True, None), (False, [6.5]), (True, None)], "one unit nearer to where the leader is"
        post(page.url, takes_over=True)
        person.robot.begin = lambda spec: "again"
        person.ask = lambda text, choices: ""
        person.begin(SPEC)
        assert person.takes_over is False, "an episode starts with the policy"
        page.last_seen_s -= 2 * BROWSER_TIMEOUT_S
        who.update(last)
        assert not who.policy_acts and who.action is None
