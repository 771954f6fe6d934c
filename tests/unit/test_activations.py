"""Bytes of passes on the meta device: by hand, and against what autograd keeps in real passes of every family."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.models import build_policy
from rlinf.models.embodiment.modules.normalizer import unit_range_stats
from rlinf.models.layers import find_layers, set_training_options
from rlinf.preflight import activations
from rlinf.preflight.activations import AsOnGpu, MetaBytes, attend, measure_passes
from rlinf.preflight.activations import _measure as measured_rows
from rlinf.preflight.gpu_memory import _observation as observation
from rlinf.preflight.gpu_memory import measure

FAMILIES = {
    "openvla": ["experiment=quickstart", "model.action_chunks_len=1"],
    "openvla_oft": ["experiment=tabletop_openvla_oft_tiny"],
    "pi0": ["experiment=tabletop_pi0_tiny"],
    "hf_vla": ["experiment=tabletop_hf_vla_tiny"],
    "cnn": ["experiment=tabletop_ppo_cnn"],
    "mlp": ["experiment=tabletop_ppo_mlp"],
}


@pytest.fixture(autouse=True)
def many_rows(monkeypatch):
    """In these small models, gradients of single weights are larger than the activations of few rows."""
    monkeypatch.setattr(activations, "FEW", 64)
    monkeypatch.setattr(activations, "MORE", 128)


def config_of(*words):
    return build_config(compose_config([*words, "cluster.device=cpu", "sft.max_steps=0"]))


def two_layers():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 128))


def test_a_pass_by_hand():
    model = two_layers()
    with MetaBytes(model) as memory:
        x = torch.empty(64, 256, device="meta")
        assert memory.now == 64 * 256 * 4
        output = model(x)
        kept = 64 * (256 + 2 * 1024 + 128) * 4
        assert memory.now == kept, "input, both sides of GELU, output; no weights, and no views of them"
        del output
        with torch.no_grad():
            memory.peak = memory.now
            output = model(x)
            assert memory.now == 64 * (256 + 128) * 4, "control: without gradients nothing is kept"
            assert memory.peak == 64 * (256 + 2 * 1024) * 4
        del output, x
    assert memory.now == 0


def test_a_loop_until_a_number_changes_ends(monkeypatch):
    monkeypatch.setattr(activations, "MOST_READS", 50)
    with MetaBytes(nn.Linear(1, 1, device="meta")):
        x = torch.empty(1, device="meta")
        assert all(bool(x > 0) for _ in range(50))  # control: so many are answered
        with pytest.raises(RuntimeError, match="more than 50 values"):
            bool(x > 0)


@pytest.mark.parametrize(("dtype", "masked", "kept"), [
    (torch.bfloat16, False, "flash"), (torch.float32, False, "efficient"), (torch.bfloat16, True, "efficient"),
])  # fmt: skip
def test_attention_keeps_no_scores(dtype, masked, kept):
    rows, actors, length, width = 2, 4, 1024, 64
    query = torch.empty(rows, actors, length, width, dtype=dtype, device="meta", requires_grad=True)
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device="meta") if masked else None
    with MetaBytes(nn.Identity()) as memory, AsOnGpu():
        before = memory.now
        nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask).sum()
        given = 2 * length * length * rows * (2 if dtype == torch.bfloat16 else 4) if masked else 0
    assert memory.peak - before - given < actors * rows * length * length * 2 / 4, kept
    assert attend(query, query, query).shape == query.shape


def saved_bytes(model, run):
    """Bytes that autograd keeps of a real pass, without weights."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run()
    return sum(found.values()), outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_keep_what_autograd_keeps_in_a_real_pass(family):
    config = config_of(*FAMILIES[family])
    model, rows = build_policy(config, {"norm_stats": with_states(config)} if family == "pi0" else None), 8
    inputs = model.preprocess(observation(config, rows))
    with torch.no_grad():
        sequences = model.predict_action_batch(uniforms=torch.full((rows, model.num_uniforms), 0.5), **inputs).sequences
    real, _ = saved_bytes(model, lambda: model.evaluate_actions(inputs, sequences))
    empty, passes, unknown = measure(config)
    assert not unknown
    with MetaBytes(empty) as memory, AsOnGpu():
        with torch.no_grad():
            inputs = empty.preprocess(observation(config, rows))
            before = memory.now
        scored = empty.evaluate_actions(inputs, sequences.to("meta"))
        kept = memory.now - before
        del scored
    assert kept == pytest.approx(real, rel=0.1, abs=rows * 512), (kept, real, before)
    assert passes.updates.at(256) == pytest.approx(peak_of(empty, config, 256), rel=0.02), "a line"


def peak_of(model, config, rows):
    """The peak of an update, counted with so many rows."""
    return measured_rows(model, observation(config, rows), rows, config.model.precision, ["rl"]).updates["rl"]


def with_states(config):
    found = unit_range_stats(config.model.action_token_len, 4)
    return {config.env.name: found["unit_range"]}


@pytest.mark.parametrize("family", ["openvla", "openvla_oft", "pi0", "hf_vla"])
def test_recomputing_the_first_blocks_is_estimated_from_few_passes(family):
    config = config_of(*FAMILIES[family])
    model, passes, _ = measure(config)
    rows, num_blocks = 96, len(find_layers(model))
    peaks = []
    for number in sorted({0, 1, num_blocks // 2, num_blocks - 1, num_blocks}):
        set_training_options(model, recomputed=number, compiled=False)
        peaks.append(peak_of(model, config, rows))
        estimate = passes.update(number).at(rows)
        assert 0.85 * peaks[-1] <= estimate <= 1.25 * peaks[-1], (number, peaks, estimate)  # blocks are few and unequal
    assert passes.update(num_blocks).at(rows) == pytest.approx(peaks[-1], rel=0.05)
    assert peaks[-1] < 0.9 * peaks[0], "control: recomputing saves something"


def test_a_phase_that_clones_and_one_that_proposes_are_counted():
    config = config_of("experiment=tabletop_openvla_oft_tiny")
    model, rl, _ = measure(config)
    of_both = measure_passes(model, lambda rows: observation(config, rows), "fp32", ["sft", "rl"])
    assert of_both.updates.at(activations.MORE) >= rl.updates.at(activations.MORE)
    actor = measure_passes(model, lambda rows: observation(config, rows), "fp32", ["actor"])
    assert actor.updates.at(8) == 0 < actor.acts.at(8)


def test_sixteen_bits_by_autocast_keep_less():
    config = config_of("experiment=quickstart")
    mixed = replace(config, model=replace(config.model, precision="bf16-mixed"))
    full, half = measure(config)[1], measure(mixed)[1]
    assert half.updates.at(64) < 0.9 * full.updates.at(64)


@pytest.mark.parametrize("kind", [RuntimeError, AttributeError])
def test_a_policy_whose_pass_is_unknown_is_told(monkeypatch, kind):
    config = config_of("experiment=quickstart")

    def preprocess(self, observed):
        raise kind("reads numbers\nand more")

    model, _, _ = measure(config)
    monkeypatch.setattr(type(model), "preprocess", preprocess)
    _, passes, unknown = measure(config)
    assert unknown == f"{kind.__name__}: reads numbers" and passes.updates.at(8) == 0


def test_nothing_is_drawn_from_the_global_generator():
    config = config_of("experiment=quickstart")
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    measure(config)
    assert torch.equal(torch.rand(1), expected) and np.isfinite(float(expected))
