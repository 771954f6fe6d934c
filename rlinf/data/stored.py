"""Demonstrations on disk: the description of a dataset, and access to its rows."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.data.frames import Frames
from rlinf.data.rows import following_rows
from rlinf.data.statistics import normalization_statistics
from rlinf.errors import ConfigError, UnreadableRowError, damaged
from rlinf.types import Observation, Statistics

logger = logging.getLogger("rlinf")

DESCRIPTIONS = ("meta/info.json", "meta/stats.json", "dataset_info.json", "features.json")
"""Description files of the two formats."""
NUMBERS = re.compile(r"u?int\d+|float\d+")
"""Dtypes allowed for action and state columns."""


def column_names(key: str | Sequence[str] | None) -> list[str]:
    return [key] if isinstance(key, str) else list(key or ())


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset's description. ``image_shapes`` maps each camera column to (height, width).

    ``state_dims`` maps columns usable as state to their widths; ``state_key`` is the default. ``action_dim`` is the width of column
    ``action``, or 0. ``fps`` is the number of rows per second. ``env`` is the env section of ``rlinf collect``; empty if unknown.
    """

    folder: Path
    format: str
    num_episodes: int
    image_shapes: Mapping[str, tuple[int, int]]
    state_dims: Mapping[str, int]
    state_key: str
    action_dim: int
    packages: tuple[str, ...] = ()
    env: Mapping[str, Any] = field(default_factory=dict)
    num_rows: int | None = None
    has_rewards: bool = False
    reports_success_per_row: bool = False
    reports_intervention: bool = False
    fps: float | None = None


@dataclass(frozen=True)
class Outcomes:
    """The executed actions (including the expert's noise) of a dataset's ``N`` rows, and their consequences.

    ``success`` marks rows whose action reached the goal, ``terminated`` rows where the episode ended by its own rules, and
    ``intervention`` rows where a human had taken over and acted. A field is None if the dataset has no such column.
    """

    executed: np.ndarray
    rewards: np.ndarray | None
    success: np.ndarray | None
    terminated: np.ndarray
    intervention: np.ndarray | None = None


@dataclass
class StoredDemonstrations:
    """A dataset's rows of (observation, next ``C`` actions); frames are read only for requested rows.

    Raises ConfigError if the dataset is empty, a value is not finite, or an episode's rows are not consecutive.

    ``frames`` maps each camera of the env, in its order, to its frames. ``task_ids``, int64 ``[N]``, index the
    instructions ``tasks``. ``last_rows``, int64 ``[N]``, is the last row of each row's episode. ``chunk_len`` is ``C``. Rows that
    are ``unreadable``, bool ``[N]``, return the nearest row's images and must not be used for training.
    """

    info: DatasetInfo
    frames: dict[str, Frames]
    state: np.ndarray | None
    actions: np.ndarray
    task_ids: np.ndarray
    tasks: list[str]
    episode_ids: np.ndarray
    chunk_len: int = 1
    outcomes: Outcomes | None = None

    def __post_init__(self) -> None:
        if not len(self.actions):
            raise damaged(self.info.folder, "it has no rows")
        rewards = None if self.outcomes is None or self.outcomes.rewards is None else self.outcomes.rewards[:, None]
        for name, values in (("action", self.actions), ("state", self.state), ("reward", rewards)):
            if values is not None and not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values).all(1))[0])
                place = f"row {row} (episode {self.episode_ids[row]})"
                raise damaged(self.info.folder, f"the {name} of {place} is not finite: {values[row].tolist()}")
        ends = np.flatnonzero(np.append(np.diff(self.episode_ids) != 0, True))
        self.last_rows = ends[np.searchsorted(ends, np.arange(len(self.actions)))]
        self.num_episodes = len(ends)
        if len(np.unique(self.episode_ids)) != len(ends):
            raise damaged(self.info.folder, "the rows of an episode are not consecutive in the order of their index")
        self.unreadable = np.zeros(len(self.actions), dtype=bool)
        self._image_rows = np.arange(len(self.actions))
        self._statistics: Statistics | None = None

    def check_images(self, skip: bool) -> StoredDemonstrations:
        """Raise UnreadableRowError for the first row known to lack an image. With ``skip``, read all images and mark such rows."""
        faults = dict(fault for frames in self.frames.values() for fault in frames.faults.items())
        for row in np.setdiff1d(np.arange(len(self)), list(faults)).tolist() if skip else ():
            try:
                self.rows(np.array([row]))
            except UnreadableRowError as error:
                faults[row] = str(error)
        if not faults:
            return self
        row = min(faults)
        reason = f"{len(faults)} of {len(self)} rows have no image; row {row} (episode {self.episode_ids[row]}): {faults[row]}"
        if not skip or len(faults) == len(self):
            raise damaged(self.info.folder, reason, UnreadableRowError)
        logger.warning("%s is used without these rows: %s", self.info.folder, reason)
        self.unreadable[list(faults)] = True
        readable = np.flatnonzero(~self.unreadable)
        # The nearest readable row replaces an unreadable one, so that batches keep their shape.
        self._image_rows = readable[np.searchsorted((readable[1:] + readable[:-1]) / 2, np.arange(len(self)))]
        return self

    def __len__(self) -> int:
        return len(self.actions)

    def statistics(self) -> Statistics:
        """Return the ``normalization_statistics`` of all rows; they are computed and logged only once."""
        if self._statistics is None:
            self._statistics = normalization_statistics(self.actions, self.state)
        return self._statistics

    def digest(self) -> str:
        """Return a hash of everything but the pixels: numbers, tasks, and the dataset's description files."""
        digest = hashlib.sha256(json.dumps(self.tasks).encode())
        for values in (self.actions, self.state, self.task_ids, self.episode_ids):
            if values is not None:
                digest.update(repr(values.shape).encode() + np.ascontiguousarray(values).tobytes())
        for name in DESCRIPTIONS:
            path = Path(self.info.folder) / name
            digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()

    def rows(self, index: np.ndarray) -> tuple[Observation, Tensor]:
        """Return observations and float32 actions ``[B, C, D]``, repeating the last one past the end; may raise UnreadableRowError."""
        try:
            images = {camera: frames.read(self._image_rows[index]) for camera, frames in self.frames.items()}
        except ConfigError as error:
            raise UnreadableRowError(str(error)) from error
        observation = Observation(
            images=images,
            state=None if self.state is None else self.state[index],
            instruction=[self.tasks[task] for task in self.task_ids[index]],
        )
        following = following_rows(index, self.last_rows[index], self.chunk_len)
        return observation, torch.from_numpy(self.actions[following])
