"""What a run does when its policy has collapsed: end, or go back to its best checkpoint with half the learning rate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.checkpoints.checkpoint import on_rank_zero
from rlinf.checkpoints.saved_config import read_saved_config
from rlinf.errors import CheckpointError
from rlinf.evaluation.result import Success
from rlinf.files import write_text
from rlinf.run_folder import CHECKPOINTS_FOLDER, ROLLBACKS_FILE

if TYPE_CHECKING:
    from rlinf.training.loop import Loop

IN_A_ROW = 2
"""Evaluations, one after the other, that must show it."""
MAX_ROLLBACKS = 3
"""Times that a run goes back: after that the rate is an eighth, and something else is wrong."""


class RolledBack(Exception):
    """A run continues from an earlier checkpoint; all ranks raise it.

    Attributes:
        checkpoint: Its folder, which says how often the run has gone back.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"the run goes back to {checkpoint}")
        self.checkpoint = checkpoint


def ends_by_collapse(loop: Loop) -> bool:
    """Return whether the run is to end, because its last evaluations have collapsed (a collective call).

    It asks the evaluations that a checkpoint keeps, so that a resumed run decides the same. With ``on_collapse=rollback`` it notes one
    more rollback in the best checkpoint and raises RolledBack. The run is then built again from there, as a resumed one, and halves its
    learning rates for each rollback noted.
    """
    mode, state = loop.settings.on_collapse, loop.state
    if mode == "continue":
        return False
    found = on_rank_zero(lambda: _best_before_collapse(loop), "read the checkpoints")
    if found is None:
        return False
    text, name = found
    goes_back = mode == "rollback" and name not in (None, state.start) and state.rollbacks < MAX_ROLLBACKS
    if goes_back:
        checkpoint, rate = loop.folder / CHECKPOINTS_FOLDER / name, loop.settings.learning_rate
        note = json.dumps({"rollbacks": state.rollbacks + 1, "learning_rate": rate})
        # Before later checkpoints are set aside: a run that is killed in between finds the collapse again and notes the same.
        on_rank_zero(lambda: write_text(checkpoint / ROLLBACKS_FILE, note), f"write {checkpoint / ROLLBACKS_FILE}")
        lower = rate / 2 ** (state.rollbacks + 1)
        loop.progress.note(f"{text}; the run goes back to {name}, with a learning rate of {lower:g}")
        raise RolledBack(checkpoint)
    best = "no checkpoint holds the best policy" if name is None else f"the best checkpoint is {name}"
    loop.progress.note(f"{text}; the run ends, and {best}")
    return True


def is_collapsed(best: Success, later: Success) -> bool:
    """Return whether ``later`` is certainly less than half of ``best``.

    Its 95 % Wilson interval ends below half of the best success rate, and below the interval of the best. A significant difference
    alone would not do: the best of many evaluations is best by luck too, so that three of four runs of 50 evaluations that stay
    where they are would be accused. With this rule, and twice in a row, at most one run in fifty is (100 episodes).
    """
    end = later.interval[1]
    return end < best.success_rate / 2 and end < best.interval[0]


def has_collapsed(evaluations: Sequence[Success]) -> bool:
    """Return whether each of the last ``IN_A_ROW`` evaluations is collapsed against the best one before them."""
    before, last = evaluations[:-IN_A_ROW], evaluations[-IN_A_ROW:]
    if not before:
        return False
    best = max(before, key=lambda each: each.success_rate)
    return all(is_collapsed(best, each) for each in last)


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


def _best_before_collapse(loop: Loop) -> tuple[str, str | None] | None:
    """Return a sentence and the checkpoint of RL's best evaluation (None if it is gone); None: no collapse."""
    evaluations = [one for one in loop.state.evaluations.values() if one["phase"] == "rl"]
    counts = [Success(one["successes"] or 0, one["episodes"]) for one in evaluations]
    if not has_collapsed(counts):
        return None
    best = max(range(len(counts)), key=lambda index: (counts[index].success_rate, index))
    name = evaluations[best]["checkpoint"]
    loop.checkpoints.wait()  # it may be the one that is being written
    return (
        f"the policy has collapsed, from {counts[best]} to {counts[-1]}",
        name if name in (*loop.checkpoints.names(), loop.state.start) else None,
    )
