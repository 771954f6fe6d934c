"""The file of a recorded episode: a script that hands one JSON value to the report.

A page that is opened as a file may load scripts, but no data.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rlinf.errors import CheckpointError
from rlinf.files import write_text

RECORDINGS_FOLDER = "episodes"
BEFORE, AFTER = "rlinfEpisode(", ");\n"
"""What stands before and after the JSON value."""


def write_recording(path: str | os.PathLike, content: dict[str, Any]) -> Path:
    """Write a recording, atomically."""
    return write_text(path, f"{BEFORE}{json.dumps(content)}{AFTER}")


def read_recording(path: str | os.PathLike) -> dict[str, Any]:
    """Return the content of a recording (docs/evaluation.md); raise CheckpointError if the file is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if not (text.startswith(BEFORE) and text.endswith(AFTER)):
            raise ValueError(f"it is not {BEFORE}...{AFTER.rstrip()}")
        return json.loads(text[len(BEFORE) : -len(AFTER)])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a recorded episode ({type(error).__name__}: {error}).") from error
