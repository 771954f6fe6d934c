"""Weights through shared memory: bit-equal in another process, and complete or rejected."""

import dataclasses
import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rlinf.engines.weight_handle import WeightBuffer, WeightsRejectedError, check_manifest, complete_tied
from rlinf.errors import ConfigError

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name needs Linux")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)

READER = """
import pickle, sys, torch
handle = pickle.load(sys.stdin.buffer)
tensors = {name: (tensor.dtype, tensor.contiguous().view(torch.uint8).tolist() if tensor.ndim else tensor.item())
           for name, tensor in handle.open().items()}
sys.stdout.buffer.write(pickle.dumps((handle.version, tensors)))
"""


def read_elsewhere(handle):
    """Version and bytes of every tensor, as another process sees them."""
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", READER], input=pickle.dumps(handle), env=environment, stdout=subprocess.PIPE, check=True
    )
    return pickle.loads(done.stdout)


def example():
    generator = torch.Generator().manual_seed(0)
    tensors = {str(dtype): torch.randn(3, 5, generator=generator).to(dtype) for dtype in DTYPES}
    tensors["transposed"] = torch.randn(4, 3, generator=generator).T
    tensors["special"] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    tensors["scalar"] = torch.tensor(7)
    tensors["empty"] = torch.zeros(0, 3)
    return tensors


def test_a_buffer_is_written_again_in_place_and_grows():
    buffer = WeightBuffer()
    first = buffer.write({"a": torch.ones(4)}, 1)
    view = first.open()["a"]
    second = buffer.write({"a": torch.full((4,), 2.0)}, 2)
    assert second.path == first.path and view.tolist() == [2.0] * 4
    large = torch.arange(1000.0)
    assert torch.equal(buffer.write({"a": torch.ones(4), "b": large}, 3).open()["b"], large)
    buffer.close()


def test_weights_of_a_closed_buffer_are_an_error_that_says_so():
    buffer = WeightBuffer()
    handle = buffer.write({"a": torch.ones(4)}, 5)
    buffer.close()
    with pytest.raises(WeightsRejectedError, match="version 5 has been overwritten or freed.*Keep the WeightBuffer"):
        handle.open()


def test_a_handle_never_opens_as_other_weights():
    buffer = WeightBuffer()
    first = buffer.write({"a": torch.ones(4)}, 1)
    second = buffer.write({"a": torch.zeros(4)}, 2)
    with pytest.raises(WeightsRejectedError, match="version 1 has been overwritten or freed"):
        first.open()
    assert second.open()["a"].tolist() == [0.0] * 4
    buffer.close()
    # The number of the closed descriptor may by now belong to another buffer of the same size and version.
    other = WeightBuffer()
    third = other.write({"a": torch.full((4,), 7.0)}, 2)
    with pytest.raises(WeightsRejectedError, match="version 2 has been overwritten or freed"):
        dataclasses.replace(second, path=third.path).open()
    assert third.open()["a"].tolist() == [7.0] * 4, "control"
    other.close()


def test_a_stale_handle_leaves_a_file_under_its_descriptor_as_it_is(tmp_path):
    buffer = WeightBuffer()
    handle = buffer.write({"a": torch.ones(400)}, 1)
    buffer.close()
    with open(tmp_path / "log", "w+b") as file:
        file.write(b"short")
        file.flush()
        with pytest.raises(WeightsRejectedError, match="version 1 has been overwritten or freed"):
            dataclasses.replace(handle, path=f"/proc/{os.getpid()}/fd/{file.fileno()}").open()
    assert (tmp_path / "log").read_bytes() == b"short"


def shared() -> int:
    """Count the buffers that this process holds."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("rlinf-weights" in os.readlink(link) for link in links if link.is_symlink())


def test_a_buffer_that_nobody_keeps_gives_its_memory_back():
    gc.collect()
    before = shared()
    kept = WeightBuffer()
    handle = kept.write({"a": torch.ones(4)}, 1)
    assert shared() == before + 1
    lost = WeightBuffer().write({"a": torch.ones(4)}, 2)
    assert shared() == before + 1
    with pytest.raises(WeightsRejectedError):
        lost.open()
    assert handle.open()["a"].tolist() == [1.0] * 4
    kept.close()
    assert shared() == before


def test_a_reader_in_the_middle_of_a_write_gets_whole_weights_or_none():
    """The writer is asked for its second tensor when the first one is in place: just then another one reads."""
    buffer, opened = WeightBuffer(), []

    class Watched(dict):
        def items(self):
            for name, tensor in super().items():
                try:
                    opened.append({name: float(tensor[0]) for name, tensor in first.open().items()})
                except WeightsRejectedError:
                    opened.append(None)
                yield name, tensor

    first = buffer.write({"a": torch.ones(4), "b": torch.ones(4)}, 1)
    buffer.write(Watched(a=torch.zeros(4), b=torch.zeros(4)), 2)
    assert None in opened and all(read in (None, {"a": 1.0, "b": 1.0}) for read in opened)
    buffer.close()


def test_a_handle_of_a_gpu_is_opened_under_the_number_that_the_gpu_has_here(monkeypatch):
    """Stands in for CUDA IPC: the seventh argument of ``rebuild`` is the number of the device."""
    buffer = WeightBuffer()
    handle = buffer.write({"a": torch.ones(4)}, 3)
    size = os.stat(handle.path).st_size
    memory, asked = torch.from_file(handle.path, shared=True, size=size, dtype=torch.uint8), []

    def rebuild(*arguments):
        asked.append(arguments)
        return memory

    monkeypatch.setattr("rlinf.engines.weight_handle.gpu_uuids", lambda: ["GPU-a", "GPU-b", "GPU-c"])
    on_gpu = dataclasses.replace(handle, path=None, ipc=(rebuild, tuple("tensors8")), gpu="GPU-c")
    assert on_gpu.open()["a"].tolist() == [1.0] * 4
    assert asked == [(*"tensor", 2, "8")]
    with pytest.raises(WeightsRejectedError, match="version 3 are on the GPU GPU-x, but this process sees .*GPU-a"):
        dataclasses.replace(on_gpu, gpu="GPU-x").open()
    assert len(asked) == 1
    buffer.write({"a": torch.zeros(4)}, 4)
    with pytest.raises(WeightsRejectedError, match="version 3 has been overwritten or freed"):
        on_gpu.open()
    buffer.close()


def test_weights_of_another_size_move_to_other_memory():
    """A larger and a smaller model in turn; each tensor starts at a multiple of the alignment, behind the header."""
    gc.collect()
    buffer, before = WeightBuffer(), shared()
    for length in (1, 16, 17, 3, 16):
        tensors = {"a": torch.full((length,), float(length)), "b": torch.arange(length, dtype=torch.int16)}
        handle = buffer.write(tensors, length)
        blocks = -(-4 * length // 64), -(-2 * length // 64)
        assert [entry.offset for entry in handle.manifest.values()] == [64, 64 + 64 * blocks[0]]
        assert handle.nbytes == 64 + 64 * sum(blocks) == os.stat(handle.path).st_size
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in handle.open().items())
        assert shared() == before + 1
    for _ in range(2):
        buffer.close()  # the second time nothing is left to give back
    assert shared() == before
    again = buffer.write(tensors, 6)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in again.open().items())
    buffer.close()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture
def manifest():
    def of(tensors):
        return WeightBuffer().write(tensors, 1).manifest

    return of


def test_weights_must_be_complete_known_and_of_the_right_shape_and_kind(manifest):
    model = Tied()
    required, tensors = model.state_dict(keep_vars=True), dict(model.state_dict())
    check_manifest(manifest(tensors), required)
    rejections = {
        r"missing norm.bias, norm.weight \(2 in all\)": {k: v for k, v in tensors.items() if "norm" not in k},
        r"unknown extra \(1 in all\)": tensors | {"extra": torch.zeros(1)},
        r"norm.bias is \[3\] instead of \[4\]": tensors | {"norm.bias": torch.zeros(3)},
        "norm.bias is torch.int8 instead of torch.float32": tensors | {"norm.bias": torch.zeros(4, dtype=torch.int8)},
    }
    for words, given in rejections.items():
        with pytest.raises(WeightsRejectedError, match=words):
            check_manifest(manifest(given), required)
    check_manifest(manifest({name: tensor.bfloat16() for name, tensor in tensors.items()}), required)
    counts = {"count": torch.tensor(3)}
    check_manifest(manifest(counts), counts)
    check_manifest(manifest({"count": torch.tensor(3.0)}), counts)  # a fraction can be an integer
    with pytest.raises(ConfigError, match="needs at least one tensor"):
        manifest({})


def test_one_name_of_tied_weights_is_enough_and_none_is_not(manifest):
    model = Tied()
    required, tensors = model.state_dict(keep_vars=True), dict(model.state_dict())
    for name in ("embedding.weight", "head.weight"):
        check_manifest(manifest({k: v for k, v in tensors.items() if k != name}), required)
        tied = complete_tied({k: v for k, v in tensors.items() if k != name}, required)
        assert tied.keys() == required.keys() and tied["embedding.weight"] is tied["head.weight"]
    with pytest.raises(WeightsRejectedError, match="missing embedding.weight, head.weight"):
        check_manifest(manifest({k: v for k, v in tensors.items() if "norm" in k}), required)


def test_tensors_arrive_bit_for_bit_in_another_process():
    buffer, tensors = WeightBuffer(), example()
    version, arrived = read_elsewhere(buffer.write(tensors, 12))
    assert version == 12 and arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor.contiguous().view(torch.uint8).tolist() if tensor.ndim else tensor.item()
        assert arrived[name] == (tensor.dtype, expected), name
    buffer.close()
