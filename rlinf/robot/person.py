"""A person who puts the scene back before an episode of a robot, and tells its success."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlinf.errors import RLinfError
from rlinf.files import write_bytes
from rlinf.robot.robot import LOST, EpisodeVoidError, EpisodicRobot, cameras_of
from rlinf.types import EpisodeResult, EpisodeSpec

OVERLAY = "overlay.png"
"""The wanted start and the present picture, half and half."""
ANSWERS = {"y": True, "yes": True, "n": False, "no": False}


class PersonTells:
    """A robot (an ``EpisodicRobot``) whose episodes begin when a person says so, and end with the success that the person tells.

    The first picture of each episode is kept. With ``wanted``, the person sees it over the present one, and moves things until they
    match.

    Args:
        robot: Executes the actions, and says when an episode has ended.
        folder: Of the kept pictures.
        wanted: Such a folder of an earlier evaluation of the same episodes; None: nothing is laid over.
        ask: Shows a text and returns the answer; raises EOFError if nobody can answer.
    """

    def __init__(
        self, robot: EpisodicRobot, folder: Path, wanted: Path | None, ask: Callable[[str], str] = input
    ) -> None:
        self.robot, self.folder, self.wanted, self._ask_person = robot, folder, wanted, ask
        self._told: bool | None = None
        self._number = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.robot, name)

    def begin(self, spec: EpisodeSpec) -> str:
        """Put the scene back; wait until the person says that it is there."""
        self._told, self._number = None, self._number + 1
        instruction = self.robot.begin(spec)
        while True:
            shown = self._look(f"{spec.task_id}_{spec.init_state_id}_{spec.seed}.png")
            again = "; o: look again" if shown else ""
            text = f"\nepisode {self._number}: {instruction}\n{shown}put the scene back, then press Enter{again}: "
            if self._ask(text) != "o":
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
        return replace(found, success=self._told, success_told=True)

    def _success(self) -> bool:
        while (answer := self._ask("success? y, n, or r to repeat the episode: ")) not in ANSWERS:
            if answer == "r":
                self._number -= 1
                raise EpisodeVoidError("the person repeats it")
        return ANSWERS[answer]

    def _ask(self, text: str) -> str:
        try:
            return self._ask_person(text).strip().lower()
        except EOFError as error:
            raise RLinfError(
                "Nobody answers on the terminal (success=person), and the robot holds. Set success=env, or type the answers"
            ) from error

    def _look(self, name: str) -> str:
        """Keep the first picture of an episode, or lay the wanted one over the present one; return a line that names them."""
        camera = next(iter(cameras_of(self.robot)), None)
        try:
            picture = None if camera is None else np.asarray(self.robot.get_observation()[camera], np.uint8)
        except LOST:
            return "no picture came; "
        if picture is None:
            return ""
        wanted = None if self.wanted is None else self.wanted / name
        _write(picture, self.folder / name)
        if wanted is None or not wanted.is_file():
            return ""
        with Image.open(wanted) as file:
            before = np.asarray(file.convert("RGB").resize(picture.shape[1::-1]), np.float32)
        _write((before / 2 + picture / 2).astype(np.uint8), self.folder / OVERLAY)
        return f"wanted: {wanted}, wanted and present: {self.folder / OVERLAY}\n"


def _write(picture: np.ndarray, path: Path) -> None:
    content = io.BytesIO()
    Image.fromarray(picture).save(content, "PNG")
    write_bytes(path, content.getvalue())
