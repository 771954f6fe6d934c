"""The end of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf.commands.train import Run
from rlinf.config.training import TrainerConfig
from rlinf.training.action_trainer import TrainerContext
from rlinf.training.loop import Loop, Update
from rlinf.training.state import LoopState
from rlinf.training.stop_signal import StopRequested
from rlinf.training.train_worker import rl_trainer_config


def test_the_last_checkpoint_is_written_although_something_else_cannot_be_closed():
    closed = []

    def part(name):
        return SimpleNamespace(close=lambda: closed.append(name), closes_in_time=True)

    def fail():
        raise OSError("the simulator is gone")

    loop = Loop(
        LoopState(), Path(), TrainerConfig(), {}, checkpoints=part("checkpoints"), stop_signal=None,
        progress=part("progress"),
    )  # fmt: skip
    loop.tracker, loop.profile_window = part("tracker"), part("profile")
    evaluator = SimpleNamespace(env=SimpleNamespace(close=fail))
    run = Run(
        TrainerContext(None, loop, None, SimpleNamespace(generator=part("engine")), evaluator), None, part("trainer")
    )
    with pytest.raises(OSError, match="the simulator is gone"):
        run.close()
    assert closed == ["trainer", "engine", "profile", "tracker", "progress", "checkpoints"]


class Trainer:
    """A trainer of an action policy, of two iterations; a signal comes while an evaluation is played."""

    phase, num_steps, last_tag, ends_run, model, optimizer = "rl", 2, "after_rl", False, None, None

    def __init__(self, state, signal, signal_in):
        self.state, self.signal, self.signal_in = state, signal, signal_in

    def begin(self):
        self.state.phase = "rl"

    def is_done(self):
        return self.state.step >= 2

    def update(self, step):
        return Update({})

    def evaluation_due(self, last):
        return None if last else f"step_{self.state.step}"

    def evaluate(self, tag, step):
        self.state.evaluations[tag] = {"phase": "rl", "step": step, "success_rate": 0.5}
        self.signal.number = 15 if tag == self.signal_in else self.signal.number

    @property
    def checkpoint_name(self):
        return f"rl_{self.state.step:06d}"

    def best_checkpoint(self, names):
        return None

    def state_dict(self):
        return {}

    def loop_state(self):
        return {}

    def manifest(self):
        return None


def loop_of(folder, state, signal, resumed_from=None):
    """A loop that notes the names of the checkpoints that it saves."""
    saved = []
    checkpoints = SimpleNamespace(names=list, wait=lambda: None, save=lambda name, **_: saved.append(name))
    progress = SimpleNamespace(update=lambda *_, **__: None)
    loop = Loop(
        state, folder, TrainerConfig(save_every_minutes=0.0), {}, checkpoints=checkpoints, stop_signal=signal,
        progress=progress, resumed_from=resumed_from,
    )  # fmt: skip
    return loop, saved


def test_a_signal_in_the_last_evaluation_keeps_its_result_and_the_run_is_finished(tmp_path):
    state, signal = LoopState(), SimpleNamespace(number=None)
    loop, saved = loop_of(tmp_path, state, signal)
    loop.fit(Trainer(state, signal, "after_rl"))
    assert "after_rl" in state.evaluations and signal.number == 15 and saved == ["rl_000002"]
    state, signal = LoopState(), SimpleNamespace(number=None)
    loop, saved = loop_of(tmp_path, state, signal)
    with pytest.raises(StopRequested, match="after step 1 of phase rl"):  # control: an earlier evaluation
        loop.fit(Trainer(state, signal, "step_1"))
    assert saved == ["rl_000001"]


@pytest.mark.parametrize(("where", "saved_again"), [("run", []), ("elsewhere", ["rl_000001"])])
def test_a_resumed_run_that_is_stopped_at_once_saves_only_what_its_folder_lacks(tmp_path, where, saved_again):
    state, signal = LoopState("rl", step=1), SimpleNamespace(number=15)
    loop, saved = loop_of(tmp_path / "run", state, signal, tmp_path / where / "checkpoints" / "rl_000001")
    with pytest.raises(StopRequested):
        loop.fit(Trainer(state, signal, None))
    assert saved == saved_again


def test_each_rollback_halves_the_learning_rates_of_policy_and_value_head():
    trainer = TrainerConfig(learning_rate=3e-4, value_learning_rate=7e-3)
    found = [rl_trainer_config(trainer, rollbacks) for rollbacks in (0, 1, 3)]
    assert found[0] == trainer
    assert [(one.learning_rate, one.value_learning_rate) for one in found[1:]] == [
        (3e-4 / 2, 7e-3 / 2), (3e-4 / 8, 7e-3 / 8),
    ]  # fmt: skip
