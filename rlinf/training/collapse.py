"""What a run does when its policy has collapsed: end, or go back to its best checkpoint with half the learning rate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.checkpoints.checkpoint import on_rank_zero
from rlinf.checkpoints.folders import CHECKPOINTS_FOLDER
from rlinf.checkpoints.saved_config import read_saved_config
from rlinf.errors import CheckpointError
from rlinf.evaluation.collapse import has_collapsed
from rlinf.evaluation.result import Success
from rlinf.files import write_text
from rlinf.training.session import Session

MAX_ROLLBACKS = 3
"""Times that a run goes back: after that the rate is an eighth, and something else is wrong."""
ROLLBACKS_FILE = "rollbacks.json"
"""In a checkpoint to which a run has gone back: how often, and the ``trainer.learning_rate`` that was halved."""


class RolledBack(Exception):
    """A run goes on from an earlier checkpoint; all ranks raise it.

    Attributes:
        checkpoint: Its folder, which says how often the run has gone back.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"the run goes back to {checkpoint}")
        self.checkpoint = checkpoint


def ends_by_collapse(session: Session) -> bool:
    """Return whether the run is to end, because its last evaluations have collapsed (a collective call).

    It asks the evaluations that a checkpoint keeps, so that a resumed run decides the same. Raise RolledBack if it goes on from its best
    checkpoint instead.
    """
    mode, state = session.config.trainer.on_collapse, session.state
    if mode == "continue":
        return False
    found = on_rank_zero(lambda: _best_before_collapse(session), "read the checkpoints")
    if found is None:
        return False
    text, name = found
    goes_back = mode == "rollback" and name is not None and state.rollbacks < MAX_ROLLBACKS
    if goes_back:
        checkpoint, rate = session.folder / CHECKPOINTS_FOLDER / name, session.config.trainer.learning_rate
        note = json.dumps({"rollbacks": state.rollbacks + 1, "learning_rate": rate})
        # Before later checkpoints are set aside: a run that is killed in between finds the collapse again and notes the same.
        on_rank_zero(lambda: write_text(checkpoint / ROLLBACKS_FILE, note), f"write {checkpoint / ROLLBACKS_FILE}")
        lower = rate / 2 ** (state.rollbacks + 1)
        session.progress.note(f"{text}; the run goes back to {name}, with a learning rate of {lower:g}")
        raise RolledBack(checkpoint)
    best = "no checkpoint holds the best policy" if name is None else f"the best checkpoint is {name}"
    session.progress.note(f"{text}; the run ends, and {best}")
    return True


def rollbacks_of(checkpoint: Path, loop_state: Mapping[str, Any], learning_rate: float) -> int:
    """Return how often a run that resumes ``checkpoint`` has gone back, 0 if ``learning_rate`` is another one than was halved then.

    Raise CheckpointError if a file of the checkpoint cannot be read.
    """
    path = checkpoint / ROLLBACKS_FILE
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        rollbacks, halved = note["rollbacks"], note["learning_rate"]
    except FileNotFoundError:
        rollbacks = loop_state.get("rollbacks", 0)
        halved = read_saved_config(checkpoint)["trainer"]["learning_rate"] if rollbacks else learning_rate
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Use another checkpoint.") from error
    return rollbacks if halved == learning_rate else 0


def _best_before_collapse(session: Session) -> tuple[str, str | None] | None:
    """Return a sentence and the checkpoint of the best evaluation of RL, None if there is none on disk; None: no collapse."""
    evaluations = [one for one in session.state.evaluations.values() if one["phase"] == "rl"]
    counts = [Success(one["successes"], one["episodes"]) for one in evaluations]
    if not has_collapsed(counts):
        return None
    best = max(range(len(counts)), key=lambda index: (counts[index].success_rate, index))
    name = evaluations[best]["checkpoint"]
    session.checkpoints.wait()  # it may be the one that is being written
    return (
        f"the policy has collapsed, from {counts[best]} to {counts[-1]}",
        name if name in session.saved_names() else None,
    )
