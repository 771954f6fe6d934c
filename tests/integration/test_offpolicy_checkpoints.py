"""Checkpoints of an actor: the frozen policy lies once in the run folder, and a kill while one is written loses nothing before it."""

import shutil

import numpy as np
import pytest
import torch
from offpolicy_runs import config_of
from safetensors.torch import load_file

import rlinf
from rlinf.checkpoints.trainer_state import read_entries
from rlinf.commands.export import export, random_observation
from rlinf.commands.train import build, train
from rlinf.errors import CheckpointError

CLONED = ["sft.max_steps=2", "sft.num_demonstrations=4", "sft.batch_size=8", "env.state=full", "trainer.save_every=1"]


@pytest.fixture(scope="module")
def cloned(tmp_path_factory):
    """A run that clones and trains an actor on the clone; returns its folder and the policy in memory."""
    folder = tmp_path_factory.mktemp("cloned") / "run"
    run = build(config_of(folder, *CLONED, "trainer.max_steps=4", "trainer.max_keep=2"))
    run.execute()
    return folder, run.rl.policy.eval(), random_observation(run.parts.config, run.rl.policy, num_rows=50)


def acts(policy, observation) -> np.ndarray:
    return policy.predict_action_batch(do_sample=False, **policy.preprocess(observation)).actions.numpy()


def test_checkpoints_hold_the_head_and_the_run_folder_the_policy_below_it(tmp_path, cloned):
    source, trained, observation = cloned
    kept = [path.name for path in (source / "checkpoints").iterdir() if path.name.startswith("rl_")]
    assert sorted(kept) == ["rl_000003", "rl_000004"]
    for name in kept:
        files = {path.name for path in (source / "checkpoints" / name / "model").iterdir()}
        assert files == {"actor.json", "actor.safetensors"}
        entries = read_entries(source / "checkpoints" / name / "trainer_state")
        assert "model.actor.network.0.weight" in entries and not any(
            entry.startswith("model.base.") for entry in entries
        )
    (base,) = (source / "frozen").iterdir()
    weights = load_file(base / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in trained.base.state_dict().items())
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    for path in (moved / "checkpoints").glob("sft_*"):  # what the actor learnt on does not need them
        shutil.rmtree(path)
    (moved / "checkpoints" / "superseded_1").mkdir()
    aside = (moved / "checkpoints" / "rl_000004").rename(moved / "checkpoints" / "superseded_1" / "rl_000004")
    assert np.array_equal(rlinf.load_policy(aside).act(observation), acts(trained, observation))
    export(aside, tmp_path / "export")
    shutil.rmtree(moved)
    assert np.array_equal(rlinf.load_policy(tmp_path / "export").act(observation), acts(trained, observation))


def test_a_checkpoint_without_the_policy_below_its_head_is_refused(tmp_path, cloned):
    source, _, _ = cloned
    alone = shutil.copytree(source / "checkpoints" / "rl_000004", tmp_path / "rl_000004")
    with pytest.raises(
        CheckpointError, match="does not contain its base policy .*Copy the complete run folder, or run `rlinf export"
    ):
        rlinf.load_policy(alone)
    shutil.copytree(source / "frozen", tmp_path / "frozen")
    rlinf.load_policy(alone)  # the control
    weights = next((tmp_path / "frozen").glob("*/model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or were replaced"):
        rlinf.load_policy(alone)


def test_a_run_that_goes_on_elsewhere_keeps_the_policy_there(tmp_path, cloned, monkeypatch):
    source, _, _ = cloned
    more = [*CLONED, "trainer.max_steps=5", f"resume={source / 'checkpoints' / 'rl_000004'}"]
    train(config_of(tmp_path / "new", *more))
    (there,), (here,) = (list((folder / "frozen").iterdir()) for folder in (source, tmp_path / "new"))
    assert here.name == there.name
    shutil.copytree(source, tmp_path / "same")

    def written(*_):
        raise AssertionError("the run folder has it already")

    monkeypatch.setattr("rlinf.offpolicy.trainer.write_policy", written)
    resumed = build(config_of(tmp_path / "same", *CLONED, "trainer.max_steps=5", f"resume={tmp_path / 'same'}"))
    resumed.execute()
    with pytest.raises(AssertionError, match="has it already"):  # the control
        build(config_of(tmp_path / "third", *more)).execute()
