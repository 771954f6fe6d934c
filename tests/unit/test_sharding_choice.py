"""Which ranks shard a policy, and why: a pure function of its shapes, the ranks and their memory."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from rlinf.distributed.parallel import StateBytes, check_can_shard, choose_sharding
from rlinf.errors import ConfigError
from rlinf.number_formats import GIB

BIG = 80 * 10**9


def model_of(frozen, trained, dtype=torch.bfloat16, layers=("Linear",)):
    """Shapes of a policy with so many frozen and trained weights."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(frozen, 1, bias=False, dtype=dtype), nn.Linear(trained, 1, bias=False, dtype=dtype)
        )
    model[0].requires_grad_(False)
    model.fsdp_wrap_modules = layers
    return model


@pytest.mark.parametrize(("model", "ranks", "memory", "sharded", "reason"), [
    (model_of(0, 7_540_000_000), 1, BIG, False, "there is one rank"),
    (model_of(0, 1_600_000, torch.float32), 2, 12 * 10**9, False, "100.0% of the parameters.*at most 1.00 GiB"),
    (model_of(7_540_000_000, 110_000_000), 8, BIG, False, "1.4% of the parameters"),
    (model_of(7_540_000_000, 110_000_000), 8, 24 * 10**9, True, "1.4% of the parameters.*22.35 GiB"),
    (model_of(0, 7_540_000_000), 8, BIG, True, "100.0% of the parameters.*140.44 GiB of a rank's 74.51 GiB"),
    (model_of(3_190_000_000, 310_000_000), 8, BIG, False, "8.9% of the parameters"),
    (model_of(1_000_000_000, 1_250_000_000), 2, BIG, False, "55.6% of the parameters"),
    (model_of(1_000_000_000, 1_250_000_001), 2, BIG, True, "55.6% of the parameters"),
])  # fmt: skip
def test_auto_shards_what_is_large_and_trained(model, ranks, memory, sharded, reason):
    choice = choose_sharding("auto", model, ranks, memory)
    assert choice.sharded == sharded
    assert re.search(reason, choice.reason), choice.reason
    assert str(choice) == f"trainer.sharding={'fsdp2' if sharded else 'replicate'}: {choice.reason}"


@pytest.mark.parametrize(("name", "frozen", "trained", "sharded"), [
    ("OpenVLA, LoRA", 7_541_000_000, 113_000_000, (True, False, False, False)),  # 17.3 GB a replica, 1.8 of them for steps
    ("OpenVLA in full", 0, 7_541_000_000, (True, True, True, True)),  # 150.8 and 120.7
    ("OpenVLA-OFT, LoRA", 7_541_000_000, 111_000_000, (True, False, False, False)),  # 17.3 and 1.8
    ("pi0, expert", 3_190_000_000, 315_000_000, (False, False, False, False)),  # 12.7 and 5.0
    ("pi0.5, expert", 3_190_000_000, 430_000_000, (True, False, False, False)),  # 15.0 and 6.9
    ("Qwen2.5-3B in full", 0, 3_086_000_000, (True, True, True, True)),  # 61.7 and 49.4
    ("Qwen2.5-7B in full", 0, 7_616_000_000, (True, True, True, True)),  # 152.3 and 121.9
])  # fmt: skip
def test_models_on_gpus_as_counted_by_hand(name, frozen, trained, sharded):
    """A replica has 2 bytes of a frozen and 20 of a trained parameter, of which 16 are for steps: at most 0.6 and 0.25 of a GPU."""
    model = model_of(frozen, trained)
    assert tuple(choose_sharding("auto", model, 8, size * 10**9).sharded for size in (24, 40, 80, 141)) == sharded


def test_words_override_the_rule():
    small = model_of(0, 100)
    assert choose_sharding("fsdp2", small, 1, BIG).sharded
    assert choose_sharding("auto", small, 1, BIG, cpu_offload=True).sharded
    assert not choose_sharding("replicate", model_of(0, 10**10), 8, BIG).sharded
    with pytest.raises(ConfigError, match="sharding=replicate with cpu_offload=true.*Pass sharding='fsdp2'"):
        choose_sharding("replicate", small, 2, BIG, cpu_offload=True)
    with pytest.raises(ConfigError, match="Pass sharding='fsdp2' or shard_size=None"):
        choose_sharding("replicate", small, 4, BIG, shard_size=2)


def test_a_model_that_does_not_name_its_layers_is_refused_by_name():
    with pytest.raises(ConfigError, match="Sequential cannot be sharded: its fsdp_wrap_modules are empty"):
        choose_sharding("fsdp2", model_of(0, 100, layers=()), 2, BIG)
    with pytest.raises(ConfigError, match=r"Sequential .*it contains none of its fsdp_wrap_modules \['Block'\]"):
        check_can_shard(model_of(0, 100, layers=("Block",)))
    with pytest.raises(ConfigError, match="are empty"):  # auto, where a replica is too large
        choose_sharding("auto", model_of(0, 10**10, layers=()), 2, BIG)
    assert not choose_sharding("auto", model_of(0, 100, layers=()), 2, BIG).sharded
    check_can_shard(model_of(0, 100))


def test_bytes_of_a_rank():
    """Weights 2, masters 4, gradients 2 + 4, moments 8 bytes; shards 4, 0, 4, 8; frozen weights 2."""
    model = model_of(1000, 80)
    assert StateBytes.of(model, None) == StateBytes(2 * 1080, 4 * 80, 6 * 80, 8 * 80)
    assert StateBytes.of(model, 4) == StateBytes((2 * 1000 + 4 * 80) // 4, 0, 80, 2 * 80)
    exact = model_of(0, GIB // 16, torch.float32)
    assert StateBytes.of(exact, None).total == GIB
    assert not choose_sharding("auto", exact, 2, BIG).sharded
    assert not choose_sharding("auto", exact, 2, GIB).sharded, "small, whatever the memory"
    assert choose_sharding("auto", model_of(0, GIB // 16 + 1, torch.float32), 2, GIB).sharded  # control: a byte more
