"""Demonstrations that lie on disk: what a dataset holds, its rows, and batches of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.data.frames import Frames
from rlinf.data.rows import following_rows
from rlinf.data.statistics import normalization_statistics
from rlinf.errors import ConfigError
from rlinf.types import Observation

DESCRIPTIONS = ("meta/info.json", "meta/stats.json", "dataset_info.json", "features.json")
"""Files in which datasets of the two formats describe themselves."""


@dataclass(frozen=True)
class DatasetInfo:
    """What the description of a dataset says, before any row is read.

    Attributes:
        folder: Where it lies.
        format: In words.
        num_episodes: Episodes.
        image_shapes: Column of a camera to (height, width).
        state_dims: Column that may serve as state to its width.
        state_key: The usual column of the state.
        action_dim: ``D``; 0: there are no actions.
        packages: Python packages that reading it needs.
        env: The env section of the configuration under which it was collected, where that is known.
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


@dataclass
class StoredDemonstrations:
    """Rows of (observation, next ``C`` actions) of a dataset; frames are read when a batch is made.

    Attributes:
        info: Its description.
        frames: Camera of the env to the frames of its column, in the env's order.
        state: float32 ``[N, S]``, or None.
        actions: float32 ``[N, D]``, the action of each row.
        task_ids: int64 ``[N]``, index into ``tasks``.
        tasks: Instructions.
        episode_ids: int64 ``[N]``, ascending; rows of an episode lie side by side.
        chunk_len: ``C``.

    Raises:
        ConfigError: There is no row, an action or a state is not finite, or the rows of an episode do not lie together.
    """

    info: DatasetInfo
    frames: dict[str, Frames]
    state: np.ndarray | None
    actions: np.ndarray
    task_ids: np.ndarray
    tasks: list[str]
    episode_ids: np.ndarray
    chunk_len: int = 1

    def __post_init__(self) -> None:
        if not len(self.actions):
            raise ConfigError(f"{self.info.folder} holds no rows. Set sft.dataset=<another folder>")
        for name, values in (("action", self.actions), ("state", self.state)):
            if values is not None and not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values).all(1))[0])
                raise ConfigError(
                    f"The {name} of row {row} of {self.info.folder} (episode {self.episode_ids[row]}) is not finite: "
                    f"{values[row].tolist()}. Set sft.dataset=<a dataset without it>"
                )
        ends = np.flatnonzero(np.append(np.diff(self.episode_ids) != 0, True))
        self._last_rows = ends[np.searchsorted(ends, np.arange(len(self.actions)))]
        self.num_episodes = len(ends)
        if len(np.unique(self.episode_ids)) != len(ends):
            raise ConfigError(
                f"The rows of an episode of {self.info.folder} do not lie together in the order of the rows' index. "
                "Set sft.dataset=<a whole dataset>"
            )

    def __len__(self) -> int:
        return len(self.actions)

    def statistics(self) -> dict[str, Any]:
        """Return what models normalise by, from all rows: see ``normalization_statistics``."""
        return normalization_statistics(self.actions, self.state)

    def digest(self) -> str:
        """Return a hash of everything but the pixels: numbers, tasks, and the dataset's description with its statistics."""
        found = hashlib.sha256(json.dumps(self.tasks).encode())
        for values in (self.actions, self.state, self.task_ids, self.episode_ids):
            found.update(
                b"" if values is None else repr(values.shape).encode() + np.ascontiguousarray(values).tobytes()
            )
        for name in DESCRIPTIONS:
            path = Path(self.info.folder) / name
            found.update(path.read_bytes() if path.is_file() else b"")
        return found.hexdigest()

    def rows(self, index: np.ndarray) -> tuple[Observation, Tensor]:
        """Return the rows ``index`` (int64 ``[B]``): observation, and actions float32 ``[B, C, D]``, the last one of an
        episode repeated past its end."""
        observation = Observation(
            images={camera: frames.read(index) for camera, frames in self.frames.items()},
            state=None if self.state is None else self.state[index],
            instruction=[self.tasks[task] for task in self.task_ids[index]],
        )
        return observation, torch.from_numpy(
            self.actions[following_rows(index, self._last_rows[index], self.chunk_len)]
        )
