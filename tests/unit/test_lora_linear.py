"""Adapted layers with fewer kernels: results and gradients of PEFT's own layers, and PEFT's code wherever they do not apply."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from torch import nn

from rlinf.models.lora_linear import FusedLoraLinear, fuse_adapters

WIDTHS = {"query": 24, "key": 8, "value": 8}


def layers(dtype=torch.float64, dropout=0.0, fused=True):
    """Three adapted layers of the same input of width 16."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(16, width, bias=name != "key") for name, width in WIDTHS.items()}).to(dtype)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=list(WIDTHS), lora_dropout=dropout, rank_pattern={"key": 2})
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    if fused:
        fuse_adapters(model)
    return model


def run(model, x, together=False):
    """Outputs, and the gradients of the input and of all adapters, of a sum with unequal weights."""
    x, members = x.clone().requires_grad_(), list(model.values())
    outputs = FusedLoraLinear.together(x, members) if together else tuple(layer(x) for layer in members)
    loss = sum((output.double() * torch.linspace(-1, 2, output.shape[-1])).sum() for output in outputs)
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    return [output.detach() for output in outputs], torch.autograd.grad(loss, [x, *adapters])


def test_a_result_may_be_changed_in_place_as_in_attention_of_olmo():
    doubled = [
        layers(fused=fused)["query"](torch.ones(2, 3, 16, dtype=torch.float64)).mul_(2) for fused in (True, False)
    ]
    torch.testing.assert_close(*doubled)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 5, 16), (0, 16)])
def test_results_and_gradients_are_pefts(together, shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(run(layers(), x, together), run(layers(fused=False), x), atol=1e-12, rtol=1e-12)


def test_bfloat16_rounds_less_than_pefts():
    x, errors = torch.randn(400, 16, generator=torch.Generator().manual_seed(1)).bfloat16(), {}
    for fused in (True, False):
        model = layers(torch.bfloat16, fused=fused)
        exact = run(copy.deepcopy(model).double(), x.double())  # with the same rounded weights
        pairs = [
            pair
            for kinds in zip(run(model, x, together=fused), exact, strict=True)
            for pair in zip(*kinds, strict=True)
        ]
        errors[fused] = [((result.double() - right).norm() / right.norm()).item() for result, right in pairs]
    assert all(0 < ours <= pefts for ours, pefts in zip(errors[True], errors[False], strict=True)), errors
    assert sum(errors[True]) < 0.9 * sum(errors[False])


CASES = {
    "disabled": lambda layer: layer.enable_adapters(False),
    "merged": lambda layer: layer.merge(),
    "trained base": lambda layer: layer.base_layer.weight.requires_grad_(),
    "hook": lambda layer: layer.base_layer.register_forward_hook(lambda base, inputs, output: output + 1),
    "formats": lambda layer: (layer.lora_A.half(), layer.lora_B.half()),
    "second adapter": lambda layer: (
        torch.manual_seed(3), layer.update_layer("more", 2, 4, config=LoraConfig(r=2)), layer.set_adapter(["default", "more"])
    ),
    "dropout": id, "autocast": id,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_other_cases_run_pefts_code(case, monkeypatch):
    x, calls, results = torch.randn(4, 16), [], []
    monkeypatch.setattr(Linear, "forward", lambda layer, *args, f=Linear.forward: calls.append(1) or f(layer, *args))
    for fused in (True, False):
        members = list(layers(torch.float32, 0.5 if case == "dropout" else 0.0, fused).requires_grad_(False).values())
        for layer in members:
            CASES[case](layer)
        torch.manual_seed(2)
        with torch.autocast("cpu", enabled=case == "autocast"):
            results.append(FusedLoraLinear.together(x, members))
    assert len(calls) == 6
    torch.testing.assert_close(*results, atol=0, rtol=0)
    FusedLoraLinear.together(x, list(layers(torch.float32).requires_grad_(False).values()))
    assert len(calls) == 6, "control: the usual case does not"
