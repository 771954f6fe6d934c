"""Scoring, optimiser steps and pushes wait for a GPU once, and launch few kernels for gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rlinf.distributed.transfers import different, not_finite
from rlinf.llm import logprobs
from rlinf.llm.hf_policy import HuggingFacePolicy, HuggingFacePolicyConfig
from rlinf.llm.losses import GRPOLossFn, NLLLossFn
from rlinf.llm.packing import attend_each_sequence
from rlinf.optim.train_step import Totals
from tests.fake_gpu.child import call
from tests.fake_gpu.gpu import FakeGpu

HERE = __name__
BOOKKEEPING = ("optim/", "distributed/parallel.py", "distributed/transfers.py")
IN_BF16 = ["model.precision=bf16", "model.micro_batch_size=4", "model.val_micro_batch_size=4"]
FAMILIES = {
    "openvla": ["experiment=quickstart", *IN_BF16, "model.is_lora=true"],
    "openvla_oft": ["experiment=tabletop_openvla_oft_tiny", *IN_BF16],
    "pi0": ["model=pi0_tiny", "env.state=proprio", *IN_BF16],
    "mlp": ["model=mlp", "model.micro_batch_size=4"],
}


def action(words, faulty=False):
    """Counts of an action policy: scoring, an update and a step of cloning, on 8 rows each."""
    from tests.fake_gpu.runs import ActionRun, described

    with FakeGpu() as gpu, pytest.MonkeyPatch.context() as patch:
        if faulty:
            patch.setattr(Totals, "add", add_one_by_one)
        run = ActionRun(gpu, words, rows=8)
        run.policy_call()
        return {phase: described(getattr(run, phase)()) for phase in ("score", "update", "sft_step")}


def add_one_by_one(self, shares, *others):
    """Read each metric when it comes."""
    for metrics in shares:
        for name, value in metrics.items():
            self[name] = self.get(name, 0.0) + float(value)
    return [float(other) for other in others]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_action_policy_waits_once(family):
    found = call(f"{HERE}:action", words=FAMILIES[family])
    for phase, counts in found.items():
        assert counts["syncs"] == counts["waits"] == 0, counts["places"]
        copies = 2 if phase == "score" else 1  # log-probabilities and values; metrics and norms
        assert counts["d2h"] == copies, (phase, counts["places"]["d2h"])
        kernels = {at: n for at, n in counts["places"]["launches"].items() if at.startswith(BOOKKEEPING)}
        kernels = {at: n for at, n in kernels.items() if not at.endswith(" accumulate")}  # the backward pass
        assert sum(kernels.values()) <= 60, (phase, kernels)
    assert found["update"]["launches"] > 100, "control: kernels are counted"


def test_control_metrics_that_are_read_one_by_one_are_seen():
    found = call(f"{HERE}:action", words=FAMILIES["mlp"], faulty=True)
    assert found["update"]["syncs"] > 10


def token(packed, windows):
    """Counts of a step of a token policy, and of the scores of its rows; masks that are looked at included."""
    from tests.fake_gpu.runs import described

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    with FakeGpu() as gpu:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").bfloat16()
        policy = HuggingFacePolicy.__new__(HuggingFacePolicy)
        size = {"sequence_packing": True, "max_tokens_per_microbatch": 40} if packed else {"micro_batch_size": 2}
        policy.config = HuggingFacePolicyConfig(torch_dtype="bfloat16", gradient_checkpointing=False, **size)
        policy.model, policy.model_name, policy.temperature = gpu.place(model), "here", 1.0
        policy._sharded, policy._lora, policy._initial = False, None, None
        if not windows:
            attend_each_sequence(policy.model)
        logprobs._SEPARABLE[policy.model] = True  # found by comparing numbers
        policy._init_training(config, 0)
        mask = torch.arange(20) < torch.tensor([20, 7, 12, 3]).unsqueeze(1)
        data = {"input_ids": mask.long(), "attention_mask": mask}
        data |= {"advantages": torch.ones(4), "old_logprobs": torch.zeros(4, 20)}
        found = {}
        for name, work in {
            "first": lambda: policy.train(dict(data), NLLLossFn()),
            "NLL": lambda: policy.train(dict(data), NLLLossFn()),
            "GRPO": lambda: policy.train(dict(data), GRPOLossFn()),
            "scores": lambda: policy._score(policy.model, data),
        }.items():
            with gpu.count() as counts:
                work()
            found[name] = described(counts)
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_a_token_policy_waits_once(packed):
    for name, counts in call(f"{HERE}:token", packed=packed, windows=False).items():
        assert counts["syncs"] == counts["waits"] == 0, (name, counts["places"]["syncs"])
        assert counts["d2h"] == (2 if name == "first" else 1), (name, counts["places"]["d2h"])  # with the checksum
        assert "_scaled_dot_product_efficient_attention" not in counts["places"]["ops"], "no masks"
        assert counts["places"]["ops"]["_scaled_dot_product_flash_attention"] > 0
    control = call(f"{HERE}:token", packed=packed, windows=True)
    assert "_scaled_dot_product_efficient_attention" in control["NLL"]["places"]["ops"], "masks"


def pushed(num_tensors):
    """Counts of the checks of a push."""
    from tests.fake_gpu.runs import described

    with FakeGpu() as gpu:
        tensors = {str(number): torch.zeros(8, device="cuda", dtype=torch.bfloat16) for number in range(num_tensors)}
        found = {}
        for name, work in {
            "finite": lambda: not_finite(tensors),
            "equal": lambda: different((name, each, each) for name, each in tensors.items()),
        }.items():
            with gpu.count() as counts:
                work()  # its answer means nothing
            found[name] = described(counts)
    return found


def test_a_push_waits_once_for_each_check():
    found = call(f"{HERE}:pushed", num_tensors=1000)
    assert {name: counts["syncs"] + counts["d2h"] for name, counts in found.items()} == {"finite": 1, "equal": 1}
    assert found["finite"]["launches"] <= 3 and found["equal"]["launches"] > 1000
