"""The gradient of what a policy is trained by is its derivative: no term has lost its gradient on the way."""

import pytest
import torch

from rlinf.commands.export import random_observation
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.models import build_policy
from rlinf.models.embodiment.modules.normalizer import unit_range_stats

ROWS = 3
TEXT = ["model.hidden_size=16", "model.init_config.text_config.hidden_size=16", "model.init_config.text_config.intermediate_size=32",
        "model.init_config.text_config.num_hidden_layers=1",
        "model.init_config.vision_overrides=[{embed_dim: 16, depth: 1, num_heads: 2, mlp_ratio: 2}]"]  # fmt: skip
POLICIES = {
    "mlp": ["model=mlp", "model.init_config.state_dim=4"],
    "openvla": ["model=openvla_tiny", *TEXT],
    "openvla_oft": ["model=openvla_oft_tiny", *TEXT, "model.init_config.mlp_stem_dim=16"],
    "cnn": ["model=cnn", "env.image_size=64"],
    "hf_vla": ["model=hf_vla_tiny"],
    "pi0": ["model=pi0_tiny", "model.init_config.num_steps=2"],
    "pi0, learned noise": [
        "model=pi0_tiny",
        "model.init_config.num_steps=2",
        "model.init_config.noise_method=flow_noise",
    ],
}
KEYFRAMES = ("openvla", "openvla_oft", "hf_vla", "pi0")
POLICIES |= {f"{name}, keyframes": [*POLICIES[name], "model.features=keyframe"] for name in KEYFRAMES}


def policy_of(*overrides):
    """Return a policy whose weights are moved away from zeros, what it reads, and actions."""
    config = build_config(compose_config(["env=tabletop", "env.state=proprio", "env.image_size=32", *overrides]))
    torch.manual_seed(0)
    model = build_policy(config, {"norm_stats": unit_range_stats(2, 4)}).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    inputs = model.preprocess(random_observation(config, model, ROWS, seed=0))
    return model, inputs, torch.rand(ROWS, model.sft_chunk_len, 2) * 2 - 1


@pytest.fixture(scope="module", params=POLICIES)
def policy(request):
    return policy_of(*POLICIES[request.param])


def assert_gradient_is_derivative(model, loss) -> None:
    """Go a short way along the gradient, in both directions: the loss changes by its length, and not with what has none."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    value = loss()
    gradients = [None] * len(trained)
    if value.requires_grad:
        gradients = torch.autograd.grad(value, trained, allow_unused=True)
    idle = [(p, p.detach().clone()) for p, g in zip(trained, gradients, strict=True) if g is None or not g.any()]
    with torch.no_grad():
        for parameter, _ in idle:
            parameter += 0.1 * torch.randn_like(parameter)
        assert float(loss()) == pytest.approx(float(value.detach()), rel=1e-4, abs=1e-4)
        for parameter, before in idle:
            parameter.copy_(before)
    if len(idle) == len(trained):
        return
    length = float(sum(g.double().square().sum() for g in gradients if g is not None).sqrt())
    way = 2e-3 * max(1.0, abs(float(value.detach()))) / length
    ends = []
    with torch.no_grad():
        for sign in (1, -2):
            for parameter, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    parameter += sign * way / length * gradient
            ends.append(float(loss()))
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter += way / length * gradient
    assert (ends[0] - ends[1]) / (2 * way) == pytest.approx(length, rel=0.02)


def test_a_policy_clones_along_the_derivative_of_its_loss(policy):
    model, inputs, actions = policy
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.rand(ROWS, model.num_sft_uniforms, generator=generator)] if model.num_sft_uniforms else []
    assert_gradient_is_derivative(model, lambda: model.sft_loss(inputs, actions, *drawn).sum())


def test_log_probabilities_and_entropies_have_the_gradients_of_their_derivatives(policy):
    model, inputs, _ = policy
    uniforms = torch.rand(ROWS, model.num_uniforms, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        sequences = model.predict_action_batch(uniforms=uniforms, **inputs).sequences

    def scored(which: str):
        return lambda: getattr(model.evaluate_actions(inputs, sequences, 1.3), which).sum()

    assert_gradient_is_derivative(model, scored("logprobs"))
    assert_gradient_is_derivative(model, scored("entropy"))


@pytest.mark.parametrize(
    ("name", "more"),
    [("openvla", []), ("openvla_oft", []), ("openvla_oft", ["model.init_config.action_head=l1"])],
    ids=["openvla", "openvla_oft", "openvla_oft, l1"],
)
def test_the_token_and_the_policy_learn_side_by_side(name, more):
    """Each from its own loss: no gradient of the token's reaches the states that it reads."""
    model, inputs, actions = policy_of(*POLICIES[name], "model.features=token", *more)
    token, read = model.readout_token, []
    model.readout_token.register_forward_pre_hook(lambda _, given: read.append(given))
    losses = model.sft_loss(inputs, actions)
    own = token.loss(*read[0])
    model.readout_token = None
    others = model.sft_loss(inputs, actions)
    assert others.min() > 0 and own.min() > 0
    torch.testing.assert_close(losses, others + own)
    for module, expected in ((token, own), (model, others)):
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(losses.sum(), trained, retain_graph=True, allow_unused=True, materialize_grads=True)
        wanted = torch.autograd.grad(expected.sum(), trained, allow_unused=True, materialize_grads=True)
        assert any(gradient.any() for gradient in wanted)
        torch.testing.assert_close(found, wanted)


def test_a_control_whose_target_is_not_held_is_noticed():
    weight = torch.nn.Linear(2, 1, bias=False)
    x = torch.ones(3, 2)
    with pytest.raises(AssertionError):
        assert_gradient_is_derivative(weight, lambda: (weight(x) * weight(x).detach()).sum())
    with pytest.raises(AssertionError):
        assert_gradient_is_derivative(weight, lambda: weight(x).detach().sum())
    assert_gradient_is_derivative(weight, lambda: (weight(x) * weight(x)).sum())
