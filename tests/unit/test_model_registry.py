"""Model types by name: registration, loading, and the errors of a mistyped configuration."""

import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from rlinf.errors import CheckpointError, ConfigError, MissingDependencyError
from rlinf.models import (
    MODELS,
    build_policy,
    get_model,
    get_model_config_and_processor,
    register_model,
    torch_dtype_from_precision,
)
from rlinf.models.config import ModelConfig
from rlinf.models.embodiment.modules.value_head import ValueHead
from rlinf.models.embodiment.openvla_processing import TINY_TOKENIZER
from rlinf.registry import Registry

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
    copy = Registry(MODELS.kind, MODELS.group, {})
    copy._entries = dict(MODELS.entries())
    monkeypatch.setattr("rlinf.models.MODELS", copy)
    return copy


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder of the pattern model, with a tokenizer."""
    from transformers import AutoTokenizer

    PatternModel(PatternConfig(**SIZES), 16, "key", 3).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY_TOKENIZER).save_pretrained(tmp_path)
    return str(tmp_path)


def test_importing_the_registry_imports_neither_torch_nor_transformers():
    code = "import sys, rlinf.models; print(sorted({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_unknown_type_lists_the_known_ones():
    for call in (get_model, lambda cfg: get_model_config_and_processor({"model": cfg})):
        with pytest.raises(ValueError, match="Did you mean 'openvla'.*mlp, openvla") as error:
            call({"model_type": "openvlaa"})
        assert isinstance(error.value, ConfigError)


def test_a_model_of_user_code_loads_by_name(models, folder):
    for _ in range(2):
        register_model("seed_pattern", config=PatternConfig, processor=PatternProcessor, model=PatternModel)
    cfg = OmegaConf.create(
        {
            "model": {"model_type": "seed_pattern", "model_path": folder, "action_token_len": 3, "hidden_size": 16},
            "tokenizer": {"tokenizer_model": folder},
        }
    )
    config, processor = get_model_config_and_processor(cfg)
    config, processor = get_model_config_and_processor(cfg)
    assert isinstance(config, PatternConfig) and processor.tokenizer.padding_side == "left"
    model = get_model(cfg.model)
    assert isinstance(model, PatternModel)
    assert model.action_dim == 3 and model.value_head.mlp[0].in_features == 16
    assert model.config._attn_implementation == "sdpa"


def test_registration_by_name_imports_at_first_use(models):
    register_model("later", model="rlinf.models.embodiment.no_such_module:Model")
    assert "later" in models
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        get_model({"model_type": "later"})


def test_overrides_reach_the_config_and_unknown_ones_are_refused(models, folder):
    register_model("seed_pattern", config=PatternConfig, processor=PatternProcessor, model=PatternModel)
    section = {"model_type": "seed_pattern", "model_path": folder, "hidden_size": 16}
    assert get_model(section, {"rms_norm_eps": 1e-3}).config.rms_norm_eps == 1e-3
    assert get_model(section).config.rms_norm_eps != 1e-3
    with pytest.raises(ConfigError, match="Did you mean 'rms_norm_eps'"):
        get_model(section, {"rms_norm_ep": 1e-3})


def test_unknown_key_of_the_model_section_is_refused():
    with pytest.raises(ConfigError, match="unnorm_key"):
        get_model({"model_type": "openvla", "unorm_key": "x"})


@pytest.mark.parametrize(
    "precision, dtype",
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("bf16-mixed", torch.float32), (16, torch.float16),
     ("32-true", torch.float32)],
)  # fmt: skip
def test_precisions(precision, dtype):
    assert torch_dtype_from_precision(precision) is dtype


@pytest.mark.parametrize("junk", ["fp8", "", None, "double", "fp16-mixed", "16-mixed", "BF16-mixed"])
def test_junk_precision_is_refused(junk):
    with pytest.raises(ConfigError, match="model.precision=bf16"):
        torch_dtype_from_precision(junk)


def test_precision_is_the_dtype_of_the_weights():
    section = {"model_type": "mlp", "init_config": {"state_dim": 3}}
    assert {p.dtype for p in get_model(section | {"precision": "bf16"}).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in get_model(section | {"precision": "bf16-mixed"}).parameters()} == {torch.float32}


def test_missing_flash_attention_names_the_override():
    from transformers.utils import is_flash_attn_2_available

    if is_flash_attn_2_available():
        pytest.skip("flash-attn is installed here")
    with pytest.raises(MissingDependencyError, match="model.attn_implementation=sdpa"):
        get_model(ModelConfig(model_type="mlp", init_config={"state_dim": 3}, attn_implementation="flash_attention_2"))


@pytest.mark.parametrize("path", ["no/such/folder", "/no/such/folder", "."])
def test_a_folder_that_is_no_checkpoint_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model_type in ("openvla", "mlp"):
        with pytest.raises(CheckpointError, match="model.model_path"):
            get_model({"model_type": model_type, "model_path": path})


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    from rlinf.models.embodiment.openvla_config import OpenVLAConfig

    OpenVLAConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer.tokenizer_model"):
        get_model_config_and_processor({"model": {"model_type": "openvla", "model_path": str(tmp_path)}})


def test_random_weights_and_a_folder_exclude_each_other(folder):
    with pytest.raises(ConfigError, match="model.model_path=null"):
        get_model({"model_type": "mlp", "model_path": folder, "init_config": {"state_dim": 3}})


def test_packaged_model_files_list_every_field_and_build():
    from pathlib import Path

    import rlinf.config
    from rlinf.config.options import from_mapping, public_fields

    group = Path(rlinf.config.__file__).parent / "model"
    for name in ("openvla", "openvla_tiny", "mlp"):
        section = OmegaConf.load(group / f"{name}.yaml")
        assert list(section) == list(public_fields(ModelConfig)), name
        config = from_mapping(ModelConfig, section)
        if config.init_config:
            policy = build_policy({"model": section})
            assert policy.num_logprobs == config.action_token_len * config.action_chunks_len
            assert (policy.processor is None) == (name == "mlp")
