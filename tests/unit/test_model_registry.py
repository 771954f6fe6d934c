"""Model types by name: registration, loading, and the errors of a mistyped configuration."""

import contextlib
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_flash_attn_2_available

from rlinf.errors import CheckpointError, ConfigError, MissingDependencyError
from rlinf.models import (
    MODELS,
    get_model,
    get_model_config_and_processor,
    local_settings,
    register_model,
    torch_dtype_from_precision,
)
from rlinf.models.building import override_fields
from rlinf.models.config import ModelConfig
from rlinf.models.embodiment.modules.tokenizer import TINY_TOKENIZER
from rlinf.models.embodiment.modules.value_head import ValueHead

MLP = {"model_type": "mlp", "init_config": {"state_dim": 3, "hidden_sizes": [4]}}
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 544,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class PatternConfig(LlamaConfig):
    model_type = "seed_pattern"


class PatternModel(LlamaForCausalLM):
    """The least that the guide asks for: four arguments, on a base whose own config has a ``hidden_size``."""

    config_class = PatternConfig

    def __init__(self, config, hidden_size, unnorm_key, action_dim):
        super().__init__(config)
        self.value_head = ValueHead(hidden_size)
        self.action_dim, self.unnorm_key = action_dim, unnorm_key


class PatternProcessor:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, path, tokenizer=None, trust_remote_code=False):
        return cls(tokenizer)


@pytest.fixture
def models(monkeypatch):
    """A registry of its own, so that registrations do not leak into other tests."""
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS.entries()))
    return MODELS


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder of the pattern model, with a tokenizer."""
    from transformers import AutoTokenizer

    PatternModel(PatternConfig(**SIZES), 16, "key", 3).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY_TOKENIZER).save_pretrained(tmp_path)
    return str(tmp_path)


def test_unknown_type_lists_the_known_ones():
    for call in (get_model, lambda cfg: get_model_config_and_processor({"model": cfg})):
        with pytest.raises(ValueError, match="Did you mean 'openvla'.*mlp, openvla") as error:
            call({"model_type": "openvlaa"})
        assert isinstance(error.value, ConfigError)


def test_a_model_of_user_code_loads_by_name(models, folder):
    for _ in range(2):
        register_model("seed_pattern", config=PatternConfig, processor=PatternProcessor, model=PatternModel)
    model = {"model_type": "seed_pattern", "model_path": folder, "action_token_len": 3, "hidden_size": 16}
    cfg = OmegaConf.create({"model": model, "tokenizer": {"tokenizer_model": folder}})
    config, processor = get_model_config_and_processor(cfg)
    config, processor = get_model_config_and_processor(cfg)
    assert isinstance(config, PatternConfig) and processor.tokenizer.padding_side == "left"
    model = get_model(cfg.model)
    assert isinstance(model, PatternModel)
    assert model.action_dim == 3 and model.value_head.mlp[0].in_features == 16
    assert model.config._attn_implementation == "sdpa"


def without(weights, prefix):
    return {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda weights: weights, None),
        (lambda weights: without(weights, "value_head."), None),
        (lambda weights: without(weights, "model.norm.weight"), "missing .'model.norm"),
        (lambda weights: without(weights, "value_head.mlp.0.bias"), "missing .'value_head.mlp.0.bias"),
        (lambda weights: weights | {"model.more.weight": torch.zeros(1)}, "unexpected .'model.more"),
        (lambda weights: weights | {"model.norm.weight": torch.zeros(3)}, "a different shape .*model.norm"),
    ],
    ids=["whole", "without value head", "missing", "half a value head", "unexpected", "a different shape"],
)
def test_a_model_of_user_code_takes_exactly_its_weights(models, folder, change, message):
    register_model("seed_pattern", config=PatternConfig, processor=PatternProcessor, model=PatternModel)
    file = Path(folder) / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    section = {"model_type": "seed_pattern", "model_path": folder, "action_token_len": 3, "hidden_size": 16}
    with contextlib.nullcontext() if message is None else pytest.raises(CheckpointError, match=message):
        get_model(section)


def test_overrides_reach_the_config_and_unknown_ones_are_refused(models, folder):
    register_model("seed_pattern", config=PatternConfig, processor=PatternProcessor, model=PatternModel)
    section = {"model_type": "seed_pattern", "model_path": folder, "hidden_size": 16}
    assert get_model(section, {"rms_norm_eps": 1e-3}).config.rms_norm_eps == 1e-3
    assert get_model(section).config.rms_norm_eps != 1e-3
    with pytest.raises(ConfigError, match="Did you mean 'rms_norm_eps'"):
        get_model(section, {"rms_norm_ep": 1e-3})


@pytest.mark.parametrize(
    "precision, dtype",
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("bf16-mixed", torch.float32), (16, torch.float16),
     ("32-true", torch.float32)],
)  # fmt: skip
def test_precisions(precision, dtype):
    assert torch_dtype_from_precision(precision) is dtype


def test_junk_precision_is_refused():
    for junk in ("fp8", "", None, "double", "fp16-mixed", "16-mixed", "BF16-mixed"):
        with pytest.raises(ConfigError, match="model.precision=bf16"):
            torch_dtype_from_precision(junk)


def test_precision_is_the_dtype_of_the_weights_but_for_heads():
    section = {"model_type": "cnn", "init_config": {"image_size": 64}}
    for name, parameter in get_model(section | {"precision": "bf16"}).named_parameters():
        is_head = name.split(".")[0] in ("policy", "value_head")
        assert parameter.dtype == (torch.float32 if is_head else torch.bfloat16), name
    assert {p.dtype for p in get_model(section | {"precision": "bf16-mixed"}).parameters()} == {torch.float32}


@pytest.mark.skipif(is_flash_attn_2_available(), reason="flash-attn is installed here")
def test_missing_flash_attention_names_the_override():
    with pytest.raises(MissingDependencyError, match="model.attn_implementation=sdpa"):
        get_model(MLP | {"attn_implementation": "flash_attention_2"})


@pytest.mark.parametrize("path", ["no/such/folder", "/no/such/folder", "."])
def test_a_folder_that_is_no_checkpoint_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model_type in ("openvla", "mlp"):
        with pytest.raises(CheckpointError, match="model.model_path"):
            get_model({"model_type": model_type, "model_path": path})


def test_an_index_without_weights_is_refused(tmp_path):
    get_model(MLP).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"missing \['log_std'"):
        get_model({"model_type": "mlp", "model_path": str(tmp_path)})


@pytest.mark.parametrize("name", ["config.json", "dataset_statistics.json"])
@pytest.mark.parametrize("text, found", [('{"a": ', "line 1"), ("[1]", "contains a list"), ("\xff", "utf-8")])
def test_a_file_that_is_no_json_is_refused_by_its_path(tmp_path, name, text, found):
    from rlinf.models.embodiment.openvla.config import OpenVLAConfig

    OpenVLAConfig().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    for model_type in ("openvla", "openvla_oft"):
        section = ModelConfig(model_type=model_type, model_path=str(tmp_path))
        with pytest.raises(CheckpointError, match=f"{name}' is not a JSON object.*{found}.*Set model.model_path="):
            get_model(section)
        if name == "config.json":
            with pytest.raises(CheckpointError, match="config.json' is not a JSON object"):
                local_settings(section)


def test_random_weights_and_a_folder_exclude_each_other(folder):
    with pytest.raises(ConfigError, match="model.model_path=null"):
        get_model(MLP | {"model_path": folder})


def test_an_override_of_one_nested_field_leaves_the_others():
    from transformers import LlavaConfig

    rope = {"rope_type": "default", "rope_theta": 7.0}
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "rope_parameters": rope}
    config = LlavaConfig(text_config=text)
    changed = override_fields(config, {"text_config": {"rope_parameters": {"rope_theta": 9.0}}}).text_config
    assert (changed.hidden_size, changed.num_hidden_layers) == (32, 2)
    assert changed.rope_parameters == {"rope_type": "default", "rope_theta": 9.0}
    config.norm_stats = {"a": {"action": {"q01": [0.0]}}}
    other = {"b": {"action": {"q01": [1.0]}}}
    assert override_fields(config, {"norm_stats": other}).norm_stats == other


def test_dropout_of_a_policy_is_off_wherever_a_model_keeps_its_rates():
    init = {"text_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                            "vocab_size": 64, "attention_dropout": 0.3}}  # fmt: skip
    tiny = {"timm_model_ids": ["vit_tiny_patch8_siglip_64"], "image_sizes": [16], "vision_feature_layer": -1,
            "vision_overrides": [{"embed_dim": 16, "depth": 1, "num_heads": 2}], "n_action_bins": 8, "pad_to_multiple_of": 0,
            "use_fused_vision_backbone": False, "timm_override_act_layers": [None]}  # fmt: skip
    model = get_model({"model_type": "openvla", "init_config": tiny | init, "action_token_len": 2}).train()
    rates = [getattr(module, "attention_dropout", 0.0) for module in model.modules()]
    assert rates == [0.0] * len(rates) and model.config.text_config.attention_dropout == 0.0
    inputs = {"input_ids": torch.tensor([[1, 5, 6, 7]]), "attention_mask": torch.ones(1, 4, dtype=torch.long),
              "pixel_values": torch.randn(1, 3, 16, 16)}  # fmt: skip
    tokens = torch.tensor([[1, 5, 6, 7, 60, 61]])
    first, second = (model.evaluate_actions(inputs, tokens).logprobs for _ in range(2))
    assert torch.equal(first, second)
