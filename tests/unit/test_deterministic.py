"""``trainer.deterministic``: torch rejects kernels that do not repeat, and tokens are drawn without one."""

from __future__ import annotations

import pytest
import torch

from rlinf.models import sampling
from rlinf.seeding import seed_everything


@pytest.fixture
def own_settings():
    """Give torch's settings back at the end."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def write(numbers):
    """An operation that torch has no deterministic kernel for, on CPUs either."""
    numbers.put_(torch.tensor([0]), torch.tensor([1.0]))


def test_torch_refuses_what_does_not_repeat(own_settings, monkeypatch):
    seed_everything(0)
    write(torch.zeros(2))
    environment = {}
    monkeypatch.setattr("os.environ", environment)
    seed_everything(0, deterministic=True)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with pytest.raises(RuntimeError, match="deterministic"):
        write(torch.zeros(2))
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    seed_everything(0, deterministic=True)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, "the user's own stays"
    seed_everything(0)
    write(torch.zeros(2))
    torch.use_deterministic_algorithms(True)
    seed_everything(0)
    assert torch.are_deterministic_algorithms_enabled(), "the caller's own choice stays"


@pytest.mark.parametrize("width", [1, 7, 256, 257, 5000, 70_001])
def test_sums_by_blocks_are_running_sums(width):
    numbers = torch.rand(3, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    torch.testing.assert_close(sampling.sums_by_blocks(numbers), numbers.cumsum(-1), rtol=1e-12, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = sampling.sums_by_blocks(numbers.float())
    torch.testing.assert_close(sums.double(), numbers.cumsum(-1), rtol=1e-5, atol=0)
    if width > 256:
        assert not torch.allclose(sampling.sums_by_blocks(numbers)[:, 1:], numbers.cumsum(-1)[:, :-1]), "control"


def test_tokens_are_the_same_by_blocks(monkeypatch):
    logits = 5 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(1))
    expected = sampling.sample_tokens(logits, True, uniforms=uniforms)
    monkeypatch.setattr(sampling, "_running_sums", sampling.sums_by_blocks)
    assert torch.equal(sampling.sample_tokens(logits, True, uniforms=uniforms), expected)
    monkeypatch.setattr(sampling, "_running_sums", lambda numbers: numbers.flip(-1).cumsum(-1))
    assert not torch.equal(sampling.sample_tokens(logits, True, uniforms=uniforms), expected), "control"
