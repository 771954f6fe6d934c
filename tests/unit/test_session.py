"""The end of a session."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlinf.training.session import Session


def test_the_last_checkpoint_is_written_although_something_else_cannot_be_closed():
    closed = []

    def part(name):
        return SimpleNamespace(close=lambda: closed.append(name))

    def fail():
        raise OSError("the simulator is gone")

    session = object.__new__(Session)
    session.profile_window, session.sync = part("profile"), SimpleNamespace(generator=part("engine"))
    session.evaluator = SimpleNamespace(env=SimpleNamespace(close=fail))
    session.tracker, session.progress, session.checkpoints = part("tracker"), part("progress"), part("checkpoints")
    with pytest.raises(OSError, match="the simulator is gone"):
        session.close()
    assert closed == ["profile", "engine", "tracker", "progress", "checkpoints"]
