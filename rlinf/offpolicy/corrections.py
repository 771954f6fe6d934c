"""What a head changes of the actions of the frozen policy: how much at each sentence, and where most."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from rlinf.distributed.process_group import gather_objects
from rlinf.files import write_text
from rlinf.run_folder import CORRECTIONS_FILE
from rlinf.types import EpisodeSpec, Observation

NUM_LARGEST = 8
PICTURE_SIDE = 96
"""Pixels of the longer side of a picture in the file."""


@dataclass
class Correction:
    """The largest correction of an episode.

    Attributes:
        task, instruction, init_state_id: The episode.
        call: Policy calls of the episode before this one.
        size: Mean absolute change of a number of the chunk.
        base, action: Mean over the chunk of what the frozen policy and the head say, ``[D]``.
        picture: uint8 ``[H, W, 3]`` of the first camera; None without cameras.
    """

    task: str
    instruction: str
    init_state_id: int
    call: int
    size: float
    base: list[float]
    action: list[float]
    picture: np.ndarray | None


class Corrections:
    """The corrections of an iteration: the action of the head without noise minus the greedy one of the frozen policy.

    All numbers are in halves of the range of the env. The iteration's own noise is not in them, except for a head of noise: what the frozen
    policy would say without it is not asked.
    """

    def __init__(self, task_names: Sequence[str], action_dim: int) -> None:
        self.task_names, self.action_dim = task_names, action_dim
        self._episodes: dict[int, tuple[EpisodeSpec, int]] = {}  # of each row, and its policy calls so far
        self._sums: dict[tuple[str, str], np.ndarray] = {}  # of task and sentence: calls, sizes, changes [D]
        self._largest: dict[EpisodeSpec, Correction] = {}

    def begin(self, row: int, spec: EpisodeSpec) -> None:
        """Note that an env begins an episode."""
        self._episodes[row] = spec, 0

    def begin_again(self, rows: Sequence[int] | np.ndarray) -> None:
        """Note that envs, whose simulators were lost, begin their episodes again."""
        for row in rows:
            self._episodes[int(row)] = self._episodes[int(row)][0], 0

    def pass_by(self) -> None:
        """Count a policy call of every env in which the head did not act."""
        self._episodes = {row: (spec, calls + 1) for row, (spec, calls) in self._episodes.items()}

    def add(self, observation: Observation, base: Tensor, actions: Tensor) -> None:
        """Add a policy call of every env: greedy chunks ``base`` and ``actions`` of the head without noise, ``[B, C * D]`` both."""
        chunks = [each.float().cpu().numpy().reshape(len(base), -1, self.action_dim) for each in (base, actions)]
        changes = chunks[1] - chunks[0]
        camera = next(iter(observation.images.values()), None)
        sizes = np.abs(changes).mean((1, 2), dtype=np.float64)
        for row, size in enumerate(sizes.tolist()):
            spec, calls = self._episodes[row]
            task, instruction = self.task_names[spec.task_id], observation.instruction[row]
            added = np.array([1, size, *changes[row].mean(0)], dtype=np.float64)
            self._sums[task, instruction] = self._sums.get((task, instruction), 0) + added
            before, after = (chunk[row].mean(0).tolist() for chunk in chunks)
            picture = None if camera is None else camera[row]
            self._keep(
                spec, Correction(task, instruction, spec.init_state_id, calls, size, before, after, picture=picture)
            )
        self.pass_by()

    def _keep(self, spec: EpisodeSpec, found: Correction) -> None:
        """Keep a correction if it is among the largest, one of each episode."""
        if spec not in self._largest and len(self._largest) == NUM_LARGEST:
            least = min(self._largest, key=lambda each: self._largest[each].size)
            if found.size <= self._largest[least].size:
                return
            del self._largest[least]
        if spec not in self._largest or found.size > self._largest[spec].size:
            picture = None if found.picture is None else found.picture.copy()
            self._largest[spec] = replace(found, picture=picture)

    def gather(self) -> None:
        """Join the corrections of all ranks (a collective call)."""
        parts = gather_objects((self._sums, self._largest))
        self._sums, self._largest = {}, {}
        for sums, largest in parts:
            for key, added in sums.items():
                self._sums[key] = self._sums.get(key, 0) + added
            for spec, correction in largest.items():
                self._keep(spec, correction)

    def metrics(self) -> dict[str, float]:
        """Return the mean size, over all and of each task."""
        by_task: dict[str, np.ndarray] = {}
        for (task, _), sums in self._sums.items():
            by_task[task] = by_task.get(task, 0) + sums[:2]
        if not by_task:
            return {}
        count, size = np.sum(list(by_task.values()), axis=0)
        sizes = {f"rollout/correction/{task}": float(sums[1] / sums[0]) for task, sums in sorted(by_task.items())}
        return {"rollout/correction": float(size / count), **sizes}

    def write(self, folder: Path, step: int) -> None:
        """Write ``corrections.json`` of the iteration ``step``, if the head has acted in it."""
        if not self._sums:
            return
        rows = [
            {"task": task, "instruction": sentence, "calls": int(sums[0]), "size": sums[1] / sums[0],
             "change": (sums[2:] / sums[0]).tolist()}
            for (task, sentence), sums in sorted(self._sums.items())
        ]  # fmt: skip
        largest = sorted(self._largest.values(), key=lambda each: -each.size)
        shown = [vars(each) | {"picture": _encoded(each.picture)} for each in largest]
        write_text(folder / CORRECTIONS_FILE, json.dumps({"step": step, "sentences": rows, "largest": shown}))


def _encoded(picture: np.ndarray | None) -> str | None:
    """Return a picture as PNG in base64, made smaller where it is large."""
    if picture is None:
        return None
    image, buffer = Image.fromarray(picture), io.BytesIO()
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
