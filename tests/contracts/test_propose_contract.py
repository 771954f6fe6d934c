"""What ``propose`` promises (``ActionModel.propose``), checked for each registered model on what an env gives."""

from dataclasses import replace

import pytest
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import ConfigError
from rlinf.models.embodiment.modules.readout_token import ReadoutToken
from rlinf.models.lora import apply_lora, is_trained_in_full, save_adapter
from rlinf.preflight.memory import policy_on_meta_device
from tests.contracts.test_model_contract import CASES, make_case

L1 = "openvla_oft, l1"
PROPOSING = {name: overrides for name, overrides in CASES.items() if name != "your_model_type"} | {
    L1: ["model=openvla_oft_tiny", "env.state=proprio", "+model.init_config.action_head=l1"]
}
NUM_CANDIDATES = 4
BACKBONES = {
    "mlp": ["policy.0"],
    "cnn": ["encoder", "policy.0"],
    "openvla": ["vision_backbone", "language_model.model.layers.0"],
    "openvla_oft": ["vision_backbone", "language_model.model.layers.0"],
    "hf_vla": ["vlm.model.vision_tower", "vlm.model.language_model.layers.0"],
    "pi0": ["vision_tower", "language_model.layers.0"],
}
"""Modules through which images and prompts go, by model type."""


@pytest.fixture(scope="module", params=PROPOSING)
def case(request):
    return make_case(request.param, build_config(compose_config([*PROPOSING[request.param], "env=tabletop"])))


WITHOUT_PREFIX = ("mlp", "cnn")


@pytest.fixture(params=["hidden", "pooled", "token"])
def policy(case, request):
    if request.param == "token":
        if case.name in WITHOUT_PREFIX:
            pytest.skip(f"{case.name} has no states of images and prompt, and model.features=token is rejected for it")
        torch.manual_seed(3)
        case.policy.readout_token = ReadoutToken(prefix_width(case)).eval()
    case.policy.feature_kind = request.param
    yield case.policy
    case.policy.feature_kind = "hidden"
    if request.param == "token":
        case.policy.readout_token = None


def prefix_width(case):
    """``H``, width of the states of images and prompt."""
    config = case.policy.config
    return config.hidden_size if case.config.model.model_type == "pi0" else config.text_config.hidden_size


def uniforms_for(policy, num_rows, seed=0):
    shape = (num_rows, NUM_CANDIDATES - 1, policy.num_candidate_uniforms)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def propose(policy, observation, seed=0):
    uniforms = uniforms_for(policy, len(observation), seed)
    return policy.propose(policy.preprocess(observation), NUM_CANDIDATES, uniforms)


def greedy(policy, observation):
    return policy.predict_action_batch(**policy.preprocess(observation), do_sample=False)


def is_deterministic(policy):
    return policy.num_candidate_uniforms == 0


def test_shapes_are_known_before_a_batch(case, policy):
    feature_dim, rows = policy.feature_dim, len(case.observation)
    chunks, features, _ = propose(policy, case.observation)
    chunk_shape = (policy.action_chunks_len, case.config.model.action_token_len)
    assert chunks.shape == (rows, NUM_CANDIDATES, *chunk_shape) and features.shape == (rows, feature_dim)
    assert chunks.dtype == features.dtype == torch.float32
    assert features.isfinite().all() and not chunks.requires_grad and not features.requires_grad


def test_the_first_candidate_is_the_greedy_action_bit_for_bit(case, policy):
    expected = greedy(policy, case.observation).actions
    chunks, features, _ = propose(policy, case.observation)
    assert torch.equal(chunks[:, 0], expected)
    alone = policy.propose(policy.preprocess(case.observation))
    assert torch.equal(alone.chunks, expected[:, None]) and torch.equal(alone.features, features)
    others_differ = [not torch.equal(chunks[:, index], expected) for index in range(1, NUM_CANDIDATES)]
    assert others_differ == [not is_deterministic(policy)] * (NUM_CANDIDATES - 1), "control: the others are drawn"


def test_uniforms_decide_the_other_candidates(case):
    policy = case.policy
    first, again, other = (propose(policy, case.observation, seed) for seed in (0, 0, 1))
    assert torch.equal(first.chunks, again.chunks) and torch.equal(first.features, other.features)
    assert torch.equal(first.chunks, other.chunks) == is_deterministic(policy)
    uniforms = uniforms_for(policy, len(case.observation))
    if policy.num_candidate_uniforms == policy.num_uniforms:
        for index in range(NUM_CANDIDATES - 1):
            drawn = policy.predict_action_batch(
                **policy.preprocess(case.observation), uniforms=uniforms[:, index]
            ).actions
            torch.testing.assert_close(first.chunks[:, 1 + index], drawn, atol=1e-5, rtol=1e-5)
            assert not torch.allclose(first.chunks[:, 1 + index], drawn.roll(1, 0), atol=1e-3), "control: another row's"


def test_chunks_that_are_drawn_later_are_those_that_are_drawn_at_once(case):
    policy = case.policy
    inputs, uniforms = policy.preprocess(case.observation), uniforms_for(policy, len(case.observation))
    at_once = policy.propose(inputs, NUM_CANDIDATES, uniforms)
    begun = policy.propose(inputs, resumable=True)
    assert at_once.sample is None and torch.equal(begun.features, at_once.features)
    assert torch.equal(begun.sample(uniforms), at_once.chunks[:, 1:])
    one = begun.sample(uniforms[:, 1:2])[:, 0]  # again, and fewer
    torch.testing.assert_close(one, at_once.chunks[:, 2], atol=1e-5, rtol=1e-5)
    assert torch.equal(begun.chunks, at_once.chunks[:, :1]), "what is drawn later leaves the greedy chunk as it is"


def test_noise_of_a_head_decides_a_chunk(case):
    policy, rows = case.policy, len(case.observation)
    begun, width = policy.propose(policy.preprocess(case.observation), resumable=True), policy.steering_dim
    noise = torch.linspace(-2, 2, rows * width).view(rows, width)
    drawn = [
        begun.sample(policy.steering_uniforms(each).unsqueeze(1)) for each in (noise, noise.clone(), -noise, 0 * noise)
    ]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2]) == is_deterministic(policy)
    uniforms = policy.steering_uniforms(noise)
    assert uniforms.shape == (rows, policy.num_candidate_uniforms) and ((uniforms > 0) & (uniforms < 1)).all()
    normal = torch.distributions.Normal(0.0, 1.0).icdf(uniforms).reshape(rows, -1, max(1, width))
    if width:
        torch.testing.assert_close(
            normal, noise.unsqueeze(1).expand_as(normal), atol=1e-4, rtol=1e-4
        )  # of a flow, once for each action of the horizon
    if case.config.model.model_type in ("mlp", "cnn"):
        torch.testing.assert_close(drawn[3], begun.chunks)  # the median of a Gaussian is its mode


def test_without_uniforms_candidates_come_from_the_global_generator(case):
    policy = case.policy
    inputs = policy.preprocess(case.observation)
    chunks = [torch.manual_seed(seed) and policy.propose(inputs, 3).chunks for seed in (1, 1, 2)]
    assert torch.equal(chunks[0], chunks[1])
    assert torch.equal(chunks[0], chunks[2]) == is_deterministic(policy)


def test_a_row_does_not_depend_on_the_others(case, policy):
    observation, uniforms = case.observation, uniforms_for(policy, len(case.observation))
    together = propose(policy, observation)
    for row in range(len(observation)):
        alone = policy.propose(policy.preprocess(observation.select([row])), NUM_CANDIDATES, uniforms[row : row + 1])
        torch.testing.assert_close(alone.chunks[0], together.chunks[row], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(alone.features[0], together.features[row], atol=1e-4, rtol=1e-4)
    spread = (together.features - together.features[:1]).abs().amax(1)[1:]
    assert (spread > 1e-3).all(), "control: rows differ"


def test_images_and_prompt_are_read_once_however_many_candidates(case, policy):
    inputs, counts = policy.preprocess(case.observation), {}

    def count(name):
        def hook(module, arguments, output):
            positions = arguments[0].shape[:-1] if arguments else ()
            if len(positions) < 2 or positions[1] > 1:  # one position is a token that is being decoded
                counts.setdefault(name, []).append(tuple(positions))

        return hook

    names = BACKBONES[case.config.model.model_type]
    hooks = [policy.get_submodule(name).register_forward_hook(count(name)) for name in names]
    try:
        proposal = policy.propose(inputs, NUM_CANDIDATES, uniforms_for(policy, len(case.observation)), resumable=True)
        proposal.sample(uniforms_for(policy, len(case.observation), seed=1))
        proposing = dict(counts)
        counts.clear()
        policy.predict_action_batch(**inputs, do_sample=False)
        assert proposing == counts and {len(calls) for calls in counts.values()} == {1}
        policy.predict_action_batch(**inputs, do_sample=False)
        assert {len(calls) for calls in counts.values()} == {2}, "control: a second pass is counted"
    finally:
        for hook in hooks:
            hook.remove()


def test_uniforms_of_another_shape_are_refused(case):
    policy = case.policy
    inputs, uniforms = policy.preprocess(case.observation), uniforms_for(policy, len(case.observation))
    with pytest.raises(ValueError, match=r"uniforms has the shape \[4, 3, .*expected \[4, 2, "):
        policy.propose(inputs, NUM_CANDIDATES - 1, uniforms)
    with pytest.raises(ValueError, match="num_candidates is 0; expected at least 1"):
        policy.propose(inputs, 0)


def test_the_setting_reaches_the_policy_and_its_width_needs_no_weights(case):
    for kind in ("hidden", "pooled") if case.name in WITHOUT_PREFIX else ("hidden", "pooled", "token"):
        built = case.build(features=kind)
        empty = policy_on_meta_device(replace(case.config, model=replace(case.config.model, features=kind)))
        assert built.feature_kind == kind and built.feature_dim == empty.feature_dim


def read_action(policy, observation, features):
    """The greedy action, read from ``hidden`` features by the actor of the model."""
    if hasattr(policy, "policy"):
        return policy.decode_actions(policy.policy[-1](features))
    if hasattr(policy, "expert"):
        sequences = policy.predict_action_batch(**policy.preprocess(observation), do_sample=False).sequences
        chain, velocity = (
            policy._split(sequences)[0],
            policy.action_out_proj(features.unflatten(1, (policy.action_chunks_len, -1))),
        )
        last = chain[:, -2, : policy.action_chunks_len] - velocity / policy.config.num_steps
        return policy.action_normalizer.unnormalize(last[..., : policy.action_dim]).float()
    states = features.unflatten(1, (policy.num_logprobs, -1))
    if getattr(policy, "action_head", None) is not None:
        return policy.decode_actions(policy.action_head(states).flatten(1))
    logits = policy.vlm.get_output_embeddings()(states) if hasattr(policy, "vlm") else policy._bin_logits(states)
    return policy.decode_actions(logits.argmax(-1) + policy.action_tokenizer.first_token)


@torch.no_grad()
def test_the_greedy_action_is_read_from_the_hidden_features(case):
    chunks, features, _ = propose(case.policy, case.observation)
    torch.testing.assert_close(read_action(case.policy, case.observation, features), chunks[:, 0], atol=1e-5, rtol=1e-5)
    control = read_action(case.policy, case.observation, -features)
    assert (control - chunks[:, 0]).abs().max() > 1e-3, "control: other features give another action"


def test_features_see_every_input(case, policy):
    inputs, before = policy.preprocess(case.observation), propose(policy, case.observation).features
    others = case.observation.select([1, 2, 3, 0])
    for part in ("images", "state", "instruction"):
        if (given := getattr(case.observation, part)) is None or not len(given):
            continue
        changed = replace(case.observation, **{part: getattr(others, part)})
        is_read = any(
            x.shape != inputs[name].shape or not torch.equal(x, inputs[name])
            for name, x in policy.preprocess(changed).items()
        )
        difference = (propose(policy, changed).features - before).abs().amax(1)
        assert (difference > 1e-4).all() == is_read, part


@torch.no_grad()
def test_candidates_of_a_flow_begin_with_the_given_noise():
    case = make_case("pi0", build_config(compose_config([*CASES["pi0"], "env=tabletop"])))
    policy, config = case.policy, case.policy.config
    inputs, uniforms = policy.preprocess(case.observation), uniforms_for(case.policy, len(case.observation))
    found = policy.propose(inputs, NUM_CANDIDATES, uniforms).chunks
    prefix = policy.encode_prefix(**inputs)
    for index in range(NUM_CANDIDATES - 1):
        noise = torch.special.ndtri(uniforms[:, index].double()).float()
        x = noise.view(-1, config.action_horizon, config.action_dim)
        for step in range(config.num_steps):
            t = torch.full((len(x),), 1.0 - step / config.num_steps)
            x = x - policy.velocity(prefix, inputs.get("state"), x, t)[0] / config.num_steps
        actions = x[:, : policy.action_chunks_len, : policy.action_dim]
        expected = policy.action_normalizer.unnormalize(actions).float()
        torch.testing.assert_close(found[:, 1 + index], expected, atol=1e-4, rtol=1e-4)
        assert (found[:, 0] - expected).abs().max() > 1e-2, "control: the greedy one starts elsewhere"


@pytest.fixture
def token_case(case):
    if case.name in WITHOUT_PREFIX:
        with pytest.raises(ConfigError, match="no hidden states of images and prompt.*Set model.features=hidden"):
            case.build(features="token")
        pytest.skip("it has been rejected")
    return replace(case, config=replace(case.config, model=replace(case.config.model, features="token")))


def cloning_losses(policy, case):
    losses = policy.sft_loss(policy.preprocess(case.observation), case.actions, case.sft_uniforms())
    policy.zero_grad()
    losses.sum().backward()
    return losses.detach(), {name: each.grad for name, each in policy.named_parameters()}


def test_cloning_trains_the_token_and_the_token_changes_nothing_else(token_case):
    plain, plain_grads = cloning_losses(token_case.build(features="hidden"), token_case)
    losses, grads = cloning_losses(token_case.build(), token_case)
    assert (losses > plain + 0.1).all()
    own = {name: grad for name, grad in grads.items() if name.startswith("readout_token.")}
    assert own and all(grad is not None and bool(grad.abs().sum() > 0) for grad in own.values())
    assert grads.keys() - own.keys() == plain_grads.keys()
    for name, grad in plain_grads.items():
        assert (grads[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(grads[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_the_token_lies_in_folders_and_beside_adapters(token_case, tmp_path):
    policy, observation = token_case.build(), token_case.observation
    policy.save_pretrained(tmp_path / "whole")
    loaded = token_case.load(tmp_path / "whole")
    assert torch.equal(propose(loaded, observation).features, propose(policy, observation).features)
    policy = apply_lora(token_case.build(), token_case.config.model.lora)
    trained = {name.split(".")[0] for name, each in policy.named_parameters() if each.requires_grad}
    assert "readout_token" in trained and is_trained_in_full(policy, "readout_token.token")
    with torch.no_grad():
        policy.readout_token.token += 1.0
    save_adapter(policy, tmp_path / "adapter")
    other = apply_lora(token_case.build(), token_case.config.model.lora, tmp_path / "adapter")
    assert torch.equal(other.readout_token.token, policy.readout_token.token)
    assert all(each.dtype == torch.float32 for each in token_case.build(precision="bf16").readout_token.parameters())
