"""RMSNorm in one kernel on GPUs: only for modules that compute it, with less rounding, and with no change on CPUs."""

import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rlinf.models.norms import _is_rms_norm, _kernel, fuse_norms


class Shifted(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) + x


def test_only_modules_that_compute_an_rms_norm_are_converted():
    model = nn.ModuleList([LlamaRMSNorm(8), Qwen2RMSNorm(8), GemmaRMSNorm(8), Shifted(8), MambaRMSNormGated(8)])
    x = torch.randn(4, 8)
    before = [norm(x) for norm in model]
    fuse_norms(model)
    assert ["forward" in vars(norm) for norm in model] == [True, True, False, False, False]
    assert all(torch.equal(norm(x), result) for norm, result in zip(model, before, strict=True)), (
        "the same bits on a CPU"
    )
    with torch.device("meta"):
        assert _is_rms_norm.__wrapped__(Qwen2RMSNorm) and "forward" not in vars(LlamaRMSNorm(8)), "no class is changed"


def test_one_rounding_is_closer_to_the_exact_result_than_two():
    torch.manual_seed(0)
    x, weight, norm = torch.randn(200, 256).bfloat16(), torch.randn(256).bfloat16(), LlamaRMSNorm(256, 1e-6).bfloat16()
    norm.weight.data.copy_(weight)
    exact = weight.double() * x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    once, twice = ((result.double() - exact).abs() / exact.abs() for result in (_kernel(x, weight, 1e-6), norm(x)))
    assert once.max() <= 2**-8 * 1.01 < twice.max() and once.mean() < 0.8 * twice.mean()
