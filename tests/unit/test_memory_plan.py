"""Rows per pass and recomputed layers of token policies, against bytes counted by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config

from rlinf.algorithms import NLLLossFn
from rlinf.distributed import BatchedDataDict
from rlinf.distributed.parallel import StateBytes
from rlinf.llm import hf_policy
from rlinf.llm.hf_model import HFModel
from rlinf.llm.memory_plan import PassPlan, plan_passes
from rlinf.models.config import LoraConfig
from rlinf.models.layers import _is_recomputed, find_layers
from rlinf.models.lora import apply_lora

GB = 10**9
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SEVEN, THREE, TINY = (3584, 18944, 28, 28, 4), (2048, 11008, 36, 16, 2), (64, 64, 1, 2, 2)


def plan(sizes, lora, gpu_gb, **options):
    """Plan rows of 2048 tokens; return the plan and the bytes of weights, gradients and optimiser."""
    config = Qwen2Config(**dict(zip(NAMES, sizes, strict=True)), vocab_size=152064, tie_word_embeddings=False)
    model = HFModel.from_config(config, dtype=torch.bfloat16, meta=True)
    if lora:
        apply_lora(model, LoraConfig())
    options = {"shards": None, "offloads": False, "has_reference": False} | options
    return plan_passes(model, 2048, None, "auto", gpu_gb * GB, **options), StateBytes.of(model, None).total


def saved_by_hand(sizes):
    """Bytes that a layer saves for a row: of each token two norms (input and product in float32, output), attention's inputs and output,
    and four tensors of the MLP, all in 16 bits."""
    hidden, wide, *_ = sizes
    return 2048 * (2 * (4 + 4 + 2) * hidden + 2 * 4 * hidden + 2 * 4 * wide)


def test_a_seven_billion_with_adapters_recomputes_nothing_where_40_gb_are_free():
    chosen, state = plan(SEVEN, True, 40)
    assert chosen[1:4] == (1, 0, 28)
    assert 16 * GB < state < 18 * GB, "2 bytes for each of 7.6 billion weights, 20 for each of 80 million in adapters"
    logits = 5 * 2**27
    assert chosen.memory - state - 1.5 * GB == pytest.approx(28 * saved_by_hand(SEVEN) + logits, rel=0.15)
    assert chosen.memory < 0.95 * 40 * GB < chosen.memory + 28 * saved_by_hand(SEVEN), "a second row would not fit"


def test_a_three_billion_in_full_recomputes_a_part_on_80_gb():
    chosen, state = plan(THREE, False, 80)
    assert state == pytest.approx(20 * 3.398e9, rel=0.001)
    missing = state + 1.5 * GB + 36 * saved_by_hand(THREE) + 5 * 2**27 + 2 * 152064 * 2048 - 0.95 * 80 * GB
    assert chosen.rows == 1 and chosen.recomputed == pytest.approx(missing / saved_by_hand(THREE), abs=4)
    assert 0 < chosen.recomputed < 36 and chosen.memory <= 0.95 * 80 * GB


def trained(source, **arguments):
    policy = hf_policy.HuggingFacePolicy(source, device_map=None, learning_rate=1e-2, **arguments)
    ids = torch.randint(3, 48, (8, 16), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_mask": torch.ones(8, 16)}
    policy.train(BatchedDataDict(data), NLLLossFn())
    return policy, torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def test_a_cpu_recomputes_nothing_and_a_short_gpu_changes_no_bit(tiny_lm, monkeypatch):
    policy, weights = trained(tiny_lm())
    assert policy.pass_plan is None and not any(map(_is_recomputed, find_layers(policy.model)))
    monkeypatch.setattr(hf_policy, "_gpu_bytes", lambda config: 2 * GB)
    free, _ = trained(tiny_lm())
    assert free.pass_plan[:4] == (16, 2**14 // 16, 0, 2)
    monkeypatch.setattr(hf_policy, "_gpu_bytes", lambda config: GB)  # less than CUDA takes
    short, less = trained(tiny_lm(), micro_batch_size=8)
    assert short.pass_plan[:4] == (16, 8, 2, 2) and all(map(_is_recomputed, find_layers(short.model)))
    assert torch.equal(weights, less)


def test_rows_follow_the_tokens_of_a_batch(tiny_lm, monkeypatch):
    monkeypatch.setattr(hf_policy, "_gpu_bytes", lambda config: GB)
    monkeypatch.setattr(hf_policy, "plan_passes", lambda *arguments, **_: PassPlan(arguments[1], 3, 0, 2, 0))
    policy, _ = trained(tiny_lm(), max_model_len=32)
    assert [policy._rows_per_pass(length) for length in (32, 16, 5)] == [3, 6, 19]
    assert policy._rows_per_pass(48) == 3, "longer rows than expected are planned anew"


def test_copies_of_the_weights_are_counted():
    (alone, state), (beside, _) = plan(TINY, False, 80), plan(TINY, False, 80, has_reference=True)
    apart, _ = plan(TINY, False, 80, offloads=True)
    assert (alone.rows, beside.rows, apart.rows) == (8, 8, 8), "16,384 tokens"
    assert (beside.memory - alone.memory, alone.memory - apart.memory) == (state // 10, state), (
        "2 of 20 bytes per weight"
    )
