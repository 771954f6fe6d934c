"""What every policy promises (``rlinf/models/embodiment/base.py``), checked for each registered model on what an env gives.

Random weights, moved away from zeros and ones, so that no part of a model is idle.
"""

import copy
import re
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch

from rlinf.checkpoints.checkpoint import write_policy
from rlinf.commands.open_checkpoint import statistics_of_env
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.contracts.policy import PolicyChecker
from rlinf.envs import make_env
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models import MODELS, build_policy, register_model
from rlinf.models.config import TokenizerConfig
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.embodiment.token_action_model import TokenActionModel
from rlinf.models.lora import apply_lora, is_trained_in_full, merge_lora, save_adapter
from rlinf.options import from_mapping
from rlinf.preflight.memory import policy_on_meta_device
from rlinf.registry import BUILTIN
from rlinf.types import Observation

CASES = {
    "mlp": ["model=mlp", "model.action_chunks_len=2"],
    "cnn": ["model=cnn", "model.action_chunks_len=2"],
    "openvla": ["model=openvla_tiny", "model.action_chunks_len=2"],
    "openvla, autoregressive": ["model=openvla_tiny", "model.init_config.action_decoding=autoregressive",
                                "model.init_config.learned_placeholders=false"],
    "openvla_oft": ["model=openvla_oft_tiny", "env.state=proprio"],
    "hf_vla": ["model=hf_vla_tiny"],
    "pi0": ["model=pi0_tiny", "env.state=proprio", "model.init_config.joint_logprob=false",
            "model.init_config.num_steps=4"],
    "pi0, all steps": ["model=pi0_tiny", "env.state=proprio"],
    "your_model_type": ["model=default"],
}  # fmt: skip
"""Name to overrides; of the packaged groups, the smallest of each family."""

YOUR_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
YOUR_CONFIG = {
    "text_config": YOUR_SIZES
    | {"num_key_value_heads": 2, "vocab_size": 544, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": YOUR_SIZES | {"image_size": 32, "patch_size": 16},
    "image_seq_length": 4,
    "n_action_bins": 32,
}
IDLE = {
    "hf_vla": r"vlm\.model\.vision_tower\.post_layernorm\.",
    "your_model_type": r"model\.vision_tower\.(encoder\.layers\.1|post_layernorm)\.",
}
"""Parameters that may stay without a gradient: LLaVA reads inner layers of its vision tower."""

BF16_BOUNDS = {"logprobs": 0.02, "entropy": 0.01, "values": 0.02}
"""Largest accepted distance of bfloat16 weights from float32, in nats and in units of the value."""

BF16_LOGPROBS = {"pi0": 0.2, "pi0, all steps": 0.05}
"""The same, where a log-density divides the rounding of a mean by a small deviation (the last denoising steps)."""


@dataclass
class Case:
    """A policy, its configuration, and rows of the env that it acts on."""

    name: str
    config: RunConfig
    overrides: dict | None
    observation: Observation
    policy: ActionModel
    actions: torch.Tensor
    action_range: torch.Tensor

    def build(self, **model):
        """Build the policy again, with other settings and the same weights (adapters keep their own)."""
        config = replace(self.config, model=replace(self.config.model, **model))
        torch.manual_seed(1)
        policy = build_policy(config, self.overrides).eval()
        move(policy, self.policy.state_dict())
        return policy

    @cached_property
    def half(self):
        """The policy with weights in bfloat16."""
        return self.build(precision="bf16")

    @property
    def lora(self):
        return replace(self.config.model.lora, rank=2, alpha=2)

    @cached_property
    def adapted(self):
        """The policy with adapters that do something."""
        return self.build(is_lora=True, lora=self.lora)

    def load(self, folder, **model):
        """The policy that lies in a folder."""
        model = replace(self.config.model, model_path=str(folder), init_config={}, **model)
        return build_policy(replace(self.config, model=model, tokenizer=TokenizerConfig())).eval()

    def is_idle(self, name):
        """Whether a parameter may stay without a gradient."""
        return self.name in IDLE and re.match(IDLE[self.name], name) is not None

    def uniforms(self):
        shape = (len(self.observation), self.policy.num_uniforms)
        return torch.rand(shape, generator=torch.Generator().manual_seed(0))

    def sft_uniforms(self):
        shape = (len(self.observation), self.policy.num_sft_uniforms)
        return torch.rand(shape, generator=torch.Generator().manual_seed(2)) if shape[1] else None


def move(policy, weights):
    """Give a policy the weights of another; what only it has (adapters, which start at zero) is drawn."""
    own = {name.replace(".base_layer.", "."): parameter for name, parameter in policy.named_parameters()}
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name]) if name in weights else parameter.normal_(std=0.1)


def act(policy, observation, **arguments):
    return policy.predict_action_batch(**policy.preprocess(observation), **arguments)


@pytest.fixture(scope="module")
def your_processor(tmp_path_factory):
    """Registers the template under its name; returns a folder with its tokenizer, and the id of ``<image>``."""
    from transformers import AutoTokenizer

    from rlinf.models.embodiment.modules.tokenizer import TINY_TOKENIZER
    from rlinf.models.embodiment.your_model_action_model import YourImageProcessor, YourProcessor

    folder = tmp_path_factory.mktemp("your_model")
    tokenizer = AutoTokenizer.from_pretrained(TINY_TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    YourProcessor(tokenizer, YourImageProcessor(image_size=32)).save_pretrained(folder)
    template, before = "rlinf.models.embodiment.your_model_action_model:Your", dict(MODELS.entries())
    parts = {"config": "ModelConfig", "processor": "Processor", "image_processor": "ImageProcessor"}
    parts = {name: template + part for name, part in parts.items()}
    register_model("your_model_type", model=f"{template}ModelForRLActionPrediction", **parts)
    yield str(folder), tokenizer.convert_tokens_to_ids("<image>")
    MODELS.entries().clear()
    MODELS.entries().update(before)


@pytest.fixture(scope="module", params=CASES)
def case(request, your_processor):
    """The policy of a configuration and four first observations of its env."""
    config = build_config(compose_config([*CASES[request.param], "env=tabletop"]))
    if request.param == "your_model_type":
        folder, image_token = your_processor
        init_config = YOUR_CONFIG | {"image_token_index": image_token}
        model = replace(config.model, model_type="your_model_type", init_config=init_config)
        config = replace(config, model=model, tokenizer=from_mapping(TokenizerConfig, {"tokenizer_model": folder}))
    return make_case(request.param, config)


def make_case(name, config):
    """The policy of a configuration and four first observations of its env."""
    env = make_env(config.env, 4, auto_reset=False)
    specs = env.episode_specs("train")
    observation, _ = env.reset(options={"episodes": [specs[index] for index in range(4)]})
    overrides = statistics_of_env(config, env)
    low, high = torch.from_numpy(env.action_low), torch.from_numpy(env.action_high)
    env.close()
    torch.manual_seed(0)
    policy = build_policy(config, overrides).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    actions = low + (high - low) * torch.rand(4, policy.sft_chunk_len, len(low))
    return Case(name, config, overrides, observation, policy, actions.float(), high - low)


@pytest.fixture
def policy(case):
    return case.policy


@pytest.fixture
def observation(case):
    return case.observation


def test_no_registered_model_is_left_out():
    entries = MODELS.entries()
    ours = {name for name, entry in entries.items() if entry.origin == BUILTIN and not MODELS.get(name).is_remote}
    ours -= {
        "lerobot",
        "smolvla",
        "groot",
    }  # classes of another project, which need its folders and Python 3.12: tests/unit/test_lerobot.py
    composed = {compose_config([*overrides, "env=tabletop"]).model.model_type for overrides in CASES.values()}
    assert ours <= composed | {"your_model"}  # the class of the case your_model_type


def test_every_model_passes_the_checks_of_users(case):
    checks = PolicyChecker(case.policy, case.observation, case.action_range, 1.3, is_exact=True).torch_checks()
    assert len(checks) > 15 and not [check for check in checks if check.passed is False]


def test_chunks_are_as_long_as_configured_and_predictions_carry_no_graph(case, policy, observation):
    prediction = act(policy, observation)
    assert policy.action_chunks_len == case.config.model.action_chunks_len <= policy.sft_chunk_len
    assert prediction.actions.shape[2] == case.config.model.action_token_len
    assert prediction.sequences.dtype in (torch.int64, torch.float32)
    assert not any(tensor.requires_grad for tensor in prediction)


def test_rows_of_one_prompt_length_are_preprocessed_together_without_padding(case, policy, observation):
    alone = [policy.preprocess(observation.select([row])) for row in range(len(observation))]
    lengths = policy.prompt_lengths(observation)
    assert len(lengths) == len(observation)
    for length in set(lengths):
        rows = [row for row in range(len(observation)) if lengths[row] == length]
        together = policy.preprocess(observation.select(rows))
        for name, tensor in together.items():
            torch.testing.assert_close(tensor, torch.cat([alone[row][name] for row in rows]), atol=1e-6, rtol=1e-6)
    shapes = [{name: tensor.shape for name, tensor in inputs.items()} for inputs in alone]
    different = [shape != shapes[0] for shape in shapes]  # a control: the instructions have different lengths
    assert any(different) == (len(set(lengths)) > 1) and [length != lengths[0] for length in lengths] == different


def test_what_stands_in_padding_does_not_matter(policy, observation):
    inputs = policy.preprocess(observation)
    if "attention_mask" not in inputs:
        assert "input_ids" not in inputs
        return
    before = policy.predict_action_batch(**inputs, do_sample=False)
    padding = inputs["attention_mask"] == 0
    assert padding.any()
    noise = torch.where(padding, inputs["input_ids"] + 5, inputs["input_ids"])
    after = policy.predict_action_batch(**inputs | {"input_ids": noise}, do_sample=False)
    torch.testing.assert_close(after.logits, before.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after.values, before.values, atol=1e-5, rtol=0)
    changed = inputs["input_ids"].clone()
    changed[:, -1] += 1
    control = policy.predict_action_batch(**inputs | {"input_ids": changed}, do_sample=False)
    assert (control.logits - before.logits).abs().max() > 1e-4, "control: a word that is not a padding matters"


def test_sampling_without_uniforms_draws_from_the_global_generator(policy, observation):
    first, again, other = (torch.manual_seed(seed) and act(policy, observation).sequences for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_actions_of_token_policies_lie_within_the_statistics(case, policy, observation):
    settings = {"temperature": 20.0, "uniforms": case.uniforms()}
    wide = act(policy, observation, **settings)
    if wide.sequences.is_floating_point():
        return
    overrides = copy.deepcopy(case.overrides)
    (statistics,) = (entry["action"] for entry in overrides["norm_stats"].values())
    statistics["q01"], statistics["q99"] = [-0.25] * wide.actions.shape[-1], [0.5] * wide.actions.shape[-1]
    narrow = act(replace(case, overrides=overrides).build(), observation, **settings)
    assert torch.equal(narrow.sequences, wide.sequences)
    assert (narrow.actions >= -0.25 - 1e-6).all() and (narrow.actions <= 0.5 + 1e-6).all()
    assert narrow.actions.max() > 0.25, "control: the range is used"
    assert (wide.actions < -0.25).any() and (wide.actions > 0.5).any(), "control: the statistics give the bounds"


def test_cloning_loss_is_one_number_per_row_and_falls(case, observation):
    policy = copy.deepcopy(case.policy)
    inputs, uniforms = policy.preprocess(observation), case.sft_uniforms()

    def loss_of(actions, rows=slice(None)):
        picked = policy.preprocess(observation.select(range(len(observation))[rows]))
        drawn = () if uniforms is None else (uniforms[rows],)
        return policy.sft_loss(picked, actions[rows], *drawn)

    before = loss_of(case.actions)
    assert before.shape == (len(observation),) and before.dtype == torch.float32 and torch.isfinite(before).all()
    torch.testing.assert_close(loss_of(case.actions, slice(1, 2))[0], before[1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(loss_of(case.actions.flip(0)), before), "control: other actions, another loss"
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        policy.sft_loss(inputs, case.actions, *(() if uniforms is None else (uniforms,))).mean().backward()
        optimizer.step()
    assert loss_of(case.actions).mean() < 0.9 * before.mean() - 0.01


def with_gradient(policy):
    return {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


@pytest.mark.parametrize("detach_value", [True, False])
def test_gradients_reach_exactly_what_they_should(case, observation, detach_value):
    policy = case.build(detach_value=detach_value)
    trainable = {name for name, p in policy.named_parameters() if p.requires_grad}
    value_head = {name for name in trainable if name.startswith("value_head.")}
    assert value_head
    frozen_layer = next(iter(sorted(trainable - value_head)))
    policy.get_parameter(frozen_layer).requires_grad_(False)
    inputs = policy.preprocess(observation)
    evaluation = policy.evaluate_actions(inputs, act(policy, observation, uniforms=case.uniforms()).sequences)
    evaluation.values.sum().backward(retain_graph=True)
    reached = with_gradient(policy)
    assert reached >= value_head
    trunk_is_shared = case.name != "mlp"
    assert (reached == value_head) == (detach_value or not trunk_is_shared)
    policy.zero_grad()
    (evaluation.logprobs.sum() + 0.1 * evaluation.entropy.sum()).backward()
    expected = trainable - value_head - {frozen_layer}
    assert {name for name in expected if not case.is_idle(name)} <= with_gradient(policy) <= expected


def test_saved_and_loaded_policy_is_the_same(case, observation, tmp_path):
    policy = case.policy
    write_policy(tmp_path, policy, policy.state_dict())
    again = case.load(tmp_path)
    assert policy.state_dict().keys() == again.state_dict().keys()
    uniforms = case.uniforms()
    first, second = (act(each, observation, uniforms=uniforms) for each in (policy, again))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    trained, loaded = ({name for name, p in each.named_parameters() if p.requires_grad} for each in (policy, again))
    assert trained == loaded


def test_parameters_are_counted_on_the_meta_device(case, policy, tmp_path):
    write_policy(tmp_path, policy, policy.state_dict())
    model = replace(case.config.model, model_path=str(tmp_path), init_config={})
    expected = {name: (p.shape, p.dtype, p.requires_grad) for name, p in policy.named_parameters()}
    for config in (case.config, replace(case.config, model=model)):
        counted = policy_on_meta_device(config)
        assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in counted.named_parameters()} == expected
        assert {p.device.type for p in counted.parameters()} == {"meta"}


def test_bfloat16_stays_close_to_float32(case, policy, observation):
    half = case.half
    for name, parameter in half.named_parameters():
        is_exact = name.split(".")[0] in half.float32_modules
        assert parameter.dtype == (torch.float32 if is_exact else torch.bfloat16), name
    sequences = act(policy, observation, uniforms=case.uniforms()).sequences
    with torch.no_grad():
        exact, rounded = (each.evaluate_actions(each.preprocess(observation), sequences) for each in (policy, half))
    gaps = {name: float((getattr(exact, name) - getattr(rounded, name)).abs().max()) for name in BF16_BOUNDS}
    bounds = BF16_BOUNDS | {"logprobs": BF16_LOGPROBS.get(case.name, BF16_BOUNDS["logprobs"])}
    assert all(gaps[name] <= bound for name, bound in bounds.items()), gaps
    is_rounded = any(parameter.dtype == torch.bfloat16 for parameter in half.parameters())  # an mlp is all head
    assert (max(gaps.values()) > 0) == is_rounded, "control: the weights are rounded"


def test_heads_keep_their_digits_in_a_folder_of_bfloat16(case, observation, tmp_path):
    half = case.half
    write_policy(tmp_path, half, half.state_dict())
    own, loaded = half.state_dict(), case.load(tmp_path, precision="bf16").state_dict()
    assert all(torch.equal(tensor, loaded[name]) and tensor.dtype == loaded[name].dtype for name, tensor in own.items())
    heads = [tensor for name, tensor in own.items() if name.startswith("value_head.")]
    assert any(not torch.equal(head, head.bfloat16().float()) for head in heads), "control: more digits than 16 bits"
    prediction = act(half, observation, uniforms=case.uniforms())
    for tensor in (prediction.logits, prediction.values):
        assert tensor.dtype == torch.float32
        assert tensor.numel() == 0 or not torch.equal(tensor, tensor.bfloat16().float())


def test_values_alone_are_those_of_acting_without_decoding(case, policy, observation, monkeypatch):
    inputs = policy.preprocess(observation)
    expected = policy.predict_action_batch(**inputs, do_sample=False).values
    if isinstance(policy, TokenActionModel):
        monkeypatch.setattr(type(policy), "predict_action_batch", None)
    torch.testing.assert_close(policy.predict_values(**inputs), expected, atol=1e-5, rtol=0)


def test_values_of_a_rollout_are_those_of_evaluate_actions(case, policy, observation):
    inputs = policy.preprocess(observation)
    prediction = policy.predict_action_batch(**inputs, uniforms=case.uniforms())
    with torch.no_grad():
        values = policy.evaluate_actions(inputs, prediction.sequences[:, -policy.num_sampled :]).values
    assert torch.allclose(values, prediction.values, atol=1e-5, rtol=0) == policy.predicts_values


def test_lora_trains_adapters_and_what_is_trained_in_full(case, observation):
    policy = copy.deepcopy(case.adapted)
    trainable = {name for name, p in policy.named_parameters() if p.requires_grad}
    adapters = {name for name in trainable if ".lora_" in name}
    assert adapters and trainable - adapters == {n for n in policy.state_dict() if is_trained_in_full(policy, n)}
    assert not any(is_trained_in_full(policy, name) for name in adapters)
    inputs = policy.preprocess(observation)
    evaluation = policy.evaluate_actions(inputs, act(policy, observation, uniforms=case.uniforms()).sequences)
    (evaluation.logprobs.sum() + evaluation.values.sum()).backward()
    reached = with_gradient(policy)
    assert {name for name in adapters if not case.is_idle(name)} <= reached <= trainable


def test_adapters_are_saved_and_go_on_where_they_stopped(case, observation, tmp_path):
    policy, uniforms = case.adapted, case.uniforms()
    save_adapter(policy, tmp_path)
    again = apply_lora(copy.deepcopy(case.policy), case.lora, str(tmp_path)).eval()
    first, second, base = (act(each, observation, uniforms=uniforms) for each in (policy, again, case.policy))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first.logits, base.logits), "control: the adapters change the logits"
    trained, going_on = ({name for name, p in each.named_parameters() if p.requires_grad} for each in (policy, again))
    assert trained == going_on


def test_adapters_merge_into_a_copy_and_only_once(case, observation, tmp_path):
    policy = case.adapted
    inputs = policy.preprocess(observation)
    expected = act(policy, observation, do_sample=False)
    merged = merge_lora(policy, inputs)
    found = act(merged, observation, do_sample=False)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    base = act(case.policy, observation, do_sample=False)
    assert (base.logits - expected.logits).abs().max() > 1e-3, "control: the adapters change the logits"
    assert merged.state_dict().keys() == case.policy.state_dict().keys()
    with pytest.raises(CheckpointError, match="changed the"):
        merge_lora(policy, inputs, atol=-1.0)
    with pytest.raises(ConfigError, match="merged before"):
        merge_lora(merged, inputs)
    save_adapter(policy, tmp_path / "adapter")
    write_policy(tmp_path / "merged", merged, merged.state_dict())
    again = case.load(tmp_path / "merged")
    torch.testing.assert_close(act(again, observation, do_sample=False).logits, found.logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(CheckpointError, match="twice"):
        apply_lora(again, case.lora, str(tmp_path / "adapter"))
