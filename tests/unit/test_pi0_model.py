"""pi0 and pi0.5 from random weights: the contract of an action model, inputs, files and rejections."""

import copy
import dataclasses
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from policy_checks import failed_checks
from safetensors.torch import load_file, save_file

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config, declared_policy
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models import build_policy, get_model, get_model_config_and_processor
from rlinf.models.embodiment.pi0.config import Pi0Config
from rlinf.models.embodiment.pi0.gemma_expert import AdaRMSNorm
from rlinf.models.embodiment.pi0.policy import Pi0ForRLActionPrediction
from rlinf.models.embodiment.pi0.processing import StatisticsNormalizer, discretize_state, resize_with_pad
from rlinf.models.lora import apply_lora
from rlinf.preflight.compatibility import check_inputs
from rlinf.types import Observation

CHUNK_LEN, ENV_DIM, STATE_DIM = 2, 3, 4
ACTION = {"q01": [-1, -2, 0], "q99": [1, 2, 4], "mean": [0, 0, 2], "std": [1, 2, 3], "mask": [True, True, True]}
PROPRIO = {"q01": [-1.0] * 4, "q99": [1.0] * 4, "mean": [0.0] * 4, "std": [1.0] * 4}
STATS = {"arm": {"action": ACTION, "proprio": PROPRIO}}
SIZES = {"width": 16, "depth": 2, "mlp_dim": 24, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
INIT = {
    "vocab_size": 544, "action_dim": 5, "action_horizon": 3, "vlm": SIZES | {"width": 24}, "expert": SIZES,
    "vision": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
               "image_size": 16, "patch_size": 8},
    "use_quantile_norm": True, "norm_stats": STATS, "num_steps": 4, "value_hidden_sizes": [16], "noise_hidden_sizes": [8],
}  # fmt: skip
kinds = pytest.mark.parametrize("pi05", [False, True], ids=["pi0", "pi05"])


def section(pi05=False, **changes):
    init = copy.deepcopy(INIT) | {"pi05": pi05} | changes
    return {"model_type": "pi0", "init_config": init, "action_token_len": ENV_DIM, "action_chunks_len": CHUNK_LEN}


def make(pi05=False, move=True, **changes):
    """A policy whose adaptive norms, which start at zero, have moved, so that all of it takes part."""
    torch.manual_seed(0)
    model = build_policy({"model": section(pi05, **changes)})
    if move:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def observe(num_rows=4, seed=0, size=16):
    rng = np.random.default_rng(seed)
    return Observation(
        images={name: rng.integers(0, 256, (num_rows, size, size, 3), dtype=np.uint8) for name in ("front", "wrist")},
        state=rng.uniform(-1, 1, (num_rows, STATE_DIM)).astype(np.float32),
        instruction=[("reach the red block", "push it")[row % 2] for row in range(num_rows)],
    )


def uniforms_for(model, num_rows=4, seed=1):
    return torch.rand(num_rows, model.num_uniforms, generator=torch.Generator().manual_seed(seed)).clamp_min(1e-6)


@kinds
def test_random_weights_begin_with_small_values_and_adaptive_norms_at_zero(pi05):
    model = make(pi05, move=False)
    norms = [module.dense for module in model.modules() if isinstance(module, AdaRMSNorm)]
    assert bool(norms) == pi05
    assert all(not norm.weight.any() and not norm.bias.any() for norm in norms)
    last = model.value_head.mlp[-1]
    assert last.weight.std().item() == pytest.approx(0.02, rel=0.6) and not last.bias.any()
    positions = model.vision_tower.embeddings.position_embedding.weight
    tokens = model.language_model.embed_tokens.weight * model.config.hidden_size**0.5
    assert positions.std().item() == pytest.approx(1.0, rel=0.3) and tokens.std().item() == pytest.approx(1.0, rel=0.1)


@kinds
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("method", ["flow_sde", "flow_cps", "flow_noise"])
@torch.no_grad()
def test_rollout_and_training_agree_on_logprobs(pi05, method, joint):
    model = make(pi05, noise_method=method, joint_logprob=joint)
    inputs = model.preprocess(observe())
    for temperature in (1.0, 1.6):
        prediction = model.predict_action_batch(**inputs, temperature=temperature, uniforms=uniforms_for(model))
        rollout = model.rollout_logprobs(prediction, temperature)
        tokens = prediction.sequences[:, -model.num_sampled :]
        evaluation = model.evaluate_actions(inputs, tokens, temperature)
        assert rollout.shape == evaluation.logprobs.shape == evaluation.entropy.shape == (4, model.num_logprobs)
        assert rollout.dtype == evaluation.logprobs.dtype == evaluation.values.dtype == torch.float32
        torch.testing.assert_close(evaluation.logprobs, rollout, rtol=0, atol=1e-5)
        assert torch.equal(model.decode_actions(tokens), prediction.actions)
        if joint:
            torch.testing.assert_close(evaluation.values, prediction.values)


@torch.no_grad()
def test_control_other_weights_or_temperatures_change_the_logprobs():
    model = make()
    inputs = model.preprocess(observe())
    prediction = model.predict_action_batch(**inputs, uniforms=uniforms_for(model))
    rollout = model.rollout_logprobs(prediction)
    warmer = model.evaluate_actions(inputs, prediction.sequences, 1.1).logprobs
    model.action_out_proj.bias.add_(0.1)
    moved = model.evaluate_actions(inputs, prediction.sequences).logprobs
    assert (warmer - rollout).abs().max() > 1e-2 and (moved - rollout).abs().max() > 1e-2


@kinds
@torch.no_grad()
def test_both_kinds_keep_the_contract(pi05):
    model = make(pi05)
    assert failed_checks(model, observe()) == []
    inputs = model.preprocess(observe())
    assert ("state" in inputs) == (not pi05), "pi05 reads the state in its prompt"
    uniforms = uniforms_for(model)
    together = model.predict_action_batch(**inputs, uniforms=uniforms)
    for row in range(4):
        alone = model.predict_action_batch(**model.preprocess(observe().select([row])), uniforms=uniforms[[row]])
        torch.testing.assert_close(alone.sequences[0], together.sequences[row], rtol=0, atol=1e-5)


@torch.no_grad()
def test_one_step_of_a_chain_is_sampled_and_the_others_are_euler_steps():
    model = make()
    inputs, uniforms = model.preprocess(observe()), uniforms_for(model)
    uniforms[:, -1] = torch.tensor([0.0, 0.3, 0.6, 0.99])
    prediction = model.predict_action_batch(**inputs, uniforms=uniforms)
    assert prediction.sequences[:, -1].tolist() == [0, 1, 2, 3]
    deviations = prediction.logits[..., 1].amax((2, 3))
    assert torch.equal(deviations > 0, torch.eye(4, dtype=torch.bool))
    chain = prediction.sequences[:, :-1].unflatten(1, (5, 3, 5))
    prefix = model.encode_prefix(**inputs)
    for i in range(4):
        velocity, _ = model.velocity(prefix, inputs["state"], chain[:, i], torch.full((4,), 1 - i / 4))
        difference = (chain[:, i + 1] - (chain[:, i] - velocity / 4)).abs().amax((1, 2))
        assert (difference[torch.arange(4) != i] < 1e-5).all() and difference[i] > 1e-2


@torch.no_grad()
def test_joint_logprobs_are_the_mean_over_initial_noise_and_all_steps():
    model = make(joint_logprob=True)
    prediction = model.predict_action_batch(**model.preprocess(observe()), uniforms=uniforms_for(model))
    chain = prediction.sequences[:, :-1].unflatten(1, (5, 3, 5))
    mean, std = prediction.logits.unbind(-1)
    terms = [torch.distributions.Normal(0.0, 1.0).log_prob(chain[:, 0])]
    terms += [torch.distributions.Normal(mean[:, i], std[:, i]).log_prob(chain[:, i + 1]) for i in range(4)]
    expected = torch.stack(terms).mean(0)[:, :CHUNK_LEN, :ENV_DIM].flatten(1)
    torch.testing.assert_close(model.rollout_logprobs(prediction), expected)


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise"])
def test_a_greedy_chain_has_no_density_in_training_as_in_the_rollout(method):
    model = make(noise_method=method)
    inputs = model.preprocess(observe())
    prediction = model.predict_action_batch(**inputs, do_sample=False)
    evaluation = model.evaluate_actions(inputs, prediction.sequences)
    assert not model.rollout_logprobs(prediction).any()
    assert not evaluation.logprobs.any() and not evaluation.entropy.any() and torch.isfinite(evaluation.values).all()
    (evaluation.logprobs + evaluation.entropy).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    sampled = model.predict_action_batch(**inputs, uniforms=uniforms_for(model)).sequences
    assert model.evaluate_actions(inputs, sampled).logprobs.all(), "control: a sampled step has a density"


@torch.no_grad()
def test_entropy_is_that_of_learned_deviations_only():
    inputs = make().preprocess(observe())
    for method in ("flow_sde", "flow_noise"):
        model = make(noise_method=method)
        prediction = model.predict_action_batch(**inputs, temperature=2.0, uniforms=uniforms_for(model))
        entropy = model.evaluate_actions(inputs, prediction.sequences, 2.0).entropy
        if method == "flow_sde":
            assert not entropy.any()
        else:
            std = prediction.logits[..., 1].sum(1)[:, :CHUNK_LEN, :ENV_DIM].flatten(1)
            torch.testing.assert_close(entropy, torch.distributions.Normal(0.0, std).entropy())


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


@kinds
@pytest.mark.parametrize("freeze", [False, True])
def test_frozen_vlm_gets_no_gradients(pi05, freeze):
    model = make(pi05, freeze_vlm=freeze)
    inputs = model.preprocess(observe())
    prediction = model.predict_action_batch(**inputs, uniforms=uniforms_for(model))
    found = gradients(model, model.evaluate_actions(inputs, prediction.sequences).logprobs.sum())
    found |= gradients(model, model.sft_loss(inputs, torch.zeros(4, 3, ENV_DIM)).sum())
    vlm = {name for name in found if name.startswith(("vision_tower", "projector", "language_model"))}
    assert bool(vlm) != freeze
    assert any(name.startswith("expert.layers.0") for name in found) and "action_in_proj.weight" in found
    assert not any(name.startswith(("expert_lm_head", "value_head")) for name in found)


@kinds
def test_what_no_output_depends_on_is_frozen_and_nothing_else(pi05):
    model = make(pi05)
    inputs = model.preprocess(observe())
    found = gradients(model, model.sft_loss(inputs, torch.zeros(4, 3, ENV_DIM)).sum())
    trainable = {name for name, p in model.named_parameters() if p.requires_grad and not name.startswith("value_head.")}
    assert found == trainable
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    layer = "language_model.layers.1"
    used = {f"{layer}.{name}.weight" for name in ("self_attn.k_proj", "self_attn.v_proj", "input_layernorm")}
    unused = {name for name in model.state_dict() if name.startswith(layer)} - used
    assert unused and frozen == unused | {"language_model.norm.weight", "expert_lm_head.weight"}


@pytest.mark.parametrize("targets", [None, ["q_proj", "k_proj", "fc1"]])
def test_lora_adapts_the_expert_and_the_vlm_unless_frozen(targets):
    from rlinf.models.config import LoraConfig

    for freeze in (False, True):
        model = apply_lora(make(freeze_vlm=freeze), LoraConfig(rank=2, alpha=2, target_modules=targets))
        names = {name for name, _ in model.named_parameters() if ".lora_" in name}
        parts = {"expert"} if freeze else {"expert", "vision_tower", "language_model"}
        assert {name.split(".")[0] for name in names} == parts
        assert not any("language_model.layers.1.self_attn.q_proj" in name for name in names)
        assert any("language_model.layers.1.self_attn.k_proj" in name for name in names) != freeze
        inputs = model.preprocess(observe())
        assert torch.isfinite(model.sft_loss(inputs, torch.zeros(4, 3, ENV_DIM))).all()


def test_normalisation_by_hand():
    x = torch.tensor([[0.5, 1.0, 3.0]])
    quantiles = StatisticsNormalizer(ACTION, 3, True, "action")
    expected = torch.tensor([[2 * 1.5 / 2.000001 - 1, 2 * 3 / 4.000001 - 1, 2 * 3 / 4.000001 - 1]], dtype=torch.float64)
    torch.testing.assert_close(quantiles.normalize(x), expected, rtol=0, atol=1e-12)
    moments = StatisticsNormalizer(ACTION, 3, False, "action")
    expected = torch.tensor([[0.5 / 1.000001, 1 / 2.000001, 1 / 3.000001]], dtype=torch.float64)
    torch.testing.assert_close(moments.normalize(x), expected, rtol=0, atol=1e-12)
    masked = StatisticsNormalizer(ACTION | {"mask": [True, False, True]}, 3, False, "action")
    assert masked.normalize(x)[0, 1] == 1.0
    padded = {key: [*values, 0] for key, values in ACTION.items() if key != "mask"}
    assert torch.equal(StatisticsNormalizer(padded, 3, True, "action").normalize(x), quantiles.normalize(x))
    for each in (quantiles, moments, masked):
        torch.testing.assert_close(each.unnormalize(each.normalize(x)).float(), x)


def test_pi05_without_a_state_in_the_prompt_needs_none():
    model, observation = make(True, discrete_state_input=False), observe()
    observation.state = None
    assert torch.isfinite(model.predict_action_batch(**model.preprocess(observation)).actions).all()


def test_cameras_are_taken_by_name():
    observation = observe()
    both, wrist = make().preprocess(observation), make(cameras=["wrist", None]).preprocess(observation)
    assert both["pixel_values"].shape[1] == 2 and wrist["pixel_values"].shape[1] == 1
    assert torch.equal(both["pixel_values"][:, 1], wrist["pixel_values"][:, 0])
    expected = torch.from_numpy(observation.images["front"]).permute(0, 3, 1, 2) / 255 * 2 - 1
    assert torch.equal(both["pixel_values"][:, 0], expected)


@pytest.mark.parametrize(
    "changes, observation, message",
    [
        ({"cameras": ["top"]}, {}, r"cameras \['top'\].*\['front', 'wrist'\].*cameras=\[front,wrist\]"),
        ({}, {"state": None}, r"provides none\. Set env\.state=proprio"),
        ({}, {"state": np.zeros((4, 31), np.float32)}, r"31 dimensions.* policy supports 5.*Set env\.state=proprio"),
        ({"norm_stats": {"arm": {"action": ACTION}}}, {}, r"'arm' only cover actions.*model\.unnorm_key="),
        ({}, {"state": np.zeros((4, 3), np.float32)}, r"'proprio' have 4 .*state has 3; .*Set env\.state=proprio"),
        ({"max_token_len": 3}, {}, r"max_token_len is 3\. Set model\.override_config\.max_token_len=\d+"),
    ],
)
def test_observations_that_do_not_fit_are_refused(changes, observation, message):
    model = make(**changes)
    with pytest.raises(ConfigError, match=message):
        model.preprocess(replace(observe(), **observation))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"noise_method": "sde"}, r"'sde'; expected flow_sde or flow_ode.*noise_method=flow_sde"),
        ({"num_steps": 0}, r"num_steps is 0.*num_steps=4"),
        ({"paligemma_variant": "gemma_2b_lora", "vlm": None}, r"'gemma_2b_lora'.*Merge the LoRA weights.*model\.model_path="),
        ({"vlm": SIZES | {"depth": 5}}, r"differ in depth \(\[5\] and \[2\]\).*expert\.depth=5"),
        ({"pi05": True, "use_quantile_norm": False}, r"use_quantile_norm=False.*use_quantile_norm=true"),
        ({"norm_stats": {"arm": {"action": {"q01": [0, 0, 0], "q99": [1, 1, 1]}}}, "use_quantile_norm": False},
         r"needs mean and std of 'action'.*use_quantile_norm=true"),
        ({"action_dim": 2}, r"model\.action_token_len is 3.*2 dimensions.*model\.action_token_len=2"),
        ({"action_horizon": 1}, r"model\.action_chunks_len is 2.*predicts 1.*model\.action_chunks_len=1"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        get_model(section(**changes))


def test_attention_without_masks_is_refused():
    config = Pi0Config(**copy.deepcopy(INIT))
    config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"flash_attention_2.*model\.attn_implementation=sdpa"):
        Pi0ForRLActionPrediction(config, action_dim=ENV_DIM)


def test_sizes_of_public_checkpoints():
    config = Pi0Config()
    sizes = (config.hidden_size, config.expert["width"], config.vlm["depth"], config.longest_prompt)
    assert sizes == (2048, 1024, 18, 48)
    assert Pi0Config(pi05=True).longest_prompt == 200 and Pi0Config(pi05=True).by_quantiles


def test_an_override_of_the_kind_takes_its_defaults_along(tmp_path):
    Pi0Config(**copy.deepcopy(INIT) | {"use_quantile_norm": None}).save_pretrained(tmp_path)
    config = Pi0Config.from_dict(Pi0Config.from_pretrained(tmp_path).to_dict() | {"pi05": True})
    assert (config.longest_prompt, config.state_in_prompt, config.by_quantiles) == (200, True, True)


def test_a_saved_folder_gives_the_same_policy(tmp_path):
    model = make(noise_method="flow_noise")
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["noise_method"] == "flow_noise"
    saved = section() | {"init_config": {}, "model_path": str(tmp_path)}
    reloaded = build_policy({"model": saved})
    inputs, uniforms = model.preprocess(observe()), uniforms_for(model)
    assert all(torch.equal(tensor, inputs[name]) for name, tensor in reloaded.preprocess(observe()).items())
    before = model.predict_action_batch(**inputs, uniforms=uniforms)
    after = reloaded.eval().predict_action_batch(**inputs, uniforms=uniforms)
    assert torch.equal(before.sequences, after.sequences) and torch.equal(before.values, after.values)
    assert not reloaded.expert_lm_head.weight.requires_grad
    frozen = get_model(saved | {"override_config": {"freeze_vlm": True}})
    assert not any(parameter.requires_grad for parameter in frozen.language_model.parameters())


def saved(folder, **changes):
    """A folder, and the model section that names it."""
    make(**changes).save_pretrained(folder)
    return section() | {"init_config": {}, "model_path": str(folder)}


def rewrite_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes, config, message",
    [
        ({"unnorm_key": "leg"}, {}, r"model\.unnorm_key 'leg'"),
        ({"action_token_len": 6}, {}, r"model\.action_token_len is 6.*5 dimensions.*Set model\.action_token_len=5"),
        ({"action_chunks_len": 9}, {}, r"model\.action_chunks_len is 9.*Set model\.action_chunks_len=3"),
        ({}, {"norm_stats": {}}, r"model\.unnorm_key=tabletop"),
    ],
)
def test_settings_are_refused_before_weights_are_read(tmp_path, changes, config, message):
    cfg = saved(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    if config:
        rewrite_config(tmp_path, **config)
        (tmp_path / "assets" / "arm" / "norm_stats.json").unlink()
    with pytest.raises(ConfigError, match=message) as caught:
        get_model(cfg | changes)
    assert "safetensors" not in str(caught.value)
    if not config:
        with pytest.raises(Exception, match=r"(?i)header|safetensors"):  # the control: nothing but the weights is wrong
            get_model(cfg)


def test_statistics_of_the_env_stand_in_for_those_of_the_folder(tmp_path):
    cfg = saved(tmp_path)
    rewrite_config(tmp_path, norm_stats={})
    (tmp_path / "assets" / "arm" / "norm_stats.json").unlink()
    model = get_model(cfg | {"unnorm_key": "tabletop"}, {"norm_stats": {"tabletop": STATS["arm"]}})
    assert model.unnorm_key == "tabletop"


def test_bounds_of_the_deviation_are_those_of_the_weights_unless_they_are_set(tmp_path):
    cfg = saved(tmp_path, noise_method="flow_noise")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["noise_head.logvar_min"], tensors["noise_head.logvar_max"] = torch.tensor([-4.0]), torch.tensor([-2.0])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    head = get_model(cfg).noise_head
    assert (head.logvar_min.item(), head.logvar_max.item()) == (-4.0, -2.0)
    other = get_model(cfg | {"override_config": {"noise_std_range": [0.1, 0.5]}})
    found = [other.noise_head.logvar_min.item(), other.noise_head.logvar_max.item()]
    assert found == pytest.approx([2 * math.log(0.1), 2 * math.log(0.5)])
    for name in ("logvar_min", "logvar_max"):
        del tensors[f"noise_head.{name}"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing .'noise_head.logvar_max"):
        get_model(cfg)
    bare = get_model(cfg | {"override_config": {"noise_std_range": [0.1, 0.5]}}).noise_head
    assert [bare.logvar_min.item(), bare.logvar_max.item()] == found, "a folder without bounds needs them set"
    other.save_pretrained(tmp_path / "again")
    again = get_model(cfg | {"model_path": str(tmp_path / "again")}).noise_head
    assert [again.logvar_min.item(), again.logvar_max.item()] == found
    same = other.noise_head.state_dict()
    assert all(torch.equal(x, same[key]) or "logvar_m" in key for key, x in head.state_dict().items())


@kinds
def test_folder_of_the_public_converter(tmp_path, pi05):
    """Only what the converter writes: no kind, no statistics in config.json, no heads, no tokenizer."""
    make(pi05).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if not name.startswith("value_head.")}
    save_file(tensors, tmp_path / "model.safetensors")
    written = {"action_dim": 5, "action_horizon": 3, "precision": "bfloat16", "vlm": INIT["vlm"], "expert": SIZES}
    (tmp_path / "config.json").write_text(json.dumps(written | {"vision": INIT["vision"], "vocab_size": 544}))
    for path in tmp_path.glob("token*"):
        path.unlink()
    cfg = section() | {"init_config": {}, "model_path": str(tmp_path)}
    model = get_model(cfg)
    assert model.config.pi05 == pi05 and list(model.config.norm_stats) == ["arm"] and model.value_head is not None
    with pytest.raises(ConfigError, match=r"contains no tokenizer.*tokenizer\.tokenizer_model="):
        get_model_config_and_processor({"model": cfg})
    (tmp_path / "assets" / "arm" / "norm_stats.json").write_text(json.dumps({"norm_stats": {"actions": {}}}))
    with pytest.raises(CheckpointError, match=r"statistics of \['actions'\].*Set model\.model_path="):
        get_model(cfg)


def test_settings_of_a_lerobot_folder(tmp_path):
    values = {
        "type": "pi05",
        "chunk_size": 7,
        "max_action_dim": 9,
        "num_inference_steps": 3,
        "tokenizer_max_length": 60,
    }
    (tmp_path / "config.json").write_text(json.dumps(values | {"n_obs_steps": 1, "device": "cpu"}))
    config = Pi0Config.from_pretrained(tmp_path)
    found = (config.pi05, config.action_horizon, config.action_dim, config.num_steps, config.max_token_len)
    assert found == (True, 7, 9, 3, 60)
    assert not hasattr(config, "device")


def test_images_keep_their_aspect_between_black_borders():
    images = torch.full((1, 3, 10, 20), 200, dtype=torch.uint8)
    resized = resize_with_pad(images, 16)
    assert resized.shape == (1, 3, 16, 16)
    assert (resized[:, :, 4:12] == 200).all() and not resized[:, :, :4].any() and not resized[:, :, 12:].any()
    assert resize_with_pad(resized, 16) is resized


def test_images_are_resized_as_openpi_resizes_uint8_tensors():
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 48, 64), dtype=np.uint8))
    inside = resize_with_pad(images, 32)[:, :, 4:28]
    assert torch.equal(inside, torch.nn.functional.interpolate(images, size=(24, 32), mode="bilinear"))
    floats = torch.nn.functional.interpolate(images.float(), size=(24, 32), mode="bilinear").round()
    gap = (floats - inside).abs()
    assert gap.max() <= 1 and gap.mean() > 0.01, "control: in float32 the numbers are others"


@torch.no_grad()
def test_images_that_were_resized_once_give_the_same_numbers():
    model, seen = make(), observe(2)
    size = model.config.vision["image_size"]
    generator = np.random.default_rng(0)
    images = {name: generator.integers(0, 256, (2, size + 8, size, 3), np.uint8) for name in seen.images}
    large = Observation(images, seen.state, seen.instruction)
    once = model.resize_images(large)
    assert all(image.shape[1:3] == (size, size) for image in once.images.values())
    for name, tensor in model.preprocess(large).items():
        assert torch.equal(model.preprocess(once)[name], tensor), name


def test_a_camera_that_is_absent_in_one_row_changes_that_row_as_if_it_were_not_there():
    model, observation = make(), observe(2)
    front = Observation({"front": observation.images["front"]}, observation.state, observation.instruction)
    mask = torch.tensor([[True, False], [True, True]])
    uniforms = uniforms_for(model, 2)
    found = model.predict_action_batch(**model.preprocess(observation, mask), uniforms=uniforms).actions
    both = model.predict_action_batch(**model.preprocess(observation), uniforms=uniforms).actions
    alone = model.predict_action_batch(**model.preprocess(front), uniforms=uniforms).actions
    torch.testing.assert_close(found, torch.cat([alone[:1], both[1:]]), atol=1e-5, rtol=0)
    assert (both[0] - alone[0]).abs().max() > 1e-4, "control: the second camera counts where it is there"
    with pytest.raises(ConfigError, match=r"image_mask has the shape \[2\]; expected \[2, 2\]"):
        model.preprocess(observation, mask[:, 0])


def test_prompts_of_both_kinds():
    processor = make().processor
    ids, mask = processor.encode(["reach the_red\nblock ", "push"])
    text = processor.tokenizer.encode("reach the red block", add_special_tokens=False)
    newline = processor.tokenizer.encode("\n", add_special_tokens=False)
    assert ids[0].tolist() == [processor.tokenizer.bos_token_id, *text, *newline]
    assert mask[0].all() and not mask[1].all() and mask[1, 0]
    assert discretize_state(np.array([-1.5, -1.0, 0.0, 0.999, 2.0])).tolist() == [-1, 0, 128, 255, 255]
    ids, _ = processor.encode(["push"], np.array([[0.0, -1.0]]))
    text = processor.tokenizer.encode("Task: push, State: 128 0;\nAction: ", add_special_tokens=False)
    assert ids[0].tolist() == [processor.tokenizer.bos_token_id, *text]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"model_type": "openvla"}, r"model type 'openvla'.*Set model\.model_type=openvla"),
        ({"type": "smolvla"}, r"model type 'smolvla'.*Set model\.model_type=smolvla"),
        ({"type": "xvla"}, r"model type 'xvla'.*Set model\.model_path=<a different folder>"),
        ({"vlm": {"text_config": {"hidden_size": 8}}}, r"vlm lacks width, depth.*Set model\.model_path="),
        ({"vision": {"image_size": 16}}, r"vision lacks hidden_size.*expected hidden_size.*Set model\.model_path="),
        ({"expert": "gemma_300m"}, r"expert lacks width.*Set model\.model_path="),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "tiny_config.json"])
def test_folders_of_another_architecture_are_refused(tmp_path, file, values, message):
    (tmp_path / file).write_text(json.dumps({"pi05": False} | values))
    with pytest.raises((ConfigError, CheckpointError), match=message):
        get_model({"model_type": "pi0", "model_path": str(tmp_path)})


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["env.state=none"], r"width at most 4.*tabletop provides none.*Set env\.state=proprio"),
        (["env.state=full"], r"width at most 4.*one of width 31.*Set env\.state=proprio"),
        (["env.state=proprio", "+model.init_config.cameras=[front,nose]"], r"model\.init_config\.cameras=\[front\]"),
        (["env.state=proprio", "+model.init_config.cameras=[]"], r"model\.init_config\.cameras=\[front\]"),
        (["env.state=proprio", "env.cameras=[]"], r"env\.cameras of env\.name=tabletop is \[\]"),
        (["env.state=proprio"], None),
        (["env.state=none", "model.init_config.pi05=true", "+model.init_config.discrete_state_input=false"], None),
        (["env.state=proprio", "+model.init_config.cameras=[front,null]"], None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("from_folder", [False, True])
def test_inputs_that_the_env_does_not_give_are_refused_before_anything_runs(tmp_path, overrides, message, from_folder):
    config = build_config(compose_config(["model=pi0_tiny", "env=tabletop", *overrides]))
    if from_folder:
        (tmp_path / "tiny_config.json").write_text(json.dumps(config.model.init_config))
        model = dataclasses.replace(config.model, init_config={}, model_path=str(tmp_path))
        config, message = dataclasses.replace(config, model=model), message and message.replace("init_", "override_")
    if message is None:
        return check_inputs(config, declared_policy(config))
    with pytest.raises(ConfigError, match=message):
        check_inputs(config, declared_policy(config))
