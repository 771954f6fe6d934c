"""A run that is killed while it saves resumes from a whole checkpoint, at random moments and at each moment between two files."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import status_of_child

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import checkpoint_kill

from rlinf.checkpoints.checkpoint import load_checkpoint
from rlinf.checkpoints.folders import resolve_checkpoint

BENCHMARK = Path(checkpoint_kill.__file__)


def test_a_killed_run_resumes_from_a_whole_checkpoint():
    """Four kills at random moments; the benchmark makes twenty. In a process of its own, whose forks inherit nothing from here."""
    program = f"import sys; sys.path.insert(0, {str(BENCHMARK.parent)!r}); import checkpoint_kill as c; print(c.kills_survived(4, 256))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "'resumed': 4" in result.stdout, result.stdout + result.stderr


def save(manager, step: int, model, optimizer) -> None:
    about = {"loop_state": {"step": step}, "run_config": {}, "manifest": checkpoint_kill.MANIFEST}
    manager.save(f"step_{step}", model=model, optimizer=optimizer, **about)


STAGES = {
    "the folder is made": ("_start_folder", 3, "step_2"),
    "the shards are written": ("write_tensors", 3, "step_2"),
    "all files are written": ("hash_files", 3, "step_2"),
    "the checkpoint has its name": ("replace_folder", 3, "step_3"),
    "an old one is deleted": ("_remove", 1, "step_3"),
}
"""What has just been done when the process is killed, and which checkpoint is the newest whole one then."""


@pytest.mark.parametrize("stage", STAGES)
def test_there_is_no_moment_at_which_a_kill_loses_more_than_one_save(tmp_path, stage):
    name, call, newest = STAGES[stage]
    child = os.fork()
    if child == 0:  # a process that ends without cleaning up
        try:
            _save_three(tmp_path, name, call)
        finally:
            os._exit(1)
    status = status_of_child(child)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"it did not reach {name}: {status}"
    model, optimizer = checkpoint_kill.build(16)
    assert resolve_checkpoint(tmp_path).name == newest
    state = load_checkpoint(resolve_checkpoint(tmp_path), model=model, optimizer=optimizer)
    straight, own = checkpoint_kill.build(16)
    for step in range(state["step"]):
        checkpoint_kill.train(straight, own, step)
    assert all(torch.equal(straight.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    manager = checkpoint_kill.CheckpointManager(tmp_path, max_keep=2, with_policy=False)
    save(manager, 4, model, optimizer)
    assert "step_4" in manager.names() and len(manager.names()) == 2
    assert not list((tmp_path / "checkpoints").glob(".*")), "what was half-written is cleared away"


def test_a_child_that_hangs_is_ended_and_told():
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    with pytest.raises(pytest.fail.Exception, match=f"child process {child} had not ended after 0.2 s"):
        status_of_child(child, 0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def _save_three(folder: Path, name: str, call: int) -> None:
    from rlinf.checkpoints import checkpoint as module

    done, calls = getattr(module, name), []

    def then_killed(*arguments, **more):
        result = done(*arguments, **more)
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, then_killed)
    model, optimizer = checkpoint_kill.build(16)
    manager = checkpoint_kill.CheckpointManager(folder, max_keep=2, with_policy=False)
    for step in range(3):
        checkpoint_kill.train(model, optimizer, step)
        save(manager, step + 1, model, optimizer)


def test_a_torn_file_of_a_checkpoint_is_noticed(tmp_path):
    """The control of the tests above: had a checkpoint its name before it was whole, it would be refused."""
    model, optimizer = checkpoint_kill.build(16)
    manager = checkpoint_kill.CheckpointManager(tmp_path, with_policy=False)
    for step in (1, 2):
        save(manager, step, model, optimizer)
    torn = next((tmp_path / "checkpoints" / "step_2" / "trainer_state").glob("*.distcp"))
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    assert resolve_checkpoint(tmp_path).name == "step_1"
    shutil.rmtree(tmp_path / "checkpoints" / "step_1")
    with pytest.raises(checkpoint_kill.CheckpointError, match="all damaged"):
        resolve_checkpoint(tmp_path)
