"""Records robot episodes as a LeRobotDataset."""

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
"""Prefix of camera images in an episode's file."""
SOURCE = "source"
"""File with the unique name of a folder of pending episodes."""


class EpisodeRecorder:
    """Saves each episode when it ends, and finally adds all of them to a dataset.

    Args:
        folder: Folder of the dataset, either new or written by a recorder at the same rate.
        pending: Folder with one file per saved episode, so that a resumed process can find them.
    """

    def __init__(self, folder: Path, pending: Path, fps: int, env: Mapping[str, Any]) -> None:
        self.folder, self.pending, self.fps = folder, pending, fps
        self.env = recorded_env(env)
        if folder.exists():
            self._check(fps=fps)
        self.begin()

    def begin(self) -> None:
        """Start an episode, discarding an unfinished one."""
        self._frames: list[tuple[Observation, np.ndarray, bool]] = []

    def add(self, observation: Observation | None, action: np.ndarray, is_correction: bool) -> None:
        """Add an observation (None: the step is not recorded) and the action ``[D]`` that followed it."""
        if observation is not None:
            self._frames.append((observation, action, is_correction))

    def end(self, result: EpisodeResult) -> None:
        """Save the episode."""
        if not self._frames:
            return
        observations, actions, corrections = zip(*self._frames, strict=True)
        batch = Observation.concatenate(list(observations))
        arrays = {f"{CAMERA}{name}": images for name, images in batch.images.items()}
        arrays |= {} if batch.state is None else {"state": batch.state}
        content = io.BytesIO()
        np.savez(
            content, actions=np.stack(actions), interventions=np.array(corrections), task=batch.instruction[0],
            success=result.success, **arrays,
        )  # fmt: skip
        write_bytes(self._path(result.spec), content.getvalue())
        if not (self.pending / SOURCE).exists():
            write_text(self.pending / SOURCE, uuid.uuid4().hex)
        self.begin()

    def write(self, results: Sequence[EpisodeResult]) -> Path | None:
        """Add the saved episodes of ``results`` to the dataset, delete their files, and return its folder, or None without frames."""
        # Other processes may add to the same dataset: wait for them.
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with open(self.folder.with_name(f".{self.folder.name}.lock"), "a", encoding="utf-8") as file:
            lock(file, None)
            return self._write(results)

    def _write(self, results: Sequence[EpisodeResult]) -> Path | None:
        former = self.folder.with_name(f".{self.folder.name}.old")
        if former.exists() and not self.folder.exists():
            os.rename(former, self.folder)  # a process was killed between the two renames of `replace_folder`
        paths = [path for result in results if (path := self._path(result.spec)).is_file()]
        source = (self.pending / SOURCE).read_text() if paths else None
        known: list[str] = []
        if self.folder.exists():
            known = json.loads((self.folder / "meta" / OWN_FILE).read_text(encoding="utf-8"))["sources"]
        # A process killed after writing the dataset leaves these files behind, but their source is already listed.
        if paths and source not in known:
            first = _read(paths[0])
            # Rewrite the dataset in a second folder, so that the old one stays complete until the larger one is ready.
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
        shutil.rmtree(self.pending, ignore_errors=True)
        return self.folder if paths else None

    def _check(self, **required: Any) -> None:
        """Raise ConfigError if the dataset's rate, env or columns differ."""
        info = read_info(self.folder) | {"env": describe(self.folder).env}
        for key, value in required.items():
            if (actual := json.loads(json.dumps(info[key]))) != value:
                fix = f"fps={actual:g}, or record=<a new folder>" if key == "fps" else "record=<a new folder>"
                raise ConfigError(f"record={self.folder} has {key}={actual}; expected {value}, the robot's. Set {fix}")

    def _path(self, spec: EpisodeSpec) -> Path:
        return self.pending / f"{spec.task_id}_{spec.init_state_id}_{spec.seed}.npz"


def recorded_env(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return the env section that a dataset records: a robot reports success as its only reward."""
    return {**env, "reward_mode": "sparse", "success_bonus": 1.0}


def _read(path: Path) -> dict[str, Any]:
    """Return a saved episode as arguments of ``LeRobotWriter.add_episode``."""
    with np.load(path) as arrays:
        success = np.zeros(len(arrays["actions"]), dtype=bool)
        success[-1] = arrays["success"]
        return {
            "images": {name.removeprefix(CAMERA): arrays[name] for name in arrays if name.startswith(CAMERA)},
            "state": arrays["state"] if "state" in arrays else None,
            "actions": arrays["actions"],
            "task": str(arrays["task"]),
            "rewards": success,
            "success": success,
            "truncated": not success[-1],
            "more": {INTERVENTION: arrays["interventions"]},
        }


def _stored(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a dataset as arguments of ``LeRobotWriter.add_episode``."""
    info = describe(folder)
    cameras = {key.removeprefix(IMAGES): key for key in info.image_shapes}
    dataset = open_dataset(folder, cameras, STATE if STATE in info.state_dims else None, outcomes=True)
    for last in np.unique(dataset.last_rows):
        rows = np.flatnonzero(dataset.last_rows == last)
        batch, outcomes = dataset.rows(rows)[0], dataset.outcomes
        yield {
            "images": batch.images,
            "state": batch.state,
            "actions": dataset.actions[rows],
            "task": batch.instruction[0],
            "rewards": outcomes.rewards[rows],
            "success": outcomes.success[rows],
            "truncated": not outcomes.terminated[last],
            "more": {INTERVENTION: outcomes.intervention[rows]},
        }
