"""Units between an env and a policy of lerobot, by hand, with a stand-in for lerobot: CI does not install it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot_small_folders import AFTER, BEFORE, NORMALIZER, UNNORMALIZER, change_tensors, make
from safetensors.torch import load_file, save_file

from rlinf.errors import CheckpointError
from rlinf.models import build_policy
from rlinf.models.embodiment.lerobot import runner as runner_module
from rlinf.models.embodiment.lerobot import worker
from rlinf.models.embodiment.lerobot.policy import LerobotPolicy
from rlinf.models.embodiment.lerobot.smolvla import SmolVLAPolicy
from rlinf.models.embodiment.modules.ranges import STDS
from rlinf.types import Observation

STATE, ACTIONS = 6, 4
MEAN, STD = 0.25, 0.75
"""Of the images, the state and the action, in the folders of ``make``."""
WEIGHT = torch.linspace(-1, 1, ACTIONS * (3 + STATE)).reshape(ACTIONS, 3 + STATE)
BIAS = torch.tensor([0.1, -0.2, 0.3, -0.4])
STATE_SCALE, ACTION_SCALE = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 4.0, 8.0, 16.0]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ``import lerobot`` find the stand-in, also where lerobot is installed or Python is too old for it."""
    real = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "lerobot"}
    for name in real:
        del sys.modules[name]
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "lerobot_stand_in")
    monkeypatch.setattr(worker, "OLDEST", sys.version_info[:2])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lerobot"]:
        del sys.modules[name]
    sys.modules.update(real)


@pytest.fixture
def folder(tmp_path: Path, stand_in: None) -> Path:
    """A folder of a linear policy with mean 0.25 and std 0.75 everywhere."""
    folder = make(tmp_path / "folder")
    save_file({"model.encoder.weight": WEIGHT, "model.encoder.bias": BIAS}, folder / "model.safetensors")
    return folder


def policy_of(folder: Path, **fields: object) -> LerobotPolicy:
    section = {"model_type": "lerobot", "model_path": str(folder), "action_token_len": ACTIONS, "action_chunks_len": 4}
    return build_policy({"model": {**section, "override_config": fields}})


def observation(rows: int = 3) -> Observation:
    generator = np.random.default_rng(0)
    images = {"front": generator.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)}
    return Observation(images, generator.normal(size=(rows, STATE)).astype(np.float32), ["push the block"] * rows)


def by_hand(seen: Observation) -> torch.Tensor:
    """Return the normalised action ``[B, D]``: each input in the policy's units, less its mean, over its std."""
    colours = torch.from_numpy(seen.images["front"]).double().div(255).mean((1, 2))
    state = torch.from_numpy(seen.state).double() * torch.tensor(STATE_SCALE)
    return (torch.cat([colours, state], 1) - MEAN) / STD @ WEIGHT.double().T + BIAS


def test_an_action_comes_back_in_the_units_of_the_env(folder: Path) -> None:
    policy, seen = policy_of(folder, state_scale=STATE_SCALE, action_scale=ACTION_SCALE), observation()
    wanted = (by_hand(seen) * STD + MEAN) / torch.tensor(ACTION_SCALE)
    inputs = policy.preprocess(seen)
    for actions in (
        policy.predict_action_batch(do_sample=False, **inputs).actions,
        policy.propose(inputs).chunks[:, 0],
    ):
        assert actions.shape == (3, 4, ACTIONS)
        torch.testing.assert_close(actions.double(), wanted[:, None].expand(-1, 4, -1), atol=1e-5, rtol=1e-5)


def test_cloning_learns_actions_in_the_units_of_the_policy(folder: Path, tmp_path: Path) -> None:
    """The loss is lerobot's of normalised labels, and trained weights are written with the statistics as they were."""
    policy = policy_of(folder, state_scale=STATE_SCALE, action_scale=ACTION_SCALE, trained=True)
    seen, actions = observation(), torch.linspace(-1, 1, 3 * 8 * ACTIONS).reshape(3, 8, ACTIONS)
    labels = (actions.double() * torch.tensor(ACTION_SCALE) - MEAN) / STD
    loss = policy.sft_loss(policy.preprocess(seen), actions)
    wanted = (by_hand(seen)[:, None] - labels).square().mean()
    torch.testing.assert_close(loss.double(), wanted.expand(3), atol=1e-4, rtol=1e-5)
    loss.mean().backward()
    trained = [parameter for parameter in policy.parameters() if parameter.grad is not None]
    torch.optim.SGD(trained, 0.01).step()
    policy.save_pretrained(tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "model.safetensors")
    assert not torch.equal(written["model.encoder.weight"], WEIGHT)
    for name in (NORMALIZER, UNNORMALIZER, f"{BEFORE}.json", f"{AFTER}.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes()
    again = policy_of(tmp_path / "saved", state_scale=STATE_SCALE, action_scale=ACTION_SCALE)
    inputs = again.preprocess(seen)
    torch.testing.assert_close(
        again.predict_action_batch(do_sample=False, **inputs).actions,
        policy.predict_action_batch(do_sample=False, **inputs).actions,
    )


def test_a_trained_flow_acts_in_the_units_of_the_env() -> None:
    """The executed part of a chunk is unnormalised by lerobot, then divided by the scale."""
    runner = SimpleNamespace(unnormalized=lambda x: x * STD + MEAN)
    policy = SimpleNamespace(runner=runner, action_chunks_len=2, config=SimpleNamespace(action_scale=ACTION_SCALE))
    x = torch.linspace(-1, 1, 3 * 8 * ACTIONS).reshape(3, 8, ACTIONS)
    wanted = (x[:, :2] * STD + MEAN) / torch.tensor(ACTION_SCALE)
    torch.testing.assert_close(SmolVLAPolicy._chunk(policy, x), wanted)


def test_a_folder_is_checked_again_where_lerobot_reads_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that loads the policy, be it another interpreter, trusts no check that another one made."""
    policy = policy_of(folder)
    change_tensors(folder, UNNORMALIZER, lambda state: {name: each * 57.3 for name, each in state.items()})
    with pytest.raises(CheckpointError, match="learnt in units that differ"):
        runner_module.LocalRunner(str(folder), policy.config)


def test_numbers_that_are_not_normalised_have_no_range(tmp_path: Path, stand_in: None) -> None:
    """Without statistics nothing lies beyond them, whatever the width; the actions keep theirs."""
    folder = make(tmp_path / "folder", modes={"ACTION": "MEAN_STD"})
    save_file({"model.encoder.weight": WEIGHT, "model.encoder.bias": BIAS}, folder / "model.safetensors")
    policy = policy_of(folder)
    assert not policy.state_range.far(np.full((2, STATE), 1e5)).any()
    np.testing.assert_allclose(policy.action_range.middle, np.full(ACTIONS, MEAN))
    np.testing.assert_allclose(policy.action_range.half, np.full(ACTIONS, STDS * STD))
