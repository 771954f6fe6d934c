"""Detect a collapsed policy, and either end the run or roll back to its best checkpoint with half the learning rate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.checkpoints.checkpoint import on_rank_zero
from rlinf.checkpoints.folders import read_saved_config
from rlinf.errors import CheckpointError
from rlinf.evaluation.result import Success
from rlinf.files import write_text
from rlinf.run_folder import CHECKPOINTS_FOLDER, ROLLBACKS_FILE

if TYPE_CHECKING:
    from rlinf.training.loop import Loop

IN_A_ROW = 2
"""Number of consecutive collapsed evaluations after which the policy is considered collapsed."""
MAX_ROLLBACKS = 3
"""Maximum number of rollbacks. The learning rate is an eighth by then, so it cannot be the cause of further collapses."""


class RolledBack(Exception):
    """Raised on all ranks to resume the run from the earlier ``checkpoint``."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"the run is rolled back to {checkpoint}")
        self.checkpoint = checkpoint


def ends_by_collapse(loop: Loop) -> bool:
    """Return whether the run must end because its policy has collapsed (a collective call).

    With ``on_collapse=rollback``, record the rollback in the best checkpoint and raise RolledBack. The run is then rebuilt from this
    checkpoint, with learning rates halved once per recorded rollback.
    """
    mode, state = loop.settings.on_collapse, loop.state
    if mode == "continue":
        return False
    # Only use evaluations that are saved in checkpoints, so that a resumed run makes the same decision.
    collapse = on_rank_zero(lambda: _best_before_collapse(loop), "read the checkpoints")
    if collapse is None:
        return False
    text, name = collapse
    goes_back = mode == "rollback" and name not in (None, state.start) and state.rollbacks < MAX_ROLLBACKS
    if goes_back:
        checkpoint, rate = loop.folder / CHECKPOINTS_FOLDER / name, loop.settings.learning_rate
        note = json.dumps({"rollbacks": state.rollbacks + 1, "learning_rate": rate})
        # Write the note before moving later checkpoints: a run killed in between then detects the collapse again and writes the same note.
        on_rank_zero(lambda: write_text(checkpoint / ROLLBACKS_FILE, note), f"write {checkpoint / ROLLBACKS_FILE}")
        lower = rate / 2 ** (state.rollbacks + 1)
        loop.progress.note(f"{text}; rolling back to {name}, with a learning rate of {lower:g}")
        raise RolledBack(checkpoint)
    best = "no checkpoint has the best policy" if name is None else f"the best checkpoint is {name}"
    loop.progress.note(f"{text}; the run ends, and {best}")
    return True


def is_collapsed(best: Success, later: Success) -> bool:
    """Return whether the 95 % Wilson interval of ``later`` is below half of the best rate and below the interval of ``best``."""
    # A significant difference is not enough, because the best of many evaluations is partly luck: 3 in 4 runs whose success does not
    # change would be considered collapsed within 50 evaluations. With this rule, twice in a row, at most 1 in 50 are (100 episodes).
    end = later.interval[1]
    return end < best.success_rate / 2 and end < best.interval[0]


def has_collapsed(evaluations: Sequence[Success]) -> bool:
    """Return whether each of the last ``IN_A_ROW`` evaluations has collapsed relative to the best earlier evaluation."""
    before, last = evaluations[:-IN_A_ROW], evaluations[-IN_A_ROW:]
    if not before:
        return False
    best = max(before, key=lambda success: success.success_rate)
    return all(is_collapsed(best, success) for success in last)


def rollbacks_of(checkpoint: Path, loop_state: Mapping[str, Any], learning_rate: float) -> int:
    """Return the number of rollbacks recorded for a run resumed from ``checkpoint``; 0 if ``learning_rate`` has been changed since."""
    path = checkpoint / ROLLBACKS_FILE
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        rollbacks, halved = note["rollbacks"], note["learning_rate"]
    except FileNotFoundError:
        rollbacks = loop_state.get("rollbacks", 0)
        halved = read_saved_config(checkpoint)["trainer"]["learning_rate"] if rollbacks else learning_rate
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Use a different checkpoint.") from error
    return rollbacks if halved == learning_rate else 0


def _best_before_collapse(loop: Loop) -> tuple[str, str | None] | None:
    """Return a description and the checkpoint of the best evaluation during RL (None if missing), or None without a collapse."""
    evaluations = [summary for summary in loop.state.evaluations.values() if summary["phase"] == "rl"]
    counts = [Success(summary["successes"] or 0, summary["episodes"]) for summary in evaluations]
    if not has_collapsed(counts):
        return None
    best = max(range(len(counts)), key=lambda index: (counts[index].success_rate, index))
    name = evaluations[best]["checkpoint"]
    loop.checkpoints.wait()  # the best checkpoint may be the one being written
    return (
        f"the policy has collapsed, from {counts[best]} to {counts[-1]}",
        name if name in (*loop.checkpoints.names(), loop.state.start) else None,
    )
