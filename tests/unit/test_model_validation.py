"""Validation and diagnostics find what they look for, and nothing where there is nothing."""

import importlib.util
import math

import pytest
import torch

from rlinf.algorithms import NLLLossFn
from rlinf.cli import main
from rlinf.distributed import BatchedDataDict
from rlinf.errors import ConfigError
from rlinf.llm import validation as diagnostics
from rlinf.llm.decoding import StaticLayer
from rlinf.llm.validation import log_probability_error, response_mask, validate_log_probability_consistency
from rlinf.models import HuggingFacePolicy
from rlinf.models.generation import HuggingFaceGeneration

YES = torch.ones(1, 2, dtype=torch.bool)


def test_error_by_hand():
    training, inference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.9]])
    assert log_probability_error(training, inference, YES) == pytest.approx((math.exp(0.5) + math.exp(0.1)) / 2)
    only_first = torch.tensor([[True, False]])
    assert log_probability_error(training, inference, only_first) == pytest.approx(math.exp(0.5))
    assert math.isnan(log_probability_error(training, torch.tensor([[float("nan"), 0.0]]), YES))
    with pytest.raises(ConfigError, match="max_new_tokens=8"):
        log_probability_error(training, inference, ~YES)


def test_only_generated_tokens_count():
    output = BatchedDataDict({"output_ids": torch.zeros(2, 4), "generation_lengths": torch.tensor([1, 2]),
                              "unpadded_sequence_lengths": torch.tensor([4, 3])})  # fmt: skip
    assert response_mask(output).tolist() == [[False, False, False, True], [False, True, True, False]]


def test_equal_weights_are_consistent_and_changed_ones_are_not(tiny_lm, prompts, caplog):
    policy = HuggingFacePolicy(tiny_lm(), learning_rate=3e-3)
    engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=8)
    assert validate_log_probability_consistency(policy, engine, prompts) and not caplog.records
    assert validate_log_probability_consistency(policy, engine, prompts, threshold=1.0001)
    policy.train(prompts, NLLLossFn())
    assert not validate_log_probability_consistency(policy, engine, prompts)
    assert "more than 1.05" in caplog.text
    with torch.no_grad():
        policy.model.lm_head.weight[0, 0] = float("nan")
    assert not validate_log_probability_consistency(policy, engine, prompts, threshold=float("inf"))


def test_another_temperature_is_inconsistent_and_named(tiny_lm, prompts, caplog):
    policy, engine = HuggingFacePolicy(tiny_lm()), HuggingFaceGeneration(tiny_lm(), max_new_tokens=8, temperature=0.5)
    assert not validate_log_probability_consistency(policy, engine, prompts)
    assert "temperature=1.0, the inference backend 0.5" in caplog.text
    assert validate_log_probability_consistency(HuggingFacePolicy(tiny_lm(), temperature=0.5), engine, prompts)


def test_the_engine_is_finished_even_if_it_fails(tiny_lm, prompts):
    calls = []

    class Failing(HuggingFaceGeneration):
        def generate(self, data, greedy=False):
            raise RuntimeError("no tokens today")

        def finish_generation(self):
            calls.append("finish")

    with pytest.raises(RuntimeError):
        validate_log_probability_consistency(HuggingFacePolicy(tiny_lm()), Failing(tiny_lm()), prompts)
    assert calls == ["finish"]


def test_another_vocabulary_is_refused(tiny_lm, prompts):
    policy, engine = HuggingFacePolicy(tiny_lm()), HuggingFaceGeneration(tiny_lm())
    engine.model.config.vocab_size = 64
    with pytest.raises(ConfigError, match=r"vocab_size=48, the inference backend 64.*Pass the same model_name"):
        validate_log_probability_consistency(policy, engine, prompts)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_sound_model_passes_the_diagnostics(tiny_lm, family):
    for function in (diagnostics.test_max_model_len_respected, diagnostics.test_generation_consistency):
        checks = function(tiny_lm(family))
        assert len(checks) >= 8 and all(check.passed for check in checks)
        for word in ("batch 1", "batch 4", "prompts of 4", "prompts of 16", "greedy", "sampled"):
            assert any(word in check.name for check in checks)


@pytest.fixture
def broken_cache(monkeypatch):
    """A cache that keeps the key of the first token in the place of every later one."""
    update = StaticLayer.update

    def wrong(self, keys, values, *args, **kwargs):
        if keys.shape[-2] == 1:
            keys = self.keys[..., :1, :]
        return update(self, keys, values, *args, **kwargs)

    monkeypatch.setattr(StaticLayer, "update", wrong)


def test_a_broken_cache_is_found(tiny_lm, broken_cache):
    with pytest.raises(diagnostics.DiagnosticError, match=r"8 of 8 checks.*\n.*decode against prefill.*mean exp"):
        diagnostics.test_generation_consistency(tiny_lm())


def test_a_length_that_is_not_respected_is_found(tiny_lm, monkeypatch):
    def longer(prompt_lengths, config, declared):
        return [config.max_new_tokens] * len(prompt_lengths)

    monkeypatch.setattr("rlinf.llm.hf_generation._new_tokens_allowed", longer)
    with pytest.raises(diagnostics.DiagnosticError, match="limit 32"):
        diagnostics.test_max_model_len_respected(tiny_lm())


def test_scores_of_another_shape_are_refused(tiny_lm, prompts):
    class Table(HuggingFacePolicy):
        def get_logprobs(self, data):
            return BatchedDataDict({"logprobs": torch.zeros(4, 8, 48)})

    with pytest.raises(ConfigError, match=r"\[4, 8, 48\].*\[B, S\]"):
        validate_log_probability_consistency(Table(tiny_lm()), HuggingFaceGeneration(tiny_lm()), prompts)


def test_a_model_that_vllm_rejects_fails_and_keeps_the_table(tiny_lm, capsys, monkeypatch):
    def rejected(self):
        raise ConfigError("vLLM rejects 'x': head size 8")

    monkeypatch.setattr(diagnostics, "BATCH_SIZES", (1,))
    monkeypatch.setattr(diagnostics, "PROMPT_LENGTHS", (4,))
    monkeypatch.setattr("rlinf.engines.vllm_engine.require_vllm", lambda *_: None)
    monkeypatch.setattr("rlinf.llm.vllm_generation.VllmGenerationWorker.start", rejected)
    assert main(["diagnose", tiny_lm()]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("torch: ") and " pass " in line for line in lines) == 3 + 2
    assert lines[-1] == "vllm: vLLM rejects 'x': head size 8"


def test_the_command_prints_a_table_and_its_status(tiny_lm, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))
    assert main(["diagnose", tiny_lm()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["check", "result", "detail"] and len(lines) == 2 + 9 + 8 + 1
    assert all(line.startswith("torch: ") and "pass" in line for line in lines[2:-1])
    assert lines[-1].startswith("vllm: not checked. Generation with vLLM needs the vllm package")
    monkeypatch.setattr(diagnostics, "MAX_EXP_GAP", 0.5)
    monkeypatch.setattr(diagnostics, "BATCH_SIZES", (1,))
    assert main(["diagnose", tiny_lm(), "torch_dtype=bfloat16"]) == 1
    assert "FAIL" in capsys.readouterr().out
