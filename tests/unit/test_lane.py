"""What a worker thread of a rollout waits for on a GPU, as far as a machine without one can show it."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs.config import EnvConfig, default_num_worker_threads
from rlinf.rollout import cuda_stream as lane_module
from rlinf.rollout.cuda_stream import CudaStream, packed, unpacked

RESULTS = [
    torch.arange(12).view(3, 4)[:, -3:],  # tokens: a view of the prompt and them
    torch.linspace(-9, 0, 9).view(3, 3),
    torch.tensor([0.5, -1.5, float("nan")]),
    torch.rand(3, 2, 2).bfloat16(),
    torch.tensor([True, False, True]),
    torch.zeros(3, 0),
]


def test_packed_results_come_back_bit_for_bit():
    numbers = packed(RESULTS)
    assert numbers.dtype == torch.uint8 and len(numbers) == 9 * 8 + 9 * 4 + 3 * 4 + 12 * 2 + 3
    for given, found in zip(RESULTS, unpacked(numbers, RESULTS), strict=True):
        assert found.dtype == given.dtype and found.shape == given.shape
        assert found.contiguous().view(torch.uint8).equal(given.contiguous().view(torch.uint8))
    numbers[0] ^= 1  # control
    assert not torch.equal(unpacked(numbers, RESULTS)[0], RESULTS[0])


def test_results_on_a_cpu_are_not_copied():
    for given, found in zip(RESULTS, CudaStream("cpu").fetch(RESULTS), strict=True):
        assert found is given
    assert CudaStream("cpu").send(RESULTS[0]) is RESULTS[0]


class FakeStream:
    """Writes down who waits for whom."""

    log: list[str] = []

    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch):
    """Streams that are not there; returns what is done with them."""
    names, default = iter("AB"), FakeStream("default")
    FakeStream.log = log = []

    @contextmanager
    def on(stream):
        log.append(f"{stream.name} starts")
        yield
        log.append(f"{stream.name} ends")

    monkeypatch.setattr(torch.cuda, "Stream", lambda: FakeStream(next(names)))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: default)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return log


def test_each_lane_has_a_stream_that_waits_for_the_weights_and_is_waited_for(streams):
    first, second = CudaStream("cuda"), CudaStream("cuda")
    for stream in (first, second, first):
        with stream.running():
            pass
    once = "{0} waits for default|{0} starts|{0} ends|default waits for {0}"
    assert "|".join(streams) == "|".join(once.format(name) for name in "ABA")


def test_a_failure_in_a_lane_leaves_nothing_that_is_not_waited_for(streams, monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with pytest.raises(KeyError), CudaStream("cuda").running():
        raise KeyError
    assert streams == ["A waits for default", "default waits for A"]


@pytest.mark.parametrize(
    "device, own_stream, autocast", [("cpu", True, False), ("cuda", True, True), ("cuda", False, False)]
)
def test_a_policy_on_the_cpu_one_under_autocast_and_an_only_lane_have_no_stream(
    streams, monkeypatch, device, own_stream, autocast
):
    """Autocast keeps casts of weights for all threads, and a stream does not wait for another's casts."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast and kind == "cuda")
    with CudaStream(device, own_stream).running():
        pass
    assert streams == []


def test_a_gpu_has_two_lanes_where_each_has_32_rows():
    env = EnvConfig(cameras=["front"])
    counts = {rows: default_num_worker_threads(env, rows, policy_on_gpu=True) for rows in (1, 32, 63, 64, 256)}
    assert counts == {1: 1, 32: 1, 63: 1, 64: 2, 256: 2}
    assert default_num_worker_threads(env, 32) == 2, "control: on a CPU"


def test_the_lanes_of_a_run_follow_the_device(monkeypatch):
    from rlinf.cluster import factory

    class Env:
        on_gpu = False

    config = build_config(compose_config(["model=openvla_tiny", "env=tabletop", "rollout.num_envs=32"]))
    monkeypatch.setattr(factory, "rank_memory_bytes", lambda *_: 80 * 10**9)
    for device, count in (("cuda", 1), ("cpu", 2)):
        monkeypatch.setattr(factory, "resolve_device", lambda *_, device=device: device)
        assert factory.threads_of_rank(config, Env(), 1) == count
        made = factory.collector_factory(config, factory.make_env(config.env, 1, auto_reset=False), 1, 1)
        assert made.keywords["device"] == device
    assert lane_module.CudaStream("cuda")._on_gpu and not lane_module.CudaStream("cpu")._on_gpu
