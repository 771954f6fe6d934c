"""Teleoperation in a real browser: Chromium with key events, pointers and a simulated gamepad."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest

from rlinf.robot.browser import HOLD_S, BrowserTeleoperator, TeleoperationPage
from rlinf.robot.config import RobotConfig
from rlinf.robot.human import WatchedRobot
from rlinf.robot.loop import RobotEpisodes
from rlinf.types import EnvSpec, EpisodeResult, EpisodeSpec

connect = pytest.importorskip("websockets.sync.client").connect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
FPS = 20
GAMEPAD = """
window.fake = {index: 0, connected: true, axes: [0, 0, 0, 0], buttons: Array.from({length: 17}, () => ({pressed: false, value: 0}))}
navigator.getGamepads = () => [window.fake]
"""


class Browser:
    """A headless Chromium that shows one page, driven by DevTools."""

    def __init__(self, profile):
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--touch-events=enabled"]
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "--window-size=900,700", "about:blank"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.port_file, self.socket, self.number = Path(profile) / "DevToolsActivePort", None, 0

    def open(self, url):
        port = wait_for(lambda: self.port_file.is_file() and self.port_file.read_text(), "Chromium starts").split()[0]
        with urlopen(Request(f"http://127.0.0.1:{port}/json/new?{url}", method="PUT"), timeout=30) as reply:
            self.socket = connect(json.load(reply)["webSocketDebuggerUrl"], max_size=None)
        wait_for(lambda: self.status() not in (None, "connecting"))

    def call(self, method, **parameters):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while (reply := json.loads(self.socket.recv(30))).get("id") != self.number:
            pass
        assert "error" not in reply, reply
        return reply["result"]

    def run(self, script):
        return self.call("Runtime.evaluate", expression=script)["result"].get("value")

    def key(self, code, is_down):
        text = " " if code == "Space" else code[-1].lower()
        self.call("Input.dispatchKeyEvent", type="keyDown" if is_down else "keyUp", code=code, key=text)

    def touch(self, *selectors):
        """Touch the elements with one finger each, and lift all other fingers."""
        points = []
        for number, selector in enumerate(selectors):
            box = json.loads(self.run(f"JSON.stringify(document.querySelector('{selector}').getBoundingClientRect())"))
            points.append({"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "id": number})
            self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=points)
        if not selectors:
            self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def status(self):
        return self.run("document.getElementById('status')?.textContent")

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the renderer, too, which would send for a moment
        self.process.wait()
        if self.socket is not None:
            self.socket.close()


@pytest.fixture
def browse(tmp_path):
    """Opens an address in a new browser; all are killed at the end."""
    with contextlib.ExitStack() as stack:

        def opened(url):
            browser = Browser(tempfile.mkdtemp(dir=tmp_path))
            stack.callback(browser.kill)
            browser.open(url)
            return browser

        yield opened


def wait_for(condition, why="", seconds=20.0):
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, why
        time.sleep(0.002)
    return value


class Bench:
    """A robot with two relative dimensions that notes when it was sent what."""

    num_restarts, is_calibrated, action_high = 0, True, np.ones(2, np.float32)
    observation_features = {"front": (32, 32, 3)}
    action_features = {"action_0": float, "action_1": float}

    def __init__(self):
        self.sent, self.result, self.ends = [], None, threading.Event()

    def begin(self, spec):
        self.spec = spec
        return "move"

    def position(self):
        return dict.fromkeys(self.action_features, 0.0)

    def get_observation(self):
        return {"front": np.full((32, 32, 3), len(self.sent) % 256, np.uint8)}

    def send_action(self, action):
        self.sent.append((time.monotonic(), *action.values()))
        if self.ends.is_set():
            self.result = EpisodeResult(self.spec, "move", True, 0.0, len(self.sent))
        return action


class Policy:
    """Always moves by 0.25 in the first dimension."""

    class model:
        action_dim, num_observations = 2, 1

    def start_episode(self, spec):
        return None

    def act(self, observation, streams):
        return np.tile(np.array([0.25, 0.0], np.float32), (1, 8, 1))


@contextlib.contextmanager
def teleoperated():
    """Run the robot loop in a thread; yield the robot and the page."""
    bench, settings, spec = Bench(), RobotConfig(fps=FPS), EnvSpec("bench", ["front"], ["front"], 32, 0)
    robot, high = WatchedRobot(bench), bench.action_high
    page = TeleoperationPage(list(bench.action_features), lambda: robot.seen, HOLD_S - 1.2 / FPS, "127.0.0.1", 0)
    operator = BrowserTeleoperator(page, robot, settings.is_relative(2), -high, high, None)
    with contextlib.closing(page), RobotEpisodes(Policy(), robot, spec, settings, teleoperator=operator) as episodes:
        loop = threading.Thread(target=episodes.run, args=([EpisodeSpec("bench", 0, 0, 0)], lambda result: None))
        loop.start()
        try:
            yield bench, page
        finally:
            bench.ends.set()
            loop.join(20)


def last(bench):
    return bench.sent[-1][1:] if bench.sent else None


def press_and_release(bench, browser):
    """Press and release a key three times while the switch is held, and wait each time for the action."""
    browser.key("Space", True)
    wait_for(lambda: last(bench) == (0.0, 0.0))
    for _ in range(3):
        browser.key("KeyD", True)
        wait_for(lambda: last(bench) == (0.5, 0.0))
        browser.key("KeyD", False)
        wait_for(lambda: last(bench) == (0.0, 0.0))


def test_keys_pads_and_gamepad_act_and_a_killed_page_holds(browse):
    with teleoperated() as (bench, page):
        wait_for(lambda: last(bench) == (0.0, 0.0), "nobody shows the page, so the policy does not act, either")
        browser = browse(page.url)
        wait_for(lambda: last(bench) == (0.25, 0.0), "the policy acts")
        browser.key("KeyW", True)
        time.sleep(0.3)
        assert not any(y for _, _, y in bench.sent), "a key without the switch"
        browser.key("KeyW", False)
        press_and_release(bench, browser)
        wait_for(lambda: browser.status() == "You act.")
        wait_for(lambda: browser.run("document.getElementById('now').naturalWidth") == 32, "the camera's image")
        wait_for(lambda: browser.run("/^latency [0-9]{1,3} ms$/.test(document.getElementById('latency').textContent)"))
        browser.key("Space", False)
        wait_for(lambda: last(bench) == (0.25, 0.0), "released: the policy acts again")

        browser.touch("#switch", "#pads button:nth-of-type(4)")
        wait_for(lambda: last(bench) == (0.0, 0.5))
        browser.touch()
        wait_for(lambda: last(bench) == (0.25, 0.0))

        browser.run(GAMEPAD + "fake.buttons[5] = {pressed: true, value: 1}; fake.axes[1] = -1")
        wait_for(lambda: last(bench) == (0.0, 0.5))
        browser.run("navigator.getGamepads = () => [null]")
        wait_for(lambda: last(bench) == (0.0, 0.0))
        wait_for(lambda: "gamepad has vanished" in browser.status())
        assert not page._message["held"] and last(bench) == (0.0, 0.0), "the policy does not act, either"
        browser.run("document.querySelector('#without button').click()")
        wait_for(lambda: last(bench) == (0.25, 0.0))

        second = browse(page.url)
        wait_for(lambda: last(bench) == (0.0, 0.0))
        for shown in (browser, second):
            wait_for(lambda shown=shown: "two browsers" in shown.status())
        second.kill()
        wait_for(lambda: last(bench) == (0.25, 0.0))

        browser.key("Space", True)
        browser.key("KeyD", True)
        wait_for(lambda: last(bench) == (0.5, 0.0))
        browser.kill()
        wait_for(lambda: last(bench) == (0.0, 0.0), "the robot holds")
        number = len(bench.sent)
        wait_for(lambda: len(bench.sent) > number + 5)
        assert not any(any(action) for _, *action in bench.sent[number:]), "and goes on holding"
