"""Episode player for reports: shows recorded episodes step by step, for one policy or two side by side."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from rlinf.errors import CheckpointError
from rlinf.evaluation.recorded import read_recording
from rlinf.files import Json, replace_folder
from rlinf.report.run_data import RunData
from rlinf.run_folder import BASELINE_FOLDER, RECORDINGS_FOLDER
from rlinf.types import EpisodeSpec

DIVERGENCE_FRACTION = 0.1
"""Two actions differ if any dimension differs by more than this fraction of its range."""


@dataclass(frozen=True)
class Side:
    """One policy's recordings.

    Attributes:
        folder: Folder with the recordings, relative to the page.
        colour: Index of the policy's colour in the charts.
    """

    name: str
    folder: str
    colour: int


def copy_baseline(baseline: Path, folder: Path) -> None:
    """Copy the recordings from the evaluation ``baseline`` to the evaluation ``folder``, replacing earlier copies."""
    target = folder / BASELINE_FOLDER
    shutil.rmtree(target, ignore_errors=True)
    if (folder / RECORDINGS_FOLDER).is_dir() and (baseline / RECORDINGS_FOLDER).is_dir():
        partial = folder / f".{BASELINE_FOLDER}.tmp"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(baseline / RECORDINGS_FOLDER, partial)
        replace_folder(partial, target)


def player(data: RunData) -> Json:
    """Return the template values for ``pages/player.html``."""
    sides = _sides(data)
    left_out: list[str] = []
    side_recordings = [read_recordings(data.folder / side.folder, left_out) for side in sides]
    both = list(zip(sides, side_recordings, strict=True))
    specs = dict.fromkeys(spec for recordings in side_recordings for spec in recordings)
    episodes = [
        _episode([(side, recordings[spec]) for side, recordings in both if spec in recordings]) for spec in specs
    ]
    return {
        "episodes": episodes,
        "left_out": left_out,
        "num_sides": len(sides),
        "divergence_fraction": DIVERGENCE_FRACTION,
    }


def read_recordings(folder: Path, left_out: list[str]) -> dict[EpisodeSpec, tuple[str, Json]]:
    """Map each episode in a folder to its file name and content; append the reason for each skipped file to ``left_out``."""
    recordings = {}
    for path in sorted(folder.glob("*.js")):
        try:
            content = read_recording(path)
        except CheckpointError as error:
            left_out.append(str(error))
        else:
            recordings[EpisodeSpec(**content["spec"])] = (path.name, content)
    return recordings


def executed_actions(recording: Json) -> np.ndarray:
    """Return the actions that the env executed, clipped to its bounds, ``[T, D]``."""
    num_steps, calls = len(recording["rewards"]), recording["calls"]
    ends = [*(call["step"] for call in calls[1:]), num_steps]
    executed = [np.asarray(call["chunk"])[: end - call["step"]] for call, end in zip(calls, ends, strict=True)]
    return np.clip(np.concatenate(executed), recording["low"], recording["high"])


def divergence_step(first: Json, second: Json) -> int | None:
    """Return the first env step (from 0) at which two recordings differ in their actions or only one has ended; None: never."""
    actions, other = executed_actions(first), executed_actions(second)
    if actions.shape[1] != other.shape[1]:
        return 0
    common = min(len(actions), len(other))
    width = np.subtract(first["high"], first["low"])
    tolerance = DIVERGENCE_FRACTION * np.where(np.isfinite(width), width, 1.0)
    differs = (np.abs(actions[:common] - other[:common]) > tolerance).any(1)
    if differs.any():
        return int(differs.argmax())
    return common if len(actions) != len(other) else None


def _sides(data: RunData) -> list[Side]:
    """Return the compared evaluations, baseline first, or the evaluations in the task table if there is no comparison."""
    compared = data.comparison is not None and (data.folder / BASELINE_FOLDER).is_dir()
    if compared:
        first, second = short_names(data.comparison["a"], data.comparison["b"])
        return [Side(f"a: {first}", BASELINE_FOLDER, 2), Side(f"b: {second}", RECORDINGS_FOLDER, 1)]
    return [
        Side(evaluation.name, (Path(evaluation.folder) / RECORDINGS_FOLDER).as_posix(), colour)
        for evaluation, colour in data.in_the_table
    ]


def short_names(first: str, second: str) -> tuple[str, str]:
    """Return the shortest ends of two paths that differ."""
    parts = [Path(path).parts for path in (first, second)]
    for count in range(1, max(map(len, parts)) + 1):
        ends = [Path(*path[-count:]).as_posix() for path in parts]
        if ends[0] != ends[1]:
            return ends[0], ends[1]
    return first, second


def _episode(sides: Sequence[tuple[Side, tuple[str, Json]]]) -> Json:
    """Return the episode data that the page contains before any recordings are loaded."""
    contents = [content for _, (_, content) in sides]
    first = contents[0]
    shown = [
        {
            "name": side.name, "colour": side.colour, "source": quote(f"{side.folder}/{name}"),
            "success": content["success"], "steps": len(content["rewards"]), "as_counted": content["as_counted"],
        }
        for side, (name, content) in sides
    ]  # fmt: skip
    is_pair = len(contents) == 2
    images, sizes = ({content["frames"][0] for content in contents}, {content["size"] for content in contents})
    same_start = len(images) == 1 if len(sizes) == 1 else None  # images of different sizes cannot be compared
    return {
        "task": first["task"], "instruction": first["instruction"], "number": first["number"],
        "sides": shown, "divergence": divergence_step(*contents) if is_pair else None, "same_start": same_start,
    }  # fmt: skip
