"""pi0 and pi0.5 against arrays that the public reference implementation gave for tiny random checkpoints.

The folders are not part of the project: ``RLINF_PARITY_DIR`` names their parent (default: ``../shared/parity`` next to the
project). Sizes, step counts and times are read from the files.
"""

import functools
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from run_results import gap
from safetensors.torch import load_file, save_file

from rlinf.errors import CheckpointError
from rlinf.models import get_model
from rlinf.models.embodiment import flow_policy
from rlinf.models.embodiment.modules.flow import step_moments, time_embedding
from rlinf.models.embodiment.pi0.gemma_expert import AdaRMSNorm
from rlinf.models.embodiment.pi0.network import prefix_positions
from rlinf.models.embodiment.pi0.processing import resize_with_pad

ROOT = Path(os.environ.get("RLINF_PARITY_DIR", Path(__file__).parents[2].parent / "shared" / "parity"))
FOLDERS = [name for name in ("pi0_openpi", "pi05_openpi") if (ROOT / name).is_dir()]
pytestmark = pytest.mark.skipif(
    not FOLDERS, reason=f"no reference fixtures at {ROOT}; set RLINF_PARITY_DIR to the folder that holds pi0_openpi/"
)
family = pytest.mark.parametrize("name", FOLDERS)


@functools.cache
def fixture(name):
    return {key: torch.from_numpy(array) for key, array in np.load(ROOT / name / "fixture.npz").items()}


def tags(name):
    return sorted({key.split("/")[0] for key in fixture(name) if "/" in key})


def all_tags():
    return [(name, tag) for name in FOLDERS for tag in tags(name)]


def of_tag(name, tag):
    return {key.split("/")[1]: array for key, array in fixture(name).items() if key.startswith(f"{tag}/")}


def stated_noise_level(name):
    """``a`` as the fixture's text gives it; None: it does not."""
    path = ROOT / name / "README.md"
    stated = re.search(r"noise_level a=([\d.]*\d)", path.read_text(encoding="utf-8")) if path.is_file() else None
    return None if stated is None else float(stated[1])


def shown_noise_level(name):
    """``a`` read off a fresh rollout of ``flow_sde``, where ``log p = -log sigma - log(2 pi) / 2 - eps^2 / 2``."""
    arrays, expected = fixture(name), of_tag(name, "flow_sde")
    num_steps, index = len(arrays["step_eps"]), int(expected["denoise_inds"][0, 0])
    eps = arrays["step_eps"][index].double()
    log_std = -expected["train_logprobs_raw"][:, 0].double() - 0.5 * np.log(2 * np.pi) - 0.5 * eps.square()
    t = 1 - index / num_steps
    spread = (t / (1 - (t if index else 1 - 1 / num_steps)) / num_steps) ** 0.5
    return round(log_std.median().exp().item() / spread, 4)


def noise_level(name):
    stated = stated_noise_level(name)
    return shown_noise_level(name) if stated is None else stated


def hidden_sizes(heads, prefix):
    weights = [heads[key] for key in sorted(heads) if key.startswith(prefix) and key.endswith("weight")]
    return [len(weight) for weight in weights[:-1]]


def load(name, method="flow_sde", joint=False, num_steps=None, attn_implementation="sdpa", folder=None):
    """Load the fixture checkpoint with the reference's heads, acting as the arrays were made."""
    arrays, heads = fixture(name), load_file(ROOT / name / "rl_heads.safetensors")
    chunk_len, env_dim = arrays[f"{tags(name)[0]}/prev_logprobs"].shape[1:]
    unit = {"mean": [0.0] * env_dim, "std": [1.0] * env_dim, "q01": [-1.0] * env_dim, "q99": [1.0] * env_dim}
    model = get_model(
        {
            "model_type": "pi0",
            "model_path": str(folder or ROOT / name),
            "action_token_len": env_dim,
            "action_chunks_len": chunk_len,
            "attn_implementation": attn_implementation,
            "override_config": {
                "norm_stats": {"unit": {"action": unit, "proprio": unit}},
                "noise_method": method,
                "joint_logprob": joint,
                "num_steps": num_steps or len(arrays["step_eps"]),
                "noise_level": noise_level(name),
                "value_hidden_sizes": hidden_sizes(heads, "value_head."),
                "noise_hidden_sizes": hidden_sizes(heads, "noise_head."),
            },
        }
    )
    for head in ("value_head", "noise_head"):
        module = getattr(model, head)
        if module is not None:
            module.load_state_dict(
                {key.removeprefix(f"{head}."): each for key, each in heads.items() if key.startswith(f"{head}.")}
            )
    return model.eval()


cached = functools.cache(load)


def inputs_of(name, image_mask=(True, True, False)):
    arrays = fixture(name)
    images = [arrays[key].permute(0, 3, 1, 2).float() / 255 * 2 - 1 for key in ("image_base", "image_wrist")]
    pixel_values = torch.stack([*images, torch.full_like(images[0], -1.0)], dim=1)
    inputs = {
        "pixel_values": pixel_values,
        "image_mask": torch.tensor(image_mask).expand(len(pixel_values), -1),
        "input_ids": arrays["tokens"],
        "attention_mask": arrays["token_mask"],
    }
    return (
        inputs
        if json.loads((ROOT / name / "tiny_config.json").read_text())["pi05"]
        else inputs | {"state": arrays["state"]}
    )


def prefix_inputs(name):
    return {key: value for key, value in inputs_of(name).items() if key != "state"}


def array_named(name, stem):
    """The array whose name starts with ``stem`` and its times: numbers in the name, or an array ``..._time``."""
    arrays = fixture(name)
    key = next(key for key in arrays if re.fullmatch(rf"{stem}(_t?[\d._]+)?", key))
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", key)]
    times = torch.tensor(numbers) if numbers else arrays[f"{stem.split('_')[0]}_time"]
    return arrays[key], times.float().reshape(-1)


def every(sub, full_len):
    """Stride that made ``sub`` out of ``full_len`` positions."""
    return -(-full_len // sub.shape[1])


@family
def test_resize_with_pad(name):
    arrays = fixture(name)
    key = next(key for key in arrays if key.startswith("resize_with_pad_out"))
    stride = int(re.search(r"sub(\d+)", key)[1])
    resized = resize_with_pad(arrays["resize_in"].permute(0, 3, 1, 2), len(arrays[key])).permute(0, 2, 3, 1)[0]
    assert gap(resized[:, ::stride, ::stride], arrays[key]) == 0


@family
@torch.no_grad()
def test_prefix_embeddings_and_image_features(name):
    model, arrays = cached(name), fixture(name)
    embeddings, _ = model.embed_prefix(**prefix_inputs(name))
    expected, features = arrays["prefix_embs_sub"], arrays["image_features_base_sub"]
    assert gap(embeddings[:, :: every(expected, embeddings.shape[1])], expected) <= 1e-5
    base = embeddings[:, : model.vision_tower.num_tokens]
    assert gap(base[:, :: every(features, base.shape[1])], features) <= 1e-5


@family
@torch.no_grad()
def test_control_erf_gelu_misses_the_image_features(name):
    model, features = load(name), fixture(name)["image_features_base_sub"]
    for layer in model.vision_tower.encoder.layers:
        layer.mlp.activation_fn = torch.nn.GELU()
    embeddings, _ = model.embed_prefix(**prefix_inputs(name))
    base = embeddings[:, : model.vision_tower.num_tokens]
    assert gap(base[:, :: every(features, base.shape[1])], features) > 2e-5


@family
@torch.no_grad()
def test_output_of_the_language_model_at_valid_positions(name):
    model, expected = cached(name), fixture(name)["prefix_out_sub"]
    embeddings, mask = model.embed_prefix(**prefix_inputs(name))
    output = model.language_model(embeddings, mask[:, None, None], prefix_positions(mask))
    stride = every(expected, output.shape[1])
    seen = mask[:, ::stride]
    assert gap(output[:, ::stride][seen], expected[seen]) <= 1e-5


@family
def test_noise_level_of_the_text_is_that_of_the_arrays(name):
    if stated_noise_level(name) is None:
        pytest.skip("the README of the fixture does not state noise_level")
    assert abs(shown_noise_level(name) - stated_noise_level(name)) < 1e-3


@family
def test_time_embedding(name):
    expected, t = array_named(name, "timestep_emb")
    assert gap(time_embedding(t, expected.shape[1]), expected) <= 1e-9


@family
def test_control_float32_time_embedding_is_too_coarse(name):
    expected, t = array_named(name, "timestep_emb")
    period = 4e-3 * 1000.0 ** torch.linspace(0, 1, expected.shape[1] // 2)
    angle = 2 * torch.pi * t[:, None] / period
    assert gap(torch.cat([angle.sin(), angle.cos()], -1), expected) > 1e-7


def velocity_gaps(name, model, inputs):
    expected, t = array_named(name, "velocity")
    with torch.no_grad():
        velocity, output = model.velocity(
            model.encode_prefix(**inputs), inputs.get("state"), fixture(name)["noise"], t.expand(len(expected))
        )
    return gap(velocity, expected), gap(output, fixture(name)["suffix_out"])


@family
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_velocity_and_expert_output(name, attn_implementation):
    model = load(name, attn_implementation=attn_implementation)
    assert max(velocity_gaps(name, model, inputs_of(name))) <= 1e-5


@family
def test_an_absent_camera_may_be_left_out(name):
    inputs = inputs_of(name)
    inputs["pixel_values"], inputs["image_mask"] = inputs["pixel_values"][:, :2], inputs["image_mask"][:, :2]
    assert max(velocity_gaps(name, cached(name), inputs)) <= 1e-5


@family
@pytest.mark.parametrize("change", ["camera mask", "black image", "token mask"])
def test_control_other_inputs_miss_the_velocity(name, change):
    inputs = inputs_of(name, image_mask=(True, True, change == "camera mask"))
    if change == "black image":
        inputs["pixel_values"][:, 0] = -1.0
    elif change == "token mask":
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    assert velocity_gaps(name, cached(name), inputs)[0] > 1e-4


@family
def test_control_without_gate_or_without_state_the_velocity_is_missed(name, monkeypatch):
    model = load(name)
    if model.config.pi05:
        forward = AdaRMSNorm.forward
        monkeypatch.setattr(AdaRMSNorm, "forward", lambda *args: (forward(*args)[0], torch.tensor(1.0)))
    else:
        monkeypatch.setattr(
            model.state_proj, "forward", lambda state: torch.zeros(len(state), model.config.expert["width"])
        )
    assert velocity_gaps(name, model, inputs_of(name))[0] > 1e-3


@family
@torch.no_grad()
def test_flow_matching_loss(name):
    arrays = fixture(name)
    loss = cached(name).flow_loss(inputs_of(name), arrays["loss_actions"], arrays["noise"], arrays["loss_time"])
    assert gap(loss, arrays["loss_per_elem"]) <= 1e-4


@family
def test_euler_steps(name):
    arrays = fixture(name)
    found = [key for key in arrays if re.fullmatch(r"actions_ode\d+", key)]
    assert found
    for key in found:
        noise = arrays["noise"]
        nothing = torch.full((len(noise),), -1)
        prediction = cached(name, num_steps=int(key.removeprefix("actions_ode"))).denoise(
            inputs_of(name), noise, torch.zeros_like(noise)[:, None], nothing, False, 1.0
        )
        assert gap(chain_of(prediction, arrays["noise"])[:, -1], arrays[key]) <= 2e-4  # the reference adds up its times


def chain_of(prediction, noise):
    return prediction.sequences[:, :-1].unflatten(1, (-1, *noise.shape[1:]))


def policy(name, tag):
    joint = tag.endswith("_joint")
    return cached(name, tag.removesuffix("_joint"), joint), joint


@pytest.mark.parametrize("name, tag", all_tags())
def test_rollout_chain_values_and_logprobs(name, tag):
    (model, joint), arrays, expected = policy(name, tag), fixture(name), of_tag(name, tag)
    step = torch.full_like(expected["denoise_inds"][:, 0], -1) if joint else expected["denoise_inds"][:, 0]
    prediction = model.denoise(inputs_of(name), arrays["noise"], arrays["step_eps"].transpose(0, 1), step, joint, 1.0)
    assert gap(chain_of(prediction, arrays["noise"]), expected["chains"]) <= 1e-4
    assert gap(chain_of(prediction, arrays["noise"])[:, -1], expected["actions"]) <= 1e-4
    assert gap(prediction.values, expected["prev_values"].reshape(-1)) <= 1e-5
    assert gap(model.rollout_logprobs(prediction), expected["prev_logprobs"].flatten(1)) <= 1e-4
    with torch.no_grad():
        logprobs, entropy, values = model.score_chain(inputs_of(name), prediction.sequences)
    assert gap(logprobs, expected["train_logprobs_raw"]) <= 1e-4
    assert gap(entropy, expected["train_entropy_raw"]) <= 1e-4
    assert gap(values, expected["train_values"]) <= 1e-5


def off_policy(name, tag):
    expected = of_tag(name, tag)
    return torch.cat([expected["off_chains"].flatten(1), expected["off_inds"][:, :1].float()], dim=1)


@pytest.mark.parametrize("name, tag", all_tags())
@torch.no_grad()
def test_logprobs_values_and_entropy_of_other_chains(name, tag):
    model, expected = policy(name, tag)[0], of_tag(name, tag)
    logprobs, entropy, values = model.score_chain(inputs_of(name), off_policy(name, tag))
    assert gap(logprobs, expected["off_logprobs_raw"]) <= 1e-4
    assert gap(entropy, expected["off_entropy_raw"]) <= 1e-4
    assert gap(values, expected["off_values"]) <= 1e-5
    evaluation = model.evaluate_actions(inputs_of(name), off_policy(name, tag))
    chunk_len, env_dim = expected["prev_logprobs"].shape[1:]
    executed = expected["off_logprobs_raw"].mean(1)[:, :chunk_len, :env_dim].flatten(1)
    assert gap(evaluation.logprobs, executed) <= 1e-4
    assert gap(evaluation.values, expected["off_values"].mean(1)) <= 1e-5


@family
@pytest.mark.parametrize("change", ["black image", "no drift", "other step"])
@torch.no_grad()
def test_control_changes_miss_the_logprobs_of_other_chains(name, change, monkeypatch):
    tag, inputs = "flow_sde", inputs_of(name)
    model, sequences = load(name, tag), off_policy(name, tag)
    if change == "black image":
        inputs["pixel_values"][:, 0] = -1.0
    elif change == "no drift":

        def without_drift(method, *args):
            return step_moments("flow_ode", *args)[0], step_moments(method, *args)[1]

        monkeypatch.setattr(flow_policy, "step_moments", without_drift)
    else:
        sequences[:, -1] = (sequences[:, -1] + 1) % model.config.num_steps
    logprobs, _, _ = model.score_chain(inputs, sequences)
    assert gap(logprobs, of_tag(name, tag)["off_logprobs_raw"]) > 1e-3


@family
def test_saved_folder_has_the_public_names_and_the_same_bits(name, tmp_path):
    model = load(name)
    model.save_pretrained(tmp_path)
    saved = {
        key: each
        for key, each in load_file(tmp_path / "model.safetensors").items()
        if not key.startswith("value_head.")
    }
    public = load_file(ROOT / name / "model.safetensors")
    shapes = json.loads((ROOT / name / "state_dict_keys.json").read_text())["in_file"]
    assert {key: list(tensor.shape) for key, tensor in saved.items()} == shapes
    assert all(torch.equal(saved[key], tensor) for key, tensor in public.items())
    statistics = json.loads((tmp_path / "assets" / "unit" / "norm_stats.json").read_text())["norm_stats"]
    assert set(statistics) == {"state", "actions"}
    reloaded = load(name, folder=tmp_path)
    assert all(torch.equal(tensor, reloaded.state_dict()[key]) for key, tensor in model.state_dict().items())


def copy_with(name, tmp_path, tensors):
    shutil.copytree(ROOT / name, tmp_path, dirs_exist_ok=True)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@family
@pytest.mark.parametrize("with_embedding", [False, True])
def test_lerobot_names_give_the_same_policy(name, with_embedding, tmp_path):
    tensors = load_file(ROOT / name / "model.safetensors")
    if with_embedding:
        head = tensors["paligemma_with_expert.paligemma.lm_head.weight"]
        tensors["paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"] = head.clone()
    folder = copy_with(name, tmp_path, {f"model.{key}": tensor for key, tensor in tensors.items()})
    assert max(velocity_gaps(name, load(name, folder=folder), inputs_of(name))) <= 1e-5


@family
@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "untied"])
def test_weights_that_do_not_fit_are_refused(name, tmp_path, change):
    tensors = load_file(ROOT / name / "model.safetensors")
    if change == "missing":
        del tensors["action_in_proj.bias"]
    elif change == "unexpected":
        tensors["action_in_proj.extra"] = torch.zeros(3)
    elif change == "shape":
        tensors["action_in_proj.bias"] = torch.zeros(3)
    else:
        head = tensors["paligemma_with_expert.paligemma.lm_head.weight"]
        tensors["paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"] = head + 1
    with pytest.raises(
        CheckpointError, match=r"lm_head.*model\.model_path" if change == "untied" else r"action_in_proj"
    ):
        load(name, folder=copy_with(name, tmp_path, tensors))


@family
def test_kind_of_checkpoint_is_read_off_the_tensors(name, tmp_path):
    folder = copy_with(name, tmp_path, load_file(ROOT / name / "model.safetensors"))
    settings = json.loads((folder / "tiny_config.json").read_text())
    kind = settings.pop("pi05")
    (folder / "tiny_config.json").write_text(json.dumps(settings))
    assert load(name, folder=folder).config.pi05 == kind
