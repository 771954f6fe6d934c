"""Attention to each sequence of a packed row alone: the numbers of the whole row, with a fraction of the scores."""

import pytest
import torch
from transformers import AutoModelForCausalLM, masking_utils

from rlinf.llm import logprobs, packing
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.logprobs import has_separable_head, sequence_scores
from rlinf.llm.losses import NLLLossFn

LENGTHS = [1, 23, 40, 7]
FAMILIES = {
    "llama": {},  # two queries share a key
    "gpt2": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},  # in one layer of two
}


@pytest.fixture
def packed():
    ids = torch.randint(3, 48, (4, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(40) < torch.tensor(LENGTHS).unsqueeze(1)
    return ids * mask, mask


@pytest.fixture
def kernel(monkeypatch):
    """Numbers of queries and keys of each call of the kernel."""
    calls, plain = [], packing.sdpa_attention_forward

    def recorded(module, query, key, *arguments, **more):
        calls.append((query.shape[2], key.shape[2]))
        return plain(module, query, key, *arguments, **more)

    monkeypatch.setattr(packing, "sdpa_attention_forward", recorded)
    return calls


def scored(model, ids, mask, packed=True):
    """Log-probabilities, and gradients of an uneven sum of them."""
    model.zero_grad()
    values = sequence_scores(model, ids, mask, packed=packed).logprobs
    (values * torch.linspace(-1, 1, values.numel()).view_as(values)).sum().backward()
    return values.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def largest_gap(found, expected):
    gaps = [(found[1][name] - gradient).abs().max() / gradient.abs().max() for name, gradient in expected[1].items()]
    return max((found[0] - expected[0]).abs().max(), *gaps)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_alone_give_the_numbers_of_the_packed_row(tiny_lm, packed, kernel, family, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_lm(family, **FAMILIES[family]), attn_implementation="sdpa").eval()
    expected = scored(model, *packed)
    assert not kernel
    packing.attend_each_sequence(model)
    assert largest_gap(scored(model, *packed), expected) < 1e-5
    assert kernel == [(length, length) for length in LENGTHS] * 2
    monkeypatch.setattr(logprobs, "known_rows", lambda lengths, packed: packing.known_rows([30, 41], packed))
    assert largest_gap(scored(model, *packed), expected) > 1e-3, "control: a cut within a sequence matters"


def test_padded_rows_and_generation_run_as_they_are(tiny_lm, packed, kernel):
    model = AutoModelForCausalLM.from_pretrained(tiny_lm(), attn_implementation="sdpa").eval()
    expected, tokens = scored(model, *packed, packed=False), model.generate(packed[0][1:3, :7], max_new_tokens=3)
    packing.attend_each_sequence(model)
    values, gradients = scored(model, *packed, packed=False)
    assert torch.equal(values, expected[0]) and all(
        torch.equal(gradients[name], expected[1][name]) for name in gradients
    )
    assert torch.equal(model.generate(packed[0][1:3, :7], max_new_tokens=3), tokens)
    assert set(kernel) == {(40, 40), (7, 7), (1, 8), (1, 9)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_packed", [True, False])
def test_as_on_a_gpu_no_mask_is_looked_at_and_the_numbers_are_the_same(tiny_lm, packed, family, is_packed, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_lm(family, **FAMILIES[family]), attn_implementation="sdpa").eval()
    expected = scored(model, *packed, is_packed)
    packing.attend_each_sequence(model)
    monkeypatch.setattr(packing, "_is_cpu", lambda device: False)
    has_separable_head(model)  # its trial has no known rows
    with monkeypatch.context() as patch:
        for name in ("_ignore_causal_mask_sdpa", "find_packed_sequence_indices"):
            patch.setattr(masking_utils, name, lambda *_, name=name: pytest.fail(f"{name} looks at numbers"))
        assert largest_gap(scored(model, *packed, is_packed), expected) < 1e-5
    model.set_attn_implementation("sdpa")
    with pytest.MonkeyPatch.context() as control, pytest.raises(LookupError):
        control.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: {}["looked at"])
        scored(model, *packed)


def test_a_policy_that_packs_attends_to_each_sequence_and_saves_a_plain_model(tiny_lm, packed, kernel, tmp_path):
    settings = {"sequence_packing": True, "max_tokens_per_microbatch": 80, "device_map": None}
    policy = HuggingFacePolicy(tiny_lm(), gradient_checkpointing=True, **settings)
    assert has_separable_head(policy.model)  # its trial runs the model, once
    kernel.clear()
    policy.train({"input_ids": packed[0], "attention_mask": packed[1]}, NLLLossFn())
    assert kernel == [(length, length) for length in LENGTHS] * 4, "two layers, run again in the backward pass"
    policy.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    assert "sdpa_by_sequence" not in (tmp_path / "config.json").read_text()
