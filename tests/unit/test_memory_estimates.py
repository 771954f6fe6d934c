"""The estimate of memory against the peaks of runs on a GPU that is not there (``tests/fake_gpu/budgets.txt``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.models.embodiment.modules.normalizer import unit_range_stats
from rlinf.preflight.gpu_memory import GB, estimate_gpu, measure
from tests.fake_gpu.cases import CASES
from tests.fake_gpu.run import HEADROOM

LINES = (Path(__file__).parents[1] / "fake_gpu" / "budgets.txt").read_text(encoding="utf-8").splitlines()
PEAKS = {
    (case.strip(), phase.strip()): int(numbers.split()[-1]) * 1e6 / HEADROOM["peak_mb"]
    for case, phase, numbers in (line.split("|") for line in LINES[1:])
}
FAMILIES = [  # one of each family, all ways to train, and a policy at its full size
    "openvla, LoRA", "openvla_oft, LoRA, merged", "openvla_oft, all weights", "openvla_oft, 7.5 billion, LoRA", "pi0, action expert", "hf_vla, LoRA, bf16-mixed",
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_estimate_is_within_a_tenth_of_a_run_on_a_fake_gpu(name):
    case = CASES[name]
    config = build_config(compose_config([*case.settings, "cluster.device=cpu"]))
    statistics = unit_range_stats(config.model.action_token_len)["unit_range"]
    config.model.init_config["norm_stats"] = {"still": statistics}
    estimate, memory = estimate_gpu(config, 80 * GB, measured := measure(config))
    assert not memory.unknown
    passes, there = measured[1], estimate.weights + estimate.masters + estimate.rollout_weights
    recomputed = len(passes.saved) if config.model.gradient_checkpointing is True else 0
    stepping = there + estimate.optimizer + 4 * estimate.num_trainable
    estimates = {
        "policy_call": there + passes.acts.at(case.rows),
        "score": there + passes.scores.at(config.model.val_micro_batch_size),
        "update": stepping + max(memory.half_gradients, passes.update(recomputed).at(config.model.micro_batch_size)),
    }
    gaps = {phase: size / PEAKS[name, phase] - 1 for phase, size in estimates.items() if (name, phase) in PEAKS}
    assert len(gaps) >= 2 and all(abs(gap) <= 0.1 for gap in gaps.values()), gaps
    less = estimates["update"] - passes.update(recomputed).at(config.model.micro_batch_size)
    without = less / PEAKS[name, "update"] - 1  # control: without activations
    assert without < gaps["update"]
