"""OpenVLA against arrays that the public reference implementation gave for a tiny random checkpoint.

The folder is not part of the project: ``RLINF_PARITY_DIR`` names it (default: ``../shared/parity`` next to the project).
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from run_results import gap
from safetensors.torch import load_file

from rlinf.errors import CheckpointError
from rlinf.models import get_model
from rlinf.models.embodiment.openvla.processing import PrismaticImageProcessor, PrismaticProcessor

ROOT = Path(os.environ.get("RLINF_PARITY_DIR", Path(__file__).parents[2].parent / "shared" / "parity")) / "openvla"
pytestmark = pytest.mark.skipif(
    not ROOT.is_dir(), reason=f"no reference fixtures at {ROOT}; set RLINF_PARITY_DIR to the folder that holds openvla/"
)


def load(attn_implementation="sdpa", folder=None, unnorm_key="bridge_orig"):
    """Load the fixture checkpoint with the reference's value head."""
    model = get_model(
        {
            "model_type": "openvla",
            "model_path": str(folder or ROOT / "checkpoint"),
            "action_token_len": 7,
            "unnorm_key": unnorm_key,
            "attn_implementation": attn_implementation,
        }
    )
    head = load_file(ROOT / "value_head.safetensors")
    model.value_head.load_state_dict(
        {name.removeprefix("value_head."): tensor.float() for name, tensor in head.items()}
    )
    return model.eval()


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request):
    return load(request.param)


@pytest.fixture(scope="module")
def plain():
    """First fixture: the public model."""
    return {name: torch.from_numpy(array) for name, array in np.load(ROOT / "fixture.npz").items()}


@pytest.fixture(scope="module")
def rl():
    """Second fixture: the RL variant with a value head."""
    return {name: torch.from_numpy(array) for name, array in np.load(ROOT / "fixture_rlinf.npz").items()}


def rl_inputs(rl):
    return {"input_ids": rl["input_ids"], "attention_mask": rl["attention_mask"], "pixel_values": rl["pixel_values"]}


@pytest.mark.parametrize("index", [0, 1])
def test_pil_path_reproduces_pixel_values_exactly(plain, index):
    processor = PrismaticImageProcessor.from_pretrained(ROOT / "checkpoint")
    pixels = processor(plain[f"image{index}"].numpy())["pixel_values"]
    assert gap(pixels, plain[f"pixel_values{index}"]) == 0.0


def test_control_unrounded_means_miss_the_pixel_values(plain):
    processor = PrismaticImageProcessor.from_pretrained(ROOT / "checkpoint")
    processor.tvf_normalize_params = None  # what is left are `means` and `stds` of the file
    assert gap(processor(plain["image0"].numpy())["pixel_values"], plain["pixel_values0"]) > 1e-3


@pytest.mark.parametrize("strategy", ["letterbox", "resize-crop", "resize-naive"])
def test_resize_strategies_with_unrounded_means(plain, strategy):
    settings = json.loads((ROOT / "checkpoint" / "preprocessor_config.json").read_text())
    kept = {
        key: settings[key] for key in ("input_sizes", "interpolations", "means", "stds", "use_fused_vision_backbone")
    }
    processor = PrismaticImageProcessor(image_resize_strategy=strategy, **kept)
    pixels = processor(plain["image1"].numpy())["pixel_values"][:, :, ::8, ::8]
    assert gap(pixels, plain[f"f32mean_{strategy}_img1_sub8"]) <= 1e-5


def test_batched_tensors_reproduce_pixel_values_exactly(rl, plain):
    processor = PrismaticImageProcessor.from_pretrained(ROOT / "checkpoint")
    assert gap(processor.preprocess_tensors(rl["images"]), rl["pixel_values"]) <= 1e-5
    for index in (0, 1):
        pixels = processor.preprocess_tensors(plain[f"image{index}"].permute(2, 0, 1)[None])
        assert gap(pixels, plain[f"pixel_values{index}"]) == 0.0


def test_control_the_tensor_path_of_the_rl_variant_is_not_pillow_on_resized_images(rl, plain):
    """The RL variant resizes with torch's interpolation, which is not what the checkpoints were trained with."""
    processor = PrismaticImageProcessor.from_pretrained(ROOT / "checkpoint")
    pixels = processor.preprocess_tensors(plain["image1"].permute(2, 0, 1)[None])[:, :, ::8, ::8]
    assert gap(pixels, rl["pixel_values_tensor_path_img1_sub8"]) > 1e-3


@torch.no_grad()
def test_vision_features_and_projector(model, plain):
    features = model.vision_backbone(plain["pixel_values0"])
    assert gap(features, plain["vision_features0"]) <= 1e-4
    assert gap(model.projector(features), plain["projector_features0"]) <= 1e-4


@torch.no_grad()
def test_control_tanh_gelu_misses_the_vision_features(plain):
    model = load()
    for tower in (model.vision_backbone.featurizer, model.vision_backbone.fused_featurizer):
        for block in tower.blocks:
            block.mlp.activation_fn = torch.nn.GELU(approximate="tanh")
    assert gap(model.vision_backbone(plain["pixel_values0"]), plain["vision_features0"]) > 5e-4


@torch.no_grad()
def test_control_last_block_misses_the_vision_features(plain):
    model = load()
    tower = model.vision_backbone.featurizer
    object.__setattr__(tower.spec, "feature_layer", -1)
    assert gap(model.vision_backbone(plain["pixel_values0"]), plain["vision_features0"]) > 1e-2


@torch.no_grad()
def test_forward_hidden_states_and_logits(model, plain):
    output = model(plain["prompt_ids"], None, plain["pixel_values0"])
    assert gap(output.hidden_states[0], plain["forward_last_hidden"]) <= 1e-4
    assert gap(output.logits[:, -1], plain["forward_logits_lastpos"]) <= 1e-4
    assert gap(output.logits[:, 256:, 31744:32000], plain["forward_logits_action_slice_textpos"]) <= 1e-4


@torch.no_grad()
@pytest.mark.parametrize("index", [0, 1])
def test_greedy_tokens_over_the_whole_vocabulary(model, plain, index):
    generated = plain[f"generated_ids{index}"]
    prompt_len = plain["prompt_ids"].shape[1]
    logits = model(generated[:, :-1], None, plain[f"pixel_values{index}"]).logits[:, 256 + prompt_len - 1 :]
    assert torch.equal(logits.argmax(-1), generated[:, prompt_len:])
    if index == 1:
        assert gap(logits[..., 31744:32000], plain["teacher_forced_logits_action_slice1"]) <= 1e-4


def test_sft_loss_of_the_public_fine_tuning(model, plain):
    pixels = torch.cat([plain["pixel_values0"], plain["pixel_values1"]])
    loss = model(plain["sft_input_ids"], plain["sft_attention_mask"], pixels, labels=plain["sft_labels"]).loss
    assert gap(loss, plain["sft_loss"]) <= 1e-5


def test_digitize_and_decode(model, plain):
    assert torch.equal(model.action_tokenizer.encode(plain["digitize_in"]), plain["digitize_token"])
    assert gap(model.action_tokenizer.decode(plain["detok_token"]), plain["detok_value"]) <= 1e-9


@pytest.mark.parametrize("key, name", [("bridge_orig", "bridge"), ("libero_spatial_no_noops", "libero")])
def test_unnormalised_actions(plain, key, name):
    model = load(unnorm_key=key)
    for index in (0, 1):
        for array in (f"action_{name}{index}", f"action_{name}_with_mask{index}"):
            if array in plain:
                assert gap(model.decode_actions(plain[f"generated_ids{index}"])[0, 0], plain[array]) <= 1e-6


def test_control_statistics_of_another_data_set_give_other_actions(plain):
    model = load(unnorm_key="libero_spatial_no_noops")
    assert gap(model.decode_actions(plain["generated_ids0"])[0, 0], plain["action_bridge0"]) > 1e-2


class GivenTokens:
    """A tokenizer whose prompts are the numbers of rows of left-padded ids."""

    pad_token_id = 32000

    def __init__(self, left):
        self.rows = [row[row != self.pad_token_id].tolist() for row in left]
        self.bos_token_id = self.rows[0][0]

    def __call__(self, prompt, add_special_tokens):
        return {"input_ids": self.rows[int(prompt)]}


def test_prompts_are_padded_behind_bos(rl):
    left = rl["tokenizer_left_padded_ids"]
    tokenizer = GivenTokens(left)
    processor = PrismaticProcessor(PrismaticImageProcessor(), tokenizer, max_prompt_len=left.shape[1])
    input_ids, attention_mask = processor.encode([str(row) for row in range(len(left))])
    assert len({len(row) for row in tokenizer.rows}) > 1
    assert torch.equal(input_ids, rl["input_ids"])
    assert torch.equal(attention_mask, rl["attention_mask"])


def test_greedy_generation_with_cache(model, rl):
    prediction = model.predict_action_batch(**rl_inputs(rl), do_sample=False)
    assert torch.equal(prediction.sequences[:, -7:], rl["greedy_tokens"][:, 0])
    assert torch.equal(prediction.sequences[:, :-7], rl["input_ids"])
    assert gap(prediction.actions, rl["greedy_actions"]) <= 1e-6
    assert gap(prediction.values, rl["greedy_values"][:, 0]) <= 1e-5
    logprobs = prediction.logits.log_softmax(-1).max(-1).values
    assert gap(logprobs, rl["greedy_logprobs"]) <= 1e-4


def test_teacher_forced_logprobs_entropy_and_values_at_every_temperature(model, rl):
    sequences = torch.cat([rl["input_ids"], rl["greedy_tokens"][:, 0]], dim=1)
    found = [name.removeprefix("train_logprobs_T") for name in rl if name.startswith("train_logprobs_T")]
    assert found
    for temperature in found:
        with torch.no_grad():
            evaluation = model.evaluate_actions(rl_inputs(rl), sequences, float(temperature))
        assert gap(evaluation.logprobs, rl[f"train_logprobs_T{temperature}"]) <= 1e-4
        assert gap(evaluation.entropy, rl[f"train_entropy_T{temperature}"]) <= 1e-4
        assert gap(evaluation.values, rl["train_values"][:, 0]) <= 1e-5


def test_control_another_temperature_misses_the_logprobs(model, rl):
    sequences = torch.cat([rl["input_ids"], rl["greedy_tokens"][:, 0]], dim=1)
    with torch.no_grad():
        evaluation = model.evaluate_actions(rl_inputs(rl), sequences, 1.3)
    assert gap(evaluation.logprobs, rl["train_logprobs_T1.0"]) > 1e-2


def test_control_ignoring_the_padding_misses_the_logprobs(model, rl):
    sequences = torch.cat([rl["input_ids"], rl["greedy_tokens"][:, 0]], dim=1)
    inputs = {**rl_inputs(rl), "attention_mask": torch.ones_like(rl["attention_mask"])}
    with torch.no_grad():
        evaluation = model.evaluate_actions(inputs, sequences)
    assert gap(evaluation.logprobs, rl["train_logprobs_T1.0"]) > 1e-3


def test_saved_folder_has_the_public_layout_and_the_same_bits(tmp_path):
    model = load()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    public = load_file(ROOT / "checkpoint" / "model.safetensors")
    keys = json.loads((ROOT / "state_dict_keys.json").read_text())
    assert {name: list(t.shape) for name, t in saved.items() if not name.startswith("value_head.")} == {
        name: shape for name, (shape, _) in keys.items()
    }
    assert all(torch.equal(saved[name], tensor.float()) for name, tensor in public.items())
    config, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path, ROOT / "checkpoint"))
    for key in ("timm_model_ids", "image_sizes", "n_action_bins", "vision_overrides", "pad_token_id"):
        assert config[key] == original[key]
    reloaded = load(folder=tmp_path)
    assert all(torch.equal(tensor, reloaded.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_weights_that_do_not_fit_are_refused(tmp_path, change):
    from safetensors.torch import save_file

    shutil.copytree(ROOT / "checkpoint", tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del weights["projector.fc1.bias"]
    elif change == "unexpected":
        weights["projector.fc9.bias"] = torch.zeros(3)
    else:
        weights["projector.fc1.bias"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"projector\.fc"):
        load(folder=tmp_path)


def test_dataset_statistics_file_extends_and_overrides_the_config(tmp_path):
    shutil.copytree(ROOT / "checkpoint", tmp_path, dirs_exist_ok=True)
    stats = {
        "mine": {"action": {"q01": [-2.0] * 7, "q99": [2.0] * 7}},
        "bridge_orig": {"action": {"q01": [0.0] * 7, "q99": [9.0] * 7}},
    }
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(stats))
    assert load(folder=tmp_path, unnorm_key="mine").max_action.tolist() == [2.0] * 7
    assert load(folder=tmp_path, unnorm_key="bridge_orig").max_action.tolist() == [9.0] * 7
    assert load(folder=tmp_path, unnorm_key="libero_spatial_no_noops").max_action[0] == 0.9375
