"""The end of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf.commands.train import Run
from rlinf.config.training import TrainerConfig
from rlinf.training.action_trainer import Parts
from rlinf.training.loop import Loop
from rlinf.training.state import LoopState


def test_the_last_checkpoint_is_written_although_something_else_cannot_be_closed():
    closed = []

    def part(name):
        return SimpleNamespace(close=lambda: closed.append(name), export=None)

    def fail():
        raise OSError("the simulator is gone")

    loop = Loop(
        LoopState(), Path(), TrainerConfig(), {}, checkpoints=part("checkpoints"), stop_signal=None,
        progress=part("progress"),
    )  # fmt: skip
    loop.tracker, loop.profile_window = part("tracker"), part("profile")
    evaluator = SimpleNamespace(env=SimpleNamespace(close=fail))
    run = Run(Parts(None, loop, None, SimpleNamespace(generator=part("engine")), evaluator), None, part("trainer"))
    with pytest.raises(OSError, match="the simulator is gone"):
        run.close()
    assert closed == ["trainer", "engine", "profile", "tracker", "progress", "checkpoints"]
