"""Episodes of a robot as a LeRobotDataset."""

from __future__ import annotations

import io
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.lerobot_dataset import OWN_FILE, describe, open_dataset
from rlinf.data.lerobot_format import IMAGES, INTERVENTION, STATE, read_info
from rlinf.data.lerobot_writer import LeRobotWriter
from rlinf.errors import ConfigError
from rlinf.files import lock, replace_folder, write_bytes, write_text
from rlinf.types import EpisodeResult, EpisodeSpec, Observation

CAMERA = "camera."
"""Prefix of the images of a camera in the file of an episode."""
SOURCE = "source"
"""File beside the kept episodes with a name that no others have."""


class EpisodeRecorder:
    """Keeps each episode on disk as soon as it ends, and adds all to a dataset.

    Args:
        folder: The dataset; new, or one that a recorder wrote at the same rate.
        kept: Where the episodes lie until then, a file each; a process that continues finds them there.
        fps: Rows a second.
        env: The env section of the configuration, which the dataset records.
    """

    def __init__(self, folder: Path, kept: Path, fps: int, env: Mapping[str, Any]) -> None:
        self.folder, self.kept, self.fps = folder, kept, fps
        self.env = recorded_env(env)
        if folder.exists():
            self._check(fps=fps)
        self.begin()

    def begin(self) -> None:
        """Start an episode; one that has not ended is forgotten."""
        self._rows: list[tuple[Observation, np.ndarray, bool]] = []

    def add(self, seen: Observation | None, action: np.ndarray, is_correction: bool) -> None:
        """Note an action ``[D]`` and the row that was seen before it; None: nothing was seen yet, and nothing is noted."""
        if seen is not None:
            self._rows.append((seen, action, is_correction))

    def end(self, result: EpisodeResult) -> None:
        """Keep the episode."""
        if not self._rows:
            return
        seen, actions, corrections = zip(*self._rows, strict=True)
        every = Observation.concatenate(list(seen))
        arrays = {f"{CAMERA}{name}": images for name, images in every.images.items()}
        arrays |= {} if every.state is None else {"state": every.state}
        content = io.BytesIO()
        np.savez(
            content, actions=np.stack(actions), interventions=np.array(corrections), task=seen[0].instruction[0],
            success=result.success, **arrays,
        )  # fmt: skip
        write_bytes(self._path(result.spec), content.getvalue())
        if not (self.kept / SOURCE).exists():
            write_text(self.kept / SOURCE, uuid.uuid4().hex)
        self.begin()

    def write(self, results: Sequence[EpisodeResult]) -> Path | None:
        """Add the kept episodes of ``results`` to the dataset and delete their files; return its folder, or None without any row.

        A dataset that exists is written anew, and stays whole until the larger one is there. Another process that adds to it is waited
        for. Raise ConfigError if it has become one of other columns or another rate; the episodes stay kept.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with open(self.folder.with_name(f".{self.folder.name}.lock"), "a", encoding="utf-8") as file:
            lock(file, None)
            return self._write(results)

    def _write(self, results: Sequence[EpisodeResult]) -> Path | None:
        former = self.folder.with_name(f".{self.folder.name}.old")
        if former.exists() and not self.folder.exists():
            os.rename(former, self.folder)  # a process was killed between the two renames of `replace_folder`
        paths = [path for result in results if (path := self._path(result.spec)).is_file()]
        source = (self.kept / SOURCE).read_text() if paths else None
        known: list[str] = []
        if self.folder.exists():
            known = json.loads((self.folder / "meta" / OWN_FILE).read_text(encoding="utf-8"))["sources"]
        if paths and source not in known:  # a process that was killed after it had written leaves the files
            first = _read(paths[0])
            partial = self.folder.with_name(f".{self.folder.name}.grown")
            shutil.rmtree(partial, ignore_errors=True)
            with LeRobotWriter(
                partial,
                fps=self.fps,
                image_shapes={name: images.shape[1:3] for name, images in first["images"].items()},
                state_dim=0 if first["state"] is None else first["state"].shape[1],
                action_dim=first["actions"].shape[1],
                video=False,
                more=[INTERVENTION],
            ) as writer:
                if known:
                    self._check(fps=self.fps, env=self.env, features=writer.info["features"])
                for episode in chain(_stored(self.folder) if known else (), map(_read, paths)):
                    writer.add_episode(**episode)
                writer.about[OWN_FILE] = {"env": self.env, "sources": [*known, source]}
            replace_folder(partial, self.folder)
        shutil.rmtree(self.kept, ignore_errors=True)
        return self.folder if paths else None

    def _check(self, **wanted: Any) -> None:
        """Raise ConfigError if the dataset has another rate, env or columns."""
        info = read_info(self.folder) | {"env": describe(self.folder).env}
        for key, value in wanted.items():
            if (found := json.loads(json.dumps(info[key]))) != value:
                fix = f"fps={found:g}, or record=<a new folder>" if key == "fps" else "record=<a new folder>"
                raise ConfigError(f"record={self.folder} has {key}={found}; required: {value}, as the robot. Set {fix}")

    def _path(self, spec: EpisodeSpec) -> Path:
        return self.kept / f"{spec.task_id}_{spec.init_state_id}_{spec.seed}.npz"


def recorded_env(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return the env section that a dataset records: a robot tells success, and no other reward."""
    return {**env, "reward_mode": "sparse", "success_bonus": 1.0}


def _read(path: Path) -> dict[str, Any]:
    """Return a kept episode as ``LeRobotWriter.add_episode`` takes it."""
    with np.load(path) as kept:
        success = np.zeros(len(kept["actions"]), dtype=bool)
        success[-1] = kept["success"]
        return {
            "images": {name.removeprefix(CAMERA): kept[name] for name in kept if name.startswith(CAMERA)},
            "state": kept["state"] if "state" in kept else None,
            "actions": kept["actions"],
            "task": str(kept["task"]),
            "rewards": success,
            "success": success,
            "truncated": not success[-1],
            "more": {INTERVENTION: kept["interventions"]},
        }


def _stored(folder: Path) -> Iterator[dict[str, Any]]:
    """Return the episodes of a dataset, one after the other, as ``LeRobotWriter.add_episode`` takes them."""
    info = describe(folder)
    cameras = {key.removeprefix(IMAGES): key for key in info.image_shapes}
    dataset = open_dataset(folder, cameras, STATE if STATE in info.state_dims else None, outcomes=True)
    for last in np.unique(dataset.last_rows):
        rows = np.flatnonzero(dataset.last_rows == last)
        seen, outcomes = dataset.rows(rows)[0], dataset.outcomes
        yield {
            "images": seen.images,
            "state": seen.state,
            "actions": dataset.actions[rows],
            "task": seen.instruction[0],
            "rewards": outcomes.rewards[rows],
            "success": outcomes.success[rows],
            "truncated": not outcomes.terminated[last],
            "more": {INTERVENTION: outcomes.intervention[rows]},
        }
