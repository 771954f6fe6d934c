"""Teleoperation from a browser: the page's state, and a teleoperator that reads it."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlinf.files import Json
from rlinf.robot.human import WatchedRobot
from rlinf.robot.page import Content, ServedPage, as_jpeg, as_json
from rlinf.robot.robot import to_vector

HTML = Path(__file__).with_name("browser.html")
HOLD_S = 0.2
"""Time after a browser's last message at which nothing may move any more."""
DONE, DISCARD = "done", "discard"
TWO_BROWSERS = "two browsers show the page, so nothing moves: close one of them"
NO_GAMEPAD = "the gamepad has vanished, so nothing moves: connect it again, or continue without it on the page"


class TeleoperationPage(ServedPage):
    """Page with the image, keys, pads, a gamepad and a switch that is held to act. Only one browser can act at a time.

    Args:
        names: Names of the ``D`` action dimensions.
        look: Returns the newest image, uint8 ``[H, W, 3]``, or None.
        expires_s: Age of the newest command at which it no longer counts.
        ends: Whether the page has buttons that end an episode.

    Attributes:
        text: Shown above the image.
    """

    def __init__(
        self, names: Sequence[str], look: Callable[[], np.ndarray | None], expires_s: float, host: str, port: int,
        ends: bool = False,
    ) -> None:  # fmt: skip
        self.names, self.look, self.expires_s, self.ends, self.text = list(names), look, expires_s, ends, ""
        self._lock = threading.Lock()
        self._message: Json = {"browser": None, "number": 0, "held": False, "gone": False}
        self._axes = np.zeros(len(self.names), np.float32)
        self._arrived_s = self._second_s = -math.inf
        self._read: int | None = None
        self._end: str | None = None
        super().__init__(host, port)

    def take(self, message: Json) -> Json | None:
        """Keep a browser's newest command; the reply contains the number of the newest one that has been read."""
        browser, number, end = message["browser"], message["number"], message["end"]
        axes = np.array(message["axes"], np.float32)
        is_valid = isinstance(browser, str) and isinstance(number, int) and end in (None, DONE, DISCARD)
        # NaN fails the comparison, too.
        if not is_valid or axes.shape != self._axes.shape or not (np.abs(axes) <= 1).all():
            return None
        with self._lock:
            now, known = time.monotonic(), self._message
            is_same = browser == known["browser"]
            if not is_same and now - self._arrived_s < self.expires_s:
                self._second_s = now
            elif not is_same or number > known["number"]:  # requests may overtake each other
                flags = {key: message[key] is True for key in ("held", "gone")}
                self._message, self._axes, self._arrived_s = {"browser": browser, "number": number, **flags}, axes, now
                self._read = self._read if is_same else None
                self._end = end or self._end
            problem = self._problem()
            return {"text": self.text, "problem": problem and str(problem), "read": self._read if is_same else None}

    def read(self) -> tuple[bool, np.ndarray]:
        """Return whether the switch is held, and the axes, float32 ``[D]`` in [-1, 1]; raise TimeoutError or ConnectionError if nothing may move."""
        with self._lock:
            if (problem := self._problem()) is not None:
                raise problem
            self._read = self._message["number"]
            return self._message["held"], self._axes

    def take_end(self) -> str | None:
        """Return which button has been pressed since the last call: ``DONE``, ``DISCARD`` or None."""
        with self._lock:
            end, self._end = self._end, None
            return end

    def _problem(self) -> OSError | None:
        now = time.monotonic()
        if now - self._arrived_s > self.expires_s:
            return TimeoutError(f"no message from a browser for {1e3 * self.expires_s:.0f} ms: open {self.url}")
        if now - self._second_s < self.expires_s:
            return ConnectionError(TWO_BROWSERS)
        return ConnectionError(NO_GAMEPAD) if self._message["gone"] else None

    def content(self, name: str) -> Content | None:
        if name == "":
            return "text/html; charset=utf-8", HTML.read_bytes()
        if name == "setup":
            return as_json({"names": self.names, "ends": self.ends})
        image = self.look() if name == "now" else None
        return None if image is None else as_jpeg(image)


def displacement(axes: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return axes in [-1, 1] as fractions of an action's bounds, all ``[D]``: 0 remains 0, if it is within the bounds."""
    return np.clip(np.where(axes > 0, axes * high, -axes * low), low, high)


class BrowserTeleoperator:
    """The operator of a page as a ``Teleoperator``: acts while the switch is held, and is lost while nothing may move.

    Args:
        low, high: Bounds of the displacements, ``[D]``; ignored for positions.
        max_step: Maximum change of a position per action; None if all dimensions are displacements.
    """

    is_calibrated = True

    def __init__(
        self, page: TeleoperationPage, robot: WatchedRobot, is_relative: Sequence[bool], low: np.ndarray, high: np.ndarray,
        max_step: float | None,
    ) -> None:  # fmt: skip
        self.page, self.robot, self.is_relative, self.low, self.high = page, robot, is_relative, low, high
        self.action_features, self.max_step = robot.action_features, max_step or 0.0
        self._episode, self._last = 0, np.zeros(len(is_relative), np.float32)

    def get_teleop_events(self) -> dict[str, bool]:
        is_held, self._axes = self.page.read()
        return {"is_intervention": is_held}

    def get_action(self) -> dict[str, float]:
        if self._episode != self.robot.num_started:
            self._follow(self.robot.position())
        moved = displacement(self._axes, self.low, self.high)
        self._last = np.where(self.is_relative, moved, self._last + self._axes * self.max_step).astype(np.float32)
        return dict(zip(self.action_features, self._last.tolist(), strict=True))

    def send_feedback(self, feedback: Json) -> None:
        self._follow(feedback)

    def _follow(self, positions: Json) -> None:
        """Let the next action start at the robot's positions."""
        self._episode, self._last = self.robot.num_started, to_vector(positions, self.action_features)
