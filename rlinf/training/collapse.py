"""What a run does when its policy has collapsed: end, or go back to its best checkpoint with half the learning rate."""

from __future__ import annotations

from pathlib import Path

from rlinf.checkpoints.checkpoint import CHECKPOINTS_FOLDER, on_rank_zero
from rlinf.evaluation.collapse import has_collapsed
from rlinf.evaluation.result import Success
from rlinf.training.session import Session

MAX_ROLLBACKS = 3
"""Times that a run goes back: after that the rate is an eighth, and something else is wrong."""


class RolledBack(Exception):
    """A run goes on from an earlier checkpoint; all ranks raise it.

    Attributes:
        checkpoint: Its folder.
        rollbacks: How often the run has gone back, this time included.
    """

    def __init__(self, checkpoint: Path, rollbacks: int) -> None:
        super().__init__(f"the run goes back to {checkpoint}")
        self.checkpoint, self.rollbacks = checkpoint, rollbacks


def ends_by_collapse(session: Session) -> bool:
    """Return whether the run is to end, because its last evaluations have collapsed (a collective call).

    It asks the evaluations that a checkpoint keeps, so that a resumed run decides the same.

    Raises:
        RolledBack: It goes on from its best checkpoint instead.
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
        rate = session.config.trainer.learning_rate / 2 ** (state.rollbacks + 1)
        session.progress.note(f"{text}; the run goes back to {name}, with a learning rate of {rate:g}")
        raise RolledBack(session.folder / CHECKPOINTS_FOLDER / name, state.rollbacks + 1)
    best = "no checkpoint holds the best policy" if name is None else f"the best checkpoint is {name}"
    session.progress.note(f"{text}; the run ends, and {best}")
    return True


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
