"""A VLA out of any Hugging Face image-text-to-text model, for every family of ``scripts/make_tiny_vlm.py``."""

import copy
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from policy_checks import failed_checks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from rlinf.errors import CheckpointError, ConfigError
from rlinf.models import HFModel, build_policy, get_model
from rlinf.models.config import LoraConfig
from rlinf.models.embodiment.hf_vla.config import HfVlaConfig
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.models.lora import apply_lora
from rlinf.types import Observation

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_tiny_vlm import FAMILIES, IMAGE_SIZE, make_tiny_vlm

SENTENCES = ["reach the red block", "push the blue block to the green zone", "go to the zone", "open it"]
NUM_BINS, NUM_TOKENS = 21, 6
STATS = {"arm": {"action": {"q01": [-1.0, -2.0, 0.0], "q99": [1.0, 2.0, 1.0], "mask": [True, True, False]}}}
SETTINGS = {"n_action_bins": NUM_BINS, "norm_stats": STATS}


class Zoo:
    """One folder and one policy per family, made at first use."""

    def __init__(self, root):
        self.root, self.folders, self.policies = root, {}, {}

    def folder(self, family):
        if family not in self.folders:
            self.folders[family] = make_tiny_vlm(family, self.root / family)
        return self.folders[family]

    def policy(self, family):
        """The shared policy, in evaluation mode; tests that change weights or modules take ``copy``."""
        if family not in self.policies:
            self.policies[family] = build(self.folder(family))
        return self.policies[family]

    def copy(self, family):
        return copy.deepcopy(self.policy(family))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return Zoo(tmp_path_factory.mktemp("vlms"))


@pytest.fixture(params=sorted(FAMILIES))
def family(request):
    return request.param


def section(path, **model):
    return {
        "model_type": "hf_vla", "model_path": str(path), "override_config": SETTINGS, "action_token_len": 3,
        "action_chunks_len": 2, **model,
    }  # fmt: skip


def build(path, **model):
    torch.manual_seed(0)
    return build_policy({"model": section(path, **model)})


def observe(num_cameras=2, seed=0):
    rng = np.random.default_rng(seed)
    shape = (len(SENTENCES), IMAGE_SIZE, IMAGE_SIZE, 3)
    images = {f"camera{i}": rng.integers(0, 256, shape, dtype=np.uint8) for i in range(num_cameras)}
    return Observation(images, None, list(SENTENCES))


def largest_gap(a, b):
    return (a.float() - b.float()).abs().max().item()


def test_rollout_and_training_agree_on_every_action_token(zoo, family):
    model, observation = zoo.policy(family), observe()
    assert failed_checks(model, observation) == []
    inputs = model.preprocess(observation)
    assert inputs["attention_mask"][:, 0].tolist() == [0, 1, 0, 0], "the rows need padding on the left"
    uniforms = torch.rand(4, NUM_TOKENS, generator=torch.Generator().manual_seed(5))  # different tokens in every family
    prediction = model.predict_action_batch(**inputs, temperature=0.7, uniforms=uniforms)
    assert prediction.logits.shape == (4, NUM_TOKENS, NUM_BINS)
    assert torch.equal(prediction.sequences[:, :-NUM_TOKENS], inputs["input_ids"])
    tokens = prediction.sequences[:, -NUM_TOKENS:] - model.action_tokenizer.first_token
    assert tokens.min() >= 0 and tokens.max() < NUM_BINS and len(tokens.unique()) > 3
    evaluation = model.evaluate_actions(inputs, prediction.sequences, temperature=0.7)
    assert largest_gap(prediction.values, evaluation.values) < 1e-5
    swapped = prediction.sequences.clone()
    swapped[:, -NUM_TOKENS] = model.action_tokenizer.first_token + (tokens[:, 0] + 1) % NUM_BINS
    other = model.evaluate_actions(inputs, swapped, temperature=0.7).logprobs
    assert largest_gap(other[:, 1:], evaluation.logprobs[:, 1:]) > 1e-3, "later tokens do not see the first one"
    for camera, image in observation.images.items():  # the checks change all cameras at once
        changed = Observation({**observation.images, camera: image[::-1].copy()}, None, observation.instruction)
        after = model.evaluate_actions(model.preprocess(changed), prediction.sequences, temperature=0.7).logprobs
        assert (after - evaluation.logprobs).abs().amax(1).min() > 1e-3, camera


def test_greedy_actions_are_those_of_the_vlms_own_generate(zoo, family):
    model = zoo.policy(family)
    observation = observe()
    prediction = model.predict_action_batch(**model.preprocess(observation), do_sample=False)
    vlm = AutoModelForImageTextToText.from_pretrained(zoo.folder(family)).eval()
    end = model.action_tokenizer.vocab_size
    allowed = list(range(end - NUM_BINS, end))
    for row in range(len(SENTENCES)):  # alone, without padding
        inputs = model.processor(observation.select([row]))
        inputs.pop("labels", None)
        generated = vlm.generate(
            **inputs, do_sample=False, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS, output_logits=True,
            return_dict_in_generate=True, prefix_allowed_tokens_fn=lambda *_: allowed,
        )  # fmt: skip
        assert torch.equal(generated.sequences[0, -NUM_TOKENS:], prediction.sequences[row, -NUM_TOKENS:])
        logits = torch.stack(generated.logits, 1)[0, :, end - NUM_BINS : end]
        assert largest_gap(logits, prediction.logits[row]) < 1e-5


def moved(model, loss):
    """Names of the parameters that a loss moves."""
    model.zero_grad()
    loss.backward()
    return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


def test_gradients_reach_the_vlm_and_the_value_loss_stays_in_its_head(zoo, family):
    model, actions = zoo.copy(family).train(), torch.rand(4, 2, 3)
    inputs = model.preprocess(observe())
    names = moved(model, model.sft_loss(inputs, actions).mean())
    assert {name.split(".")[0] for name in names} == {"vlm"}
    assert any("vision" in name or "visual" in name for name in names) and any("layers.0" in name for name in names)
    tokens = model.action_tokenizer.encode(actions).flatten(1)
    for detach_value, parts in ((True, {"value_head"}), (False, {"value_head", "vlm"})):
        model.detach_value = detach_value
        names = moved(model, model.evaluate_actions(inputs, tokens).values.sum())
        assert {name.split(".")[0] for name in names} == parts


def test_a_saved_folder_loads_again_and_stays_a_folder_of_the_vlm(zoo, family, tmp_path):
    model = zoo.copy(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(tmp_path)
    again = build_policy({"model": section(tmp_path, override_config={})})
    assert again.config.norm_stats == STATS and again.config.n_action_bins == NUM_BINS
    observation = observe()
    a, b = (m.predict_action_batch(**m.preprocess(observation), do_sample=False) for m in (model, again))
    assert torch.equal(a.sequences, b.sequences) and torch.equal(a.logits, b.logits) and torch.equal(a.values, b.values)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path)
    shapes, saved = ({n: p.shape for n, p in each.named_parameters()} for each in (model.vlm, plain))
    assert shapes == saved
    assert torch.equal(plain.get_output_embeddings().weight, model.vlm.get_output_embeddings().weight)
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert tied == (again.vlm.get_output_embeddings().weight is again.vlm.get_input_embeddings().weight)


def test_lora_trains_adapters_on_all_linear_layers_and_the_value_head(zoo, family):
    plain, model = zoo.policy(family), apply_lora(zoo.copy(family), LoraConfig(rank=2, alpha=4)).train()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name or name.startswith("value_head.") for name in trained)
    adapted = {name.split(".lora_A")[0] for name in trained if ".lora_A" in name}
    head = plain.vlm.get_output_embeddings()
    linear = {name for name, m in plain.vlm.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
    assert adapted == {f"vlm.{name}" for name in linear} and linear
    model.sft_loss(model.preprocess(observe()), torch.rand(4, 2, 3)).mean().backward()
    assert all(p.grad is None for name, p in model.named_parameters() if name not in trained)
    with pytest.raises(CheckpointError, match="merge_lora"):
        model.save_pretrained("nowhere")


def test_the_shards_are_the_layers_of_both_towers(zoo, family):
    model = zoo.policy(family)
    sharded = [module for module in model.modules() if type(module).__name__ in model.fsdp_wrap_modules]
    assert len(sharded) == 4  # two layers of each
    held = sum(p.numel() for module in sharded for p in module.parameters())
    embeddings = model.get_input_embeddings().weight.numel() * 2
    total = sum(p.numel() for p in model.vlm.parameters())
    assert held > 0.5 * (total - embeddings)


def test_two_rollout_threads_do_not_disturb_each_other(zoo):
    """Qwen-VL keeps position offsets in the module, and a rollout plays in worker threads."""
    model = zoo.policy("qwen2_5_vl")
    observations = [observe(1), observe(2, seed=1)]
    alone = [model.predict_action_batch(**model.preprocess(each), do_sample=False).logits for each in observations]
    found = [[], []]

    def play(thread):
        for _ in range(4):
            inputs = model.preprocess(observations[thread])
            found[thread].append(model.predict_action_batch(**inputs, do_sample=False).logits)

    threads = [threading.Thread(target=play, args=(thread,)) for thread in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(each) for each in found] == [4, 4]
    for thread in (0, 1):
        assert max(largest_gap(each, alone[thread]) for each in found[thread]) < 1e-5


def test_paligemma_action_tokens_are_a_causal_suffix(zoo):
    """The control of the agreement above: with the prompt's token type, action tokens would see later ones."""
    model = zoo.policy("paligemma")
    inputs = model.preprocess(observe())
    prediction = model.predict_action_batch(**inputs)
    prefix = torch.zeros_like(prediction.sequences[:, :-1])
    vlm = AutoModelForImageTextToText.from_pretrained(zoo.folder("paligemma")).eval()
    first, end = model.action_tokenizer.first_token, model.action_tokenizer.vocab_size
    arguments = {"input_ids": prediction.sequences[:, :-1], "pixel_values": inputs["pixel_values"]}
    arguments["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(prefix[:, 1 - NUM_TOKENS :])], 1)
    suffix = prefix.clone()
    suffix[:, 1 - NUM_TOKENS :] = 1
    row = int(inputs["attention_mask"].sum(1).argmax())  # without padding, whose positions this plain call ignores
    with torch.no_grad():
        outputs = [vlm(**arguments, token_type_ids=types).logits for types in (prefix, suffix)]
    wrong, right = (logits[row, -NUM_TOKENS:, first:end] for logits in outputs)
    assert largest_gap(right, prediction.logits[row]) < 1e-5 < 1e-3 < largest_gap(wrong, prediction.logits[row])


@pytest.mark.parametrize(
    ("vocab_size", "num_bins", "reserved", "end"),
    [
        (544, 21, [[0, 3], [484, 488]], 544),  # padded rows above the tokenizer
        (500, 21, [[0, 3], [484, 488]], 484),  # too few of them: below the image tokens
        (488, 21, [[0, 3], [484, 500]], 484),
        (500, 21, [[0, 3], [450, 452], [484, 500]], 484),
        (500, 40, [[0, 3], [450, 452], [484, 500]], 450),
        (40, 37, [[0, 3]], 40),
    ],
)  # fmt: skip
def test_action_tokens_are_the_highest_ids_free_of_special_tokens(vocab_size, num_bins, reserved, end):
    vlm = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": vocab_size}}
    config = HfVlaConfig(vlm_config=vlm, n_action_bins=num_bins, reserved_tokens=reserved)
    assert config.action_tokens_end == end
    taken = {token for first, past in reserved for token in range(first, past)}
    assert not taken & set(range(end - num_bins, end))


def test_prompt_template_replaces_the_chat_template(zoo):
    model = build(zoo.folder("idefics3"), override_config={**SETTINGS, "prompt_template": "{instruction}?{image}"})
    assert model.processor.prompt("reach", 2) == "reach?<image><image>"
    assert zoo.policy("idefics3").processor.prompt("reach", 1) == "User: <image>reach\nAssistant:"
    assert zoo.policy("llava").processor.prompt("reach", 1) == "<image>reach"


def test_a_model_from_random_weights_needs_no_folder(tmp_path):
    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config

    config = build_config(compose_config(["model=hf_vla_tiny", "env=tabletop"]))
    torch.manual_seed(0)
    model = build_policy(config)
    size = config.env.image_size
    rng = np.random.default_rng(0)
    images = {"front": rng.integers(0, 256, (4, size, size, 3), dtype=np.uint8)}
    observation = Observation(images, None, list(SENTENCES))
    inputs = model.preprocess(observation)
    prediction = model.predict_action_batch(**inputs)
    scored = model.evaluate_actions(inputs, prediction.sequences).logprobs
    assert largest_gap(scored, model.rollout_logprobs(prediction)) < 1e-5
    assert prediction.logits.std() > 0.1, "random weights should tell observations apart"
    positions = model.vlm.model.vision_tower.embeddings.position_embeddings
    assert positions.std().item() == pytest.approx(1.0, rel=0.1), "and patches"
    model.save_pretrained(tmp_path)
    again = build_policy({"model": {"model_type": "hf_vla", "model_path": str(tmp_path), "action_token_len": 2}})
    loaded = again.predict_action_batch(**again.preprocess(observation), do_sample=False)
    assert torch.equal(loaded.logits[:, 0], prediction.logits[:, 0])


def expect(error, *parts, **model):
    with pytest.raises(error) as caught:
        get_model(model)
    for part in parts:
        assert part in str(caught.value), (part, str(caught.value))


def test_errors_name_the_value_and_the_override(zoo, tmp_path, monkeypatch):
    def loads(*_, **__):
        raise RuntimeError("weights were loaded before the error")

    path = zoo.folder("llava")
    text_only = tmp_path / "text"
    LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=40)
    ).save_pretrained(text_only)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", loads)
    expect(CheckpointError, "nowhere", "Set model.model_path=", **section(tmp_path / "nowhere"))
    kind = ("'llama'", "LlamaForCausalLM", "AutoModelForImageTextToText", "Set model.model_path=")
    expect(ConfigError, *kind, **section(text_only))
    for words, changes in (
        ("n_action_bins is 2000|Set model.override_config.n_action_bins=481",
         {"override_config": {**SETTINGS, "n_action_bins": 2000}}),
        ("model.action_token_len is 5|Set model.action_token_len=3", {"action_token_len": 5}),
        ("'arn'|arm", {"unnorm_key": "arn"}),
        ("'do {instruction}'|{image}", {"override_config": {**SETTINGS, "prompt_template": "do {instruction}"}}),
    ):  # fmt: skip
        expect(ConfigError, *words.split("|"), **section(path, **changes))
    no_processor = tmp_path / "no_processor"
    shutil.copytree(path, no_processor)
    (no_processor / "processor_config.json").unlink()
    (no_processor / "tokenizer.json").unlink()
    expect(ConfigError, str(no_processor), "LlavaProcessor", "tokenizer.tokenizer_model=", **section(no_processor))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_init": "fan"}, "weight_init is 'fan'.*model.init_config.weight_init=fan_in"),
        ({"processor_config": None}, "no processor_config.*tokenizer.tokenizer_model="),
        ({"vlm_config": None, "processor_config": None}, "no vlm_config.*Set model=hf_vla_tiny"),
        ({"n_action_bins": 512}, "n_action_bins is 512.*model.init_config.n_action_bins=481"),
        ({"vocab_size": 486}, "488 tokens.*at most 486.*tokenizer.tokenizer_model="),
    ],
)
def test_errors_of_a_model_from_random_weights(changes, words):
    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config

    config = build_config(compose_config(["model=hf_vla_tiny", "env=tabletop"]))
    init = copy.deepcopy(config.model.init_config)
    if "vocab_size" in changes:
        init["vlm_config"]["text_config"] |= changes
    config.model.init_config = init if "vocab_size" in changes else init | changes
    with pytest.raises(ConfigError, match=words):
        build_policy(config)


def test_weights_of_another_shape_and_half_a_value_head_are_refused(zoo, tmp_path):
    zoo.policy("llava").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "projector" in name and name.endswith("weight"))
    words = ("of a different shape", "Set model.model_path=")
    save_file({**weights, name: torch.zeros(2, 2)}, file, metadata={"format": "pt"})
    expect(CheckpointError, *words, **section(tmp_path, override_config={}))
    save_file(weights, file, metadata={"format": "pt"})
    save_file({"mlp.0.weight": torch.zeros(2)}, tmp_path / "value_head.safetensors")
    expect(CheckpointError, "mlp.0.weight", "missing", **section(tmp_path, override_config={}))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b"{bad", ("config.json", "not a JSON object")),
        ("model.safetensors", b"12345678 no weights", ("cannot be read",)),
        ("tokenizer.json", None, ("tokenizer.tokenizer_model=",)),
    ],
)
def test_a_damaged_folder_is_one_error(zoo, tmp_path, file, content, words):
    folder = tmp_path / "damaged"
    shutil.copytree(zoo.folder("llava"), folder)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    expect((CheckpointError, ConfigError), str(folder), *words, **section(folder))


def test_a_processor_whose_special_tokens_are_action_tokens_is_an_error(zoo, tmp_path):
    model = zoo.policy("llava")
    model.save_pretrained(tmp_path)
    processor = load_vlm_processor(tmp_path, model.config.vlm_config)
    processor.tokenizer.add_tokens([f"<new{i}>" for i in range(50)])
    processor.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"action tokens are 523\.\.543.*tokenizer\.tokenizer_model"):
        build_policy({"model": section(tmp_path, override_config={})})


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_rotary_frequencies_of_both_towers_stay_float32_in_the_fallback_class(zoo, name):
    plain = AutoModelForImageTextToText.from_pretrained(zoo.folder(name))
    expected = {key: buffer for key, buffer in plain.named_buffers() if key.endswith("inv_freq")}
    assert {key.split(".")[1] for key in expected} == {"language_model", "visual"}
    converted = HFModel.from_pretrained(zoo.folder(name)).to(torch.bfloat16)
    found = {key: buffer for key, buffer in converted.model.named_buffers() if key.endswith("inv_freq")}
    assert found.keys() == expected.keys()
    for key, buffer in found.items():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, expected[key]), key
    rounded = dict(plain.to(torch.bfloat16).named_buffers())  # control: transformers' own conversion rounds them
    assert any(rounded[key].dtype == torch.bfloat16 for key in expected)


def test_an_input_longer_than_the_language_models_positions_is_refused(zoo):
    model = zoo.copy("internvl" if "internvl" in FAMILIES else sorted(FAMILIES)[0])
    needed = model.preprocess(observe())["input_ids"].shape[1] + NUM_TOKENS
    model.config.text_config.max_position_embeddings = needed
    model.preprocess(observe())
    model.config.text_config.max_position_embeddings = needed - 1
    with pytest.raises(ConfigError, match=rf"has {needed} tokens.* {needed - 1} positions \(max_position_embeddings\)"):
        model.preprocess(observe())
