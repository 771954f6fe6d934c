"""Every experiment and recipe at its full size: composed, checked, and its model built on the meta device, without a weight.

An experiment that needs a checkpoint gets a model of the sizes of the public one (``model.init_config``). So folder,
tokenizer and statistics of the checkpoint are not looked at. The model of a recipe is described by the ``config.json`` of
the public one, as far as its sizes go. The full sizes of ``scripts/gpu_check`` have their own test
(``tests/integration/test_gpu_check.py``).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.config.search import packaged_experiments
from rlinf.envs import ENVS
from rlinf.envs.base import uniform_statistics
from rlinf.errors import ConfigError
from rlinf.llm.hf_model import model_shapes
from rlinf.models.config import LoraConfig
from rlinf.models.lora import apply_lora
from rlinf.preflight.memory import policy_on_meta_device
from rlinf.recipes.load import load_recipe, recipe_names
from rlinf.recipes.plan import make_plan, rows_per_pass

BILLIONS = {"openvla": 7.6, "openvla_oft": 7.6, "pi0": 3.5}
"""Parameters of the public model of a family."""
COMPLETED = {path.stem: path.read_text(encoding="utf-8") for path in sorted(packaged_experiments().glob("*.yaml"))}
NEEDS_FOLDER = [name for name, text in COMPLETED.items() if "Add model.model_path=" in text]
BUILT = {}
"""Models of the experiments before, by their sections: several experiments have the same."""
TEMPLATE = "your_config"  # for a model of the user's own
OF_LEROBOT = [
    name for name, text in COMPLETED.items() if "override /model: lerobot" in text
]  # built of the folder, by its classes


def completed(words):
    """Compose an experiment. A model from a folder is replaced by one of the same kind and sizes from random weights."""
    config = build_config(compose_config(words))
    model = config.model
    if model.model_path is None and not model.init_config:
        widths = {"action": model.action_token_len, "proprio": ENVS.get(config.env.name).state_width(config.env)}
        statistics = {name: uniform_statistics(-np.ones(n), np.ones(n)) for name, n in widths.items() if n}
        sizes = {**model.override_config, "norm_stats": {"any": statistics}}
        model = replace(model, init_config=sizes, override_config={}, unnorm_key=None)
    return replace(config, model=model)


@pytest.mark.parametrize("name", [name for name in COMPLETED if name not in (TEMPLATE, *OF_LEROBOT)])
def test_an_experiment_builds_at_its_full_size(name):
    config = completed([f"experiment={name}"])
    key = repr(replace(config.model, micro_batch_size=1, val_micro_batch_size=1))
    if key not in BUILT:
        BUILT[key] = policy_on_meta_device(config)
    model = BUILT[key]
    number = sum(parameter.numel() for parameter in model.parameters())
    assert all(parameter.is_meta for parameter in model.parameters())
    if name in NEEDS_FOLDER:
        wanted = BILLIONS[config.model.model_type]
        assert number / 1e9 == pytest.approx(wanted, rel=0.06), f"{number:,}"
    assert any(parameter.requires_grad for parameter in model.parameters())


def test_a_size_that_does_not_fit_is_seen():
    with pytest.raises(ConfigError, match="hidden_size"):
        policy_on_meta_device(completed(["experiment=libero_ppo_openvla_oft", "model.hidden_size=2048"]))


PUBLIC = {
    "google/gemma-3-12b-it": (12.2, {
        "model_type": "gemma3",
        "text_config": {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
                        "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262208},
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
                          "image_size": 896, "patch_size": 14},
    }),
    "nvidia/Cosmos-Reason1-7B": (8.3, {
        "model_type": "qwen2_5_vl",
        "text_config": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                        "num_key_value_heads": 4, "vocab_size": 152064},
        "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
    }),
    "mistralai/Mistral-7B-Instruct-v0.3": (7.25, {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768,
    }),
    "microsoft/phi-4": (14.7, {
        "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352, "pad_token_id": 0,
    }),
    "openai/gpt-oss-20b": (20.9, {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "vocab_size": 201088,
    }),
}  # fmt: skip
"""Name of a recipe's model to its parameters in billions, and to the sizes in its public ``config.json``."""
MADE_HERE = {"arithmetic/model", "shapes/model", "./outputs/arithmetic_sft/latest/safetensors/final"}
"""Written by the scripts of these recipes, or by a recipe; ``tests/integration`` trains them."""


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_builds_at_its_full_size(name, tmp_path):
    config, _ = load_recipe(name)
    if config.policy.model_name_or_path in MADE_HERE:
        pytest.skip("its model is small, and made by a script")
    billions, sizes = PUBLIC[config.policy.model_name_or_path]
    sizes = dict(sizes)
    AutoConfig.for_model(sizes.pop("model_type"), **sizes).save_pretrained(tmp_path)
    config, _ = load_recipe(name, [f"policy.model_name_or_path={tmp_path}"])
    plan = make_plan(config)
    rows = config.batch_size // plan.policy_gpus
    assert rows % min(rows, rows_per_pass(config, has_gpu=False)) == 0
    model = model_shapes(tmp_path, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.03)
    if config.policy.lora is not None:
        apply_lora(model, LoraConfig(**config.policy.lora.settings()))
    assert all(parameter.is_meta for parameter in model.parameters())
