"""Export: what others load acts as the checkpoint does, adapters are merged once, and nothing is overwritten."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from rlinf.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from rlinf.checkpoints.folders import is_export, resolve_checkpoint
from rlinf.commands import export as export_module
from rlinf.commands.export import export, random_observation
from rlinf.commands.open_checkpoint import load_policy, read_config
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import CheckpointError, ConfigError
from rlinf.manifest import Manifest, hash_files
from rlinf.models import build_policy
from rlinf.options import to_mapping
from rlinf.preflight.conditions import build_manifest

ACTION = {"q01": [-0.05, -0.05], "q99": [0.05, 0.05], "mask": [True, True]}
STATISTICS = {"tabletop": {"action": ACTION, "proprio": {"q01": [-1.0] * 4, "q99": [1.0] * 4}}}
MODELS = {
    "mlp": ["model=mlp"],
    "openvla_tiny": ["model=openvla_tiny"],
    "openvla_oft_tiny": ["model=openvla_oft_tiny", "model.init_config.state_dim=null", "env.state=proprio"],
    "pi0_tiny": ["model=pi0_tiny", "env.state=proprio"],
    "cnn": ["model=cnn"],
    "lora": ["model=openvla_tiny", "model.is_lora=true", "model.lora.rank=4"],
}


def make_checkpoint(folder: Path, kind: str):
    """Save a policy with random weights, adapters and value head included; returns its config and the policy."""
    torch.manual_seed(1)
    config = build_config(compose_config([*MODELS[kind], "env=tabletop", "output_dir=unused"]))
    model = build_policy(config, {"norm_stats": STATISTICS})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "value_head" in name:
                parameter.normal_(std=0.1)
    save_checkpoint(
        folder, model=model, optimizer=None, loop_state={"step": 1}, run_config=to_mapping(config),
        manifest=build_manifest(config, model, policy_version=1),
    )  # fmt: skip
    return config, model.eval()


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "rl_000001"
    return request.param, folder, *make_checkpoint(folder, request.param)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "rl_000001"
    return folder, *make_checkpoint(folder, "lora")


def act(model, config):
    with torch.no_grad():
        return model.predict_action_batch(
            **model.preprocess(random_observation(config, model, seed=5)), do_sample=False
        )


def largest_gap(a, b) -> float:
    return max(
        float((getattr(a, n).float() - getattr(b, n).float()).abs().max()) for n in ("logits", "actions", "values")
    )


def test_exported_folder_acts_as_the_checkpoint(saved, tmp_path):
    kind, folder, config, model = saved
    assert largest_gap(act(load_policy(folder, read_config(folder)).eval(), config), act(model, config)) <= 1e-6
    output = export(folder, tmp_path / "exported", merge_lora=kind == "lora")
    names = {path.name for path in output.iterdir()}
    assert {"config.json", "dataset_statistics.json", "manifest.json", "config.yaml", "model.safetensors"} <= names
    assert json.loads((output / "dataset_statistics.json").read_text()) == STATISTICS
    assert is_export(output) and resolve_checkpoint(output) == output
    read = load_policy(output, read_config(output)).eval()
    gap = largest_gap(act(read, config), act(model, config))
    assert gap <= 1e-6 if kind != "lora" else 0 < gap < 1e-4
    assert Manifest.load(output).lora["state"] == ("merged" if kind == "lora" else "none")
    assert [path.name for path in tmp_path.iterdir()] == ["exported"], "no temporary folder may stay"


def test_exported_folder_loads_with_from_pretrained(tmp_path):
    make_checkpoint(tmp_path / "rl_000001", "openvla_tiny")
    output = export(tmp_path, tmp_path / "exported")
    from transformers import AutoConfig, AutoTokenizer

    from rlinf.models.embodiment.openvla.policy import OpenVLAForRLActionPrediction

    config = AutoConfig.from_pretrained(output)
    assert config.model_type == "openvla" and AutoTokenizer.from_pretrained(output).vocab_size > 10
    model = OpenVLAForRLActionPrediction.from_pretrained(output, action_dim=2)
    assert not any("lora" in name for name in model.state_dict())


def test_merging_twice_and_merging_nothing_are_refused(lora, mlp, tmp_path):
    folder, _, _ = lora
    merged = export(folder, tmp_path / "merged", merge_lora=True)
    with pytest.raises(CheckpointError, match="already merged, and would be added twice.*merge_lora=false"):
        export(merged, tmp_path / "again", merge_lora=True)
    again = export(merged, tmp_path / "again")
    assert Manifest.load(again).lora == {"state": "merged"}
    with pytest.raises(CheckpointError, match="do not exist"):
        export(mlp[0], tmp_path / "other", merge_lora=True)
    assert not (tmp_path / "other").exists()


def test_adapters_without_lasting_base_weights_are_refused(lora, tmp_path):
    with pytest.raises(CheckpointError, match="stored nowhere else. Set merge_lora=true"):
        export(lora[0], tmp_path / "adapter")


def test_adapters_on_a_base_folder_are_exported_as_adapters(tmp_path):
    make_checkpoint(tmp_path / "base", "openvla_tiny")
    base = export(tmp_path / "base", tmp_path / "base_model")
    config = read_config(base)
    model_config = replace(config.model, model_path=str(base), init_config={}, is_lora=True)
    config = replace(config, model=model_config)
    model = build_policy(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    save_checkpoint(
        tmp_path / "rl_000001", model=model, optimizer=None, loop_state={}, run_config=to_mapping(config),
        manifest=build_manifest(config, model, policy_version=1),
    )  # fmt: skip
    assert not (tmp_path / "rl_000001" / "model").exists()
    output = export(tmp_path / "rl_000001", tmp_path / "adapter")
    assert (output / "adapter_config.json").is_file() and not (output / "model.safetensors").exists()
    read = load_policy(output, read_config(output)).eval()
    assert largest_gap(act(read, config), act(model.eval(), config)) == 0
    with pytest.raises(CheckpointError, match="is_lora=true"):
        load_policy(output, replace(config, model=replace(model_config, is_lora=False)))


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    """A run folder with one checkpoint, and the policy in it."""
    folder = tmp_path_factory.mktemp("mlp")
    return folder, make_checkpoint(folder / "rl_000001", "mlp")[1]


def test_nothing_is_overwritten(mlp, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="not empty; nothing is overwritten"):
        export(mlp[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def other_numbers(write, folder, model, weights):
    write(folder, model, {name: tensor + 0.01 for name, tensor in weights.items()})


def over_a_folder(write, folder, model, weights):
    (folder / "model.safetensors").mkdir()
    write(folder, model, weights)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (other_numbers, "after saving and reloading, its logits differ"),
        (over_a_folder, "Cannot write .*exported: .*Check space"),
    ],
)
def test_export_that_reads_back_other_numbers_is_not_written(mlp, tmp_path, monkeypatch, fault, message):
    monkeypatch.setattr(export_module, "write_policy", partial(fault, export_module.write_policy))
    with pytest.raises(CheckpointError, match=message):
        export(mlp[0], tmp_path / "exported")
    assert list(tmp_path.iterdir()) == []


def test_damaged_checkpoint_is_not_exported(mlp, tmp_path):
    shutil.copytree(mlp[0], tmp_path / "run")
    (tmp_path / "run" / "rl_000001" / "model" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="model/config.json"):
        export(tmp_path / "run" / "rl_000001", tmp_path / "exported")


def test_export_can_be_read_and_not_resumed(mlp, tmp_path):
    output = export(mlp[0], tmp_path / "exported")
    assert Manifest.load(output).files == hash_files(output)
    with pytest.raises(CheckpointError, match="exported policy, which can start a run .init_from=. but not resume"):
        load_checkpoint(output, model=mlp[1])


def test_config_of_a_checkpoint_must_be_readable(tmp_path):
    with pytest.raises(CheckpointError, match="config.yaml cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.yaml").write_text("modle: {}\n")
    with pytest.raises(ConfigError, match="modle"):
        read_config(tmp_path)
