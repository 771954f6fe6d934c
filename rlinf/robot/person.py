"""A person who puts the scene back before an episode of a robot, and tells its success."""

from __future__ import annotations

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
from rlinf.robot.robot import LOST, EpisodeVoidError, EpisodicRobot, cameras_of, image_of
from rlinf.types import EpisodeResult, EpisodeSpec

OVERLAY = "overlay.png"
"""The wanted start and the present image, half and half."""
READY, AGAIN = {"": "ready"}, {"o": "look again"}
SUCCESS = {"y": "success", "n": "failure", "r": "repeat the episode"}

Ask = Callable[[str, Mapping[str, str]], str]
"""Shows a text and returns one of the answers, which are letters with their meanings; raises EOFError if nobody can answer."""


def ask_on_terminal(text: str, answers: Mapping[str, str], read: Callable[[str], str] = input) -> str:
    """Ask until the person types an answer, or a word that starts with it.

    Lines from before the question do not count: they would start an arm while hands are at the scene.
    """
    if read is input and sys.stdin.isatty():
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
    choices = ", ".join(f"{letter or 'Enter'}: {meaning}" for letter, meaning in answers.items())
    while (given := read(f"{text} ({choices}) ").strip().lower()[:1]) not in answers:
        pass
    return given


class PersonTells:
    """A robot (an ``EpisodicRobot``) whose episodes start when a person says so, and end with the success that the person tells.

    The first image of each episode is kept. With ``wanted``, the person sees it over the present one, and moves things until they
    match.

    Args:
        robot: Executes the actions, and says when an episode has ended.
        folder: Of the kept images.
        wanted: Such a folder, perhaps the same one, of an earlier play of the episodes; None: nothing is laid over.
        ask: Asks the person.

    Attributes:
        number, num_episodes: Of the episode, from 1, and in the whole list; None: not known.
        heading: These, and the instruction.
        seen: Newest image of the first camera, uint8 ``[H, W, 3]``; None: none came.
        start: File of the image with which the episode should start; None: not known.
        ask: Asks the person.
        takes_over: The person acts, at a teleoperator; None: without a teleoperator.
        overlays: Draw the wanted start over the present image into a file; False: a page does so.
    """

    def __init__(self, robot: EpisodicRobot, folder: Path, wanted: Path | None, ask: Ask = ask_on_terminal) -> None:
        self.robot, self.folder, self.wanted, self.ask = robot, folder, wanted, ask
        self.seen: np.ndarray | None = None
        self.start: Path | None = None
        self.takes_over: bool | None = None
        self.overlays = True
        self._told: bool | None = None
        self.number, self.num_episodes, self.heading = 0, None, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.robot, name)

    def get_observation(self) -> dict[str, Any]:
        values = self.robot.get_observation()
        camera = next(iter(cameras_of(self.robot)), None)
        self.seen = None if camera is None else image_of(self.robot, values, camera)
        return values

    def look(self) -> None:
        """Let ``seen`` be the present image; None if none comes."""
        try:
            self.get_observation()
        except LOST:
            self.seen = None

    def begin(self, spec: EpisodeSpec) -> str:
        """Put the scene back; wait until the person says that it is there."""
        self._told, self.number = None, self.number + 1
        self.takes_over = None if self.takes_over is None else False
        instruction, name = self.robot.begin(spec), f"{spec.task_id}_{spec.init_state_id}_{spec.seed}.png"
        self.start = self.wanted / name if self.wanted is not None and (self.wanted / name).is_file() else None
        draws = self.overlays and self.start is not None
        of = "" if self.num_episodes is None else f" of {self.num_episodes}"
        self.heading = f"episode {self.number}{of}: {instruction}"
        text, answers = f"\n{self.heading}\n", READY | (AGAIN if draws else {})
        while True:
            shown = self._overlay() if draws else ""
            if self._ask(f"{text}{shown}put the scene back", answers) not in AGAIN:
                break
        self.look()
        if self.seen is not None:
            _write(self.seen, self.folder / name)
        return instruction

    @property
    def result(self) -> EpisodeResult | None:
        """How the episode ended; the person is asked once."""
        found = self.robot.result
        if found is None:
            return None
        if self._told is None:
            self._told = False  # if the question is interrupted, nobody asks again
            self._told = self._success()
        return replace(found, success=self._told, success_reported=True, true_success=None)

    def _success(self) -> bool:
        answer = self._ask(f"{self.heading}\ndid it succeed?", SUCCESS)
        if answer == "r":
            self.number -= 1
            raise EpisodeVoidError("the person repeats it")
        return answer == "y"

    def _ask(self, text: str, answers: Mapping[str, str]) -> str:
        try:
            return self.ask(text, answers)
        except EOFError as error:
            raise RLinfError(
                "Nobody answers on the terminal (success=person), and the robot holds. Set success=env, or type the answers"
            ) from error

    def _overlay(self) -> str:
        """Lay the wanted start over the present image; return a line that names both."""
        self.look()
        if self.seen is None:
            return "no image came; "
        before = np.asarray(open_image(self.start).resize(self.seen.shape[1::-1]), np.float32)
        _write((before / 2 + self.seen / 2).astype(np.uint8), self.folder / OVERLAY)
        return f"wanted: {self.start}, wanted and present: {self.folder / OVERLAY}\n"


def _write(image: np.ndarray, path: Path) -> None:
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG")
    write_bytes(path, content.getvalue())
