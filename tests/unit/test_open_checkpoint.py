"""Where the action statistics of a policy come from when no checkpoint of ours brings them; and weights that are not finite."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.commands.open_checkpoint import statistics_of_env
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.errors import CheckpointError
from rlinf.models import build_policy
from rlinf.models.config import LoraConfig
from rlinf.models.lora import save_adapter

STATISTICS = {"action": {"q01": [-1.0, -1.0], "q99": [1.0, 1.0]}}


class Env:
    """What is asked of an env here."""

    def action_statistics(self):
        return STATISTICS


def config_of(policy: str = "mlp", **model) -> RunConfig:
    config = build_config(compose_config([f"model={policy}", "env=tabletop"]))
    return replace(config, model=replace(config.model, **model))


def test_random_weights_take_those_of_the_env():
    assert statistics_of_env(config_of(), Env()) == {"norm_stats": {"tabletop": STATISTICS}}


@pytest.mark.parametrize(
    ("unnorm_key", "in_folder", "taken"),
    [("tabletop", "other", True), ("tabletop", "tabletop", False), ("other", "other", False), (None, "other", False)],
)
def test_a_folder_keeps_its_own_unless_it_is_adapted_to_the_env(tmp_path, unnorm_key, in_folder, taken):
    settings = {"model_type": "mlp", "state_dim": 31, "norm_stats": {in_folder: STATISTICS}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    found = statistics_of_env(config_of(model_path=str(tmp_path), init_config={}, unnorm_key=unnorm_key), Env())
    assert found == ({"norm_stats": {"tabletop": STATISTICS}} if taken else None)


def poison(file, part, value) -> str:
    """Write ``value`` into one number of the first tensor of ``file`` whose name has ``part``; returns its name."""
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if part in name)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return name


def test_weights_that_are_not_finite_are_refused_by_name_in_any_folder(tmp_path):
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    config = config_of()
    build_policy(config, {"norm_stats": {"tabletop": STATISTICS}}).save_pretrained(base)
    lora = {"model_path": str(base), "init_config": {}, "is_lora": True, "lora": LoraConfig(rank=2)}
    config = replace(config, model=replace(config.model, **lora))
    save_adapter(build_policy(config), adapters)
    config = replace(config, model=replace(config.model, lora_path=str(adapters)))
    for file, part, value in (
        (adapters / "adapter_model.safetensors", "policy.0.lora_B", float("nan")),
        (adapters / "trained_in_full.safetensors", "value_head.0", -float("inf")),
        (base / "model.safetensors", "policy.2.weight", float("inf")),
    ):
        build_policy(config)  # control
        whole = file.read_bytes()
        name = poison(file, part, value)
        found = rf"{file.parent}.*' contains weights that are not finite: '{name}' has {value} \(1 of"
        with pytest.raises(CheckpointError, match=found):
            build_policy(config)
        file.write_bytes(whole)


def test_weights_beyond_the_range_of_16_bits_are_refused(tmp_path):
    config = config_of("cnn")
    model = build_policy(config, {"norm_stats": {"tabletop": STATISTICS}})
    with torch.no_grad():
        model.word_embedding.weight[0, 0] = 1e6
    model.save_pretrained(tmp_path)

    def load(precision):
        loaded = {"model_path": str(tmp_path), "init_config": {}, "precision": precision}
        return build_policy(replace(config, model=replace(config.model, **loaded)))

    assert load("fp32") and load("bf16")
    with pytest.raises(CheckpointError, match="'word_embedding.weight' has inf"):
        load("fp16")
