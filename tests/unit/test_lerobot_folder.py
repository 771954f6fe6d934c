"""A folder of lerobot whose policy would be blind is rejected by the name of the feature; whole ones are accepted."""

import importlib
import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot_small_folders import (
    AFTER,
    BEFORE,
    MODES,
    NORMALIZER,
    UNNORMALIZER,
    change,
    change_tensors,
    image,
    make,
    make_groot,
    make_xvla,
    write,
)

from rlinf.cli import main
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models import build_policy
from rlinf.models.embodiment.lerobot import worker
from rlinf.models.embodiment.lerobot.config import LerobotConfig
from rlinf.models.embodiment.lerobot.folder import (
    MIGRATE,
    action_statistics,
    check_folder,
    compare_weights,
    reject_folder,
)
from rlinf.models.embodiment.lerobot.policy import LerobotPolicy
from rlinf.models.embodiment.lerobot.runner import LocalRunner


def two(folder: Path) -> Path:
    return make(folder, images=image("top") | image("wrist"))


HEALTHY: dict[str, Callable[[Path], Path]] = {
    "ACT with a camera": make,
    "two cameras": two,
    "without images": lambda folder: make(
        folder, images={}, inputs={"observation.environment_state": {"type": "ENV", "shape": [9]}}
    ),
    "bounds instead of deviations": lambda folder: make(folder, modes=dict.fromkeys(MODES, "MIN_MAX")),
    "quantiles, as of pi0.5": lambda folder: make(
        folder, "pi05", modes={**MODES, "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    ),
    "images as they are, as of SmolVLA": lambda folder: make(folder, "smolvla", modes={**MODES, "VISUAL": "IDENTITY"}),
    "no normalisation at all": lambda folder: make(folder, modes={}),
    "a diffusion's horizon": lambda folder: make(folder, "diffusion", n_obs_steps=2, horizon=8, chunk_size=None),
    "an empty camera, which a policy fills": lambda folder: make(
        folder, "smolvla", images=image() | image("empty_camera_0")
    ),
    "X-VLA": make_xvla,
    "GR00T N1.7": make_groot,
    "GR00T with groups of actions": lambda folder: _decoding()(make_groot(folder)) or folder,
    "VQ-BeT, whose chunk has another name": lambda folder: make(
        folder, "vqbet", n_obs_steps=2, action_chunk_size=5, chunk_size=None, n_action_steps=None
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_whole_folder_is_accepted(name: str, tmp_path: Path) -> None:
    folder = HEALTHY[name](tmp_path / "folder")
    assert check_folder(folder) == []
    reject_folder(folder)


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
    change(folder, "config.json", lambda values: values["input_features"].update(image("front", (32, 32, 3))))


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


def _set(file: str, *keys: object, value: object) -> Callable[[Path], None]:
    """Set the value at a path of keys in a JSON file."""

    def edit(values: dict) -> None:
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return lambda folder: change(folder, file, edit)


def _with_backbone(folder: Path) -> Path:
    (folder / "brain").mkdir()
    write(folder / "brain" / "config.json", {})
    change(folder, "base/config.json", lambda values: values.update(model_name="brain"))
    return folder


DECODED = {"modality_config": {"action": {"modality_keys": ["arm", "hand"]}}}
DECODED["raw_stats"] = {
    "action": {"arm": {"min": [0.25] * 3, "max": [1.25] * 3}, "hand": {"min": [0.25], "max": [1.25]}}
}
"""Statistics of the groups of an embodiment's actions, equal to the flat ones."""


def _decoding(**fields: object) -> Callable[[Path], None]:
    step = {"registry_name": "groot_n1_7_action_decode_v1", "config": {**DECODED, **fields}}
    return _set(f"{AFTER}.json", "steps", value=[step])


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
    "another kind in the processor, which has no mode": (
        lambda folder: change(folder, f"{BEFORE}.json", lambda values: values["steps"][1]["config"]["features"]["observation.state"].update(type="ENV")),
        make, "observation.state", "IDENTITY",
    ),
    "a mode that lerobot has not": (
        lambda folder: None, lambda folder: make(folder, modes={**MODES, "STATE": "MEDIAN"}), "observation.state", "QUANTILES"
    ),
    "a processor whose settings are null": (_set(f"{BEFORE}.json", "steps", 1, "config", value=None), make, "observation.images.front", "dataset_stats"),
    "channels last": (_channels_last, make, "observation.images.front", "[3, 32, 32]"),
    "statistics of bytes": (_bytes, make, "observation.images.front", "0..255"),
    "swapped cameras": (_swapped, two, "observation.images.top", "rename_map"),
    "more actions than a chunk has": (
        lambda folder: change(folder, "config.json", lambda values: values.update(n_action_steps=9)), make, "n_action_steps=9", "1 to 8"
    ),
    "actions in other units": (_degrees, make, "action", "57.3"),
    "statistics of fewer actions": (_narrow, make, "action", "4 dimensions"),
    "no tokenizer": (_tokenizer, make, "tokenizer", "model.override_config.tokenizer"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), make, "model.safetensors", "missing"),
    "a damaged file of weights": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:90]),
        make, "model.safetensors", "copy it again",
    ),
    "X-VLA whose images are not normalised": (
        lambda folder: change(folder, f"{BEFORE}.json", lambda values: values["steps"].pop(2)), make_xvla, "xvla_imagenet_normalize", "images"
    ),
    "a domain without a soft prompt": (
        _set(f"{BEFORE}.json", "steps", 3, "config", "domain_id", value=3), make_xvla, "domain_id", "0 to 2"
    ),
    "a state of which X-VLA would read a part": (
        lambda folder: None, lambda folder: make_xvla(folder, max_state_dim=5), "observation.state", "max_state_dim=5"
    ),
    "an action space that X-VLA has not": (_set("config.json", "action_mode", value="ee9d"), make_xvla, "action_mode", "so101_bimanual"),
    "GR00T N1.5": (_set("config.json", "tokenizer_assets_repo", value="lerobot/eagle"), make_groot, "N1.5", "GR00T-N1.7-3B"),
    "GR00T N1.6": (_set("config.json", "base_model_path", value="nvidia/GR00T-N1.6-3B"), make_groot, "N1.6", "GR00T-N1.7-3B"),
    "GR00T in NVIDIA's format": (
        lambda folder: write(folder / "config.json", {"model_type": "Gr00tN1d7"}), make_groot, "config.json", "save_pretrained"
    ),
    "a base of GR00T N1.6": (_set("base/config.json", "model_type", value="Gr00tN1d6"), make_groot, "base_model_path", "Gr00tN1d7"),
    "no base": (
        _set("config.json", "base_model_path", value="nobody/no-base"), make_groot, "base_model_path", "model.override_config.vlm"
    ),
    "a backbone with code": (
        lambda folder: write(folder / "brain/config.json", {"auto_map": {}}),
        lambda folder: _with_backbone(make_groot(folder)), "model_name", "contains code",
    ),
    "a tokenizer with code": (
        lambda folder: write(folder / "vlm/tokenizer_config.json", {"auto_map": {}}), make_groot, f"{BEFORE}.json", "auto_map"
    ),
    "GR00T without statistics": (
        lambda folder: change(folder, f"{BEFORE}.json", lambda values: values["steps"][0].pop("state_file")),
        make_groot, "observation.state", "is empty",
    ),
    "actions that GR00T does not normalise": (
        _set(f"{AFTER}.json", "steps", 0, "config", value={"normalize_min_max": False}), make_groot, "action", "normalize_min_max=False"
    ),
    "actions relative to the state": (_decoding(use_relative_action=True), make_groot, "action", "use_relative_action=True"),
    "its generic form": (
        _set("config.json", "use_relative_actions", value=True), make_groot, "use_relative_actions", "train again"
    ),
    "an embodiment without statistics": (_decoding(raw_stats={"action": {}}), make_groot, "action", "is empty"),
    "an unknown embodiment": (
        _set(f"{BEFORE}.json", "steps", 0, "config", "embodiment_tag", value="leg"), make_groot, "embodiment_tag", "arm"
    ),
    "GR00T's cameras by other names": (
        _set(f"{BEFORE}.json", "steps", 0, "config", "video_modality_keys", value=["ego_view"]), make_groot, "front", "ego_view"
    ),
    "a type of a newer lerobot": (
        lambda folder: change(folder, "config.json", lambda values: values.update(type="pi9")), make, "config.json", "newer lerobot"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLIND)
def test_a_blind_policy_is_refused_by_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each has the feature and the fix, in the error of loading and in the command's table."""
    plant, base, feature, fix = BLIND[name]
    folder = base(tmp_path / "folder")
    plant(folder)
    with pytest.raises(CheckpointError) as error:
        reject_folder(folder)
    assert feature in str(error.value)
    text = " ".join(str(each) for each in check_folder(folder))
    assert feature in text and fix.lower() in text.lower()
    assert main(["check-policy", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert feature in shown and fix.lower() in shown.lower()


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
    with pytest.raises(ConfigError, match="action 3 of the policy ranged from -1.4 to 2.6"):
        check(one)


@pytest.mark.parametrize("command", ["serve", "train"])
def test_a_policy_with_a_history_is_refused_where_nobody_remembers(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = make(tmp_path / "folder", "diffusion", n_obs_steps=2, horizon=8, chunk_size=None)
    words = [f"model.model_path={folder}", "model.action_token_len=4", "model.action_chunks_len=4", "algorithm=sac"]
    assert main([command, "model=lerobot", *words, "env=tabletop"]) == 2
    assert "n_obs_steps" in capsys.readouterr().err


def test_overrides_mend_what_they_are_named_for(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = make(tmp_path / "folder")
    _tokenizer(folder)
    (tmp_path / "words").mkdir()
    config = LerobotConfig.from_pretrained(folder)
    config.tokenizer = str(tmp_path / "words")
    assert check_folder(folder, config) == []
    assert str(folder) in MIGRATE.format(folder)
    assert main(["check-policy", str(folder), "override_config.prmpt=x"]) == 2
    assert "'prompt'" in capsys.readouterr().err  # a key with dots is a field of it


def test_weights_must_be_those_of_the_folder(tmp_path: Path) -> None:
    """Missing, unexpected and silently unloaded ones are told apart; a tied one, and the name without its first part, are accepted."""
    folder = make(tmp_path / "folder")
    whole = {"model.layer.weight": torch.ones(2, 2), "layer.bias": torch.zeros(2)}
    tied = {**whole, "model.tied": whole["model.layer.weight"]}
    assert compare_weights(folder, whole) == compare_weights(folder, tied) == []
    for state, named in (
        ({**whole, "model.head": torch.ones(1)}, "lacks weights of the policy: model.head"),
        ({"model.layer.weight": torch.ones(2, 2)}, "contains weights that the policy lacks: model.layer.bias"),
        ({**whole, "layer.bias": torch.ones(2)}, "was not loaded into layer.bias"),
        ({**whole, "layer.bias": torch.zeros(3)}, "was not loaded into layer.bias"),
    ):
        (found,) = compare_weights(folder, state)
        assert named in str(found)


def test_cameras_are_matched_by_name(tmp_path: Path) -> None:
    """Swapped, missing and extra ones are rejected, unless an override names them."""
    config = LerobotConfig.from_pretrained(two(tmp_path / "folder"))
    top, wrist = "observation.images.top", "observation.images.wrist"
    assert config.camera_of(["wrist", "top"]) == {top: "top", wrist: "wrist"}  # their order does not matter
    for cameras, named in ((["top"], wrist), (["top", "front"], wrist), (["top", "wrist", "front"], "'front'")):
        with pytest.raises(ConfigError, match=re.escape(named)):
            config.camera_of(cameras)
    config.cameras = {"wrist": "hand"}
    assert config.camera_of(["top", "hand"]) == {top: "top", wrist: "hand"}
    config.cameras = {"wrist": "top"}
    with pytest.raises(ConfigError, match="two images"):
        config.camera_of(["top"])
    config.cameras = {"left": "top"}
    with pytest.raises(ConfigError, match="'left'"):
        config.camera_of(["top", "wrist"])


def _pipeline(**step: object) -> Callable[[Path], None]:
    """Put a step first in the preprocessor."""
    return lambda folder: change(folder, f"{BEFORE}.json", lambda values: values["steps"].insert(0, step))


def _tokenizer_with(text: str, key: str = "action_tokenizer_name") -> Callable[[Path], None]:
    """Name a tokenizer within the folder whose configuration is ``text``."""

    def plant(folder: Path) -> None:
        (folder / "words").mkdir()
        (folder / "words" / "processor_config.json").write_text(text)
        change(folder, "config.json", lambda values: values.update({key: "words"}))

    return plant


def _text(file: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(text)


def _linked(name: str, target: str) -> Callable[[Path], None]:
    """Replace a file by a link to one beside the folder, which holds the same."""

    def plant(folder: Path) -> None:
        if (folder / name).exists():
            (folder / name).rename(folder.parent / target)
        else:
            (folder.parent / target).write_text("secret")
        (folder / name).symlink_to(folder.parent / target)

    return plant


def _state_elsewhere(name: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        (folder.parent / "other.safetensors").write_bytes((folder / NORMALIZER).read_bytes())
        given = name.format(folder.parent)
        change(folder, f"{BEFORE}.json", lambda values: values["steps"][1].update(state_file=given))

    return plant


def _sparse(name: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.truncate(10 * 2**30)

    return plant


def _pickled(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(pickle.dumps(Marker()))


class Marker:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch executed",)


TOUCH = {"args": ["touch", "executed"]}
FRONT = ("input_features", "observation.images.front")
HARMFUL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a class": (_pipeline(**{"class": "subprocess.Popen", "config": TOUCH}), "subprocess.Popen"),
    "a class after the model": (_set(f"{AFTER}.json", "steps", 0, value={"class": "subprocess.Popen", "config": TOUCH}), "subprocess.Popen"),
    "a class of lerobot": (_pipeline(**{"class": "lerobot.processor.Normalizer", "config": {}}), "lerobot.processor"),
    "a class beside a name": (_pipeline(**{"registry_name": "device_processor", "class": "os.system"}), "os.system"),
    "a class without a name": (_pipeline(**{"registry_name": None, "class": "os.system"}), "os.system"),
    "an unknown name": (_pipeline(registry_name="groot_eagle_encode_v3"), "groot_eagle_encode_v3"),
    "code of an action tokenizer": (_tokenizer_with('{"auto_map": {"AutoProcessor": "run.Run"}}'), "auto_map"),
    "its name in escapes": (_tokenizer_with('{"\\u0061uto_map": {"AutoProcessor": "a/b--run.Run"}}', "vlm_model_name"), "auto_map"),
    "a tokenizer's configuration that is a folder": (lambda folder: (_tokenizer_with("")(folder), (folder / "words/tokenizer_config.json").mkdir()), "words"),
    "a tokenizer of the hub": (_set("config.json", "action_tokenizer_name", value="nobody/no-tokenizer"), "nobody/no-tokenizer"),
    "a kernel of the hub": (_set("config.json", "florence_config", value={"text_config": {"_attn_implementation": "nobody/kernel"}}), "florence_config"),
    "statistics at an absolute path": (_state_elsewhere("{}/other.safetensors"), "other.safetensors"),
    "statistics above the folder": (_state_elsewhere("../other.safetensors"), "../other.safetensors"),
    "statistics by a link": (_linked(NORMALIZER, "other.safetensors"), NORMALIZER),
    "weights by a link": (_linked("model.safetensors", "other.safetensors"), "model.safetensors"),
    "a link that an export would copy": (_linked("notes.txt", "id_rsa"), "notes.txt"),
    "a link to a folder": (lambda folder: (folder / "home").symlink_to("/etc"), "home"),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe"), "pipe"),
    "pickled statistics": (_pickled(NORMALIZER), NORMALIZER),
    "pickled weights": (_pickled("model.safetensors"), "model.safetensors"),
    "a huge pipeline": (_sparse(f"{BEFORE}.json"), f"{BEFORE}.json"),
    "a deep pipeline": (_text(f"{BEFORE}.json", "[" * 100_000), f"{BEFORE}.json"),
    "a huge number": (_text("config.json", '{"type": "act", "chunk_size": 1' + "0" * 5000 + "}"), "config.json"),
    "a huge chunk": (_set("config.json", "chunk_size", value=10**12), "chunk_size"),
    "a shape that is a text": (_set("config.json", *FRONT, "shape", value="3x32x32"), "shape"),
    "features that are a list": (_set("config.json", "input_features", value=[]), "input_features"),
    "modes that are a text": (_set("config.json", "normalization_mapping", value="MEAN_STD"), "normalization_mapping"),
    "a count that is a text": (_set("config.json", "n_obs_steps", value="1"), "n_obs_steps"),
    "a name of a thousand letters": (_set("config.json", "text_tokenizer_name", value="a" * 1000), "aaaa"),
    "a config in another encoding": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{"), "config.json"),
    "no steps": (_text(f"{BEFORE}.json", "{}"), "steps"),
    "a map that is a text": (_set(f"{BEFORE}.json", "steps", 0, "config", "rename_map", value="a"), "rename_map"),
    "a state_file that is missing": (_set(f"{AFTER}.json", "steps", 0, "state_file", value="none.safetensors"), "none.safetensors"),
}  # fmt: skip


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Start in an empty folder, where ``lerobot`` is a module that notes its import; return the note's path."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "lerobot.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'imported')!r}).touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.setattr(worker, "OLDEST", sys.version_info[:2])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "imported"


def check_nothing_ran(imports: Path) -> None:
    assert not imports.exists() and not list(Path().iterdir()), "a folder's code ran, or lerobot was imported"


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_or_malformed_folder_is_rejected_before_lerobot_is_imported(
    name: str, tmp_path: Path, imports: Path, capsys: pytest.CaptureFixture
) -> None:
    """By the check, by what loads a policy in any process, by migration, and by the command, in a sentence that names the fault."""
    plant, named = HARMFUL[name]
    folder = make(tmp_path / "folder")
    config = LerobotConfig.from_pretrained(folder)
    plant(folder)
    for load in (
        lambda: reject_folder(folder, config),
        lambda: LocalRunner(str(folder), config),
        lambda: build_policy({"model": {"model_type": "lerobot", "model_path": str(folder), "action_token_len": 4, "action_chunks_len": 4}}),
    ):  # fmt: skip
        with pytest.raises((CheckpointError, ConfigError), match=re.escape(named)):
            load()
    assert main(["check-policy", str(folder)]) in (1, 2)
    shown = capsys.readouterr()
    assert named in shown.out + shown.err and "Traceback" not in shown.err
    check_nothing_ran(imports)


def test_migration_reads_no_folder_with_code(tmp_path: Path, imports: Path, capsys: pytest.CaptureFixture) -> None:
    folder = make(tmp_path / "folder")
    _old(folder)
    HARMFUL["a class after the model"][0](folder)
    assert main(["check-policy", str(folder), f"migrate={tmp_path / 'new'}"]) == 2
    assert "subprocess.Popen" in capsys.readouterr().err and not (tmp_path / "new").exists()
    check_nothing_ran(imports)


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate"],
        ["serve", "port=0"],
        ["train", "algorithm=sac", "algorithm.actor.name=residual"],
        ["sft", "sft.max_steps=1", "sft.dataset=null", "model.override_config.trained=true"],
    ],
    ids=lambda words: words[0],
)
def test_no_command_loads_a_folder_with_code(
    words: list[str], tmp_path: Path, imports: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = make(tmp_path / "folder", state=4, actions=2)
    HARMFUL["a class"][0](folder)
    command, *more = words
    sizes = ["model.action_token_len=2", "model.action_chunks_len=4", "env.image_size=32", "env.state=proprio"]
    assert main([command, "model=lerobot", f"model.model_path={folder}", "env=tabletop", *sizes, *more]) == 2
    assert "subprocess.Popen" in capsys.readouterr().err
    assert not imports.exists() and not Path("executed").exists()


def test_the_command_of_a_planted_class_would_run(tmp_path: Path, imports: Path) -> None:
    """Control: what the folders above hold is code that runs once somebody takes them as lerobot does."""
    folder = make(tmp_path / "folder")
    HARMFUL["a class"][0](folder)
    step = json.loads((folder / f"{BEFORE}.json").read_text())["steps"][0]
    module, _, name = step["class"].rpartition(".")
    assert getattr(importlib.import_module(module), name)(**step["config"]).wait() == 0
    pickle.loads(pickle.dumps(Marker()))
    assert Path("executed").exists()


def test_files_of_the_hubs_cache_may_be_links(tmp_path: Path) -> None:
    home = tmp_path / "models--a--b"
    (home / "snapshots").mkdir(parents=True)
    (home / "blobs").mkdir()
    folder = make(home / "snapshots" / "revision")
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(home / "blobs" / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    assert check_folder(folder) == []


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_code_in_the_hubs_cache_is_refused_whichever_file_is_there(file, tmp_path, monkeypatch):
    folder, cache = make_groot(tmp_path / "folder"), tmp_path / "cache"
    cache.mkdir()

    def rename(values):
        for step in values["steps"]:
            if "model_name" in (step.get("config") or {}):
                step["config"]["model_name"] = "somebody/processor"

    change(folder, f"{BEFORE}.json", rename)
    stored = lambda repo, name: str(cache / name) if repo == "somebody/processor" and (cache / name).is_file() else None  # noqa: E731
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", stored)
    write(cache / file, {})
    assert not check_folder(folder), "control: without code"
    write(cache / file, {"auto_map": {"AutoProcessor": "run.Run"}})
    assert "contains code" in str(check_folder(folder)[0])
