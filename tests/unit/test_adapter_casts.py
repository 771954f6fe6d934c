"""Adapters compute in the number format of the weights below them, so no call casts between the two."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.models import build_policy

WORDS = ["experiment=tabletop_openvla_oft_tiny", "model.precision=bf16"]


class Casts(TorchDispatchMode):
    """Counts changes of the number format."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "_to_copy" in func._schema.name and out.dtype != args[0].dtype:
            self.num += 1
        return out


def built(*words):
    return build_policy(build_config(compose_config([*WORDS, *words]))).eval()


def num_casts(model):
    hidden = torch.zeros(1, 4, model.config.text_config.hidden_size, dtype=torch.bfloat16)
    with Casts() as casts, torch.no_grad():
        for layer in model.language_model.model.layers:
            layer.mlp(hidden), layer.self_attn.q_proj(hidden)
    return casts.num


def test_adapters_cast_nothing():
    assert num_casts(built()) == 0
    adapted = built("model.is_lora=true")
    assert {p.dtype for name, p in adapted.named_parameters() if ".lora_" in name} == {torch.bfloat16}
    assert num_casts(adapted) == 0
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    assert num_casts(adapted) > 0, "control"
