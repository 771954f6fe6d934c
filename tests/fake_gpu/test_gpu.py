"""The stand-in itself: what it counts, and what it rejects."""

import pytest
import torch
from torch import nn

from tests.fake_gpu.child import call
from tests.fake_gpu.gpu import FakeGpu

HERE = __name__


def basics():
    """Return the counts of small pieces of work."""
    found = {}
    with FakeGpu() as gpu:
        layer = gpu.place(nn.Linear(1024, 1024, device="meta"))
        before = gpu.live_bytes

        def count(name, work):
            with gpu.count() as counts:
                work()
            found[name] = counts.totals() | {"live": gpu.live_bytes - before}

        x = torch.zeros(8, 1024).to("cuda")
        count("forward", lambda: layer(x).relu())
        count("item", lambda: layer(x).sum().item())
        count("bool", lambda: bool((x > 0).any()))
        count("mask", lambda: x[x > 0])
        count("nonzero", lambda: x.nonzero())
        count("tolist", lambda: x[0].tolist())
        count("to the CPU", lambda: x.cpu())
        count("to the GPU", lambda: torch.ones(8).to("cuda"))
        count("sent", lambda: torch.ones(8).to("cuda", non_blocking=True))
        count("views", lambda: x.view(2, 4, 1024).transpose(0, 1)[0].detach())
        count("kept", lambda: found.setdefault("_", {"tensor": x * 2}))
        del found["_"]
        pinned = torch.empty(8, 1024, pin_memory=True)
        count("pinned", lambda: pinned.copy_(x, non_blocking=True))
        count("event", lambda: (event := torch.cuda.Event()).record() or event.synchronize())
        count("backward", lambda: layer(x).sum().cpu().backward())
        assert layer.weight.grad.is_cuda
        with torch.autocast("cuda", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        half = torch.zeros(1, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
        count("attention", lambda: nn.functional.scaled_dot_product_attention(half, half, half))
    return found


@pytest.fixture(scope="module")
def counted():
    return call(f"{HERE}:basics")


@pytest.mark.parametrize(
    ("work", "column", "number"),
    [
        ("forward", "launches", 2),
        ("forward", "peak_bytes", 4 * 1024 * 1024 + 4096 + 3 * 32768),  # weights, x, sum and its relu
        ("item", "syncs", 1),
        ("bool", "syncs", 1),
        ("mask", "syncs", 1),
        ("nonzero", "syncs", 1),
        ("tolist", "d2h", 1),
        ("to the CPU", "d2h", 1),
        ("to the CPU", "syncs", 0),
        ("to the GPU", "h2d", 1),
        ("to the GPU", "syncs", 1),  # as an H100 says
        ("sent", "h2d", 1),
        ("sent", "syncs", 0),
        ("views", "launches", 0),
        ("pinned", "d2h", 1),
        ("event", "waits", 1),
        ("attention", "launches", 1),
    ],
)
def test_work_is_counted(counted, work, column, number):
    assert counted[work][column] == number


def test_memory_that_is_dropped_is_free(counted):
    assert counted["forward"]["live"] == counted["to the CPU"]["live"] == 32768  # x
    assert counted["backward"]["live"] - counted["event"]["live"] == 4 * 1024 * 1024 + 4096  # the gradient


def wrong_devices():
    with FakeGpu() as gpu:
        gpu.place(nn.Linear(4, 4))(torch.zeros(2, 4))


def reads_while_it_records():
    with FakeGpu() as gpu:
        layer, x = gpu.place(nn.Linear(4, 4)), torch.zeros(2, 4, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(x)
        assert gpu.counts.captures.total() == 1
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(x).sum().item()


@pytest.mark.parametrize(
    ("work", "message"), [("wrong_devices", "device"), ("reads_while_it_records", "waits for the GPU")]
)
def test_what_a_gpu_refuses_is_refused(work, message):
    with pytest.raises(AssertionError, match=message):
        call(f"{HERE}:{work}")
