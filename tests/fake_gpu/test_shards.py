"""One of eight ranks, with a process group that is not there either: the bytes of its shards, and a step with them."""

import functools
from contextlib import contextmanager

import pytest
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed.parallel import StateBytes
from rlinf.preflight.memory import policy_on_meta_device
from tests.fake_gpu.child import call

HERE = __name__
RANKS = 8
WORDS = ["experiment=libero_ppo_openvla_oft", "model.override_config={}", "model.unnorm_key=null", "cluster.device=cpu"]
WHOLE = ["model.init_config={n_action_bins: 256}"]
FOUR_LAYERS = [
    "model.init_config={text_config: {vocab_size: 32064, pad_token_id: 32000, num_hidden_layers: 4}, "
    "vision_overrides: [{depth: 4}, {depth: 4}]}"
]
TOLERANCE = 0.01
"""``StateBytes`` divides exactly; a shard is padded to whole rows of its tensor."""


@contextmanager
def one_of_eight(words):
    """Yield the GPU, and the model of an experiment, which is not on it yet, as rank 0 of eight."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.fake_gpu.gpu import FakeGpu

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        with FakeGpu() as gpu:
            yield gpu, meta_model(words)
    finally:
        dist.destroy_process_group()


def meta_model(words):
    return policy_on_meta_device(build_config(compose_config([*WORDS, *words])))


def sharded_bytes(words):
    """Return the bytes of a rank by ``StateBytes``, and those on it: weights, gradients and moments."""
    from rlinf.distributed.parallel import Sharded
    from rlinf.optim.master_adamw import MasterAdamW
    from tests.fake_gpu.runs import make_state

    with one_of_eight(words) as (gpu, model):
        expected = StateBytes.of(model, RANKS)
        Sharded(gpu.place(model), "cuda")
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = MasterAdamW(trained, lr=1e-5)
        make_state(optimizer)
        moments = [m for state in optimizer.state.values() for m in state.values() if m.ndim]
        gradients = [torch.zeros_like(p) for p in trained]
        parts = {"weights": model.parameters(), "gradients": gradients, "moments": moments}
        found = {name: sum(t.to_local().nbytes for t in tensors) for name, tensors in parts.items()}
        formats = sorted({str(p.dtype) for p in trained})
    return {"expected": vars(expected), "found": found | {"masters": 0}, "formats": formats}


def sharded_step(words):
    """Return the counts of a forward and backward pass over shards and of a step, and the number of FSDP units."""
    from rlinf.distributed.parallel import Sharded
    from rlinf.optim.master_adamw import MasterAdamW
    from tests.fake_gpu.runs import described, make_state

    with one_of_eight(words) as (gpu, model):
        parallel = Sharded(gpu.place(model), "cuda")
        optimizer = MasterAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
        make_state(optimizer)
        size, chunk = model.config.image_sizes[0], (model.sft_chunk_len, model.action_dim)
        inputs = {
            "input_ids": torch.ones(4, 20, dtype=torch.int64, device="cuda"),
            "attention_mask": None,
            "pixel_values": torch.zeros(4, 6, size, size, device="cuda"),
        }
        with gpu.count() as counts:
            model.sft_loss(inputs, torch.zeros(4, *chunk, device="cuda")).sum().backward()
            optimizer.step()
        return described(counts) | {"units": len(list(parallel.units()))}


@functools.cache
def bytes_of(*words):
    return call(f"{HERE}:sharded_bytes", words=[*FOUR_LAYERS, *words])


def test_an_eighth_of_seven_billion_weights_is_estimated_by_hand():
    """16 bytes of each of 7.5 billion weights."""
    estimate = vars(StateBytes.of(meta_model([*WHOLE, "model.is_lora=false"]), RANKS))
    assert sum(estimate.values()) / 1e9 == pytest.approx(15.1, rel=0.05)


@pytest.mark.parametrize(("lora", "gigabytes"), [(False, 2.46), (True, 0.353)], ids=["all weights", "adapters"])
def test_a_rank_holds_an_eighth(lora, gigabytes):
    result = bytes_of(f"model.is_lora={str(lora).lower()}")
    expected, found = result["expected"], result["found"]
    assert found == {name: pytest.approx(size, rel=TOLERANCE) for name, size in expected.items()}
    assert sum(found.values()) / 1e9 == pytest.approx(gigabytes, rel=0.05)
    assert result["formats"] == ["torch.float32"]  # trained 16-bit weights become float32 shards


def test_other_bytes_are_seen():
    results = [bytes_of("model.is_lora=true"), bytes_of("model.is_lora=true", "model.lora.rank=64")]
    moments = [result["found"]["moments"] for result in results]
    assert moments[1] > (1 + 10 * TOLERANCE) * moments[0]


def test_a_step_over_shards_gathers_each_unit_twice_and_waits_for_nothing():
    counts = call(f"{HERE}:sharded_step", words=[*FOUR_LAYERS, "model.is_lora=true"])
    ops, units = counts["places"]["ops"], counts["units"]
    assert units > 4 and counts["syncs"] == 0, counts["places"]["syncs"]
    assert units <= ops["_allgather_base_"] <= 2 * units  # forwards and backwards
    assert 1 <= ops["_reduce_scatter_base_"] <= units
