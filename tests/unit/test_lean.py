"""Lean parts of a layer: the bits of transformers' own, forwards and backwards, with less kept."""

import copy

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from rlinf.models.embodiment.openvla.llama_layer import LeanMLP, LeanRMSNorm

WIDTH, ROWS = 64, (3, 50)
PAIRS = {
    "mlp": (lambda: LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=96)), LeanMLP),
    "norm": (lambda: LlamaRMSNorm(WIDTH), LeanRMSNorm),
}


def run(module, x, gradient):
    """Result, gradients of input and weights, and the bytes that are kept beside input and weights."""
    x, kept = x.clone().requires_grad_(), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = module(x)
    # A residual connection adds a third term to the gradient of the input.
    (result.float() * gradient + x.float().sin() * gradient).sum().backward()
    for known in (x, *module.parameters()):
        kept.pop(known.untyped_storage().data_ptr(), None)
    weights = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return {"result": result, "input": x.grad, **weights}, sum(kept.values())


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_lean_parts_have_the_bits_of_transformers(name, weights, states, frozen):
    torch.manual_seed(0)
    build, lean = PAIRS[name]
    plain = build().to(weights).requires_grad_(not frozen)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    ours = copy.deepcopy(plain)
    ours.__class__ = lean
    x, gradient = 3 * torch.randn(*ROWS, WIDTH).to(states), torch.randn(*ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=weights != states):
        (wanted, kept), (found, less) = run(plain, x, gradient), run(ours, x, gradient)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert tensor.abs().max() > 0 and torch.equal(found[key], tensor), key
    assert less < kept or (name, states) == ("norm", torch.float32)
