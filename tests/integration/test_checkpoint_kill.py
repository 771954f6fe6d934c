"""A run that is killed while it saves resumes from a whole checkpoint, at each moment between two files."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from forked_processes import status_of_forked
from processes import is_running
from torch import nn

from rlinf.checkpoints.checkpoint import load_checkpoint
from rlinf.checkpoints.checkpoint_manager import CheckpointManager
from rlinf.checkpoints.folders import resolve_checkpoint
from rlinf.errors import CheckpointError
from rlinf.manifest import Manifest

MANIFEST = Manifest({}, {}, {}, {}, {}, {"state": "none"}, "fp32", {}, None, policy_version=0, seed=0)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, step: int) -> None:
    """Take a step that depends on nothing but the weights, the optimiser and its number."""
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(manager, step: int, model, optimizer) -> None:
    about = {"loop_state": {"step": step}, "run_config": {}, "manifest": MANIFEST}
    manager.save(f"step_{step}", model=model, optimizer=optimizer, **about)


STAGES = {
    "the folder is made": ("_start_folder", 3, "step_2"),
    "the shards are written": ("write_tensors", 3, "step_2"),
    "all files are written": ("hash_files", 3, "step_2"),
    "the checkpoint has its name": ("replace_folder", 3, "step_3"),
    "an old one is deleted": ("_remove", 1, "step_3"),
}
"""What has just been done when the process is killed, and which checkpoint is the newest whole one then."""


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("stage", STAGES)
def test_there_is_no_moment_at_which_a_kill_loses_more_than_one_save(tmp_path, stage, mode):
    name, call, newest = STAGES[stage]
    status = status_of_forked(_save_three, tmp_path, name, call, mode)
    assert status == -signal.SIGKILL, f"it did not reach {name}: {status}"
    model, optimizer = build()
    assert resolve_checkpoint(tmp_path).name == newest
    state = load_checkpoint(resolve_checkpoint(tmp_path), model=model, optimizer=optimizer)
    straight, own = build()
    for step in range(state["step"]):
        train(straight, own, step)
    assert all(torch.equal(straight.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    manager = CheckpointManager(tmp_path, max_keep=2, with_policy=False)
    save(manager, 4, model, optimizer)
    assert "step_4" in manager.names() and len(manager.names()) == 2
    assert not list((tmp_path / "checkpoints").glob(".*")), "what was half-written is cleared away"


def test_a_child_that_hangs_is_ended_and_reported():
    with pytest.raises(pytest.fail.Exception, match=r"child process \d+ had not ended after 0.2 s") as failure:
        status_of_forked(signal.pause, seconds=0.2)
    assert not is_running(int(str(failure.value).split()[2]))


def _save_three(folder: Path, name: str, call: int, mode: str) -> None:
    from rlinf.checkpoints import checkpoint as module

    done, calls = getattr(module, name), []

    def then_killed(*arguments, **more):
        result = done(*arguments, **more)
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, then_killed)
    model, optimizer = build()
    manager = CheckpointManager(folder, save_mode=mode, max_keep=2, with_policy=False)
    for step in range(3):
        train(model, optimizer, step)
        save(manager, step + 1, model, optimizer)
    manager.wait()


def test_a_torn_file_of_a_checkpoint_is_noticed(tmp_path):
    """The control of the tests above: had a checkpoint its name before it was whole, it would be rejected."""
    model, optimizer = build()
    manager = CheckpointManager(tmp_path, with_policy=False)
    for step in (1, 2):
        save(manager, step, model, optimizer)
    torn = next((tmp_path / "checkpoints" / "step_2" / "trainer_state").glob("*.distcp"))
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    assert resolve_checkpoint(tmp_path).name == "step_1"
    shutil.rmtree(tmp_path / "checkpoints" / "step_1")
    with pytest.raises(CheckpointError, match="all damaged"):
        resolve_checkpoint(tmp_path)
