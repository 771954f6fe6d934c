"""Adapters are put on the base weights that they were trained on, wherever they are loaded, or rejected by both digests."""

import logging
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.checkpoints.checkpoint import save_checkpoint
from rlinf.checkpoints.trainer_state import read_entries
from rlinf.commands.export import export
from rlinf.commands.open_checkpoint import load_policy
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import ManifestMismatchError
from rlinf.models import build_policy, get_model
from rlinf.models.base_weights import weights_digest
from rlinf.options import to_mapping
from rlinf.preflight.conditions import build_manifest
from rlinf.preflight.validation import validate

SMALL = ["model=openvla_tiny", "env=tabletop", "trainer.max_steps=1", "evaluation.num_videos_per_task=0"]
STATISTICS = {"tabletop": {"action": {"q01": [-0.05, -0.05], "q99": [0.05, 0.05], "mask": [True, True]}}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two bases, adapters of the first as a checkpoint and as an export, and the same as PEFT alone would write them."""
    place = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    policy = build_policy(build_config(compose_config(SMALL)), {"norm_stats": STATISTICS})
    policy.save_pretrained(place / "base")
    policy.processor.save_pretrained(place / "base")
    shutil.copytree(place / "base", place / "other")
    weights = load_file(place / "base" / "model.safetensors")
    name = next(name for name, tensor in weights.items() if tensor.is_floating_point())
    save_file(weights | {name: weights[name] + 0.5}, place / "other" / "model.safetensors", metadata={"format": "pt"})
    config = config_of(place / "base")
    policy = build_policy(config)
    checkpoint = save_checkpoint(
        place / "rl_000001", model=policy, optimizer=None, loop_state={"step": 1}, run_config=to_mapping(config),
        manifest=build_manifest(config, policy, policy_version=1),
    )  # fmt: skip
    export(checkpoint, place / "exported")
    shutil.copytree(place / "exported", place / "named_like_a_part_of_a_checkpoint" / "adapter")
    shutil.copytree(place / "exported", place / "peft", ignore=shutil.ignore_patterns("manifest.json", "config.yaml"))
    return place


def config_of(base, adapters=None, *overrides):
    words = ["~model.init_config", f"model.model_path={base}", "model.is_lora=true", "model.unnorm_key=tabletop"]
    words += [] if adapters is None else [f"model.lora_path={adapters}"]
    return build_config(compose_config([*SMALL, *words, *overrides]))


@pytest.mark.parametrize("adapters", ["exported", "rl_000001/adapter", "named_like_a_part_of_a_checkpoint/adapter"])
def test_another_base_is_refused_with_both_digests(folders, adapters):
    config = config_of(folders / "other", folders / adapters)
    cloning = replace(config, sft=replace(config.sft, max_steps=1))
    calls = {
        "train": lambda: validate(config, "train"),
        "sft": lambda: validate(cloning, "sft"),
        "evaluate": lambda: validate(config, "evaluate"),
        "diagnose": lambda: validate(config, "diagnose"),
        "Python, a run": lambda: build_policy(config),
        "Python, a model": lambda: get_model(config.model),
    }
    for name, call in calls.items():
        with pytest.raises(ManifestMismatchError, match="weights that differ from model.model_path=") as error:
            call()
        for word in (weights_digest(str(folders / "base")), weights_digest(str(folders / "other"))):
            assert word in str(error.value), name
        assert "'evaluation.allow_mismatch=[lora.base_sha256]'" in str(error.value)


def test_a_checkpoint_of_adapters_on_a_known_base_holds_no_base(folders):
    entries = read_entries(folders / "rl_000001" / "trainer_state")
    assert any(".lora_" in name for name in entries)
    assert not any(".base_layer." in name for name in entries), "the base lies where model.model_path says"
    read = load_policy(folders / "rl_000001", config_of(folders / "base"))
    base = load_file(folders / "base" / "model.safetensors")
    held = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in read.state_dict().items()
        if ".base_layer." in name
    }
    assert len(held.keys() & base.keys()) > 5, "the others have other names in the file"
    assert all(torch.equal(held[name], base[name]) for name in held.keys() & base.keys())
    with pytest.raises(ManifestMismatchError, match="lora.base_sha256"):
        load_policy(folders / "rl_000001", config_of(folders / "other"))


def test_the_right_base_is_taken_without_a_word(folders, caplog):
    config = config_of(folders / "base", folders / "exported")
    with caplog.at_level(logging.INFO, "rlinf"):
        validate(config, "train")
        get_model(config.model)
    assert "base weights" not in caplog.text


def test_what_the_user_names_is_accepted_and_recorded(folders):
    config = config_of(folders / "other", folders / "exported", "evaluation.allow_mismatch=[lora.base_sha256]")
    validate(config, "train")
    get_model(config.model, allow_mismatch=["lora.base_sha256"])
    present = build_manifest(config, build_policy(config), policy_version=0)
    assert present.lora["base_sha256"] == weights_digest(str(folders / "other"))


def test_adapters_without_a_record_are_accepted_with_one_line(folders, caplog):
    with caplog.at_level(logging.INFO, "rlinf"):
        get_model(config_of(folders / "other", folders / "peft").model)
    (record,) = [record for record in caplog.records if "base weights" in record.getMessage()]
    assert "do not record their base weights" in record.getMessage() and str(folders / "other") in record.getMessage()


def test_an_export_of_adapters_is_not_written_for_a_base_that_has_changed(folders, tmp_path):
    with pytest.raises(ManifestMismatchError, match="lora.base_sha256"):
        export(folders / "exported", tmp_path / "again", overrides=[f"model.model_path={folders / 'other'}"])
    assert list(tmp_path.iterdir()) == []
    export(folders / "exported", tmp_path / "again")  # a control
