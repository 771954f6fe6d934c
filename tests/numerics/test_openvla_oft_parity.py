"""OpenVLA-OFT against arrays that the public reference implementation gave for a tiny random checkpoint.

The folder is not part of the project: ``RLINF_PARITY_DIR`` names it (default: ``../shared/parity`` next to the project).
Every ``fixture_<platform>.npz`` has a ``heads_<platform>.safetensors``, from which the ``.pt`` files are made that the
public code writes next to the base checkpoint.

The arrays were computed in float32, and are up to 2e-4 away from a float64 run of the reference. Ours run in float64, which no
instruction set rounds visibly: what lies between the two is the reference's rounding alone, and two tokens that are 1e-5 apart
keep their order on every CPU. ``test_float32_differs_from_float64_by_rounding`` compares our own two.
"""

import json
import os
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from run_results import gap
from safetensors.torch import load_file

from rlinf.errors import CheckpointError, ConfigError
from rlinf.models import get_model
from rlinf.models.embodiment.openvla.processing import PrismaticImageProcessor
from rlinf.models.embodiment.openvla_oft.config import ACTION_BOUNDS

ROOT = Path(os.environ.get("RLINF_PARITY_DIR", Path(__file__).parents[2].parent / "shared" / "parity")) / "openvla_oft"
PLATFORMS = [path.stem.removeprefix("heads_") for path in sorted(ROOT.glob("heads_*.safetensors"))]
NORMALIZATION = {"aloha": "bounds"}  # the others: bounds_q99
pytestmark = pytest.mark.skipif(
    not PLATFORMS, reason=f"no reference fixtures at {ROOT}; set RLINF_PARITY_DIR to the folder that holds openvla_oft/"
)
BASE = {"stop_token_in_input": True}
L1 = {"action_head": "l1", "use_proprio": True, "num_images_in_input": 2}
FILM = L1 | {"use_film": True}
RL = {"stop_token_in_input": False}


@cache
def arrays(name):
    return {key: torch.from_numpy(array) for key, array in np.load(ROOT / f"fixture_{name}.npz").items()}


@cache
def statistics(platform):
    """Name and statistics of the data set of a platform."""
    known = json.loads((ROOT / "checkpoint" / "dataset_statistics.json").read_text())
    name = next(name for name in known if name.startswith(platform))
    return name, known[name]


def write_heads(folder, platform, parts, step="150000", film_as_peft=False):
    """Write the public files of ``parts`` into a copy of the base checkpoint."""
    shutil.copytree(ROOT / "checkpoint", folder, dirs_exist_ok=True)
    heads = {name: tensor.float() for name, tensor in load_file(ROOT / f"heads_{platform}.safetensors").items()}
    for part in parts:
        prefix = "vision_backbone_film." if part == "vision_backbone" else f"{part}."
        tensors = {name.removeprefix(prefix): tensor for name, tensor in heads.items() if name.startswith(prefix)}
        if part == "vision_backbone":
            for name, tensor in load_file(ROOT / "checkpoint" / "model.safetensors").items():
                if name.startswith("vision_backbone."):
                    tensors[re.sub(r"(\.blocks\.\d+)\.", r"\1.block.", name)] = tensor.float()
            keys = json.loads((ROOT / "film_vision_backbone_keys.json").read_text())
            assert {name: list(tensor.shape) for name, tensor in tensors.items()} == keys
            tensors = as_peft(tensors) if film_as_peft else tensors
        tensors = {f"module.{name}": tensor for name, tensor in tensors.items()}
        torch.save(tensors, folder / f"{part}--{step}_checkpoint.pt")
    return folder


def as_peft(tensors, rank=32):
    """Split every MLP weight into a base layer and adapters whose sum it is, as the public fine-tuning saves it."""
    generator, result = torch.Generator().manual_seed(0), {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if not layer.endswith((".fc1", ".fc2")) or "attn_pool" in name:
            result[name] = tensor
            continue
        if kind == "weight":
            down = torch.randn(rank, tensor.shape[1], generator=generator)
            up = torch.randn(tensor.shape[0], rank, generator=generator)
            result[f"{layer}.lora_A.default.weight"], result[f"{layer}.lora_B.default.weight"] = down, up
            tensor = tensor - 16 / rank * up @ down
        result[f"{layer}.base_layer.{kind}"] = tensor
    return result


def parts_of(options):
    wanted = {"action_head": "action_head", "proprio_projector": "use_proprio", "vision_backbone": "use_film"}
    return [part for part, option in wanted.items() if options.get(option)]


def load(platform, options, folder=None, attn_implementation="sdpa", dtype=torch.float64):
    """Load the fixture checkpoint with the reference's value head; tests share a model of the base checkpoint."""
    from_folder = loaded if folder is None else loaded.__wrapped__
    return from_folder(platform, tuple(options.items()), folder, attn_implementation, dtype)


@cache
def loaded(platform, options, folder, attn_implementation, dtype):
    chunk, dim = arrays(platform)["discrete_actions"].shape
    section = {
        "model_type": "openvla_oft", "model_path": str(folder or ROOT / "checkpoint"), "action_token_len": dim,
        "action_chunks_len": chunk, "unnorm_key": statistics(platform)[0], "attn_implementation": attn_implementation,
        "override_config": {"action_normalization": NORMALIZATION.get(platform, "bounds_q99"), **dict(options)},
    }  # fmt: skip
    model = get_model(section)
    head = load_file(ROOT / "value_head.safetensors")
    head = {name.removeprefix("value_head."): tensor.float() for name, tensor in head.items()}
    model.value_head.load_state_dict(head)
    return model.eval().to(dtype)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function: folder with the parts of some options, written once."""

    @cache
    def folder(platform, parts):
        return write_heads(tmp_path_factory.mktemp(platform), platform, parts)

    return lambda platform, options: folder(platform, tuple(parts_of(options)))


@pytest.fixture(params=PLATFORMS)
def platform(request):
    return request.param


def inputs_of(platform, num_images, model=None):
    """Official inputs: batch of one, prompt ends with the suffix token; with the state if the model reads it."""
    data = arrays(platform)
    processor = PrismaticImageProcessor.from_pretrained(ROOT / "checkpoint")
    pixels = [processor(data[f"image{i}"].numpy())["pixel_values"] for i in range(num_images)]
    prompt = data["prompt_ids_without_29871"]
    inputs = {
        "input_ids": torch.cat([prompt, torch.full((1, 1), 29871)], dim=1),
        "attention_mask": None,
        "pixel_values": torch.cat(pixels, dim=1).double(),
    }
    if model is not None and model.state_normalizer is not None:
        inputs["proprio"] = model.state_normalizer.normalize(data["proprio_raw"])[None].double()
    return inputs


def bin_slice(model, logits, expected):
    """The reference keeps every n-th action bin."""
    first, end = model.action_tokenizer.first_token, model.action_tokenizer.vocab_size
    return logits[..., first : end : -(-(end - first) // expected.shape[-1])]


@torch.no_grad()
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_discrete_hidden_states_logits_tokens_and_actions(platform, attn_implementation):
    data = arrays(platform)
    model = load(platform, BASE | {"greedy_over_vocabulary": True}, attn_implementation=attn_implementation)
    inputs = inputs_of(platform, 1)
    output = model(**inputs)
    assert gap(output.hidden_states[0], data["discrete_action_hidden"]) <= 1e-4
    expected = data["discrete_logits_slice"]
    assert gap(bin_slice(model, output.logits, expected), expected) <= 3e-4
    prediction = model.predict_action_batch(**inputs, do_sample=False)
    assert torch.equal(prediction.sequences[:, -model.num_logprobs :], data["discrete_tokens"])
    assert gap(prediction.actions[0], data["discrete_actions"]) <= 1e-6
    length = inputs["input_ids"].shape[1] + model.num_image_tokens + model.num_logprobs + 1
    assert length == int(data["discrete_seq_len"])


@torch.no_grad()
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_float32_differs_from_float64_by_rounding(platform, attn_implementation):
    """Single logits move by up to 5e-4 with the last bit of the pixels, so means are compared, which no tie moves."""
    exact = load(platform, BASE, attn_implementation=attn_implementation)
    model = load(platform, BASE, attn_implementation=attn_implementation, dtype=torch.float32)
    inputs = inputs_of(platform, 1)
    expected, output = exact(**inputs), model(**inputs | {"pixel_values": inputs["pixel_values"].float()})
    assert output.logits.dtype == output.hidden_states[0].dtype == torch.float32 != expected.hidden_states[0].dtype
    assert (output.hidden_states[0] - expected.hidden_states[0]).abs().mean() <= 2e-5
    assert (output.logits - expected.logits).abs().mean() <= 1e-4


@torch.no_grad()
def test_patches_of_two_images(platform):
    data = arrays(platform)
    model = load(platform, BASE | {"greedy_over_vocabulary": True, "num_images_in_input": 2})
    prediction = model.predict_action_batch(**inputs_of(platform, 2), do_sample=False)
    assert gap(prediction.actions[0], data["discrete2img_actions"]) <= 1e-6
    swapped = inputs_of(platform, 2)
    swapped["pixel_values"] = swapped["pixel_values"].roll(6, dims=1)
    other = model.predict_action_batch(**swapped, do_sample=False)
    assert gap(other.actions[0], data["discrete2img_actions"]) > 1e-2, "control: the order of the images matters"


@torch.no_grad()
@pytest.mark.parametrize("change", ["causal", "no_stop_token", "placeholders", "read_out"])
def test_control_each_broken_mechanism_misses_the_hidden_states(platform, change, monkeypatch):
    data = arrays(platform)
    model = load(platform, BASE | ({"stop_token_in_input": False} if change == "no_stop_token" else {}))
    inputs = inputs_of(platform, 1)
    if change == "causal":
        import rlinf.models.embodiment.openvla_oft.policy as module

        run = module.run_layers
        monkeypatch.setattr(module, "run_layers", lambda *a, **k: run(*a, **(k | {"is_causal": True})))
    elif change == "placeholders":
        embedding = model.get_input_embeddings().weight[1]
        monkeypatch.setattr(
            model, "_placeholder_embeddings", lambda e: embedding.expand(len(e), model.num_logprobs, -1)
        )
    hidden_states = model(**inputs).hidden_states[0]
    if change == "read_out":
        hidden_states = hidden_states.roll(1, dims=1)
    assert gap(hidden_states, data["discrete_action_hidden"]) > 0.1


def test_normalised_state(platform, folders):
    data = arrays(platform)
    model = load(platform, L1, folders(platform, L1))
    assert gap(model.state_normalizer.normalize(data["proprio_raw"]), data["proprio_norm"]) <= 1e-9
    other = next(name for name in ACTION_BOUNDS if name != model.config.action_normalization)
    model = load(platform, L1 | {"action_normalization": other}, folders(platform, L1))
    assert gap(model.state_normalizer.normalize(data["proprio_raw"]), data["proprio_norm"]) > 1e-3, (
        "control: other bounds"
    )


@torch.no_grad()
@pytest.mark.parametrize("name, options", [("l1", L1), ("film", FILM)])
def test_continuous_actions(platform, folders, name, options):
    data = arrays(platform)
    model = load(platform, options, folders(platform, options))
    inputs = inputs_of(platform, 2, model)
    hidden_states = model(**inputs).hidden_states[0]
    assert gap(hidden_states, data[f"{name}_action_hidden"]) <= 1e-4
    prediction = model.predict_action_batch(**inputs, do_sample=False)
    assert gap(prediction.actions[0], data[f"{name}_actions"]) <= 1e-4
    if name == "l1":
        head_raw = data["l1_head_raw"]
        assert gap(prediction.sequences.view_as(head_raw), head_raw) <= 1e-4
    without_state = inputs | {"proprio": torch.zeros_like(inputs["proprio"])}
    other = model(**without_state).hidden_states[0]
    assert gap(other, data[f"{name}_action_hidden"]) > 1e-3, "control: the state is read"


@torch.no_grad()
@pytest.mark.parametrize("film_as_peft", [False, True])
def test_film_vision_features(platform, tmp_path, film_as_peft):
    data = arrays(platform)
    model = load(platform, FILM, write_heads(tmp_path, platform, parts_of(FILM), film_as_peft=film_as_peft))
    inputs = inputs_of(platform, 2)
    text = model.get_input_embeddings()(inputs["input_ids"])
    expected = data["film_vision_features_sub"]

    def features(language):
        every = model.vision_backbone(inputs["pixel_values"], language)
        return every[:, :: -(-every.shape[1] // expected.shape[1])]

    tolerance = 1e-3 if film_as_peft else 1e-4  # splitting weights into sums rounds them
    assert gap(features(model._language_vector(text, None)), expected) <= tolerance
    assert gap(features(text.mean(1)), expected) > 1e-2, "control: the stop token is part of the mean"


@torch.no_grad()
def test_control_without_film_the_features_differ(platform, folders):
    data = arrays(platform)
    model = load(platform, L1, folders(platform, L1))
    inputs = inputs_of(platform, 2, model)
    assert gap(model(**inputs).hidden_states[0], data["film_action_hidden"]) > 1e-2


def rl_inputs(data):
    processor = PrismaticImageProcessor.from_pretrained(ROOT / "checkpoint")
    pixels = processor(list(data["images"].numpy()))["pixel_values"]
    return {"input_ids": data["input_ids"], "attention_mask": data["attention_mask"], "pixel_values": pixels.double()}


def distributions(data):
    """Suffix of the array names, temperature and top-k of what the reference scored."""
    names = [re.fullmatch(r"train_logprobs_(T([\d.]+)_k(\d+))", name) for name in data]
    found = [(match[1], float(match[2]), int(match[3])) for match in names if match]
    assert any(k == 0 for _, _, k in found)
    return found


@torch.no_grad()
def test_rl_greedy_actions_logprobs_and_values(platform):
    data = arrays(f"rlinf_{platform}")
    model = load(platform, RL)
    prediction = model.predict_action_batch(**rl_inputs(data), do_sample=False)
    expected = data["greedy_tokens"].flatten(1) - model.action_tokenizer.first_token
    tokens = prediction.sequences[:, -model.num_logprobs :] - model.action_tokenizer.first_token
    logits = prediction.logits
    assert torch.equal(tokens, expected)
    assert gap(prediction.actions, data["greedy_actions"]) <= 1e-6
    assert gap(logits.log_softmax(-1).gather(-1, expected[..., None])[..., 0], data["greedy_logprobs"]) <= 2e-4
    assert gap(prediction.values[:, None], data["greedy_values"]) <= 1e-5


@torch.no_grad()
def test_rl_logprobs_entropy_and_values_at_every_temperature_and_top_k(platform):
    data = arrays(f"rlinf_{platform}")
    model = load(platform, RL)
    inputs, tokens = rl_inputs(data), data["greedy_tokens"].flatten(1)
    sequences = torch.cat([data["input_ids"], tokens], dim=1)
    first, end = model.action_tokenizer.first_token, model.action_tokenizer.vocab_size
    every = model(**inputs).hidden_states[0] @ model.language_model.lm_head.weight.T
    assert every.dtype == torch.float64, "of the tokens at the border of the top 50, some are 2e-6 apart"
    for suffix, temperature, k in distributions(data):
        if k == 0:
            evaluation = model.evaluate_actions(inputs, sequences, temperature)
            logprobs, entropy = evaluation.logprobs, evaluation.entropy
            assert gap(evaluation.values[:, None], data["train_values"]) <= 1e-5
        else:  # the policy has no top-k: the reference's filter, on our logits
            scaled = every / temperature
            allowed = torch.zeros_like(scaled, dtype=torch.bool).scatter_(-1, scaled.topk(k).indices, True)
            allowed[..., :first] = allowed[..., end:] = False
            masked = scaled.masked_fill(~allowed, -torch.inf).log_softmax(-1)
            logprobs = masked.gather(-1, tokens[..., None])[..., 0]
            entropy = -(masked.exp() * masked).nan_to_num(0.0).sum(-1)
        for actual, kind in ((logprobs, "logprobs"), (entropy, "entropy")):
            expected = data[f"train_{kind}_{suffix}"]
            known = torch.isfinite(expected)
            assert torch.equal(known, torch.isfinite(actual)), suffix
            assert gap(actual[known], expected[known]) <= 2e-4, suffix


@torch.no_grad()
@pytest.mark.parametrize("change", ["stop_token", "padding", "temperature"])
def test_control_each_broken_mechanism_misses_the_rl_logprobs(platform, change):
    data = arrays(f"rlinf_{platform}")
    model = load(platform, BASE if change == "stop_token" else RL)
    inputs = rl_inputs(data)
    if change == "padding":
        assert not data["attention_mask"].all(), "a row needs padding for this control"
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    sequences = torch.cat([data["input_ids"], data["greedy_tokens"].flatten(1)], dim=1)
    suffix, temperature, _ = next(each for each in distributions(data) if each[2] == 0)
    evaluation = model.evaluate_actions(inputs, sequences, temperature * (1.3 if change == "temperature" else 1.0))
    assert gap(evaluation.logprobs, data[f"train_logprobs_{suffix}"]) > 1e-2


@torch.no_grad()
def test_control_the_value_is_not_read_at_the_last_placeholder(platform):
    data = arrays(f"rlinf_{platform}")
    model = load(platform, RL)
    hidden_states = model(**rl_inputs(data)).hidden_states[0]
    assert gap(model.value_head(hidden_states[:, -1])[:, None], data["train_values"]) > 1e-3


def test_saved_folder_holds_everything_in_safetensors(platform, folders, tmp_path):
    model = load(platform, FILM, folders(platform, FILM))
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.pt"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["action_head"], config["use_film"]) == ("openvla_oft", "l1", True)
    again = load(platform, {}, tmp_path)
    assert model.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    inputs = inputs_of(platform, 2, model)
    a, b = (each.predict_action_batch(**inputs, do_sample=False) for each in (model, again))
    assert gap(a.actions, b.actions) <= 1e-4  # equal weights in memory of another alignment may round differently


def test_the_newest_step_is_taken(tmp_path):
    platform = PLATFORMS[0]
    write_heads(tmp_path, platform, ["action_head"])
    tensors = torch.load(tmp_path / "action_head--150000_checkpoint.pt")
    older = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    torch.save(older, tmp_path / "action_head--50000_checkpoint.pt")
    model = load(platform, {"action_head": "l1"}, tmp_path)
    assert model.action_head.model.fc1.weight.abs().max() > 0
    torch.save(older, tmp_path / "action_head--200000_checkpoint.pt")
    model = load(platform, {"action_head": "l1"}, tmp_path)
    assert model.action_head.model.fc1.weight.abs().max() == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ("several_without_number", r"action_head--150000.*action_head--latest.*highest step"),
        ("other_step", r"action_head--150000_checkpoint.pt, proprio_projector--9_checkpoint.pt"),
        ("not_wanted", r"action_head--150000_checkpoint.pt.*model.override_config.action_head=l1"),
        ("absent", r"\['action_head'\] is missing"),
        ("incomplete", r"missing \['action_head.model.fc1.bias'\] \(1\)"),
        ("unexpected", r"unexpected \['action_head.model.fc9.bias'\] \(1\)"),
        ("other_width", r"of a different shape.*proprio_projector.fc1.weight"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, change, message):
    platform, options = PLATFORMS[0], L1
    write_heads(tmp_path, platform, ["action_head", "proprio_projector"])
    head, state = (tmp_path / f"{part}--150000_checkpoint.pt" for part in ("action_head", "proprio_projector"))
    tensors = torch.load(head)
    if change == "several_without_number":
        shutil.copy(head, tmp_path / "action_head--latest_checkpoint.pt")
    elif change == "other_step":
        state.rename(tmp_path / "proprio_projector--9_checkpoint.pt")
    elif change == "not_wanted":
        options = {**L1, "action_head": "discrete"}
    elif change == "absent":
        head.unlink()
    elif change == "incomplete":
        del tensors["module.model.fc1.bias"]
        torch.save(tensors, head)
    elif change == "unexpected":
        torch.save(tensors | {"module.model.fc9.bias": torch.zeros(3)}, head)
    else:
        tensors = torch.load(state)
        tensors["module.fc1.weight"] = tensors["module.fc1.weight"][:, 1:].clone()
        torch.save(tensors, state)
    with pytest.raises(CheckpointError, match=message):
        load(platform, options, tmp_path)


def test_a_value_head_in_a_file_of_its_own_is_loaded(tmp_path):
    shutil.copytree(ROOT / "checkpoint", tmp_path, dirs_exist_ok=True)
    head = load_file(ROOT / "value_head.safetensors")
    head = {name.removeprefix("value_head."): tensor.float() for name, tensor in head.items()}
    torch.save(head, tmp_path / "value_head--7_checkpoint.pt")
    chunk, dim = arrays(PLATFORMS[0])["discrete_actions"].shape
    section = {
        "model_type": "openvla_oft", "model_path": str(tmp_path), "action_token_len": dim, "action_chunks_len": chunk,
        "unnorm_key": statistics(PLATFORMS[0])[0], "override_config": {},
    }  # fmt: skip
    loaded = get_model(section).value_head.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in head.items())
    assert get_model(section | {"value_head": False}).value_head is None


def test_another_state_width_than_that_of_the_statistics_is_refused(folders):
    platform = PLATFORMS[0]
    width = len(statistics(platform)[1]["proprio"]["q01"])
    with pytest.raises(ConfigError, match=f"state_dim is {width + 1}.*state_dim={width}"):
        load(platform, L1 | {"state_dim": width + 1}, folders(platform, L1))
