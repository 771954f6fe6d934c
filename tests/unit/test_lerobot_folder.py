"""A folder of lerobot whose policy would be blind is refused by the name of the feature; whole ones are accepted."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.cli import main
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.embodiment.lerobot.config import LerobotConfig
from rlinf.models.embodiment.lerobot.folder import (
    MIGRATE,
    action_statistics,
    check_folder,
    compare_weights,
    refuse_folder,
)
from rlinf.models.embodiment.lerobot.policy import LerobotPolicy

MODES = {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
BEFORE, AFTER = "policy_preprocessor", "policy_postprocessor"
NORMALIZER, UNNORMALIZER = (
    f"{BEFORE}_step_3_normalizer_processor.safetensors",
    f"{AFTER}_step_0_unnormalizer_processor.safetensors",
)


def write(path: Path, values: object) -> None:
    path.write_text(json.dumps(values))


def change(folder: Path, file: str, edit: Callable[[dict], object]) -> None:
    values = json.loads((folder / file).read_text())
    edit(values)
    write(folder / file, values)


def change_tensors(folder: Path, file: str, edit: Callable[[dict], dict]) -> None:
    save_file(edit(load_file(folder / file)), folder / file)


def picture(name: str = "front", shape: tuple[int, ...] = (3, 32, 32)) -> dict:
    return {f"observation.images.{name}": {"type": "VISUAL", "shape": list(shape)}}


def make(
    folder: Path, kind: str = "act", pictures: dict | None = None, modes: dict[str, str] = MODES, **fields: object
) -> Path:
    """Write what lerobot 0.6 writes for a policy of one linear layer."""
    folder.mkdir()
    inputs = {**(picture() if pictures is None else pictures), "observation.state": {"type": "STATE", "shape": [6]}}
    inputs |= fields.pop("inputs", {})
    outputs = {"action": {"type": "ACTION", "shape": [4]}}
    config = {"type": kind, "n_obs_steps": 1, "chunk_size": 8, "n_action_steps": 4, "input_features": inputs}
    write(folder / "config.json", {**config, "output_features": outputs, "normalization_mapping": modes, **fields})
    save_file(
        {"model.layer.weight": torch.ones(2, 2), "model.layer.bias": torch.zeros(2)}, folder / "model.safetensors"
    )
    features = {**inputs, "action": outputs["action"]}
    step = {"config": {"eps": 1e-8, "features": features, "norm_map": modes}}
    before = [{"registry_name": "rename_observations_processor", "config": {"rename_map": {}}}]
    before += [{**step, "registry_name": "normalizer_processor", "state_file": NORMALIZER}]
    after = [{**step, "registry_name": "unnormalizer_processor", "state_file": UNNORMALIZER}]
    write(folder / f"{BEFORE}.json", {"name": BEFORE, "steps": before})
    write(folder / f"{AFTER}.json", {"name": AFTER, "steps": after})
    statistics = {}
    for name, each in features.items():
        shape = (3, 1, 1) if each["type"] == "VISUAL" else tuple(each["shape"])
        low = torch.full(shape, 0.25)
        statistics |= {
            f"{name}.{part}": low + offset for part, offset in {"mean": 0, "std": 0.5, "min": 0, "max": 1}.items()
        }
        statistics |= {
            f"{name}.{part}": low + offset for part, offset in {"q01": 0, "q99": 1, "q10": 0, "q90": 1}.items()
        }
    save_file(statistics, folder / NORMALIZER)
    save_file(statistics, folder / UNNORMALIZER)
    return folder


def two(folder: Path) -> Path:
    return make(folder, pictures=picture("top") | picture("wrist"))


HEALTHY: dict[str, Callable[[Path], Path]] = {
    "ACT with a camera": make,
    "two cameras": two,
    "without pictures": lambda folder: make(
        folder, pictures={}, inputs={"observation.environment_state": {"type": "ENV", "shape": [9]}}
    ),
    "bounds instead of deviations": lambda folder: make(folder, modes=dict.fromkeys(MODES, "MIN_MAX")),
    "quantiles, as of pi0.5": lambda folder: make(
        folder, "pi05", modes={**MODES, "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    ),
    "pictures as they are, as of SmolVLA": lambda folder: make(
        folder, "smolvla", modes={**MODES, "VISUAL": "IDENTITY"}
    ),
    "no normalisation at all": lambda folder: make(folder, modes={}),
    "a diffusion's horizon": lambda folder: make(folder, "diffusion", n_obs_steps=2, horizon=8, chunk_size=None),
    "an empty camera, which a policy fills": lambda folder: make(
        folder, "smolvla", pictures=picture() | picture("empty_camera_0")
    ),
    "VQ-BeT, whose chunk has another name": lambda folder: make(
        folder, "vqbet", n_obs_steps=2, action_chunk_size=5, chunk_size=None, n_action_steps=None
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_whole_folder_is_accepted(name: str, tmp_path: Path) -> None:
    folder = HEALTHY[name](tmp_path / "folder")
    assert check_folder(folder) == []
    refuse_folder(folder)


def _without_normalizer(folder: Path) -> None:
    change(folder, f"{BEFORE}.json", lambda values: values["steps"].pop())


def _other_keys(folder: Path) -> None:
    change_tensors(folder, NORMALIZER, lambda state: {f"so100.{name}": each for name, each in state.items()})


def _empty(folder: Path) -> None:
    change_tensors(folder, UNNORMALIZER, lambda state: {"none": torch.zeros(1)})
    change(folder, f"{AFTER}.json", lambda values: values["steps"][0].pop("state_file"))


def _old(folder: Path) -> None:
    change_tensors(
        folder,
        "model.safetensors",
        lambda state: {**state, "normalize_inputs.buffer_observation_state.mean": torch.ones(6)},
    )
    (folder / f"{BEFORE}.json").unlink()


def _channels_last(folder: Path) -> None:
    change(folder, "config.json", lambda values: values["input_features"].update(picture("front", (32, 32, 3))))


def _bytes(folder: Path) -> None:
    name = "observation.images.front"
    change_tensors(
        folder, NORMALIZER, lambda state: {key: each * 255 if name in key else each for key, each in state.items()}
    )


def _swapped(folder: Path) -> None:
    names = {"observation.images.top": "observation.images.wrist", "observation.images.wrist": "observation.images.top"}
    change(folder, f"{BEFORE}.json", lambda values: values["steps"][0]["config"].update(rename_map=names))


def _degrees(folder: Path) -> None:
    change_tensors(folder, UNNORMALIZER, lambda state: {key: each * 57.29578 for key, each in state.items()})


def _tokenizer(folder: Path) -> None:
    step = {"registry_name": "tokenizer_processor", "config": {"tokenizer_name": "nobody/no-tokenizer"}}
    change(folder, f"{BEFORE}.json", lambda values: values["steps"].insert(0, step))


def _narrow(folder: Path) -> None:
    change_tensors(
        folder, UNNORMALIZER, lambda state: {key: each[:3] if "action" in key else each for key, each in state.items()}
    )


BLIND: dict[str, tuple[Callable[[Path], object], Callable[[Path], Path], str, str]] = {
    "no normaliser": (_without_normalizer, make, "observation.images.front", "dataset_stats"),
    "no preprocessor": (lambda folder: (folder / f"{BEFORE}.json").unlink(), make, f"{BEFORE}.json", "migrate="),
    "empty statistics": (_empty, make, "action", "is empty"),
    "statistics of other keys": (_other_keys, make, "observation.state", "so100.observation.state"),
    "normalisation of an old lerobot": (_old, make, "model.safetensors", "migrate="),
    "another mode in the processor": (
        lambda folder: change(folder, f"{BEFORE}.json", lambda values: values["steps"][1]["config"]["norm_map"].update(STATE="IDENTITY")),
        make, "observation.state", "IDENTITY",
    ),
    "channels last": (_channels_last, make, "observation.images.front", "[3, 32, 32]"),
    "statistics of bytes": (_bytes, make, "observation.images.front", "0..255"),
    "bounds of bytes": (
        _bytes, lambda folder: make(folder, modes=dict.fromkeys(MODES, "MIN_MAX")), "observation.images.front", "0..255"
    ),
    "swapped cameras": (_swapped, two, "observation.images.top", "rename_map"),
    "more actions than a chunk has": (
        lambda folder: change(folder, "config.json", lambda values: values.update(n_action_steps=9)), make, "n_action_steps=9", "1 to 8"
    ),
    "actions in other units": (_degrees, make, "action", "57.3"),
    "statistics of fewer actions": (_narrow, make, "action", "4 numbers"),
    "no tokenizer": (_tokenizer, make, "tokenizer", "model.override_config.tokenizer"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), make, "model.safetensors", "missing"),
    "a damaged file of weights": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:90]),
        make, "model.safetensors", "copy it again",
    ),
    "a type of a newer lerobot": (
        lambda folder: change(folder, "config.json", lambda values: values.update(type="pi9")), make, "config.json", "newer lerobot"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLIND)
def test_a_blind_policy_is_refused_by_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each has the feature and the cure, in the error of loading and in the command's table."""
    plant, base, feature, cure = BLIND[name]
    folder = base(tmp_path / "folder")
    plant(folder)
    with pytest.raises(CheckpointError) as error:
        refuse_folder(folder)
    assert feature in str(error.value)
    text = " ".join(str(each) for each in check_folder(folder))
    assert feature in text and cure.lower() in text.lower()
    assert main(["check-policy", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert feature in shown and cure.lower() in shown.lower()


def test_actions_far_outside_the_bounds_of_the_env_are_refused(tmp_path: Path) -> None:
    """Degrees in an env of radians: one error with the number and the override, which mends it."""
    statistics = action_statistics(make(tmp_path / "folder"))  # mean 0.25, deviation 0.5
    bounds = np.array([-1, -1, -1, -0.5], np.float32), np.array([1, 1, 1, 0.5], np.float32)

    def check(learnt: dict[str, list[float]], scale: float = 1.0) -> None:
        config = LerobotConfig.from_pretrained(tmp_path / "folder")
        config.norm_stats, config.action_scale = {"lerobot": {"action": learnt}}, scale
        LerobotPolicy(config, None, 4, 4).check_actions(*bounds)

    check(statistics)
    check({})
    degrees = {name: [57.29578 * each for each in numbers] for name, numbers in statistics.items()}
    for names in (("mean", "std"), ("q01", "q99"), ("min", "max")):
        with pytest.raises(ConfigError, match=r"action 0 .*model\.override_config\.action_scale"):
            check({name: degrees[name] for name in names})
    check(degrees, 57.29578)
    one = {"min": [-1.0, -1.0, -1.4, -1.4], "max": [1.0, 1.0, 4.9, 2.6]}  # 2.6 are 5.2 half-widths of 0.5
    with pytest.raises(ConfigError, match="action 3 of the policy was learnt from -1.4 to 2.6"):
        check(one)


def test_overrides_mend_what_they_are_named_for(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder")
    _tokenizer(folder)
    (tmp_path / "words").mkdir()
    config = LerobotConfig.from_pretrained(folder)
    config.tokenizer = str(tmp_path / "words")
    assert check_folder(folder, config) == []
    assert str(folder) in MIGRATE.format(folder)


def test_weights_must_be_those_of_the_folder(tmp_path: Path) -> None:
    """Missing, unexpected and silently unloaded ones are told apart; a tied one, and the name without its first part, are accepted."""
    folder = make(tmp_path / "folder")
    whole = {"model.layer.weight": torch.ones(2, 2), "layer.bias": torch.zeros(2)}
    tied = {**whole, "model.tied": whole["model.layer.weight"]}
    assert compare_weights(folder, whole) == compare_weights(folder, tied) == []
    for state, named in (
        ({**whole, "model.head": torch.ones(1)}, "lacks weights of the policy: model.head"),
        ({"model.layer.weight": torch.ones(2, 2)}, "holds weights that the policy has not: model.layer.bias"),
        ({**whole, "layer.bias": torch.ones(2)}, "was not loaded into layer.bias"),
        ({**whole, "layer.bias": torch.zeros(3)}, "was not loaded into layer.bias"),
    ):
        (found,) = compare_weights(folder, state)
        assert named in str(found)


def test_cameras_are_matched_by_name(tmp_path: Path) -> None:
    """Swapped, missing and extra ones are refused, unless an override names them."""
    config = LerobotConfig.from_pretrained(two(tmp_path / "folder"))
    top, wrist = "observation.images.top", "observation.images.wrist"
    assert config.camera_of(["wrist", "top"]) == {top: "top", wrist: "wrist"}  # their order does not matter
    for cameras, named in ((["top"], wrist), (["top", "front"], wrist), (["top", "wrist", "front"], "'front'")):
        with pytest.raises(ConfigError, match=re.escape(named)):
            config.camera_of(cameras)
    config.cameras = {"wrist": "hand"}
    assert config.camera_of(["top", "hand"]) == {top: "top", wrist: "hand"}
    config.cameras = {"wrist": "top"}
    with pytest.raises(ConfigError, match="two pictures"):
        config.camera_of(["top"])
    config.cameras = {"left": "top"}
    with pytest.raises(ConfigError, match="'left'"):
        config.camera_of(["top", "wrist"])
