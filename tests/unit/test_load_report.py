"""Weights that do not fit are rejected in one sentence, without transformers' table before it."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import CheckpointError, ConfigError
from rlinf.llm.causal_lm import CausalLMConfig, _load_spread, load_causal_lm
from rlinf.models import HFModel, build_policy, get_model


@pytest.fixture
def told():
    """What transformers logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    yield lines
    logging.getLogger("transformers").removeHandler(handler)


def without_a_weight(folder) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = next(name for name, tensor in weights.items() if tensor.ndim == 2 and "value_head" not in name)
    del weights[name]
    save_file(weights | {"surplus.weight": torch.zeros(2)}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("model", ["mlp", "openvla_tiny", "hf_vla_tiny"])
def test_of_policies(tmp_path, told, model):
    config = build_config(compose_config([f"model={model}", "env=tabletop"]))
    build_policy(config).save_pretrained(tmp_path)
    without_a_weight(tmp_path)
    told.clear()
    config.model.model_path, config.model.init_config = str(tmp_path), {}
    with pytest.raises(CheckpointError, match="missing .*unexpected .*surplus"):
        get_model(config.model)
    assert not [line for line in told if "LOAD REPORT" in line]


def test_of_language_models_and_a_control(tmp_path, told, tiny_lm):
    from transformers import AutoModelForCausalLM

    folder = Path(shutil.copytree(tiny_lm(), tmp_path / "lm"))
    without_a_weight(folder)
    with pytest.raises(CheckpointError, match="surplus"):
        HFModel.from_pretrained(str(folder))
    with pytest.raises(CheckpointError):
        _load_spread(str(folder), device_map="cpu")
    assert not [line for line in told if "LOAD REPORT" in line]
    AutoModelForCausalLM.from_pretrained(folder)
    assert [line for line in told if "LOAD REPORT" in line], "a control: transformers prints one by itself"


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_weights_that_are_not_finite_are_refused_wherever_they_are_put(tmp_path, tiny_lm, device_map):
    folder = Path(shutil.copytree(tiny_lm(), tmp_path / "lm"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="not finite: 'model.norm.weight' has nan"):
        load_causal_lm(str(folder), CausalLMConfig(device_map=device_map))


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_a_folder_without_a_language_model_is_refused(tmp_path, device_map):
    for folder in (tmp_path / "no_such", tmp_path):
        with pytest.raises((CheckpointError, ConfigError), match=str(folder)):
            load_causal_lm(str(folder), CausalLMConfig(device_map=device_map))
