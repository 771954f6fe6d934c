"""Folders of lerobot's policies, and what tests give these policies, in a Python with lerobot or beside one."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lerobot_folders import ACTIONS, SIZE, STATE, make

from rlinf.models.embodiment.lerobot.worker import OWN_PLACE, VARIABLE, runs_here
from rlinf.types import Observation

PYTHON = sys.executable if runs_here() else os.environ.get(VARIABLE) or (str(OWN_PLACE) if OWN_PLACE.exists() else None)
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="no Python with lerobot: bash scripts/setup.sh --lerobot makes one"),
]
HERE = pytest.mark.skipif(not runs_here(), reason="lerobot does not import in this Python")


class Folders(dict):
    """Folders by type, each written by lerobot when it is first asked for."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place

    def __missing__(self, kind: str) -> Path:
        if kind == "groot" and subprocess.run([PYTHON, "-c", "import tree"], capture_output=True).returncode != 0:
            pytest.skip(
                "the Python with lerobot has no dm-tree, which GR00T needs: bash scripts/setup.sh --lerobot installs it"
            )
        if runs_here():
            self[kind] = make(kind, self.place / kind)
            return self[kind]
        command = [PYTHON, str(Path(__file__).with_name("lerobot_folders.py")), str(self.place), kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        self[kind] = self.place / kind
        return self[kind]


def section(folder: Path, **fields: object) -> dict:
    """Return the model section of a folder."""
    return {
        "model_type": "lerobot",
        "model_path": str(folder),
        "action_token_len": ACTIONS,
        "action_chunks_len": 4,
        **fields,
    }


def observation(rows: int = 3, seed: int = 0) -> Observation:
    generator = np.random.default_rng(seed)
    images = {"front": generator.integers(0, 256, (rows, SIZE, SIZE, 3), dtype=np.uint8)}
    state = generator.standard_normal((rows, STATE), dtype=np.float32)
    return Observation(images, state, ["pick up the red block"] * rows)
