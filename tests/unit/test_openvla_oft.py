"""Properties of OpenVLA-OFT that hold without reference arrays."""

import json
import logging

import numpy as np
import pytest
import torch
from policy_checks import failed_checks

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import CheckpointError, ConfigError, ManifestMismatchError
from rlinf.manifest import check
from rlinf.models import build_policy, get_model
from rlinf.models.config import LoraConfig
from rlinf.models.embodiment.openvla_oft.config import OpenVLAOFTConfig
from rlinf.models.embodiment.openvla_oft.weights import merge_adapters
from rlinf.models.lora import apply_lora, merge_lora, save_adapter
from rlinf.preflight.conditions import build_manifest
from rlinf.preflight.validation import validate
from rlinf.types import Observation

CHUNK, DIM, STATE = 2, 3, 5
STATS = {
    "arm": {
        "action": {
            "q01": [-2.0, 5.0, -1.0], "q99": [4.0, 6.0, 1.0], "min": [-3.0, 4.0, -1.0], "max": [5.0, 7.0, 1.0],
            "mask": [True, True, False],
        },
        "proprio": {"q01": [0.0] * STATE, "q99": [2.0] * STATE, "min": [-1.0] * STATE, "max": [3.0] * STATE},
    }
}  # fmt: skip
TINY = {
    "timm_model_ids": ["vit_tiny_patch8_siglip_64"], "image_sizes": [32], "vision_feature_layer": -1,
    "vision_overrides": [{"embed_dim": 16, "depth": 1, "num_heads": 2}], "patches_per_token": 4,
    "text_config": {
        "vocab_size": 544, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "pad_token_id": 0, "pad_to_multiple_of": 0, "n_action_bins": 21, "action_bin_rule": "grid",
    "prompt_template": "{instruction}", "prompt_suffix_token_id": None, "weight_init": "fan_in", "norm_stats": STATS,
}  # fmt: skip
KINDS = {
    "discrete": {},
    "everything": {"use_proprio": True, "use_film": True, "num_images_in_input": 2, "learned_placeholders": True},
    "no_stop_token": {"stop_token_in_input": False, "use_film": True, "action_normalization": "bounds"},
    "l1": {"action_head": "l1", "use_proprio": True},
}

SENTENCES = [
    "reach the red block",
    "push the blue block to the green zone",
    "go to the zone",
    "open the left drawer ...",
]


def section(kind="everything", init=None, **model):
    init = TINY | KINDS[kind] | (init or {})
    sizes = {"model_type": "openvla_oft", "action_token_len": DIM, "action_chunks_len": CHUNK}
    return sizes | {"init_config": init} | model


def build(kind="everything", init=None, **model):
    torch.manual_seed(0)
    return build_policy({"model": section(kind, init, **model)}).eval()


def observe(rows=(0, 1, 2, 3)):
    rng = np.random.default_rng(0)
    images = {camera: rng.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8) for camera in ("front", "wrist")}
    state = rng.uniform(-0.5, 2.5, (4, STATE)).astype(np.float32)
    return Observation(images, state, list(SENTENCES)).select(rows)


@pytest.fixture(params=list(KINDS))
def kind(request):
    return request.param


def test_every_kind_keeps_the_contract(kind):
    model = build(kind)
    assert failed_checks(model, observe(), is_scored=kind != "l1") == []
    inputs = model.preprocess(observe())
    before = model.predict_action_batch(**inputs, do_sample=False)
    assert kind == "l1" or before.logits.shape == (4, CHUNK * DIM, 21)
    if KINDS[kind].get("num_images_in_input") == 2:  # the checks change both images at once
        inputs["pixel_values"][:, 3:6] *= 0.5
        after = model.predict_action_batch(**inputs, do_sample=False)
        assert (after.logits - before.logits).abs().amax((1, 2)).min() > 1e-4
        assert (after.values - before.values).abs().min() > 0


def test_every_action_token_is_seen_by_the_first(monkeypatch):
    """Attention goes both ways: the last placeholder, which is read nowhere, moves the logits of the first token."""
    model = build("discrete")
    inputs = model.preprocess(observe())
    before = model.predict_action_batch(**inputs, do_sample=False).logits
    plain = model._placeholder_embeddings

    def changed(embeddings):
        result = plain(embeddings).clone()
        result[:, -1] += 1.0
        return result

    monkeypatch.setattr(model, "_placeholder_embeddings", changed)
    after = model.predict_action_batch(**inputs, do_sample=False).logits
    assert (after[:, 0] - before[:, 0]).abs().amax(-1).min() > 1e-4


def test_greedy_over_the_vocabulary_and_over_the_bins():
    model = build("discrete")
    with torch.no_grad():
        model.language_model.lm_head.weight[:500] *= 100.0
    inputs = model.preprocess(observe())
    first = model.action_tokenizer.first_token
    columns = CHUNK * DIM
    assert (model.predict_action_batch(**inputs, do_sample=False).sequences[:, -columns:] >= first).all()
    model.config.greedy_over_vocabulary = True
    greedy = model.predict_action_batch(**inputs, do_sample=False)
    assert torch.equal(greedy.sequences[:, -columns:], model(**inputs).logits.argmax(-1))
    assert (greedy.sequences[:, -columns:] < first).any()
    assert (greedy.actions[..., 2] == 1.0).any(), "a lower id decodes as the lowest bin, the highest action"
    sampled = model.predict_action_batch(**inputs, do_sample=True, temperature=100.0)
    assert (sampled.sequences[:, -columns:] >= first).all()
    assert torch.isfinite(model.rollout_logprobs(sampled)).all()


def test_the_median_of_the_bins_is_not_their_mode():
    model = build("discrete")
    with torch.no_grad():
        model.language_model.lm_head.weight *= 20.0  # a distribution in which the two differ
    inputs, first = model.preprocess(observe()), model.action_tokenizer.first_token
    mode = model.predict_action_batch(**inputs, do_sample=False)
    model.config.greedy_decoding = "median"
    median = model.predict_action_batch(**inputs, do_sample=False)
    bins = median.sequences[:, -CHUNK * DIM :] - first
    for row, token in np.ndindex(*bins.shape):
        probabilities = median.logits[row, token].double().softmax(-1).numpy()
        k = int(bins[row, token])
        assert probabilities[:k].sum() <= 0.5 + 1e-6 and probabilities[k + 1 :].sum() <= 0.5 + 1e-6
    assert (mode.sequences != median.sequences).any()
    assert torch.equal(model.propose(inputs).chunks[:, 0], median.actions), "features and evaluations use the same"


@pytest.mark.parametrize("other", [{"greedy_over_vocabulary": True}, {"action_head": "l1"}])
def test_the_median_needs_bins(other):
    with pytest.raises(ConfigError, match="greedy_decoding is 'median' with"):
        OpenVLAOFTConfig(greedy_decoding="median", **other)


def test_actions_are_unnormalised_by_the_chosen_bounds():
    tokens = torch.full((1, CHUNK * DIM), 523)  # the highest action, 1.0
    assert build("discrete").decode_actions(tokens)[0, 0].tolist() == pytest.approx([4.0, 6.0, 1.0])
    assert build("no_stop_token").decode_actions(tokens)[0, 0].tolist() == pytest.approx([5.0, 7.0, 1.0])


def test_l1_loss_by_hand_and_actions():
    model = build("l1")
    inputs = model.preprocess(observe())
    prediction = model.predict_action_batch(**inputs)
    normalized = prediction.sequences.view(4, CHUNK, DIM)
    low, span = torch.tensor([-2.0, 5.0, 0.0]), torch.tensor([6.0, 1.0, 2.0])
    expected = (normalized + 1) / 2 * span + low
    expected[..., 2] = normalized[..., 2]  # masked
    torch.testing.assert_close(prediction.actions, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(model.decode_actions(prediction.sequences), prediction.actions)
    actions = torch.tensor([1.0, 5.5, 0.5]).expand(4, CHUNK, DIM)  # normalised: 0, 0, .5
    expected = (normalized - torch.tensor([0.0, 0.0, 0.5])).abs().mean((1, 2))
    loss = model.sft_loss(inputs, actions)
    assert loss.shape == (4,)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
    assert torch.equal(model.predict_action_batch(**inputs, do_sample=False).actions, prediction.actions)


@pytest.mark.parametrize("state, actual", [(None, "none"), (np.zeros((4, 7), np.float32), "7")])
def test_an_absent_or_wide_state_is_refused(state, actual):
    with pytest.raises(ConfigError, match=f"state of 5 dimensions.*provides {actual}.*Set env.state=proprio"):
        build().preprocess(Observation(observe().images, state, SENTENCES))


def test_rl_with_the_l1_head_is_refused_before_anything_is_built():
    overrides = ["experiment=tabletop_openvla_oft_tiny", "+model.init_config.action_head=l1"]
    with pytest.raises(ConfigError, match="action_head is 'l1'.*model.init_config.action_head=discrete"):
        validate(build_config(compose_config(overrides)))
    validate(build_config(compose_config([*overrides, "trainer.max_steps=0"])))
    validate(build_config(compose_config(overrides)), "evaluate")
    validate(build_config(compose_config(overrides[:1])))


def test_a_model_that_reads_a_state_is_refused_in_an_env_without_one():
    init = "model.init_config.state_dim=null"
    overrides = ["experiment=tabletop_openvla_oft_tiny", init, "env.state=none"]
    with pytest.raises(ConfigError, match="use_proprio.*env.name=tabletop.*model.init_config.use_proprio=false"):
        validate(build_config(compose_config(overrides)))
    validate(build_config(compose_config(overrides[:2])))


def test_lora_trains_adapters_and_the_new_parts_and_merges(kind):
    model = apply_lora(build(kind), LoraConfig(rank=4, alpha=4))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    whole = {name.split(".")[0] for name in trained if ".lora_" not in name}
    expected = {"value_head"} | ({"proprio_projector"} if KINDS[kind].get("use_proprio") else set())
    expected |= {"action_head"} if kind == "l1" else set()
    expected |= {"placeholders"} if KINDS[kind].get("learned_placeholders") else set()
    assert whole == expected
    assert any("film" in name for name in trained) == bool(KINDS[kind].get("use_film"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(std=0.05)
    merge_lora(model, model.preprocess(observe()))


def test_adapters_of_public_vision_files_are_added_with_their_scale():
    generator = torch.Generator().manual_seed(0)
    for rank, scale in ((4, 1.0), (32, 0.5)):
        base, down, up = (torch.randn(shape, generator=generator) for shape in ((6, 5), (rank, 5), (6, rank)))
        merged = merge_adapters(
            {
                "blocks.0.fc1.base_layer.weight": base, "blocks.0.fc1.base_layer.bias": torch.ones(6),
                "blocks.0.fc1.lora_A.default.weight": down, "blocks.0.fc1.lora_B.default.weight": up, "norm.weight": up,
            }
        )  # fmt: skip
        assert set(merged) == {"blocks.0.fc1.weight", "blocks.0.fc1.bias", "norm.weight"}
        torch.testing.assert_close(merged["blocks.0.fc1.weight"], base + scale * up @ down)


PARTS = ["action_head", "proprio_projector", "film", "placeholders"]
OPTIONS = {"action_head": "l1", "use_proprio": True, "use_film": True, "learned_placeholders": True}


@pytest.fixture
def base(tmp_path):
    """Folder of a base OpenVLA with random weights."""
    torch.manual_seed(0)
    build_policy({"model": section("discrete", model_type="openvla")}).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def from_folder(folder, override_config=None, **model):
    return section("discrete", model_path=str(folder)) | {
        "init_config": {}, "override_config": override_config or {}, **model
    }  # fmt: skip


def test_new_parts_start_on_a_base_model_and_are_saved(base, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "rlinf"):
        model = build_policy({"model": from_folder(base, OPTIONS | {"new_parts": PARTS})}).train()
    lines = [record.getMessage() for record in caplog.records if "newly initialised" in record.getMessage()]
    assert len(lines) == 1 and ", ".join(PARTS) in lines[0]
    assert model.config.new_parts == []
    state_dict = model.state_dict()
    assert not any(tensor.any() for name, tensor in state_dict.items() if ".film." in name)
    drawn = ("action_head.model.fc1.weight", "proprio_projector.fc1.weight", "placeholders")
    assert all(state_dict[name].std() > 0 for name in drawn)
    inputs = model.preprocess(observe())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    actions = model.action_normalizer.unnormalize(torch.linspace(-1, 1, 24).view(4, CHUNK, DIM))
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(model.sft_loss(inputs, actions).mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[1] < losses[0]
    assert model.state_dict()["vision_backbone.featurizer.blocks.0.film.scale.weight"].any()
    model.eval().save_pretrained(tmp_path / "saved")
    for override_config in (None, {"new_parts": PARTS}):  # parts that may be absent are loaded where they are there
        again = build_policy({"model": from_folder(tmp_path / "saved", override_config)}).eval()
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["new_parts"] == []


def test_new_film_is_the_identity(base):
    plain = build_policy({"model": from_folder(base)}).eval()
    film = build_policy({"model": from_folder(base, {"use_film": True, "new_parts": ["film"]})}).eval()
    inputs = plain.preprocess(observe())
    a, b = (model.predict_action_batch(**inputs, do_sample=False).logits for model in (plain, film))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    with torch.no_grad():
        film.vision_backbone.featurizer.blocks[0].film.shift.bias += 1.0
    c = film.predict_action_batch(**inputs, do_sample=False).logits
    assert (a - c).abs().max() > 1e-3, "control: FiLM is on the way"


def test_half_a_part_is_refused_even_if_it_may_be_new(base, tmp_path):
    options = {"action_head": "l1", "new_parts": ["action_head"]}
    model, missing = get_model(from_folder(base, options)), "action_head.model.fc2.bias"
    state_dict = {name: tensor for name, tensor in model.state_dict().items() if name != missing}
    model.save_pretrained(tmp_path / "half", state_dict=state_dict)
    with pytest.raises(CheckpointError, match=rf"missing \['{missing}'\]"):
        get_model(from_folder(tmp_path / "half", options))


def test_adapters_on_new_parts_come_back_on_the_base_model(base, tmp_path):
    load = from_folder(base, OPTIONS | {"new_parts": PARTS}, is_lora=True)
    model = build_policy({"model": load}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(std=0.05)
    save_adapter(model, tmp_path / "adapter")
    torch.manual_seed(1)
    again = build_policy({"model": load | {"lora_path": str(tmp_path / "adapter")}}).eval()
    inputs = model.preprocess(observe())
    a, b = (each.predict_action_batch(**inputs) for each in (model, again))
    torch.testing.assert_close(a.actions, b.actions, atol=1e-5, rtol=0)
    unlike = build_policy({"model": load}).eval().predict_action_batch(**inputs)
    assert (unlike.actions - a.actions).abs().max() > 1e-3, "control: another draw acts otherwise"


@pytest.mark.parametrize(
    "new_parts, error, message",
    [
        ([], CheckpointError, r"'action_head', 'proprio_projector', 'film', 'placeholders'\] is missing.*model.override_config."
         r"new_parts=\[action_head,proprio_projector,film,placeholders\]"),
        (["film", "placeholders"], CheckpointError, r"'action_head', 'proprio_projector'\] is missing, but required by action_head=l1, "
         r"use_proprio=true.*new_parts=\[film,placeholders,action_head,proprio_projector\]"),
        (["fillm"], ConfigError, r"new_parts contains 'fillm'.*model.override_config.new_parts=\[film\]"),
    ],
)  # fmt: skip
def test_absent_parts_are_refused_unless_they_are_named(base, new_parts, error, message):
    with pytest.raises(error, match=message):
        get_model(from_folder(base, OPTIONS | {"new_parts": new_parts}))
    with pytest.raises(ConfigError, match="'film'.*model.override_config.use_film=true"):
        get_model(from_folder(base, {"new_parts": ["film"]}))


@pytest.mark.parametrize("model_type", ["openvla", "openvla_oft"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"unnorm_key": "arn"}, "Unknown model.unnorm_key 'arn'.*Known: arm.*Set model.unnorm_key=arm"),
        ({"action_token_len": 4}, "model.action_token_len is 4.*3 dimensions. Set model.action_token_len=3"),
        ({"image_size": [13, 13]}, r"image_size is \[13,13\].*Set model.image_size=\[\d+,\d+\] or"),
        ({"override_config": {"n_action_bins": 600}}, "is 600.*544.*model.override_config.n_action_bins=256"),
    ],
)
def test_wrong_settings_are_refused_before_weights_are_read(base, model_type, change, message):
    (base / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ConfigError, match=message):
        get_model(from_folder(base, model_type=model_type) | change)
    with pytest.raises(CheckpointError, match=r"model.safetensors' cannot be read.*model.model_path="):
        get_model(from_folder(base, model_type=model_type))
    if model_type == "openvla_oft":
        with pytest.raises(ConfigError, match="state_dim is 4.*5 dimensions"):
            get_model(from_folder(base, {"use_proprio": True, "state_dim": 4, "new_parts": ["proprio_projector"]}))


@pytest.mark.parametrize("asked, found", [("openvla_oft", "pi0"), ("openvla", "openvla_oft"), ("openvla", "llama")])
def test_a_folder_of_another_model_is_refused_before_weights_are_read(base, asked, found):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"model_type": found}))
    (base / "model.safetensors").write_bytes(b"garbage")
    override = "model.model_path=<a different folder>" if found == "llama" else f"model.model_type={found}"
    with pytest.raises(CheckpointError, match=f"is of model type '{found}'.*accepts 'openvla'.*Set {override}"):
        get_model(from_folder(base, model_type=asked))


@pytest.mark.parametrize(
    "init, message",
    [
        ({"action_head": "diffusion"}, "action_head is 'diffusion'.*model.init_config.action_head=discrete"),
        ({"action_decoding": "autoregressive"}, "action_decoding is 'autoregressive'.*action_decoding=parallel"),
        ({"state_dim": 4}, "no state is read because use_proprio is false.*model.init_config.use_proprio=true"),
        ({"use_proprio": True, "norm_stats": {"a": {"action": STATS["arm"]["action"]}}}, "model.unnorm_key"),
        (
            {"action_normalization": "bounds", "norm_stats": {"a": {"action": {"q01": [0.0] * 3, "q99": [1.0] * 3}}}},
            "contain q01, q99; normalising by min and max.*model.unnorm_key",
        ),
    ],
)
def test_wrong_settings_are_refused_with_the_value_to_type(init, message):
    with pytest.raises(ConfigError, match=message):
        get_model(section("discrete", init))


def test_random_weights_without_statistics_take_the_unit_range():
    init = {"norm_stats": {}, "use_proprio": True, "state_dim": STATE, "action_normalization": "bounds"}
    model = build("discrete", init)
    assert model.state_dim == STATE and model.state_normalizer.low.tolist() == [-1.0] * STATE
    assert model.min_action.tolist() == [-1.0] * DIM


def test_the_manifest_refuses_another_normalisation_of_the_actions():
    config = build_config(compose_config(["model=openvla_oft_tiny", "env=tabletop", "output_dir=unused"]))
    saved, same = (build_manifest(config, build("discrete"), policy_version=0) for _ in range(2))
    assert check(saved, same) == []
    other = build_manifest(config, build("discrete", {"action_normalization": "bounds"}), policy_version=0)
    with pytest.raises(ManifestMismatchError, match='action_normalization: saved "bounds_q99", present "bounds"'):
        check(saved, other)
