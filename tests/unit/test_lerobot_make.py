"""New policy folders of lerobot for a dataset."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from lerobot_folders import TINY, theirs

from rlinf.models import build_policy
from rlinf.models.embodiment.lerobot import check
from rlinf.models.embodiment.lerobot.worker import runs_here
from rlinf.types import Observation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not runs_here(), reason="lerobot does not import in this Python"),
]


def test_a_new_folder_of_a_dataset_without_pictures_splits_its_state(tmp_path: Path) -> None:
    """Each part has its own numbers' statistics, and a constant number a deviation of 1; ACT rejects the state alone."""
    script = Path(__file__).parents[2] / "scripts" / "make_lerobot_policy.py"
    write = runpy.run_path(str(script))["write"]
    columns = {"observation.state": [[0, 1, 2, 3, 4], [1, 2, 0, 4, 5]], "action": [[0, 0], [1, 1]]}
    known = {name: {"dtype": "float32", "shape": [len(mean)]} for name, (mean, _) in columns.items()}
    numbers = {name: {"mean": mean, "std": std, "count": [9]} for name, (mean, std) in columns.items()}
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text(json.dumps({"features": known}))
    (tmp_path / "meta" / "stats.json").write_text(json.dumps(numbers))

    folder = write(tmp_path, tmp_path / "act", state_width=2, **TINY["act"])
    assert check.report(folder)[1] == []
    model = build_policy(
        {"model": {"model_type": "lerobot", "model_path": str(folder), "action_token_len": 2, "action_chunks_len": 4}}
    )
    inputs = model.preprocess(Observation({}, np.array([[3, 5, 2.5, 11, -1]], np.float32), ["lift"]))
    assert {name: each.tolist() for name, each in inputs.items() if "state" in name} == {
        "observation.state": [[3, 5]],
        "observation.environment_state": [[2.5, 11, -1]],
    }
    seen = theirs(folder)[1]({**inputs, "task": ["lift"]})
    assert seen["observation.state"].tolist() == [[pytest.approx(3.0), pytest.approx(2.0)]]
    assert seen["observation.environment_state"][0].tolist() == pytest.approx([0.5, 2.0, -1.0])

    with pytest.raises(ValueError, match="environment state"):
        write(tmp_path, tmp_path / "alone", **TINY["act"])
    with pytest.raises(SystemExit, match="state_width=5.*1 to 4"):
        write(tmp_path, tmp_path / "all", state_width=5)


@pytest.mark.parametrize("kind", ["xvla", "groot"])
def test_a_new_folder_with_a_tiny_backbone_may_be_moved(kind: str, tmp_path: Path) -> None:
    """It names its tokenizer and base by paths within it; a backbone of a different name is rejected."""
    if kind == "groot":
        pytest.importorskip("tree", reason="GR00T needs dm-tree: bash scripts/setup.sh --lerobot installs it")
    write = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "make_lerobot_policy.py"))["write"]
    image, values = "observation.images.front", {"observation.state": 3, "action": 2}
    known = {name: {"dtype": "float32", "shape": [width]} for name, width in values.items()}
    known[image] = {"dtype": "image", "shape": [32, 32, 3]}
    numbers = {
        name: {"mean": [0.0] * n, "std": [1.0] * n, "min": [-1.0] * n, "max": [1.0] * n} for name, n in values.items()
    }
    numbers[image] = {"mean": [[[0.5]]] * 3, "std": [[[0.5]]] * 3}
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text(json.dumps({"features": known}))
    (tmp_path / "meta" / "stats.json").write_text(json.dumps(numbers))
    with pytest.raises(SystemExit, match="backbone=tiny"):
        write(tmp_path, tmp_path / "policy", kind, backbone="small")
    write(tmp_path, tmp_path / "policy", kind, backbone="tiny", chunk_size=8, n_action_steps=4)
    (tmp_path / "policy").rename(tmp_path / "moved")
    assert check.report(tmp_path / "moved")[1] == []
