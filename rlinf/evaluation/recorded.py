"""File format of a recorded episode: a JavaScript file that passes one JSON value to the report."""

import json
import os
from pathlib import Path

import numpy as np

from rlinf.errors import CheckpointError
from rlinf.files import Json, write_text
from rlinf.types import EpisodeSpec

SCORES = ("value", "entropy", "logprob")
# Recordings are scripts instead of JSON files because a page opened from disk may load scripts, but not data.
BEFORE, AFTER = "rlinfEpisode(", ");\n"
"""Text before and after the JSON value."""


def write_recording(path: str | os.PathLike, content: Json) -> Path:
    """Write a recording atomically."""
    return write_text(path, f"{BEFORE}{json.dumps(content)}{AFTER}")


def read_recording(path: str | os.PathLike) -> Json:
    """Return a recording's content (see docs/evaluation.md); raise CheckpointError if the file is not a recording."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if not (text.startswith(BEFORE) and text.endswith(AFTER)):
            raise ValueError(f"it is not {BEFORE}...{AFTER.rstrip()}")
        content = json.loads(text[len(BEFORE) : -len(AFTER)])
        _check(content)
        return content
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a recorded episode ({type(error).__name__}: {error}).") from error


def is_recording(path: Path) -> bool:
    """Return whether a file starts like a recording."""
    if path.suffix != ".js" or not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(BEFORE)) == BEFORE.encode()


def _check(content: Json) -> None:
    """Raise an error of any type if the report could not display ``content``."""
    hash(EpisodeSpec(**content["spec"]))
    texts = [content["task"], content["instruction"], *content["frames"]]
    numbers = [content["number"], content["size"], content["as_counted"], *content["rewards"]]
    kinds = [(texts, str), (numbers, (int, float)), ([content["success"]], (int, float, type(None)))]
    if not all(isinstance(value, kind) for values, kind in kinds for value in values):
        raise TypeError("a field has the wrong type")
    num_steps, calls, width = len(content["rewards"]), content["calls"], len(content["low"])
    if len(content["frames"]) != num_steps + 1 or len(content["high"]) != width:
        raise ValueError("the lengths of frames, rewards and bounds do not match")
    starts = [call["step"] for call in calls]
    if starts[:1] != [0]:
        raise ValueError("there must be a policy call at step 0")
    for call, end in zip(calls, [*starts[1:], num_steps], strict=True):
        chunk = np.asarray(call["chunk"], dtype=float)
        if chunk.ndim != 2 or chunk.shape[1] != width or not 0 < end - call["step"] <= len(chunk):
            raise ValueError(f"the chunk at step {call['step']} has the wrong shape")
        np.asarray([point for point in call["path"] or () if point is not None], dtype=float).reshape(-1, 2)
        if not all(call[name] is None or isinstance(call[name], (int, float)) for name in SCORES):
            raise TypeError("a score is not a number")
