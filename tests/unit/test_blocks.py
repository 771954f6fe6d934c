"""Recomputed and compiled blocks: the same values and gradients, for every family; less memory; nothing without gradients."""

import copy
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from rlinf.commands.open_checkpoint import statistics_of_env
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import Sharded
from rlinf.distributed.process_group import rank
from rlinf.envs import make_env
from rlinf.errors import ConfigError
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.models import build_policy, get_model
from rlinf.models import layers as module
from rlinf.models.layers import find_layers, set_training_options
from rlinf.preflight.validation import validate

CASES = {
    "openvla": ["model=openvla_tiny", "model.is_lora=true"],
    "openvla_oft": ["model=openvla_oft_tiny", "env.state=proprio"],
    "pi0": ["model=pi0_tiny", "env.state=proprio"],
    "hf_vla": ["model=hf_vla_tiny"],
    "cnn": ["model=cnn"],
    "mlp": ["model=mlp"],
}
DEEP = [
    "model=openvla_tiny",
    "model.init_config.vision_overrides=[{embed_dim: 128, depth: 6, num_heads: 4, mlp_ratio: 2}]",
]
"""Six blocks in a tower: four that are recomputed together, and two."""
WITHOUT_BLOCKS = ("cnn", "mlp")
TOLERANCE = {"atol": 2e-5, "rtol": 2e-4}


def small_policy(*overrides):
    """A policy with random weights, and rows for it."""
    config = build_config(compose_config([*overrides, "env=tabletop"]))
    env = make_env(config.env, 3, auto_reset=False)
    observation, _ = env.reset(options={"episodes": list(env.episode_specs("train")[:3])})
    torch.manual_seed(0)
    policy = build_policy(config, statistics_of_env(config, env))
    env.close()
    return policy, observation


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """Name, policy, observation and actions."""
    policy, observation = small_policy(*CASES[request.param])
    with torch.no_grad():  # no part is idle
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return request.param, policy, observation


@pytest.fixture
def quick(monkeypatch):
    """Trace and differentiate as ``torch.compile`` does, without generating code, which takes a minute."""
    module._compile.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters.clear()
    torch._dynamo.reset()
    yield
    module._compile.cache_clear()
    torch._dynamo.reset()


def score(policy, observation):
    """Values of one scoring pass, its gradients, and how many bytes it kept for them."""
    policy.train().zero_grad()
    inputs = policy.preprocess(observation)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        uniforms = torch.rand(len(observation), policy.num_uniforms, generator=generator).clamp_min(1e-6)
        sequences = policy.predict_action_batch(**inputs, uniforms=uniforms).sequences
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scored = policy.evaluate_actions(inputs, sequences)
        loss = scored.logprobs.sum() + scored.values.square().sum()
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return scored.logprobs.detach(), gradients, sum(size for place, size in kept.items() if place not in weights)


def assert_same(found, plain):
    torch.testing.assert_close(found[0], plain[0], **TOLERANCE)
    assert found[1].keys() == plain[1].keys() and len(plain[1]) > 4
    for name, gradient in plain[1].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name, **TOLERANCE)


def test_blocks_of_a_tower_are_recomputed_once_and_keep_one_input(monkeypatch):
    policy, observation = small_policy(*DEEP)
    blocks = policy.vision_backbone.featurizer.blocks
    plain, passes = score(policy, observation), []
    for block in blocks:
        block.register_forward_pre_hook(lambda block, *_: passes.append(block) if torch.is_grad_enabled() else None)
    set_training_options(policy, recomputed=True, compiled=False)
    found = {}
    for together in (4, 1):
        monkeypatch.setattr(module, "TOGETHER", together)
        found[together] = score(policy, observation)
        assert [passes.count(block) for block in blocks] == [2] * 6, "forwards and for the gradient"
        passes.clear()
    for logprobs, gradients, _ in found.values():
        assert torch.equal(logprobs, plain[0])
        assert all(torch.equal(gradient, plain[1][name]) for name, gradient in gradients.items())
    num_patches = policy.vision_backbone.featurizer.spec.grid_size**2
    inputs = len(observation) * num_patches * 128 * torch.float32.itemsize
    assert found[1][2] - found[4][2] == 4 * inputs, "of four blocks that are not the first of their group"


def test_recomputed_blocks_keep_less_and_change_no_gradient(case):
    name, policy, observation = case
    plain = score(policy, observation)
    changed = copy.deepcopy(policy)
    if name in WITHOUT_BLOCKS:
        with pytest.raises(ConfigError, match="has no repeated layers.*gradient_checkpointing=False"):
            set_training_options(changed, recomputed=True, compiled=False)
        return
    set_training_options(changed, recomputed=True, compiled=False)
    found = score(changed, observation)
    assert_same(found, plain)
    assert found[2] < 0.5 * plain[2]
    again = score(copy.deepcopy(changed), observation)  # a copy computes with its own weights
    assert_same(again, plain)
    copied = copy.deepcopy(changed)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.1)
    moved = score(copied, observation)[1]
    gaps = [(moved[name] - gradient).abs().max() for name, gradient in plain[1].items()]
    assert max(gaps) > 1e-2, "control: the copy's weights count"


def test_compiled_blocks_change_no_gradient(case, quick):
    """With recomputed blocks, where there are any."""
    name, policy, observation = case
    plain = score(policy, observation)
    changed = copy.deepcopy(policy)
    set_training_options(changed, recomputed=name not in WITHOUT_BLOCKS, compiled=True)
    with torch.no_grad():
        changed.eval().evaluate_actions(changed.preprocess(observation), score_sequences(changed, observation))
    assert counters["stats"]["calls_captured"] == 0, "nothing is compiled where no gradient is needed"
    assert_same(score(changed, observation), plain)
    assert counters["stats"]["calls_captured"] > 0
    graphs = counters["stats"]["unique_graphs"]
    assert_same(score(changed, observation), plain)
    assert counters["stats"]["unique_graphs"] == graphs, "a second pass compiles nothing"


def score_shards(folder):
    """Write what one of two ranks computes with compiled, recomputed blocks in shards."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    policy, observation = small_policy(*DEEP)
    set_training_options(policy, recomputed=True, compiled=True)
    parallel = Sharded(policy, "cpu")
    for _ in range(2):  # the second pass finds the code of the first
        policy.zero_grad()
        scored = policy.evaluate_actions(policy.preprocess(observation), torch.full((3, policy.num_sampled), 530))
        parallel.start_backward(is_last=True)
        scored.logprobs.sum().backward()
    gradients = {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None}
    torch.save([scored.logprobs.detach(), gradients, dict(counters["stats"])], f"{folder}/rank{rank()}.pt")


def test_compiled_and_recomputed_shards_give_the_gradients_of_a_plain_model(tmp_path):
    launch(score_shards, str(tmp_path), 2, "cpu")
    policy, observation = small_policy(*DEEP)
    plain = policy.evaluate_actions(policy.preprocess(observation), torch.full((3, policy.num_sampled), 530)).logprobs
    plain.sum().backward()
    for number in range(2):
        logprobs, gradients, stats = torch.load(tmp_path / f"rank{number}.pt")
        assert stats["calls_captured"] > 0
        torch.testing.assert_close(logprobs, plain.detach(), **TOLERANCE)
        for name, parameter in policy.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], 2 * parameter.grad, msg=name, **TOLERANCE)  # of two ranks


def score_sequences(policy, observation):
    inputs = policy.preprocess(observation)
    return policy.predict_action_batch(**inputs, do_sample=False).sequences


def test_generated_code_of_a_compiled_model():
    """The only test with generated code: one small layer class, whose compilation takes seconds."""
    section = {"model_type": "mlp", "init_config": {"state_dim": 3, "hidden_sizes": [8]}, "action_token_len": 2}
    torch.manual_seed(0)
    plain = get_model(section)
    compiled = get_model(section | {"compile": True})
    compiled.load_state_dict(plain.state_dict())
    inputs = {"state": torch.randn(5, 3)}
    counters.clear()
    for model in (plain, compiled):
        model.evaluate_actions(inputs, torch.full((5, 2), 0.3)).logprobs.sum().backward()
    assert counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"] > 0
    for (name, ours), (_, wanted) in zip(compiled.named_parameters(), plain.named_parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(ours.grad, wanted.grad, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"compile": True}])
def test_token_policies_take_the_same_options(tiny_lm, quick, options):
    ids = torch.arange(3, 23).view(2, 10) % 48
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain, changed = HuggingFacePolicy(tiny_lm()), HuggingFacePolicy(tiny_lm(), **options)
    assert len(find_layers(changed.model)) == 2
    gradients = []
    for policy in (plain, changed):
        policy._logprobs(policy.model, batch).sum().backward()
        gradients.append([p.grad for p in policy.model.parameters()])
    for ours, wanted in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)
    assert (counters["stats"]["calls_captured"] > 0) == ("compile" in options)


def test_no_compiler_is_refused_by_name_before_a_model_loads(monkeypatch):
    def no_compiler():
        raise module.InvalidCxxCompiler

    config = build_config(compose_config(["model=openvla_tiny", "env=tabletop", "model.compile=true"]))
    validate(config)
    monkeypatch.setenv("CXX", "absent-c++")
    monkeypatch.setattr(module, "get_cpp_compiler", no_compiler)
    missing = r"needs a C\+\+ compiler on CPU.*no working absent-c\+\+.*"
    with pytest.raises(ConfigError, match=f"{missing}Set model.compile=false"):
        validate(config)
    with pytest.raises(ConfigError, match=f"{missing}Pass compile=False"):
        HuggingFacePolicy("a folder that is not there", compile=True, device_map="cpu")
    validate(config, "evaluate")  # an evaluation compiles nothing
