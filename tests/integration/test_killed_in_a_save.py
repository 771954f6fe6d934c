"""A run that is killed while it writes a checkpoint continues from the newest whole one, bit for bit: of every trainer."""

import os
import signal
from pathlib import Path

import pytest
from every_trainer import checkpoint, lines, start, tensors
from forked_processes import status_of_forked
from recipe_sums import add_tokenizer
from run_results import differing_weights

from rlinf.checkpoints import checkpoint as checkpoints
from rlinf.checkpoints.folders import resolve_checkpoint

STAGES = {"write_tensors": 2, "hash_files": 2, "replace_folder": 3}
"""What has just been done for the third checkpoint, all its tensors, all its files, its name, and the newest whole one then."""
CASES = [("sac", stage) for stage in STAGES]
CASES += [(name, "write_tensors") for name in ("cloning", "ppo", "grpo", "recipe sft", "recipe grpo", "recipe dpo")]


def _killed_at_the_third(stage: str, *run) -> None:
    done, calls = getattr(checkpoints, stage), []

    def then_killed(*arguments, **more):
        result = done(*arguments, **more)
        calls.append(stage)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(checkpoints, stage, then_killed)
    start(*run)


def _start(name: str, folder: Path, model: str, resumes: bool) -> None:
    start(name, folder, 4, model, resumes=resumes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_lm):
    """Return the run of a trainer that nobody kills; it is made once."""
    folders = {}

    def run(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("whole") / "run"
            # Forked as the run that is killed, so that no setting of an earlier test tells the two apart.
            assert status_of_forked(_start, name, folders[name], add_tokenizer(tiny_lm()), False) == 0
        return folders[name]

    return run


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_a_run_that_is_killed_in_a_save_goes_on_bit_for_bit(name, stage, tmp_path, tiny_lm, whole):
    model, folder = add_tokenizer(tiny_lm()), tmp_path / "killed"
    status = status_of_forked(_killed_at_the_third, stage, name, folder, 4, model)
    assert status == -signal.SIGKILL, f"it did not reach {stage}: {status}"
    assert resolve_checkpoint(folder) == checkpoint(name, folder, STAGES[stage])
    assert status_of_forked(_start, name, folder, model, True) == 0
    assert not differing_weights(tensors(name, folder, 4), tensors(name, whole(name), 4))
    assert lines(folder) == lines(whole(name))
    assert not list((folder / "checkpoints").glob(".*")), "what was half-written is cleared away"
