"""What crosses to a vLLM engine: two bounded buckets, handles instead of tensors, and frozen tensors once."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
from types import SimpleNamespace

import pytest
import torch
from vllm_models import act, check_rows, gap, make_language_model, make_model, observe, trainer_logprobs, weights_of

from rlinf.engines.weight_handle import WeightBuckets
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.vllm_generation import VllmGeneration
from rlinf.models.config import LoraConfig
from rlinf.models.lora import MergedWeights, apply_lora
from rlinf.rollout.config import VllmOptions
from rlinf.rollout.vllm_policy import VllmPolicy

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: bash scripts/setup.sh --vllm"
    ),
    pytest.mark.new_processes,  # of engines
]


def crossed(policy, monkeypatch):
    """Bytes of the tensors, and of the messages, that go to the engine from now on."""
    counts, send = {"tensors": 0, "messages": 0}, policy.engine.send

    def counted(command, payload):
        counts["messages"] += len(pickle.dumps((command, payload)))
        entries = payload.manifest.values() if command == "load" else ()
        counts["tensors"] += sum((entry.stop - entry.start) * entry.dtype.itemsize for entry in entries)
        send(command, payload)

    monkeypatch.setattr(policy.engine, "send", counted)
    return counts


def test_after_the_first_push_only_blocks_with_trained_weights_cross(monkeypatch):
    """Only the queries are adapted, and vLLM fuses them with keys and values: the whole block crosses, in buckets that divide it."""
    lora = LoraConfig(rank=4, alpha=8, target_modules=["q_proj"])
    model = apply_lora(make_model(seed=1), lora)
    adapted = VllmPolicy(model, VllmOptions(), num_envs=64)
    adapted.buckets = WeightBuckets(100_000)
    inputs = model.preprocess(observe())
    try:
        adapted.update_weights(94)
        sizes = {name: tensor.nbytes for name, tensor in weights_of(adapted).items()}
        adapted_blocks = ("language_model.model.layers.", "vision_backbone.featurizer.blocks.0.")
        blocks = [name for name in sizes if name.startswith(adapted_blocks)]
        for version in (95, 96):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name) + version))
            before = act(adapted, inputs)
            assert gap(adapted, before, trainer_logprobs(model, inputs, before)).max() > 0.02, "control: stale weights"
            counts = crossed(adapted, monkeypatch)
            adapted.update_weights(version)
            assert counts["tensors"] == sum(sizes[name] for name in blocks) < sum(sizes.values())
            assert counts["messages"] < 50_000
            prediction = act(adapted, inputs)
            assert gap(adapted, prediction, trainer_logprobs(model, inputs, prediction)).max() <= 1e-4
        os.kill(adapted.engine.pid, signal.SIGKILL)
        again = act(adapted, inputs)
        assert torch.equal(again.logits, prediction.logits) and adapted.engine.num_starts == 2
    finally:
        adapted.close()


def test_two_workers_open_the_weights_themselves_and_so_do_those_of_a_restarted_engine(tmp_path):
    """Tensor parallelism: what is sent to the engine, and from it to its workers, does not grow with the model."""
    sizes = {"vocab_size": 16_000, "intermediate_size": 1024, "num_hidden_layers": 2, "initializer_range": 0.1}
    models = [make_language_model(seed, hidden_size=512, **sizes) for seed in (0, 1)]
    num_bytes = sum(parameter.nbytes for parameter in models[0].parameters())
    assert num_bytes >= 15_000_000 * 4
    models[0].save_pretrained(tmp_path)
    generation = VllmGeneration(None, {
        "model_name": str(tmp_path), "max_new_tokens": 4, "eos_token_id": [], "max_model_len": 24,
        "kv_cache_memory_bytes": 16 << 20, "tensor_parallel_size": 2,
    })  # fmt: skip
    prompts = [[5, 9, 3], [1, 2, 4]]
    data = BatchedDataDict({"input_ids": torch.tensor(prompts), "attention_mask": torch.ones(2, 3, dtype=torch.long)})
    buckets, engine = WeightBuckets(16 << 20), generation.worker.engine
    try:
        with pytest.MonkeyPatch.context() as patch:
            for version, model in enumerate([models[0], models[1]], start=1):
                generation.prepare_for_generation()
                counts = crossed(SimpleNamespace(engine=engine), patch)
                assert generation.update_weights(MergedWeights(model, version, buckets)) == version
                assert counts["messages"] < 100_000 < counts["tensors"] == num_bytes
                check_rows(generation.generate(data, greedy=True), model, prompts, 4, temperature=1.0)
                patch.undo()
        with pytest.raises(AssertionError):
            check_rows(generation.generate(data, greedy=True), models[0], prompts, 4, temperature=1.0)
        os.kill(engine.pid, signal.SIGKILL)
        check_rows(generation.generate(data, greedy=True), models[1], prompts, 4, temperature=1.0)
        assert engine.num_starts == 2
    finally:
        generation.shutdown()
        buckets.close()
