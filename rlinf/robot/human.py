"""Robot episodes in which a human resets the scene and labels success."""

import io
import sys
import termios
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlinf.errors import RLinfError
from rlinf.files import write_bytes
from rlinf.images import open_image
from rlinf.robot.robot import LOST, EpisodeVoidError, EpisodicRobot, camera_names, to_image
from rlinf.types import EpisodeResult, EpisodeSpec

OVERLAY = "overlay.png"
"""The target initial image and the current image, blended half and half."""
READY, AGAIN = {"": "ready"}, {"o": "look again"}
SUCCESS = {"y": "success", "n": "failure", "r": "repeat the episode"}

Ask = Callable[[str, Mapping[str, str]], str]
"""Shows a text and returns the chosen letter of the choices (letter -> meaning); raises EOFError if nobody can reply."""


def ask_on_terminal(text: str, choices: Mapping[str, str], read: Callable[[str], str] = input) -> str:
    """Ask until the human types a choice, or text that starts with one."""
    # Discard lines typed before the question: they would start an arm while hands are in the scene.
    if read is input and sys.stdin.isatty():
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
    legend = ", ".join(f"{letter or 'Enter'}: {meaning}" for letter, meaning in choices.items())
    while (choice := read(f"{text} ({legend}) ").strip().lower()[:1]) not in choices:
        pass
    return choice


class WatchedRobot:
    """A robot (an ``EpisodicRobot``) whose images can be shown.

    Attributes:
        seen: Newest image of the first camera, uint8 ``[H, W, 3]``, or None if none arrived.
        num_started: Number of episodes so far.
    """

    def __init__(self, robot: EpisodicRobot) -> None:
        self.robot, self.num_started = robot, 0
        self.seen: np.ndarray | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.robot, name)

    def begin(self, spec: EpisodeSpec) -> str:
        self.num_started += 1
        return self.robot.begin(spec)

    def get_observation(self) -> dict[str, Any]:
        values = self.robot.get_observation()
        camera = next(iter(camera_names(self.robot)), None)
        self.seen = None if camera is None else to_image(self.robot, values, camera)
        return values


class HumanLabelledRobot(WatchedRobot):
    """A robot (an ``EpisodicRobot``) with a human who starts each episode and labels its success.

    The initial image of each episode is saved. If ``reference`` contains one, it is overlaid on the current image, so that the
    human can arrange the scene to match.

    Args:
        folder: Folder for the initial images.
        reference: Folder of initial images from an earlier run of the episodes, possibly the same folder; None: no overlay.

    Attributes:
        number, num_episodes: Number of the current episode, counted from 1, and of all episodes (None if unknown).
        heading: Text with these numbers and the instruction.
        start: File of the episode's reference image, or None if unknown.
        takes_over: Whether the human is acting through a teleoperator; None without a teleoperator.
        overlays: Whether to write the overlay to a file; False if a page draws it.
    """

    def __init__(self, robot: EpisodicRobot, folder: Path, reference: Path | None, ask: Ask = ask_on_terminal) -> None:
        super().__init__(robot)
        self.folder, self.reference, self.ask = folder, reference, ask
        self.start: Path | None = None
        self.takes_over: bool | None = None
        self.overlays = True
        self._label: bool | None = None
        self.number, self.num_episodes, self.heading = 0, None, ""

    def look(self) -> None:
        """Refresh ``seen``; it is None if no image arrives."""
        try:
            self.get_observation()
        except LOST:
            self.seen = None

    def begin(self, spec: EpisodeSpec) -> str:
        """Reset the scene; wait until the human confirms it."""
        self._label, self.number = None, self.number + 1
        self.takes_over = None if self.takes_over is None else False
        instruction, name = self.robot.begin(spec), f"{spec.task_id}_{spec.init_state_id}_{spec.seed}.png"
        has_reference = self.reference is not None and (self.reference / name).is_file()
        self.start = self.reference / name if has_reference else None
        draws = self.overlays and self.start is not None
        of_all = "" if self.num_episodes is None else f" of {self.num_episodes}"
        self.heading = f"episode {self.number}{of_all}: {instruction}"
        choices = READY | (AGAIN if draws else {})
        while True:
            overlay = self._overlay() if draws else ""
            if self._ask(f"\n{self.heading}\n{overlay}reset the scene", choices) not in AGAIN:
                break
        # Only now is the scene in its initial state: an image taken before the confirmation may show hands.
        self.look()
        if self.seen is not None:
            _write(self.seen, self.folder / name)
        return instruction

    @property
    def result(self) -> EpisodeResult | None:
        """Labelled result of the episode; the human is asked only once."""
        result = self.robot.result
        if result is None:
            return None
        if self._label is None:
            # Set this first, so that an interrupted question is not asked again while the command ends.
            self._label = False
            self._label = self._success()
        return replace(result, success=self._label, success_reported=True, true_success=None)

    def _success(self) -> bool:
        choice = self._ask(f"{self.heading}\ndid it succeed?", SUCCESS)
        if choice == "r":
            self.number -= 1
            raise EpisodeVoidError("the human chose to repeat it")
        return choice == "y"

    def _ask(self, text: str, choices: Mapping[str, str]) -> str:
        try:
            return self.ask(text, choices)
        except EOFError as error:
            raise RLinfError(
                "No one is responding at the terminal (success=human), so the robot is holding its position. Set success=env, or type your answers"
            ) from error

    def _overlay(self) -> str:
        """Blend the reference with the current image; return a line of text that names both files."""
        self.look()
        if self.seen is None:
            return "no image arrived; "
        before = np.asarray(open_image(self.start).resize(self.seen.shape[1::-1]), np.float32)
        _write((before / 2 + self.seen / 2).astype(np.uint8), self.folder / OVERLAY)
        return f"reference: {self.start}, overlaid on the current image: {self.folder / OVERLAY}\n"


def _write(image: np.ndarray, path: Path) -> None:
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG")
    write_bytes(path, content.getvalue())
