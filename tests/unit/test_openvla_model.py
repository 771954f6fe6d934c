"""Properties of OpenVLA that hold without reference arrays, for every way of decoding."""

import re

import numpy as np
import pytest
import torch
from policy_checks import failed_checks

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import ConfigError, ManifestMismatchError
from rlinf.manifest import check
from rlinf.models import build_policy, get_model
from rlinf.models.embodiment.modules.image_resize import (
    crop_and_resize,
    jpeg_round_trip,
    resize_bicubic,
    resize_lanczos3,
)
from rlinf.preflight.conditions import build_manifest
from rlinf.types import Observation

TEXT = {
    "vocab_size": 544, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY = {
    "timm_model_ids": ["vit_tiny_patch8_siglip_64"], "image_sizes": [32], "vision_feature_layer": -1, "mlp_stem_dim": 16,
    "vision_overrides": [{"embed_dim": 16, "depth": 1, "num_heads": 2}], "use_film": True, "patches_per_token": 4,
    "text_config": TEXT, "pad_token_id": 0, "pad_to_multiple_of": 0, "n_action_bins": 21, "action_bin_rule": "grid",
    "prompt_template": "{instruction}", "prompt_suffix_token_id": None, "weight_init": "fan_in",
}  # fmt: skip
PUBLIC = {
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"], "image_sizes": [28, 28],
    "vision_overrides": [{"embed_dim": 16, "depth": 3, "num_heads": 2}, {"embed_dim": 8, "depth": 2, "num_heads": 2}],
    "text_config": TEXT, "pad_token_id": 0, "pad_to_multiple_of": 16, "n_action_bins": 32, "prompt_suffix_token_id": None,
    "weight_init": "fan_in",
}  # fmt: skip
KINDS = {
    "parallel": TINY | {"action_decoding": "parallel", "learned_placeholders": True},
    "parallel_zeros": TINY | {"action_decoding": "parallel", "use_film": False, "mlp_stem_dim": None},
    "autoregressive": TINY,
    "fused_towers": PUBLIC,
    "siglip_only": PUBLIC | {"timm_model_ids": PUBLIC["timm_model_ids"][1:], "image_sizes": [28],
                             "vision_overrides": PUBLIC["vision_overrides"][1:]},
    "dinov2_without_registers": PUBLIC | {"timm_model_ids": ["vit_base_patch14_dinov2"], "image_sizes": [28],
                                          "vision_overrides": PUBLIC["vision_overrides"][:1]},
    "two_cameras": TINY | {"num_images_in_input": 2, "action_decoding": "parallel"},
}  # fmt: skip
SENTENCES = [
    "reach the red block",
    "push the blue block to the green zone",
    "go to the zone",
    "open the left drawer ...",
]
SIZES = {"model_type": "openvla", "action_token_len": 3, "action_chunks_len": 2}


def build(kind="parallel", chunks=2, **model):
    torch.manual_seed(0)
    return build_policy({"model": SIZES | {"init_config": KINDS[kind], "action_chunks_len": chunks} | model}).eval()


def load(folder, **model):
    return build_policy({"model": SIZES | {"model_path": str(folder)} | model}).eval()


def observe(kind="parallel", size=None):
    rng = np.random.default_rng(0)
    size = size or KINDS[kind]["image_sizes"][0]
    images = {camera: rng.integers(0, 256, (4, size, size, 3), dtype=np.uint8) for camera in ("front", "wrist")}
    return Observation(images, None, list(SENTENCES))


@pytest.fixture(params=list(KINDS))
def kind(request):
    return request.param


def test_every_kind_keeps_the_contract(kind):
    model, observation = build(kind), observe(kind)
    assert failed_checks(model, observation) == []
    inputs = model.preprocess(observation)
    prediction = model.predict_action_batch(**inputs)
    assert prediction._fields == ("actions", "sequences", "logits", "values")
    assert prediction.logits.shape == (4, 6, KINDS[kind]["n_action_bins"])
    assert prediction.sequences.shape[1] == inputs["input_ids"].shape[1] + 6
    assert torch.equal(prediction.sequences[:, :-6], inputs["input_ids"])


@pytest.mark.parametrize("kind", ["parallel", "autoregressive", "fused_towers"])
def test_eager_and_sdpa_attention_agree(kind):
    model, eager = build(kind), build(kind, attn_implementation="eager")
    observation = observe(kind)
    a, b = (m.predict_action_batch(**m.preprocess(observation), do_sample=False) for m in (model, eager))
    torch.testing.assert_close(a.logits, b.logits, atol=1e-5, rtol=0)


def test_gradients_reach_exactly_what_trains(kind):
    model = build(kind)
    inputs = model.preprocess(observe(kind))
    sequences = model.predict_action_batch(**inputs).sequences
    evaluation = model.evaluate_actions(inputs, sequences)
    evaluation.values.sum().backward(retain_graph=True)
    touched = {name for name, p in model.named_parameters() if p.grad is not None}
    assert touched and all(name.startswith("value_head.") for name in touched), "the value loss moves the policy"
    evaluation.logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None), name
        if name == "language_model.model.layers.1.self_attn.q_proj.weight":
            assert parameter.grad.abs().max() > 0
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert all("vision_backbone" in name for name in frozen)
    assert bool(frozen) == (KINDS[kind].get("vision_feature_layer") != -1)


def test_adapters_lie_where_gradients_reach(kind, tmp_path):
    build(kind).save_pretrained(tmp_path)
    model = load(tmp_path, is_lora=True)
    inputs = model.preprocess(observe(kind))
    sequences = model.predict_action_batch(**inputs).sequences
    evaluation = model.evaluate_actions(inputs, sequences)
    (evaluation.logprobs.sum() + evaluation.values.sum()).backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert [name for name in trained if model.get_parameter(name).grad is None] == []
    adapted = {name.split(".lora_")[0] for name in trained if ".lora_" in name}
    used = {
        name.removesuffix(".weight")
        for name, parameter in build(kind).named_parameters()
        if parameter.requires_grad and re.fullmatch(model.lora_target_modules, name.removesuffix(".weight"))
    }
    assert adapted == used, "every layer that trains has its adapter, and no other"


def test_only_action_tokens_are_sampled_even_when_others_are_likelier():
    model = build("autoregressive")
    with torch.no_grad():
        model.language_model.lm_head.weight[:500] *= 1000.0
    inputs = model.preprocess(observe())
    tokens = model.predict_action_batch(**inputs, temperature=100.0).sequences[:, -6:]
    assert tokens.min() >= 544 - 21 and tokens.max() < 544
    full = model(inputs["input_ids"], inputs.get("attention_mask"), inputs["pixel_values"]).logits[:, -1].argmax(-1)
    assert (full < 500).any(), "control: the whole vocabulary prefers other tokens"


def test_prompts_of_one_length_have_no_mask_and_the_numbers_of_a_mask_of_ones(kind):
    model = build(kind)
    assert "attention_mask" in model.preprocess(observe(kind)), "control: the sentences have different lengths"
    inputs = model.preprocess(observe(kind).select([1, 1]))
    assert "attention_mask" not in inputs
    masked = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}
    found, expected = (model.predict_action_batch(**each, do_sample=False) for each in (inputs, masked))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    masked["attention_mask"][:, 2] = 0
    other = model.predict_action_batch(**masked, do_sample=False)
    assert not torch.equal(other.logits, found.logits), "control: a word is missing"


def test_logprobs_under_autocast_are_float32_and_close():
    model = build()
    inputs = model.preprocess(observe())
    sequences = model.predict_action_batch(**inputs).sequences
    exact = model.evaluate_actions(inputs, sequences)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model.evaluate_actions(inputs, sequences)
    assert mixed.logprobs.dtype == mixed.values.dtype == torch.float32
    assert 0 < (mixed.logprobs - exact.logprobs).abs().max() < 0.1


def test_sft_loss_by_hand():
    model = build("parallel", chunks=1)
    inputs = model.preprocess(observe())
    actions = torch.tensor([[[0.0, 1.0, -1.0]], [[0.1, 0.2, 0.3]], [[-0.5, 0.04, 0.06]], [[2.0, -2.0, 0.0]]])
    nearest = (actions[:, 0].clamp(-1, 1) * 10).round().long()
    sequences = 543 - (nearest + 10)
    expected = -model.evaluate_actions(inputs, sequences).logprobs.mean(-1)
    loss = model.sft_loss(inputs, actions)
    assert loss.shape == (4,) and loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
    assert (model.sft_loss(inputs, -actions) - loss).abs().max() > 1e-3


def test_a_gathered_state_dict_is_written_in_place_of_the_models_own(tmp_path):
    model = build()
    doubled = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=doubled)
    again = load(tmp_path)
    assert all(torch.equal(tensor * 2, again.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", ["parallel", "autoregressive"])
def test_without_value_head_values_are_zero(kind):
    model = build(kind, value_head=False)
    inputs = model.preprocess(observe(kind))
    prediction = model.predict_action_batch(**inputs)
    assert model.value_head is None and not prediction.values.any()
    assert not model.evaluate_actions(inputs, prediction.sequences).values.any()


def prepared(image_preparation, center_crop, **fields):
    return {"image_preparation": image_preparation, "center_crop": center_crop, **fields}


@pytest.mark.parametrize("image_preparation", ["none", "rlds"])
@pytest.mark.parametrize("center_crop", [False, True])
@pytest.mark.parametrize("size", [32, 80])
def test_pictures_of_every_camera_are_prepared_as_in_the_published_evaluation(image_preparation, center_crop, size):
    init = KINDS["two_cameras"] | prepared(image_preparation, center_crop)
    observation = observe(size=size)
    pixels = build(init_config=init).preprocess(observation)["pixel_values"]
    for camera, (_, frames) in enumerate(observation.images.items()):
        frames = torch.from_numpy(frames).permute(0, 3, 1, 2)
        if image_preparation == "rlds":
            frames = resize_lanczos3(jpeg_round_trip(frames), (32, 32))
        if center_crop:
            frames = crop_and_resize(frames, 0.9, (32, 32))
        expected = (resize_bicubic(frames, (32, 32)).float() / 255 - 0.5) / 0.5
        assert torch.equal(pixels[:, 3 * camera : 3 * camera + 3], expected)


def test_preparation_and_crop_of_a_folder_are_set_by_overrides_and_saved(tmp_path):
    build().save_pretrained(tmp_path / "plain")

    def pixels(model):
        return model.preprocess(observe(size=80))["pixel_values"]

    def loaded(name, **fields):
        return load(tmp_path / name, override_config=fields)

    plain, changed = pixels(loaded("plain")), loaded("plain", **prepared("rlds", True))
    assert not torch.allclose(pixels(changed), plain, atol=0.01)
    changed.save_pretrained(tmp_path / "changed")
    changed.processor.save_pretrained(tmp_path / "changed")
    assert torch.equal(pixels(loaded("changed")), pixels(changed))
    assert torch.equal(pixels(loaded("changed", **prepared("none", False))), plain)


@pytest.mark.parametrize(
    "present, field",
    [(prepared("none", True), "do_center_crop: saved false, present true"),
     (prepared("rlds", False), 'image_preparation: saved "none", present "rlds"')],
)  # fmt: skip
def test_the_manifest_refuses_other_preparation_of_pictures(present, field):
    config = build_config(compose_config(["model=openvla_tiny", "env=tabletop", "output_dir=unused"]))
    policies = (build(init_config=TINY | fields) for fields in ({}, {}, present))
    saved, same, other = (build_manifest(config, policy, policy_version=0) for policy in policies)
    assert check(saved, same) == []
    with pytest.raises(ManifestMismatchError, match=f"preprocessing.processor.{field}"):
        check(saved, other)


@pytest.mark.parametrize(
    "section, message",
    [
        ({"action_token_len": 2}, "action_token_len=3"),
        ({"hidden_size": 64}, "hidden_size=32"),
        ({"init_config": TINY | {"patches_per_token": 3}}, "is 3.*4 x 4.*init_config.patches_per_token=1"),
        ({"init_config": TINY | {"action_decoding": "both"}}, "'both'.*init_config.action_decoding=autoregressive"),
        ({"init_config": TINY | {"vision_feature_layer": 1}}, "init_config.vision_feature_layer=-1"),
        ({"init_config": PUBLIC | {"image_sizes": [28, 56]}}, r"28, 56.*2, 4.*init_config.image_sizes=.28,28"),
        ({"init_config": PUBLIC | {"image_sizes": [30, 30]}}, r"init_config.image_sizes=.28,28"),
        ({"init_config": TINY | {"image_preparation": "libero"}}, "'libero'.*model.init_config.image_preparation=rlds"),
        ({"init_config": PUBLIC | prepared("none", True, image_sizes=[28, 56])}, "override_config.center_crop=f"),
        ({"init_config": {}}, "model=openvla_tiny"),
    ],
)
def test_wrong_settings_are_refused_with_the_value_to_type(section, message):
    stats = {"unit_range": {"action": {"q01": [-1.0] * 3, "q99": [1.0] * 3}}}
    base = {"model_type": "openvla", "init_config": TINY, "action_token_len": 3}
    init = (base | section)["init_config"]
    section = base | section | {"init_config": init | {"norm_stats": stats} if init else init}
    with pytest.raises(ConfigError, match=message.replace("=", ".*=?")):
        get_model(section)


def test_an_input_longer_than_the_language_models_positions_is_refused():
    """Longest row: 1 BOS, 4 image tokens, then words, and 6 actions; a text config with one position too few rejects it."""
    observation = observe()
    needed = build().preprocess(observation)["input_ids"].shape[1] + 4 + 6
    for positions in (needed, needed - 1):
        config = KINDS["parallel"] | {"text_config": TEXT | {"max_position_embeddings": positions}}
        model = build(init_config=config)
        inputs = model.preprocess(observation)
        if positions == needed:
            model.predict_action_batch(do_sample=False, **inputs)
            continue
        with pytest.raises(ConfigError, match=rf"has {needed} tokens.*actions 6.* {positions} positions"):
            model.predict_action_batch(do_sample=False, **inputs)
        with pytest.raises(ConfigError, match="max_position_embeddings"):
            model.evaluate_actions(inputs, torch.full((len(SENTENCES), 6), 530))
        model.config.text_config.rope_parameters = {"rope_type": "yarn", "factor": 2.0}
        model.predict_action_batch(do_sample=False, **inputs)


def test_the_prompt_is_read_once_and_then_one_token_at_a_time():
    model = build("autoregressive")
    lengths, images, full_heads = [], [], []
    model.language_model.model.layers[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    model.vision_backbone.register_forward_hook(lambda *_: images.append(1))
    model.language_model.lm_head.register_forward_hook(lambda *_: full_heads.append(1))
    inputs = model.preprocess(observe("autoregressive"))
    model.predict_action_batch(do_sample=False, **inputs)
    assert lengths == [inputs["input_ids"].shape[1] + model.num_image_tokens] + [1] * (model.num_logprobs - 1)
    assert len(images) == 1 and not full_heads, "the head is applied to action tokens alone"
