"""Action tokens, value head, images, prompts, and the small policies."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models import ModelEntry, build_policy
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.embodiment.mlp_action_model import MLPForRLActionPrediction
from rlinf.models.embodiment.modules.normalizer import unit_range_stats
from rlinf.models.embodiment.modules.tokenizer import TINY_TOKENIZER, ActionTokenizer
from rlinf.models.embodiment.modules.value_head import ValueHead
from rlinf.models.embodiment.openvla.processing import PrismaticImageProcessor, PrismaticProcessor
from rlinf.models.embodiment.openvla.vllm import OpenVLAVllmAdapter
from rlinf.preflight.validation import validate
from rlinf.types import Observation


@pytest.mark.parametrize("rule, bins", [("midpoints", 256), ("midpoints", 22), ("grid", 21), ("grid", 256)])
def test_action_token_round_trip_and_range(rule, bins):
    tokenizer = ActionTokenizer(bins, 1000, rule)
    tokens = torch.arange(1000 - bins, 1000)
    values = tokenizer.decode(tokens)
    assert (values[:-1] >= values[1:]).all(), "the lowest action has the highest id"
    assert (tokenizer.decode(tokenizer.encode(values)) - values).abs().max() < 1e-12
    x = torch.linspace(-1.2, 1.2, 4001, dtype=torch.float64)
    encoded = tokenizer.encode(x)
    assert encoded.min() >= 1000 - bins and encoded.max() < 1000
    step = 2 / (bins - 1)
    assert (tokenizer.decode(encoded) - x.clamp(-1, 1)).abs().max() <= step / 2 + 1e-12


def test_grid_represents_ends_and_zero_exactly_and_midpoints_do_not():
    grid, midpoints = ActionTokenizer(21, 544, "grid"), ActionTokenizer(21, 544)
    exact = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    assert torch.equal(grid.decode(grid.encode(exact)), exact)
    assert grid.encode(exact).tolist() == [543, 533, 523]
    assert (midpoints.decode(midpoints.encode(exact)) - exact).abs().min() > 0.01


def test_midpoints_by_hand():
    tokenizer = ActionTokenizer(5, 100)  # edges -1 -.5 0 .5 1, middles -.75 -.25 .25 .75
    assert tokenizer.encode(np.array([-1.0, -0.6, 0.1, 0.9, 1.0])).tolist() == [99, 99, 97, 96, 95]
    values = [-0.75, -0.25, 0.25, 0.75, 0.75, 0.75, -0.75]
    assert tokenizer.decode(torch.tensor([99, 98, 97, 96, 95, 94, 200])).tolist() == values


def test_value_head_shapes_names_and_gradients():
    head = ValueHead(32)
    assert head(torch.randn(4, 32)).shape == (4,) and head(torch.randn(4, 7, 32)).shape == (4, 7)
    names = {"mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias", "mlp.4.weight"}
    assert set(head.state_dict()) == names
    assert head(torch.randn(64, 32)).abs().max() < 0.5
    hidden = torch.randn(4, 32, requires_grad=True)
    head(hidden).sum().backward()
    assert all(p.grad.abs().max() > 0 for p in head.parameters()) and hidden.grad.abs().max() > 0
    assert head.bfloat16()(torch.randn(4, 32)).dtype == torch.float32


def with_pillow(image, strategy, size, fill, mean, std):
    """What the public processor does, with Pillow alone."""
    image = Image.fromarray(image)
    width, height = image.size
    if strategy == "letterbox":
        left, top = ((max(image.size) - side) // 2 for side in image.size)
        square = Image.new("RGB", (width + 2 * left, height + 2 * top), fill)
        square.paste(image, (left, top))
        image, (width, height) = square, square.size
    target = (size, size)
    if strategy != "resize-naive":
        target = (size, int(size * height / width)) if width <= height else (int(size * width / height), size)
    image = image.resize((target[0], height), Image.Resampling.BICUBIC).resize(target, Image.Resampling.BICUBIC)
    left, top = (round((side - size) / 2) for side in target)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.float32).transpose(2, 0, 1)
    mean, std = (np.float32(values)[:, None, None] for values in (mean, std))
    return (pixels / np.float32(255) - mean) / std


@pytest.mark.parametrize("strategy", ["resize-naive", "letterbox", "resize-crop"])
@pytest.mark.parametrize("height, width", [(60, 100), (100, 60), (61, 100), (20, 33), (64, 64), (32, 32)])
def test_every_strategy_gives_the_numbers_of_pillow(strategy, height, width):
    mean, std = [0.2, 0.4, 0.6], [0.5, 0.25, 0.3]
    sizes = {"input_sizes": [[3, 32, 32]], "means": [mean], "stds": [std]}
    processor = PrismaticImageProcessor(image_resize_strategy=strategy, **sizes)
    image = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels = processor(image)["pixel_values"][0]
    expected = torch.from_numpy(with_pillow(image, strategy, 32, (51, 102, 153), mean, std))
    assert torch.equal(pixels, expected)
    assert not torch.equal(pixels, processor(image[:, ::-1])["pixel_values"][0]), "control: the mirrored image"


@pytest.mark.parametrize("settings", [
    {"image_preparation": "rlds", "do_center_crop": True}, {"image_resize_strategy": "letterbox"}, {"image_resize_strategy": "resize-crop"},
], ids=str)  # fmt: skip
def test_images_that_were_resized_once_give_the_same_pixels_also_of_a_saved_processor(settings, tmp_path):
    frames = torch.randint(0, 256, (2, 3, 24, 40), dtype=torch.uint8)
    means, stds = [[0.5] * 3, [0.4, 0.5, 0.6]], [[0.5] * 3, [0.2, 0.3, 0.4]]
    PrismaticImageProcessor(input_sizes=[[3, 16, 16]] * 2, means=means, stds=stds, **settings).save_pretrained(tmp_path)
    processor = PrismaticImageProcessor.from_pretrained(tmp_path)
    assert processor.normalization == list(zip(means, stds, strict=True))
    once = processor.resize_once(frames)
    assert once.shape == (2, 3, 16, 16) and once.dtype == torch.uint8
    assert torch.equal(processor.preprocess_tensors(once, is_resized=True), processor.preprocess_tensors(frames))
    assert processor.resize_once(frames[..., :8, :8]) is None, "it would grow"
    processor.input_sizes = [[3, 16, 16], [3, 12, 12]]
    assert processor.resize_once(frames) is None, "the towers need different sizes"


def test_bad_bins_are_refused():
    with pytest.raises(ConfigError, match="n_action_bins is 1"):
        ActionTokenizer(1, 100)
    with pytest.raises(ConfigError, match="action_bin_rule.*midpoints"):
        ActionTokenizer(5, 100, "edges")


def tiny_processor(**kwargs):
    from transformers import AutoTokenizer

    return PrismaticProcessor(PrismaticImageProcessor(), AutoTokenizer.from_pretrained(TINY_TOKENIZER), **kwargs)


def test_prompts_are_bos_padding_text():
    processor, push = tiny_processor(prompt_template="{instruction}"), "push the blue block to the green zone"
    ids, mask = processor.encode_instructions(["Reach the RED block", push])
    assert ids[:, 0].tolist() == [1, 1] and mask[:, 0].all() and mask[:, -1].all()
    pads = (mask[0] == 0).nonzero().flatten().tolist()
    assert pads == list(range(1, 1 + len(pads))) and len(pads) > 0 and not (ids[0, pads] != 0).any()
    text = ids[0][mask[0].bool()].tolist()
    assert processor.tokenizer.decode(text, skip_special_tokens=True).strip() == "reach the red block"
    assert torch.equal(ids, processor.encode_instructions(["reach the red block", push])[0])


def test_prompt_suffix_is_added_once_and_length_is_checked():
    processor = tiny_processor(prompt_suffix_token_id=7)
    ids, _ = processor.encode(["reach"])
    assert ids[0, -1] == 7 and (ids == 7).sum() == 1
    with pytest.raises(ConfigError, match="max_prompt_len="):
        tiny_processor(max_prompt_len=3).encode(["reach the red block"])


@pytest.mark.parametrize(
    "text", ["reach the red block", "ÄÖ 机器人 🙂 \t\n", "put both the alphabet soup and the tomato sauce", ""]
)
def test_tiny_tokenizer_loses_no_text(text):
    tokenizer = tiny_processor().tokenizer
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and max(ids) < 512
    assert tokenizer.decode(ids, skip_special_tokens=True).removeprefix(" ") == text.removeprefix(" ")
    for sentence, most in (("reach the red block", 5), ("push the blue block to the green zone", 9)):
        assert len(tokenizer(sentence)["input_ids"]) <= most, "sentences of robots are short"


def mlp(**init):
    torch.manual_seed(0)
    section = {"model_type": "mlp", "action_token_len": 2, "init_config": {"state_dim": 5, **init}}
    return build_policy({"model": section})


def state(rows=6):
    return Observation({}, np.random.default_rng(0).normal(size=(rows, 5)).astype(np.float32), [""] * rows)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_mlp_logprobs_are_those_of_a_normal_distribution(temperature):
    model = mlp()
    inputs = model.preprocess(state())
    prediction = model.predict_action_batch(**inputs, temperature=temperature)
    assert prediction.actions.shape == (6, 1, 2) and prediction.logits.shape == (6, 2, 2)
    assert prediction.sequences.shape == (6, 2)
    normal = torch.distributions.Normal(model.policy(inputs["state"]), math.exp(-0.5) * math.sqrt(temperature))
    evaluation = model.evaluate_actions(inputs, prediction.sequences, temperature)
    torch.testing.assert_close(evaluation.logprobs, normal.log_prob(prediction.sequences))
    torch.testing.assert_close(evaluation.entropy, normal.entropy())
    torch.testing.assert_close(evaluation.values, prediction.values)


def test_mlp_draws_by_inverse_transform_and_clips_what_it_executes():
    model = mlp(initial_log_std=0.0)
    inputs = model.preprocess(state())
    mean = model.predict_action_batch(**inputs, do_sample=False).sequences
    high = torch.full((6, 2), 0.8413447)
    drawn = model.predict_action_batch(**inputs, uniforms=high)
    torch.testing.assert_close(drawn.sequences, mean + 1.0, atol=1e-4, rtol=0)
    assert drawn.actions.max() <= 1.0


def test_mlp_weights_that_do_not_fit_are_refused(tmp_path):
    mlp(hidden_sizes=[8]).save_pretrained(tmp_path)
    section = {"model_type": "mlp", "model_path": str(tmp_path), "action_token_len": 2}
    weights = load_file(tmp_path / "model.safetensors")
    for how, damaged in {
        None: weights,
        "missing": {name: tensor for name, tensor in weights.items() if name != "policy.0.weight"},
        "unexpected": weights | {"policy.9.weight": torch.zeros(1)},
        "a different shape": weights | {"policy.0.bias": torch.zeros(3)},
    }.items():
        save_file(damaged, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with nullcontext() if how is None else pytest.raises(CheckpointError, match=rf"{how} \[\W*policy"):
            build_policy({"model": section})


def test_mlp_value_head_is_dropped_or_drawn_again(tmp_path):
    model = mlp()
    model.save_pretrained(tmp_path / "whole")
    section = {"model_type": "mlp", "model_path": str(tmp_path / "whole"), "action_token_len": 2}
    headless = build_policy({"model": section | {"value_head": False}})
    assert headless.value_head is None
    headless.save_pretrained(tmp_path / "headless")
    again = build_policy({"model": section | {"model_path": str(tmp_path / "headless")}})
    same = {name: torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items()}
    assert all(same[name] for name in same if not name.startswith("value_head."))
    assert not same["value_head.0.weight"], "control: the head is another one"
    weight = again.value_head[0].weight.detach()
    torch.testing.assert_close(weight.T @ weight, 2.0 * torch.eye(5), atol=1e-5, rtol=0)


def test_mlp_random_number_that_is_exactly_zero_gives_a_finite_action(monkeypatch):
    model = mlp()
    inputs = model.preprocess(state())
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.zeros(*size))
    prediction = model.predict_action_batch(**inputs)
    assert prediction.sequences.isfinite().all() and model.rollout_logprobs(prediction).isfinite().all()


def test_methods_that_a_policy_lacks_are_named_before_it_is_built():
    class Half(ActionModel):
        def preprocess(self, observation):
            return {}

    lacking = "Half.* does not implement evaluate_actions, predict_action_batch, rollout_logprobs"
    with pytest.raises(ConfigError, match=lacking):
        ModelEntry("half", model=Half).resolve()
    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_a_policy_needs_optional_methods_only_for_cloning_and_vllm(monkeypatch):
    overrides = ["experiment=tabletop_ppo_mlp"]
    for name in ("sft_loss", "decode_actions"):
        monkeypatch.setattr(MLPForRLActionPrediction, name, getattr(ActionModel, name))
    validate(build_config(compose_config([*overrides, "sft.max_steps=0"])))
    with pytest.raises(ConfigError, match=r"sft.max_steps=5.*does not implement sft_loss.*Set sft.max_steps=0"):
        validate(build_config(compose_config([*overrides, "sft.max_steps=5"])))
    monkeypatch.setattr(MLPForRLActionPrediction, "vllm_adapter", OpenVLAVllmAdapter)
    with pytest.raises(ConfigError, match=r"MLPForRLActionPrediction does not implement. Set rollout.backend=torch"):
        validate(build_config(compose_config([*overrides, "rollout.backend=vllm"])))


def cnn(**init):
    torch.manual_seed(0)
    init = {"image_size": 36, "feature_dim": 8, "hidden_sizes": [8], "norm_stats": unit_range_stats(2)} | init
    return build_policy({"model": {"model_type": "cnn", "action_token_len": 2, "init_config": init}})


def seen(sentences, seed=0, size=36):
    images = np.random.default_rng(seed).integers(0, 256, (len(sentences), size, size, 3), dtype=np.uint8)
    return Observation({"front": images}, None, list(sentences))


def greedy(model, observation):
    return model.predict_action_batch(**model.preprocess(observation), do_sample=False).sequences


def test_cnn_reads_the_image_and_the_words_but_not_their_order():
    model = cnn()
    with torch.no_grad():
        model.policy[-1].weight.normal_()
    usual = greedy(model, seen(["reach the red block"]))
    assert torch.equal(usual, greedy(model, seen(["block red  the REACH"])))
    assert (usual - greedy(model, seen(["reach the blue block"]))).abs().max() > 1e-3
    assert (usual - greedy(model, seen(["reach the red block"], seed=1))).abs().max() > 1e-3
    in_a_batch = greedy(model, seen(["reach the red block", "touch the green block, then the red block"]))
    alone = greedy(model, seen(["reach the red block", "touch the green block, then the red block"]).select([0]))
    assert torch.allclose(in_a_batch[:1], alone, atol=1e-6)


def test_cnn_features_by_hand():
    model = cnn(image_mean=0.25, image_std=0.125)
    inputs = model.preprocess(seen(["go"]))
    pixels = (inputs["images"].permute(0, 3, 1, 2).float() / 255 - 0.25) / 0.125
    expected = model.encoder(pixels) * (1 + model.word_embedding.weight[inputs["token_ids"][0, 0]])
    assert torch.allclose(model._features(**inputs), expected)


def test_mlp_names_the_width_that_it_needs():
    with pytest.raises(ConfigError, match="model.init_config.state_dim=7"):
        mlp().preprocess(Observation({}, np.zeros((2, 7), np.float32), [""] * 2))


def test_cnn_names_the_size_and_the_cameras_that_it_needs():
    with pytest.raises(ConfigError, match="env.image_size=36"):
        cnn().preprocess(seen(["go"], size=40))
    with pytest.raises(ConfigError, match="reads 2 cameras, but the environment provides 1"):
        cnn(num_images_in_input=2).preprocess(seen(["go"]))
    with pytest.raises(ConfigError, match="image_size is 20; expected at least 36"):
        cnn(image_size=20)
