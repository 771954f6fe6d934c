"""LoRA on policies: what trains, what is saved, and that an adapter is never counted twice."""

import dataclasses
import json
import shutil

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import CheckpointError, ConfigError
from rlinf.llm.hf_model import load_config
from rlinf.models import HFModel, build_policy, get_model
from rlinf.models.config import LoraConfig
from rlinf.models.lora import (
    adapter_fingerprint,
    adapter_state_dict,
    apply_lora,
    has_adapters,
    is_trained_in_full,
    merge_lora,
    merged_state_dict,
    save_adapter,
)
from rlinf.run_folder import FULL_FILE

SECTION = {
    "model_type": "openvla",
    "action_token_len": 2,
    "init_config": {
        "timm_model_ids": ["vit_tiny_patch8_siglip_64"], "image_sizes": [32], "vision_feature_layer": -1,
        "vision_overrides": [{"embed_dim": 16, "depth": 1, "num_heads": 2}], "patches_per_token": 4, "pad_token_id": 0,
        "text_config": {"vocab_size": 544, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                        "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0},
        "pad_to_multiple_of": 0, "n_action_bins": 21, "prompt_template": "{instruction}", "prompt_suffix_token_id": None,
        "weight_init": "fan_in",
    },
}  # fmt: skip
LORA = {"rank": 4, "alpha": 8}


def policy(**model):
    torch.manual_seed(0)
    return build_policy({"model": SECTION | model}).eval()


def adapted(**model):
    """A policy with adapters that do something."""
    model = policy(is_lora=True, lora=LORA, **model)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


@pytest.fixture
def inputs():
    torch.manual_seed(2)
    ids = torch.randint(3, 400, (3, 6))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(3, 3, 32, 32)}


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def logits(model, inputs):
    return model.predict_action_batch(**inputs, do_sample=False).logits


def test_fresh_adapters_change_nothing(inputs):
    before = logits(policy(), inputs)
    torch.testing.assert_close(logits(policy(is_lora=True, lora=LORA), inputs), before, atol=1e-6, rtol=0)
    assert (logits(adapted(), inputs) - before).abs().max() > 1e-2, "control: trained ones do"


def test_scale_is_alpha_over_rank(inputs):
    model = adapted()
    layer = model.projector.fc1
    x = torch.randn(5, layer.in_features)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 8 / 4 * x @ a.T @ b.T, atol=1e-5, rtol=0)


def test_save_and_continue(inputs, tmp_path):
    model = adapted()
    with torch.no_grad():
        model.value_head.mlp[0].weight += 1.0
    save_adapter(model, tmp_path)
    again = policy(is_lora=True, lora=LORA, lora_path=str(tmp_path))
    assert torch.equal(logits(model, inputs), logits(again, inputs))
    assert torch.equal(model.value_head.mlp[0].weight, again.value_head.mlp[0].weight)
    assert trained(model) == trained(again)


def test_layers_that_are_never_run_get_no_adapter():
    towers = {"vision_feature_layer": -2, "vision_overrides": [{"embed_dim": 16, "depth": 2, "num_heads": 2}]}
    unused = "vision_backbone.featurizer.blocks.1.mlp.fc1"
    assert f"{unused}.weight" in adapted(init_config=SECTION["init_config"] | towers).state_dict()


def test_adapter_folder_is_pefts_own(inputs, tmp_path):
    model = adapted()
    save_adapter(model, tmp_path)
    wrapped = PeftModel.from_pretrained(policy(), str(tmp_path)).eval()
    torch.testing.assert_close(logits(wrapped, inputs), logits(model, inputs), atol=1e-6, rtol=0)


def test_a_gathered_state_dict_is_saved_in_place_of_the_models_own(tmp_path):
    model = adapted()
    save_adapter(model, tmp_path, {name: tensor * 2 for name, tensor in model.state_dict().items()})
    again = policy(is_lora=True, lora=LORA, lora_path=str(tmp_path))
    own, doubled = adapter_state_dict(model), adapter_state_dict(again)
    assert all(torch.equal(own[name] * 2, doubled[name]) for name in own)
    assert torch.equal(model.value_head.mlp[0].weight * 2, again.value_head.mlp[0].weight)


def test_merge_keeps_the_logits_and_the_original(inputs):
    model = adapted()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits(model, inputs)
    tensors, merged = merged_state_dict(model), merge_lora(model, inputs)
    torch.testing.assert_close(logits(merged, inputs), expected, atol=1e-5, rtol=0)
    assert not has_adapters(merged) and has_adapters(model)
    assert tensors.keys() == merged.state_dict().keys() == policy().state_dict().keys()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensors[name], tensor, atol=1e-6, rtol=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (logits(policy(), inputs) - expected).abs().max() > 1e-2, "control: without the adapters the logits differ"


def test_a_token_that_flips_where_two_are_almost_as_likely_is_no_fault_of_the_merge(inputs, monkeypatch):
    model = adapted(action_token_len=3)
    predict = type(model).predict_action_batch

    def flipped(self, **arguments):
        prediction = predict(self, **arguments)
        if not has_adapters(self):
            prediction.sequences[0, -2] += 1
            prediction.logits[0, -1] += 1.0  # of another prefix
        return prediction

    monkeypatch.setattr(type(model), "predict_action_batch", flipped)
    merge_lora(model, inputs)

    def shifted(self, **arguments):
        """The same tokens from other logits, after a merge."""
        prediction = predict(self, **arguments)
        return prediction if has_adapters(self) else prediction._replace(logits=prediction.logits + 1.0)

    monkeypatch.setattr(type(model), "predict_action_batch", shifted)
    with pytest.raises(CheckpointError, match="changed the logits by 1.00e"):
        merge_lora(model, inputs)


def test_fingerprint_follows_the_numbers():
    model = adapted()
    first = adapter_fingerprint(adapter_state_dict(model))
    assert first == adapter_fingerprint(adapter_state_dict(adapted()))
    with torch.no_grad():
        model.projector.fc1.lora_A["default"].weight[0, 0] += 1e-6
    assert first != adapter_fingerprint(adapter_state_dict(model))


def test_wrong_adapters_are_refused(tmp_path):
    model = adapted()
    save_adapter(model, tmp_path)
    with pytest.raises(CheckpointError, match="model.lora.rank=4"):
        policy(is_lora=True, lora={"rank": 8, "alpha": 8}, lora_path=str(tmp_path))
    with pytest.raises(CheckpointError, match="does not fit"):
        policy(is_lora=True, lora=LORA | {"target_modules": ["q_proj"]}, lora_path=str(tmp_path))
    with pytest.raises(CheckpointError, match="not an adapter folder"):
        policy(is_lora=True, lora=LORA, lora_path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="matches no layer"):
        policy(is_lora=True, lora=LORA | {"target_modules": ["no_such_layer"]})
    with pytest.raises(ConfigError, match="already"):
        apply_lora(model, LoraConfig())
    with pytest.raises(ConfigError, match="no LoRA"):
        save_adapter(policy(), tmp_path)


def mlp(**model):
    section = {"model_type": "mlp", "init_config": {"state_dim": 3, "hidden_sizes": [8]}, "is_lora": True, "lora": LORA}
    torch.manual_seed(0)
    return get_model(section | model).eval()


def test_a_model_names_what_is_trained_beside_its_adapters(tmp_path):
    model = mlp()
    assert {name.split(".")[0] for name in trained(model)} == {"policy", "value_head", "log_std"} and type(
        model
    ).trained_in_full == ("value_head", "log_std", "state_moments")
    assert not any(p.requires_grad for name, p in model.named_parameters() if "base_layer" in name)
    assert not any(".lora_" in name for name in model.state_dict() if is_trained_in_full(model, name))
    with torch.no_grad():
        model.log_std += 1.0
    save_adapter(model, tmp_path)
    assert torch.equal(mlp(lora_path=str(tmp_path)).log_std, model.log_std)
    assert not torch.equal(mlp().log_std, model.log_std), "control: a fresh one differs"


def test_buffers_of_what_is_trained_in_full_are_part_of_an_adapter(tmp_path):
    model = mlp()
    model.value_head.register_buffer("counts", torch.ones(3))
    model.value_head.register_buffer("scratch", torch.ones(3), persistent=False)
    save_adapter(model, tmp_path)
    names = {name for name, _ in model.named_parameters() if is_trained_in_full(model, name)}
    assert set(load_file(tmp_path / FULL_FILE)) == names | {"value_head.counts"}
    with pytest.raises(CheckpointError, match=r"value_head\.counts.*which the model does not have"):
        mlp(lora_path=str(tmp_path))


def test_merge_check_reads_what_a_continuous_policy_predicts(monkeypatch):
    model = mlp()
    with torch.no_grad():
        model.policy[0].lora_B["default"].weight.normal_()
    inputs = {"state": torch.randn(4, 3)}
    predict = type(model).predict_action_batch

    def without_logits(self, **arguments):
        prediction = predict(self, **arguments)
        drift = 0.0 if has_adapters(self) else 0.01  # what a merge that goes wrong would leave
        return prediction._replace(sequences=prediction.sequences + drift, logits=prediction.logits[..., :0])

    merge_lora(model, inputs)
    monkeypatch.setattr(type(model), "predict_action_batch", without_logits)
    with pytest.raises(CheckpointError, match="changed the sequences by 1.00e-02"):
        merge_lora(model, inputs)


def test_a_language_model_takes_adapters_and_merges_them():
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2}
    section = {"model_type": "llama", "init_config": sizes, "is_lora": True, "lora": LORA}
    torch.manual_seed(0)
    model = get_model(section).eval()
    assert {name.rpartition(".lora_")[1] for name in trained(model)} == {".lora_"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    tokens = {"input_ids": torch.randint(0, 40, (2, 5))}
    with torch.no_grad():
        expected = model(**tokens).logits
        merged = merge_lora(model, tokens)
        torch.testing.assert_close(merged(**tokens).logits, expected, atol=1e-5, rtol=0)
        assert (get_model(section | {"is_lora": False})(**tokens).logits - expected).abs().max() > 1e-3
    with pytest.raises(CheckpointError, match="changed the logits"):
        merge_lora(model, tokens, atol=-1.0)
    with pytest.raises(ConfigError, match="merged before"):
        merge_lora(merged)


FOLLOWED = {
    "r": {"r": 3}, "lora_alpha": {"lora_alpha": 5}, "lora_dropout": {"lora_dropout": 0.3}, "use_rslora": {"use_rslora": True},
    "target_modules": {"target_modules": r".*\.(down_proj|q_proj)"}, "exclude_modules": {"exclude_modules": ["q_proj"]},
    "fan_in_fan_out": {"fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj"]}, "layers_to_transform": {"layers_to_transform": [1]},
    "layers_pattern": {"layers_to_transform": [1], "layers_pattern": "layers"}, "rank_pattern": {"rank_pattern": {"q_proj": 5}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 64}}, "init_lora_weights": {"init_lora_weights": "gaussian"}, "peft_type": {},
    "task_type": {"task_type": "FEATURE_EXTRACTION"}, "auto_mapping": {"auto_mapping": {"base_model_class": "x"}}, "peft_version": {},
    "base_model_name_or_path": {"base_model_name_or_path": "x"}, "revision": {"revision": "main"}, "inference_mode": {"inference_mode": True},
}  # fmt: skip
REJECTED = {
    "init_lora_weights": "pissa", "peft_type": "LOHA", "bias": "all", "modules_to_save": ["lm_head"], "megatron_config": {"a": 1},
    "megatron_core": "x", "trainable_token_indices": [1], "loftq_config": {"loftq_bits": 4}, "eva_config": {"rho": 2.0},
    "corda_config": {"cache_file": "x"}, "lora_ga_config": {"direction": "random"}, "use_dora": True, "velora_config": {"num_groups": 2},
    "alora_invocation_tokens": [1], "use_qalora": True, "qalora_group_size": 8, "monteclora_config": {"a": 1}, "layer_replication": [[0, 1]],
    "runtime_config": {"ephemeral_gpu_offload": True}, "lora_bias": True, "target_parameters": ["x"], "use_bdlora": {"a": 1},
    "arrow_config": {"top_k": 2}, "kasa_config": {"a": 1}, "ensure_weight_tying": True,
}  # fmt: skip
"""What is done with each field of PEFT's configuration: a new field is in neither."""


def updates(model):
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)]
    return {
        name.removeprefix("base_model.model."): layer.get_delta_weight("default").detach() for name, layer in layers
    }


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PeftLoraConfig)])
def test_a_setting_of_pefts_is_followed_in_every_layer_or_rejected(tiny_lm, tmp_path, field):
    source = tiny_lm("gpt2" if field == "fan_in_fan_out" else "llama")
    settings = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | FOLLOWED.get(field, {})
    torch.manual_seed(0)
    wrapped = get_peft_model(HFModel.from_pretrained(source), PeftLoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    wrapped.save_pretrained(tmp_path)
    lora = LoraConfig(rank=settings["r"], alpha=settings["lora_alpha"])
    if field in FOLLOWED:
        theirs = PeftModel.from_pretrained(HFModel.from_pretrained(source), str(tmp_path))
        ours = apply_lora(HFModel.from_pretrained(source), lora, str(tmp_path))
        expected = updates(theirs)
        torch.testing.assert_close(updates(ours), expected, atol=1e-5, rtol=0)
        assert expected and all(update.abs().max() > 1e-2 for update in expected.values())
        merged = theirs.merge_and_unload().state_dict()
        torch.testing.assert_close(merged_state_dict(ours), dict(merged), atol=1e-5, rtol=0)
        save_adapter(ours, tmp_path / "again")
        again = apply_lora(HFModel.from_pretrained(source), lora, str(tmp_path / "again"))
        torch.testing.assert_close(updates(again), expected, atol=1e-5, rtol=0)
    if field in REJECTED or field not in FOLLOWED:
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: REJECTED[field]}))
        with pytest.raises(CheckpointError, match=f"{field}="):
            apply_lora(HFModel.from_pretrained(source), lora, str(tmp_path))


def test_a_setting_that_this_version_of_peft_does_not_know_is_rejected(tiny_lm, tmp_path):
    get_peft_model(HFModel.from_pretrained(tiny_lm()), PeftLoraConfig(target_modules=["q_proj"])).save_pretrained(
        tmp_path
    )
    path, lora = tmp_path / "adapter_config.json", LoraConfig(rank=8, alpha=8)
    settings = json.loads(path.read_text())
    for unknown, is_rejected in (({"enable_lora": None}, False), ({"use_newlora": True}, True)):
        path.write_text(json.dumps(settings | unknown))
        if is_rejected:
            with pytest.raises(CheckpointError, match="use_newlora=True"):
                apply_lora(HFModel.from_pretrained(tiny_lm()), lora, str(tmp_path))
        else:
            apply_lora(HFModel.from_pretrained(tiny_lm()), lora, str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [("target_modules", 5), ("target_modules", ["no_such_layer"]), ("target_modules", "("), 
     ("rank_pattern", {"q_proj": 0}), ("alpha_pattern", {"q_proj": "x"}), ("r", "2"), ],
)  # fmt: skip
def test_a_setting_of_pefts_with_a_value_that_it_cannot_have_is_rejected(tiny_lm, tmp_path, field, value):
    lora = LoraConfig(rank=2, alpha=8)
    get_peft_model(HFModel.from_pretrained(tiny_lm()), PeftLoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        tmp_path
    )
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*lora_path=<"):
        apply_lora(HFModel.from_pretrained(tiny_lm()), lora, str(tmp_path))


def test_damaged_files_of_an_adapter_are_named(tmp_path):
    for name in ("trained_in_full.safetensors", "adapter_model.safetensors"):
        save_adapter(adapted(), tmp_path)
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(CheckpointError, match=name):
            policy(is_lora=True, lora=LORA, lora_path=str(tmp_path))


def test_each_target_must_match_a_layer_and_the_suggestion_does():
    with pytest.raises(ConfigError, match=r"'v_prj'.*'v_proj'.*Set model.lora.target_modules=\[q_proj,v_proj\]"):
        policy(is_lora=True, lora=LORA | {"target_modules": ["q_proj", "v_prj"]})
    with pytest.raises(ConfigError, match="'value_head.mlp.0'.*Set model.lora.target_modules=null"):  # trained in full
        policy(is_lora=True, lora=LORA | {"target_modules": ["q_proj", "value_head.mlp.0"]})
    for targets in (["q_proj", "v_proj"], ["layers.1.self_attn.q_proj"], None):
        assert has_adapters(policy(is_lora=True, lora=LORA | {"target_modules": targets}))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_on_tied_weights_are_not_merged_and_others_are_merged_right(tiny_lm, target):
    lora, tokens = LoraConfig(rank=2, alpha=8, target_modules=[target]), {"input_ids": torch.arange(3, 9)[None]}
    tied = apply_lora(HFModel.from_pretrained(tiny_lm(tie_word_embeddings=True)), lora)
    for merge in (merge_lora, merged_state_dict):
        with pytest.raises(ConfigError, match=f"'{target}.weight' are tied to a different layer.*target_modules=None"):
            merge(tied)
    model = apply_lora(HFModel.from_pretrained(tiny_lm()), lora).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_()
        expected, plain = model(**tokens).logits, HFModel.from_pretrained(tiny_lm()).eval()
        control = plain(**tokens).logits
        plain.load_state_dict(merged_state_dict(model))
        torch.testing.assert_close(plain(**tokens).logits, expected, atol=1e-4, rtol=1e-4)
    assert (control - expected).abs().max() > 0.1


def test_a_folder_of_adapters_in_place_of_a_model_says_what_it_is(tiny_lm, tmp_path):
    lora = {"peft_type": "LORA", "base_model_name_or_path": tiny_lm()}
    (tmp_path / "adapter_config.json").write_text(json.dumps(lora))
    for use in (
        lambda: load_config(tmp_path),
        lambda: HFModel.from_pretrained(tmp_path),
        lambda: get_model({"model_type": "hf_vla", "model_path": str(tmp_path)}),
    ):
        with pytest.raises(CheckpointError, match=f"contains only adapters for {tiny_lm()}"):
            use()
    shutil.copy(f"{tiny_lm()}/config.json", tmp_path)  # a model that keeps its adapters beside it
    assert load_config(tmp_path).model_type == "llama"


class Casts(TorchDispatchMode):
    """Counts changes of the number format."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "_to_copy" in func._schema.name and out.dtype != args[0].dtype:
            self.num += 1
        return out


def built_in_bf16(*words):
    return build_policy(
        build_config(compose_config(["experiment=tabletop_openvla_oft_tiny", "model.precision=bf16", *words]))
    ).eval()


def num_casts(model):
    hidden = torch.zeros(1, 4, model.config.text_config.hidden_size, dtype=torch.bfloat16)
    with Casts() as casts, torch.no_grad():
        for layer in model.language_model.model.layers:
            layer.mlp(hidden), layer.self_attn.q_proj(hidden)
    return casts.num


def test_adapters_cast_nothing():
    """They compute in the number format of the weights below them."""
    assert num_casts(built_in_bf16()) == 0
    model = built_in_bf16("model.is_lora=true")
    assert {p.dtype for name, p in model.named_parameters() if ".lora_" in name} == {torch.bfloat16}
    assert num_casts(model) == 0
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    assert num_casts(model) > 0, "control"
