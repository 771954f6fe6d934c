"""A run that is killed while it writes a checkpoint continues from the newest complete one, bit for bit: of every trainer."""

import os
import signal
from pathlib import Path

import pytest
import torch
from every_trainer import ACTIONS, RECIPES, VLA, checkpoint, lines, start, tensors
from forked_processes import status_of_forked
from recipe_sums import add_tokenizer
from run_results import differing_weights

from rlinf.checkpoints import checkpoint as checkpoints
from rlinf.checkpoints.folders import resolve_checkpoint

STAGES = {"write_tensors": 2, "hash_files": 2, "replace_folder": 3}
"""What has just been done for the third checkpoint, all its tensors, all its files, its name, and the newest complete one then."""
IMAGES = [
    "model=cnn", "model.init_config.image_size=36", "model.init_config.feature_dim=16", "env.cameras=[front]", "env.image_size=36",
    "algorithm.actor.name=scratch",
]  # fmt: skip
CASES = {name: (name, []) for name in (*ACTIONS, *RECIPES)} | {
    "adapters in bf16": ("cloning", [*VLA, "model.is_lora=true", "model.lora.rank=4", "model.precision=bf16"]),
    "filtered_bc with restarts": ("filtered_bc", ["algorithm.restart=true"]),
    "sac of images from scratch": ("sac", [*IMAGES, "algorithm.entropy_in_target=true"]),
    "td3 of images from scratch": ("td3", [*IMAGES, "algorithm.target_policy=true"]),
}


def _start(name: str, folder: Path, model: str, more: list[str], resumes: bool) -> None:
    start(name, folder, 4, model, *more, resumes=resumes)


def _killed_at_the_third(stage: str, *run) -> None:
    done, calls = getattr(checkpoints, stage), []

    def then_killed(*arguments, **more):
        result = done(*arguments, **more)
        calls.append(stage)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(checkpoints, stage, then_killed)
    _start(*run, False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_lm):
    """Return the run of a case that nobody kills; it is made once."""
    folders = {}

    def run(case):
        if case not in folders:
            folders[case], (name, more) = tmp_path_factory.mktemp("whole") / "run", CASES[case]
            # Forked as the run that is killed, so that no setting of an earlier test tells the two apart.
            assert status_of_forked(_start, name, folders[case], add_tokenizer(tiny_lm()), more, False) == 0
        return folders[case]

    return run


@pytest.mark.parametrize(
    ("case", "stage"), [*((case, "write_tensors") for case in CASES), ("sac", "hash_files"), ("sac", "replace_folder")]
)
def test_a_run_that_is_killed_in_a_save_goes_on_bit_for_bit(case, stage, tmp_path, tiny_lm, whole):
    (name, more), model, folder = CASES[case], add_tokenizer(tiny_lm()), tmp_path / "killed"
    status = status_of_forked(_killed_at_the_third, stage, name, folder, model, more)
    assert status == -signal.SIGKILL, f"it did not reach {stage}: {status}"
    assert resolve_checkpoint(folder) == checkpoint(name, folder, STAGES[stage])
    assert status_of_forked(_start, name, folder, model, more, True) == 0
    kept, continued = tensors(name, whole(case), 4), tensors(name, folder, 4)
    assert not differing_weights(continued, kept) and lines(folder) == lines(whole(case))
    assert not list((folder / "checkpoints").glob(".*")), "what was half-written is cleared away"
    assert any(key.startswith(("optimizer.", "learner.")) for key in kept)
    if "model.is_lora=true" in more:
        assert {tensor.dtype for key, tensor in kept.items() if "lora_" in key} == {torch.float32}, "masters"
    if name in ("sac", "td3"):
        parts = {"replay.features", "replay.generator", "learner.generator", "learner.critics.first.weight"}
        assert parts <= kept.keys()


@pytest.mark.parametrize("case", CASES)
def test_control_what_continues_from_the_weights_alone_ends_elsewhere(case, tmp_path, tiny_lm, whole):
    """Without optimiser, buffer and counters; a recipe under another seed."""
    (name, more), model = CASES[case], add_tokenizer(tiny_lm())
    if name in RECIPES:
        start(name, tmp_path, 4, model, seed=1)
    else:
        start(name, tmp_path, 2, model, *more, f"init_from={checkpoint(name, whole(case), 2)}")
    kept, other = tensors(name, whole(case), 4), tensors(name, tmp_path, 4 if name in RECIPES else 2)
    assert not all(torch.equal(tensor, other[key]) for key, tensor in kept.items() if key.startswith("model."))
