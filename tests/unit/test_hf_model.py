"""``HFModel``: every family gives transformers' own numbers, from every kind of folder, with complete weights or none."""

import json
import logging
import re
import shutil
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants as hub_constants
from safetensors.torch import load_file, save_file

from rlinf.checkpoints.checkpoint import write_policy
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import CheckpointError, ConfigError
from rlinf.llm.hf_model import check_tensor_parallel, load_config, model_class_of, model_shapes
from rlinf.models import (
    MODELS,
    HFLLMModel,
    HFModel,
    HuggingFacePolicy,
    build_policy,
    entry_for,
    get_model,
    get_model_config_and_processor,
    register_model,
)
from rlinf.models.config import LoraConfig, ModelConfig
from rlinf.models.embodiment.modules.tokenizer import TINY_TOKENIZER
from rlinf.models.loading import check_hub, hub_fault
from rlinf.models.lora import apply_lora
from rlinf.preflight.validation import validate
from rlinf.recipes.datasets import load_rows
from rlinf.rollout.weight_push import WeightPush

TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
IMAGE_TOKEN = 60
LANGUAGE = {
    "llama": TEXT | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "mistral": TEXT | {"sliding_window": 4},
    "gemma": TEXT | {"head_dim": 8},
    "gemma2": TEXT | {"head_dim": 8, "sliding_window": 4},
    "gemma3_text": TEXT | {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": TEXT,
    "phi3": TEXT,
    "qwen2": TEXT,
    "qwen3": TEXT | {"head_dim": 8},
    "gpt2": {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_oss": TEXT | {"intermediate_size": 32, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
VISION_LANGUAGE = {
    "gemma3": {
        "text_config": LANGUAGE["gemma3_text"], "vision_config": VISION | {"vision_use_head": False},
        "mm_tokens_per_image": 4, "image_token_index": IMAGE_TOKEN, "boi_token_index": 58, "eoi_token_index": 59,
    },
    "mllama": {
        "text_config": TEXT | {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": LLAMA3_ROPE},
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
            "image_size": 16, "patch_size": 8, "max_num_tiles": 1, "intermediate_layers_indices": [0],
            "vision_output_dim": 32, "supported_aspect_ratios": [[1, 1]],
        },
        "image_token_index": IMAGE_TOKEN,
    },
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": IMAGE_TOKEN,
    },
}  # fmt: skip
FAMILIES = LANGUAGE | VISION_LANGUAGE
IMAGE_TOKENS = {"gemma3": 4, "mllama": 1, "llava": 4}


def tiny_config(family):
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    return config_class(**json.loads(json.dumps(FAMILIES[family])))


def auto_class(family):
    return transformers.AutoModelForImageTextToText if family in VISION_LANGUAGE else transformers.AutoModelForCausalLM


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder per family, as transformers itself writes it, with weights that are not zero anywhere."""
    root = tmp_path_factory.mktemp("families")
    torch.manual_seed(0)
    for family in FAMILIES:
        model = auto_class(family).from_config(tiny_config(family))
        with torch.no_grad():
            for parameter in model.parameters():  # some families start gates and biases at 0, which would hide them
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(root / family)
    return root


def test_a_generation_config_that_transformers_rejects_is_saved_as_it_was_read(folders, tmp_path):
    source = shutil.copytree(folders / "llama", tmp_path / "source")
    path = source / "generation_config.json"
    odd = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "max_new_tokens": 7}
    path.write_text(json.dumps(json.loads(path.read_text()) | odd))
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        transformers.AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "theirs")
    HFModel.from_pretrained(source).save_pretrained(tmp_path / "ours")
    HuggingFacePolicy(str(source)).save_pretrained(tmp_path / "policy")
    of_others = transformers.AutoModelForCausalLM.from_pretrained(source)
    write_policy(tmp_path / "checkpoint", of_others, of_others.state_dict())
    for folder in ("ours", "policy", "checkpoint"):
        saved = json.loads((tmp_path / folder / path.name).read_text())
        assert {name: saved.get(name, False) for name in odd} == odd, "do_sample is false without a word"


def tiny_batch(family, rows=2, length=10):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if family in IMAGE_TOKENS:
        ids[:, 1 : 1 + IMAGE_TOKENS[family]] = IMAGE_TOKEN
        pixels = torch.randn(rows, 3, 16, 16, generator=generator)
        batch["pixel_values"] = pixels[:, None, None] if family == "mllama" else pixels
    if family == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    if family == "mllama":
        batch["aspect_ratio_ids"] = torch.ones(rows, 1, dtype=torch.long)
        batch["aspect_ratio_mask"] = torch.ones(rows, 1, 1, dtype=torch.long)
        batch["cross_attention_mask"] = torch.ones(rows, length, 1, 1, dtype=torch.long)
    return batch


def llama(folders, tmp_path):
    """A copy of the llama folder, to change."""
    return shutil.copytree(folders / "llama", tmp_path / "llama")


def edit_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_weights_are_those_of_transformers(folders, family):
    plain = auto_class(family).from_pretrained(folders / family, dtype=torch.float32).eval()
    model = HFModel.from_pretrained(folders / family).eval()
    assert model.model_class.__name__ == model.config.architectures[0] == type(plain).__name__
    for (name, ours), (_, theirs) in zip(model.model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name
    batch = tiny_batch(family)
    with torch.no_grad():
        logits, expected = model(**batch).logits, plain(**batch).logits
        assert (logits - expected).abs().max() <= 1e-5
        if family in VISION_LANGUAGE:
            other = batch | {"pixel_values": batch["pixel_values"] + 1}
            assert (model(**other).logits - logits).abs().max() > 1e-4  # control: the image is seen
        model.model.get_output_embeddings().weight.mul_(1.1)
        assert (model(**batch).logits - expected).abs().max() > 1e-4  # control: the weights are used


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma3", "mllama", "llava"])
def test_rotary_frequencies_stay_float32_after_meta_init_and_conversion(folders, family):
    plain = auto_class(family).from_pretrained(folders / family, dtype=torch.bfloat16)
    expected = {name: buffer for name, buffer in plain.named_buffers() if name.endswith("inv_freq")}
    assert expected and all(buffer.dtype == torch.float32 for buffer in expected.values())
    from_meta = HFModel.from_config(load_config(folders / family), meta=True)
    assert {p.device.type for p in from_meta.parameters()} == {"meta"}
    from_meta.materialize("cpu").load_state_dict(HFModel.from_pretrained(folders / family).state_dict())
    from_meta.to(torch.bfloat16).eval()
    for model in (from_meta, HFModel.from_pretrained(folders / family).bfloat16().eval()):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        found = {name: buffer for name, buffer in model.model.named_buffers() if name.endswith("inv_freq")}
        assert found.keys() == expected.keys()
        for name, buffer in found.items():
            assert buffer.dtype == torch.float32 and torch.equal(buffer, expected[name]), name
        with torch.no_grad():
            batch = tiny_batch(family)
            batch |= {"pixel_values": batch["pixel_values"].bfloat16()} if "pixel_values" in batch else {}
            assert torch.equal(model(**batch).logits, plain.eval()(**batch).logits)
    rounded = plain.to(torch.bfloat16)  # control: transformers' own conversion rounds them
    assert any(not torch.equal(rounded.get_buffer(name).float(), expected[name]) for name in expected)


def test_mxfp4_experts_are_dequantised_by_the_published_table(folders, tmp_path):
    """OCP Microscaling v1.0: value = E2M1 code * 2^(scale - 127), 32 values to a scale."""
    folder = shutil.copytree(folders / "gpt_oss", tmp_path / "gpt_oss")
    generator = torch.Generator().manual_seed(2)
    packed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = tensor
            continue
        num_experts, inputs, outputs = tensor.shape
        shape, bytes_of = (num_experts, outputs, inputs // 32), {"dtype": torch.uint8, "generator": generator}
        packed[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), **bytes_of)
        packed[f"{name}_scales"] = torch.randint(118, 124, shape, **bytes_of)
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    model = HFModel.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = (packed[f"model.layers.1.mlp.experts.{name}_{part}"] for part in ("blocks", "scales"))
        values = torch.stack([codes[(blocks & 15).long()], codes[(blocks >> 4).long()]], -1).flatten(-2)
        expected = (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
        assert torch.equal(model.model.get_parameter(f"model.layers.1.mlp.experts.{name}"), expected)
    model.save_pretrained(tmp_path / "again")
    again = HFModel.from_pretrained(tmp_path / "again")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_other_quantisation_is_refused_before_weights_load(folders, tmp_path):
    folder = llama(folders, tmp_path)
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="'gptq'.*Pass path=<"):
        HFModel.from_pretrained(folder)


def test_the_alias_is_the_class_and_the_package_exports_both():
    assert HFLLMModel is HFModel and HFModel.__doc__


def test_shards_with_an_index_load_as_one_file_does(folders, tmp_path):
    whole = HFModel.from_pretrained(folders / "phi3")
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    sharded = HFModel.from_pretrained(tmp_path)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(sharded.state_dict()[name], tensor), name
    (tmp_path / files[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{files[1]}.*Pass path="):
        HFModel.from_pretrained(tmp_path)


def test_weights_that_do_not_fit_are_named(folders, tmp_path):
    folder = llama(folders, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    missing = "model.layers.1.mlp.up_proj.weight"
    del tensors[missing]
    tensors["model.layers.7.extra"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        HFModel.from_pretrained(folder)
    named = (f"missing ['{missing}']", "unexpected ['model.layers.7.extra']", "model.norm.weight")
    for word in (*named, "Pass path=<a different folder>"):
        assert word in str(error.value)


def test_a_damaged_file_and_a_bad_path_are_checkpoint_errors(folders, tmp_path):
    folder = llama(folders, tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="cannot be read.*Pass path=<complete"):
        HFModel.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="no-such-folder.*Pass path=<folder>"):
        HFModel.from_pretrained(tmp_path / "no-such-folder")
    with pytest.raises(CheckpointError, match="cannot be read.*Set model.model_path=<complete"):
        get_model({"model_type": "llama", "model_path": str(folder)})


def test_no_architecture_takes_the_choice_of_the_auto_class_and_two_are_refused(folders, tmp_path):
    for family in ("llama", "gemma3", "mllama"):
        config = tiny_config(family)
        assert config.architectures is None
        assert model_class_of(config) is auto_class(family)._model_mapping[type(config)]
    folder = llama(folders, tmp_path)
    edit_config(folder, architectures=["LlamaForCausalLM", "LlamaModel"])
    two = r"lists 2 \(LlamaForCausalLM, LlamaModel\)"
    with pytest.raises(ConfigError, match=rf"{two}.*Pass architectures=\['LlamaForCausalLM'\]"):
        HFModel.from_pretrained(folder)
    section = {"model_type": "llama", "model_path": str(folder)}
    with pytest.raises(ConfigError, match=rf"{two}.*Set model.override_config.architectures=\[LlamaForCausalLM\]"):
        get_model(section)
    mended = section | {"override_config": {"architectures": ["LlamaForCausalLM"]}}
    assert get_model(mended).model_class is transformers.LlamaForCausalLM
    edit_config(folder, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ConfigError, match="LlamaForSequenceClassification.*AutoModelForCausalLM"):
        HFModel.from_pretrained(folder)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_oss", "gemma3", "mllama", "llava"])
def test_public_names_are_those_of_the_file_and_go_round_bit_for_bit(folders, family):
    model = HFModel.from_pretrained(folders / family).bfloat16()
    public = model.public_state_dict()
    file = load_file(folders / family / "model.safetensors")
    tied = file.keys() ^ public.keys()
    assert tied <= {"lm_head.weight", "language_model.lm_head.weight"} and len(tied) <= 1
    for name in public.keys() & file.keys():
        assert torch.equal(public[name], file[name].bfloat16()), name
    assert {tensor.dtype for tensor in public.values()} == {torch.bfloat16}
    again = model.model_class.from_pretrained(None, config=model.config, state_dict=public, dtype=torch.bfloat16)
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("family", ["phi3", "gemma3"])
def test_sync_covers_every_tensor_in_the_transfer_dtype(folders, family):
    trainer = HFModel.from_pretrained(folders / family)
    rollout = HFModel.from_config(trainer.config, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in rollout.state_dict().items()}
    WeightPush(trainer, rollout).push(1)
    assert rollout.state_dict().keys() == trainer.state_dict().keys()
    for name, tensor in rollout.state_dict().items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, trainer.state_dict()[name].bfloat16()), name
    assert any(not torch.equal(before[name], tensor) for name, tensor in rollout.state_dict().items())


def test_a_router_that_is_a_linear_layer_gets_no_adapter(tiny_lm):
    model = HFModel.from_pretrained(tiny_lm("llama4_text", head_dim=8, num_local_experts=2, intermediate_size_mlp=16))
    model = apply_lora(model, LoraConfig(rank=2, alpha=2))
    adapted = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert {"q_proj", "down_proj"} <= adapted and "router" not in adapted
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_adapters_are_on_the_linear_layers_of_the_units(folders, family):
    model = apply_lora(HFModel.from_pretrained(folders / family), LoraConfig(rank=2, alpha=2))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert not any("lm_head" in name or "embed_tokens" in name for name in trained)
    model(**tiny_batch(family)).logits.square().mean().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_tied_embeddings_are_one_tensor(folders):
    from_meta = HFModel.from_config(load_config(folders / "llama"), meta=True).materialize("cpu")
    for model in (HFModel.from_pretrained(folders / "llama"), from_meta):
        assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
    untied = HFModel.from_pretrained(folders / "qwen2").model
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


CUSTOM_CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class BigramConfig(PreTrainedConfig):
    model_type = "bigram"
    def __init__(self, vocab_size=64, width=8, **kwargs):
        self.vocab_size, self.width = vocab_size, width
        super().__init__(**kwargs)

class BigramForCausalLM(PreTrainedModel):
    config_class = BigramConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.head = nn.Linear(config.width, config.vocab_size)
        self.register_buffer("scale", torch.arange(1.0, 1.0 + config.width), persistent=False)
        self.post_init()
    def _init_weights(self, module):
        pass
    def forward(self, input_ids, attention_mask=None):
        return CausalLMOutput(logits=self.head(self.embed(input_ids) * self.scale.to(self.embed.weight.dtype)))
"""


def test_a_model_of_the_users_own_code_trains(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    namespace = {"__name__": "bigram"}
    exec(CUSTOM_CODE, namespace)
    model = namespace["BigramForCausalLM"](namespace["BigramConfig"]())
    folder = tmp_path / "checkpoint"
    model.save_pretrained(folder)
    (folder / "modeling_bigram.py").write_text(CUSTOM_CODE)
    classes = {"AutoConfig": "BigramConfig", "AutoModelForCausalLM": "BigramForCausalLM"}
    auto_map = {auto: f"modeling_bigram.{own}" for auto, own in classes.items()}
    edit_config(folder, architectures=["BigramForCausalLM"], auto_map=auto_map)
    section = {"model_type": "bigram", "model_path": str(folder)}
    with pytest.raises(ConfigError, match="'bigram'.*set model.trust_remote_code=true"):
        get_model(section)
    with pytest.raises(ConfigError, match="Pass trust_remote_code=True or path="):
        HFModel.from_pretrained(folder)
    with pytest.raises(ConfigError, match="Pass trust_remote_code=True"):
        model_shapes(folder)
    shapes = model_shapes(folder, trust_remote_code=True)
    assert [p.shape for p in shapes.parameters()] == [p.shape for p in model.parameters()]
    policy = get_model(section | {"trust_remote_code": True})
    assert isinstance(policy, HFModel) and policy.model_class.__name__ == "BigramForCausalLM"
    assert torch.equal(policy.model.scale, model.scale) and torch.equal(policy.model.embed.weight, model.embed.weight)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    ids = tiny_batch("llama")["input_ids"]
    losses = []
    for _ in range(3):
        logits = policy(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


def fallback_lines(caplog):
    return [record.message for record in caplog.records if "falling back" in record.message]


def test_an_unregistered_text_model_falls_back_with_one_line(folders, caplog):
    section = {"model_type": "mistral", "model_path": str(folders / "mistral")}
    with caplog.at_level(logging.INFO):
        model = get_model(section)
    assert isinstance(model, HFModel) and model.model_class is transformers.MistralForCausalLM
    (line,) = fallback_lines(caplog)
    assert "'mistral'" in line and "HFModel" in line
    caplog.clear()
    transformers.AutoTokenizer.from_pretrained(TINY_TOKENIZER).save_pretrained(folders / "mistral")
    config, processor = get_model_config_and_processor({"model": section})
    assert isinstance(config, transformers.MistralConfig) and processor.padding_side == "left"
    assert build_policy({"model": section}).processor.padding_side == "left"
    assert len(fallback_lines(caplog)) == 1
    assert isinstance(get_model({"model_type": "llama", "init_config": LANGUAGE["llama"]}), HFModel)


def test_a_registered_type_keeps_its_class(folders, caplog, models):
    class Custom(transformers.LlamaForCausalLM):
        def __init__(self, config, hidden_size=None, unnorm_key=None, action_dim=0):
            super().__init__(config)

    register_model("llama", model=Custom)
    model = get_model({"model_type": "llama", "model_path": str(folders / "llama")})
    assert type(model) is Custom and not fallback_lines(caplog)


@pytest.fixture
def models(monkeypatch):
    """A registry of its own, so that registrations do not leak into other tests."""
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS.entries()))
    return MODELS


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_a_vision_language_model_becomes_a_vla(folders, models, family):
    by_name, by_folder = ModelConfig(family), ModelConfig(family, model_path=str(folders / family))
    assert entry_for(by_name) is entry_for(by_folder) is models.get("hf_vla")


def test_the_line_names_the_class_that_takes_a_vision_language_model(caplog, models):
    register_model("hf_vla", model="rlinf.models.embodiment.no_such_module:Model")
    with pytest.raises(ModuleNotFoundError):
        get_model({"model_type": "gemma3"})
    lines = fallback_lines(caplog)
    assert lines and all("'gemma3'" in line and "hf_vla" in line for line in lines)


def test_architectures_of_the_folder_decide_where_a_type_is_both(folders, tmp_path):
    folder = llama(folders, tmp_path)
    edit_config(folder, model_type="qwen3_5", architectures=["Qwen3_5ForCausalLM"])
    assert entry_for(ModelConfig("qwen3_5", model_path=str(folder))).acts is False
    edit_config(folder, architectures=["Qwen3_5ForConditionalGeneration"])
    assert entry_for(ModelConfig("qwen3_5", model_path=str(folder))).name == "hf_vla"


@pytest.mark.parametrize(
    ("model_type", "message"),
    [("lama", "model_type is 'lama'.*neither registered.*openvla.*Set model.model_type=llama"),
     ("vit", "'vit'.*neither a causal nor an image-text-to-text model"),
     ("qwen2", "model_type is 'qwen2'.*of type 'llama'. Set model.model_type=llama")],
)  # fmt: skip
def test_types_that_cannot_fall_back_are_refused(folders, model_type, message):
    path = str(folders / "llama") if model_type == "qwen2" else None
    with pytest.raises(ValueError, match=message) as error:
        get_model({"model_type": model_type, "model_path": path})
    assert isinstance(error.value, ConfigError)


def test_a_registered_class_that_raises_is_strict_or_falls_back_with_its_traceback(folders, caplog, models):
    class Broken(transformers.LlamaForCausalLM):
        def __init__(self, config, hidden_size=None, unnorm_key=None, action_dim=0):
            raise RuntimeError("the custom class is broken")

    register_model("llama", model=Broken)
    section = {"model_type": "llama", "model_path": str(folders / "llama")}
    with pytest.raises(RuntimeError, match="the custom class is broken"):
        get_model(section)
    assert not caplog.records
    # Other models build their text towers by the Auto classes, which still know transformers' own class.
    tower = transformers.AutoModel.from_config(transformers.LlamaConfig(**LANGUAGE["llama"]))
    assert type(tower) is transformers.LlamaModel
    model = get_model(section | {"strict": False})
    assert isinstance(model, HFModel)
    record = next(record for record in caplog.records if "model.strict=false" in record.getMessage())
    assert "the custom class is broken" in record.exc_text and "in __init__" in record.exc_text
    transformers.AutoTokenizer.from_pretrained(TINY_TOKENIZER).save_pretrained(folders / "llama")
    policy = build_policy({"model": section | {"strict": False}})
    assert isinstance(policy, HFModel) and policy.processor.padding_side == "left"
    with pytest.raises(RuntimeError):  # there is nothing to fall back to without a folder
        get_model({"model_type": "llama", "init_config": LANGUAGE["llama"], "strict": False})


def run_config(*overrides):
    return build_config(compose_config(["experiment=quickstart", *overrides]))


def test_a_language_model_is_refused_for_an_env_before_start(folders):
    config = run_config("model=default", "model.model_type=llama", f"model.model_path={folders / 'llama'}")
    with pytest.raises(ConfigError, match="model.model_type=llama is a language model.*Set model=hf_vla"):
        validate(config)


def test_parallelism_other_than_fsdp_is_refused_by_its_key():
    keys = ("tp_size", "pp_size", "cp_size")
    cluster = run_config(*(f"cluster.{key}=1" for key in keys)).cluster
    assert [getattr(cluster, key) for key in keys] == [1, 1, 1]
    for key in keys:
        with pytest.raises(ConfigError, match=f"cluster.{key} is '2'; expected one of 1. Set cluster.{key}=1"):
            run_config(f"cluster.{key}=2")


def test_heads_must_divide_over_tensor_parallel_ranks():
    for family in ("llama", "gemma3"):  # 4 heads, 2 key-value heads
        config = tiny_config(family)
        for size in (1, 2, 4):  # 4 ranks: each key-value head is held twice
            check_tensor_parallel(config, size, "rollout.tp_size")
        words = "rollout.tp_size=3 does not divide num_attention_heads=4.*Set rollout.tp_size=2"
        with pytest.raises(ConfigError, match=words):
            check_tensor_parallel(config, 3, "rollout.tp_size")
    config = transformers.LlamaConfig(**TEXT | {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96})
    with pytest.raises(ConfigError, match="=6 does not divide num_key_value_heads=4.*Set tp=4"):
        check_tensor_parallel(config, 6, "tp")


def test_attention_kernels_that_a_class_lacks_and_unknown_ones(folders, monkeypatch):
    model = HFModel.from_pretrained(folders / "gpt_oss", attn_implementation="sdpa")
    plain = transformers.GptOssForCausalLM.from_pretrained(folders / "gpt_oss")
    assert model.config._attn_implementation == plain.config._attn_implementation == "eager"
    llama = HFModel.from_pretrained(folders / "llama", attn_implementation="eager")
    assert llama.config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match="attn_implementation='spda'; expected one of eager, .*Pass .*='sdpa'"):
        HFModel.from_pretrained(folders / "llama", attn_implementation="spda")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_supports_flash_attn", False)
    with pytest.raises(ConfigError, match="LlamaForCausalLM. Pass attn_implementation='sdpa'$"):
        HFModel.from_pretrained(folders / "llama", attn_implementation="flash_attention_2")


def test_the_support_matrix_of_the_documentation_is_what_is_tested():
    page = (Path(__file__).parents[2] / "docs" / "hf_model.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (text|image-text) \|", page, flags=re.MULTILINE)
    kinds = dict.fromkeys(LANGUAGE, "text") | dict.fromkeys(VISION_LANGUAGE, "image-text")
    assert rows == [(family, model_class_of(tiny_config(family)).__name__, kind) for family, kind in kinds.items()]


def test_a_hub_that_does_not_answer_is_named_once_and_the_cache_is_used_without_it(monkeypatch):
    """A closed port stands for a machine without a network; a server that answers 404 is reachable."""
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("the libraries retry"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(hub_constants, "ENDPOINT", closed)
    with pytest.raises(CheckpointError, match=f"'some/model' is neither a folder nor in the cache.*{closed}"):
        load_config("some/model")
    assert hub_constants.HF_HUB_OFFLINE and hub_fault() is None, "nobody asks again"
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=f"'some/data' .*not in the cache.*{closed}"):
        load_rows("some/data")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo_id, name: "/cache/config.json")
    check_hub("some/model")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(hub_constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub_fault() is None and not hub_constants.HF_HUB_OFFLINE
