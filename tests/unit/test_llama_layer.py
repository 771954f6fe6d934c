"""Decoding with the cache and ``LlamaActionLayer``, against transformers' own Llama on the same weights."""

import copy
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from rlinf.models.embodiment.openvla.llama_layer import (
    KVCache,
    LeanMLP,
    additive,
    aligned,
    attention_mask,
    run_layers,
    use_action_layers,
)
from rlinf.models.layers import set_training_options
from rlinf.models.norms import LeanRMSNorm

PROMPT_LEN, NUM_TOKENS = 9, 5
LENGTH = PROMPT_LEN + NUM_TOKENS


def flash_by_loops(module, query, key, value, attention_mask, dropout, scaling, is_causal):
    """What flash attention computes from a mask ``[B, keys]``, query by query; nothing for queries that are padding."""
    batch, num_heads, num_queries, _ = query.shape
    num_keys, groups = key.shape[2], num_heads // key.shape[1]
    seen = torch.ones(batch, num_keys, dtype=torch.bool) if attention_mask is None else attention_mask
    assert seen.shape == (batch, num_keys)
    output = torch.zeros(batch, num_queries, num_heads, query.shape[-1])
    for row in range(batch):
        for i in range(num_queries):
            position = num_keys - num_queries + i
            allowed = seen[row].clone()
            if is_causal:
                allowed[position + 1 :] = False
            if not seen[row, position]:
                continue
            for head in range(num_heads):
                keys, values = key[row, head // groups, allowed], value[row, head // groups, allowed]
                output[row, i, head] = torch.softmax(keys @ query[row, head, i] * scaling, 0) @ values
    return output, None


@pytest.fixture(params=["sdpa", "eager", "flash_by_loops"])
def implementation(request, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_by_loops", flash_by_loops)
    return request.param


def build(num_key_heads=2, implementation="sdpa"):
    """Return ours and transformers' Llama with the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=num_key_heads, initializer_range=0.4, attn_implementation="eager",
    )  # fmt: skip
    reference = LlamaForCausalLM(config).eval()
    ours = copy.deepcopy(reference)
    use_action_layers(ours)
    ours.model.config._attn_implementation = implementation
    return ours, reference


def sequence(padded):
    """Embeddings ``[3, LENGTH, 32]`` and a mask with padding in the middle of the prompt, rows unlike each other."""
    torch.manual_seed(1)
    key_mask = None
    if padded:
        key_mask = torch.ones(3, LENGTH, dtype=torch.bool)
        key_mask[0, 3:6] = False
        key_mask[2, 4] = False
    return torch.randn(3, LENGTH, 32), key_mask


def expected(reference, embeddings, key_mask):
    """Last ``NUM_TOKENS + 1`` hidden states of one causal pass of transformers' model, padding left out row by row."""
    rows = []
    for row in range(len(embeddings)):
        kept = embeddings[row] if key_mask is None else embeddings[row, key_mask[row]]
        rows.append(reference.model(inputs_embeds=kept[None]).last_hidden_state[0, -NUM_TOKENS - 1 :])
    return torch.stack(rows)


def decode(ours, embeddings, key_mask, cache):
    """Prompt in one call, then token by token: the hidden states of the prompt's end and of every token."""
    states, start = [], 0
    for end in range(PROMPT_LEN, LENGTH + 1):
        states.append(run_layers(ours.model, embeddings[:, start:end], key_mask, 1, is_causal=True, cache=cache))
        start = end
    return torch.cat(states, dim=1)


@pytest.mark.parametrize("num_key_heads", [4, 2, 1])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_decoding_with_the_cache_gives_transformers_numbers(implementation, num_key_heads, padded):
    ours, reference = build(num_key_heads, implementation)
    embeddings, key_mask = sequence(padded)
    wanted = expected(reference, embeddings, key_mask)
    actual = decode(ours, embeddings, key_mask, KVCache(LENGTH))
    torch.testing.assert_close(actual, wanted, atol=3e-5, rtol=0)
    at_once = run_layers(ours.model, embeddings, key_mask, NUM_TOKENS + 1, is_causal=True)
    torch.testing.assert_close(at_once, wanted, atol=3e-5, rtol=0)
    if padded:
        ignoring = decode(ours, embeddings, None, KVCache(LENGTH))
        assert (ignoring - wanted)[[0, 2]].abs().amax((1, 2)).min() > 1e-2, "control: the padding matters"


@torch.no_grad()
def test_heads_that_share_keys_keep_their_order():
    ours, reference = build(num_key_heads=2)
    embeddings, _ = sequence(padded=False)
    for layer in ours.model.layers:  # groups (0, 1), (2, 3) become (0, 2), (1, 3)
        weight = layer.self_attn.q_proj.weight
        weight.copy_(weight.unflatten(0, (4, 8))[[0, 2, 1, 3]].flatten(0, 1))
    actual = decode(ours, embeddings, None, KVCache(LENGTH))
    assert (actual - expected(reference, embeddings, None)).abs().max() > 1e-2, "control: another grouping differs"


class LargestCopy(TorchDispatchMode):
    """Counts elements of the largest tensor that is made, as opposed to seen through a view."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if result.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("num_key_heads", [4, 1])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_step_copies_no_earlier_keys(num_key_heads, padded):
    ours, reference = build(num_key_heads)
    embeddings, key_mask = sequence(padded)
    # so long a prompt that its keys are larger than anything else in a step
    embeddings = torch.cat([embeddings[:, :1].expand(-1, 50, -1), embeddings], dim=1)
    key_mask = None if key_mask is None else torch.cat([key_mask.new_ones(3, 50), key_mask], dim=1)
    cache = KVCache(50 + LENGTH)
    run_layers(ours.model, embeddings[:, :-1], key_mask, 1, is_causal=True, cache=cache)
    num_keys = 3 * num_key_heads * 8 * (50 + LENGTH)
    with LargestCopy() as copies:
        run_layers(ours.model, embeddings[:, -1:], key_mask, 1, is_causal=True, cache=cache)
    assert 0 < copies.largest < num_keys
    grown = DynamicCache(config=reference.config)
    reference.model(inputs_embeds=embeddings[:, :-1], past_key_values=grown)
    with LargestCopy() as copies:
        reference.model(inputs_embeds=embeddings[:, -1:], past_key_values=grown)
    assert copies.largest >= num_keys, "control: a cache that grows copies its keys"


@torch.no_grad()
def test_rotary_tables_are_computed_once(monkeypatch):
    ours, _ = build()
    embeddings, key_mask = sequence(padded=True)
    calls = []
    ours.model.rotary_emb.register_forward_hook(lambda *_: calls.append(1))
    decode(ours, embeddings, key_mask, KVCache(LENGTH))
    assert len(calls) == 1


@torch.no_grad()
def test_the_cache_appends_in_place_and_knows_its_end():
    cache = KVCache(max_len=4)
    first, second = torch.randn(2, 3, 2, 5), torch.randn(2, 3, 1, 5)
    keys, values = cache.update(first, -first, layer_idx=0)
    assert torch.equal(keys, first) and torch.equal(values, -first)
    cache.length = 2
    more, _ = cache.update(second, second, layer_idx=0)
    assert torch.equal(more, torch.cat([first, second], dim=2)) and more.data_ptr() == keys.data_ptr()
    other, _ = cache.update(second, second, layer_idx=1)
    assert other.data_ptr() != keys.data_ptr()
    with pytest.raises(ValueError, match="has 4 positions, but 5"):
        cache.update(torch.randn(2, 3, 3, 5), torch.randn(2, 3, 3, 5), layer_idx=0)


@torch.no_grad()
def test_gradient_checkpointing_in_training_mode_keeps_the_cache():
    ours, reference = build()
    embeddings, _ = sequence(padded=False)
    set_training_options(ours, recomputed=True, compiled=False)
    ours.train()
    actual = decode(ours, embeddings, None, KVCache(LENGTH))
    torch.testing.assert_close(actual, expected(reference, embeddings, None), atol=3e-5, rtol=0)


@pytest.mark.parametrize("num_queries", [None, 1, 4])
def test_gradients_are_those_of_transformers(num_queries):
    ours, reference = build()
    embeddings, _ = sequence(padded=False)
    last = slice(None) if num_queries is None else slice(-num_queries, None)
    run_layers(ours.model, embeddings, None, num_queries, is_causal=True).sin().sum().backward()
    reference.model(inputs_embeds=embeddings).last_hidden_state[:, last].sin().sum().backward()
    wanted = dict(reference.model.layers.named_parameters())
    for name, actual in ours.model.layers.named_parameters():
        assert actual.grad.abs().max() > 0, name
        torch.testing.assert_close(actual.grad, wanted.pop(name).grad, atol=1e-4, rtol=1e-4, msg=name)
    assert not wanted


@torch.no_grad()
def test_bidirectional_attention_sees_what_follows():
    ours, _ = build()
    embeddings, key_mask = sequence(padded=True)
    changed = embeddings.clone()
    changed[:, -1] += 1.0
    for is_causal in (False, True):
        after, before = (run_layers(ours.model, x, key_mask, 2, is_causal)[:, 0] for x in (changed, embeddings))
        gap = (after - before).abs().max()
        assert gap == 0 if is_causal else gap > 1e-3


@torch.no_grad()
def test_rotary_turns_pairs_by_position_times_frequency():
    """By hand: components ``i`` and ``i + d/2`` of a key are a complex number times ``exp(1j * position * theta^(-2i/d))``."""
    ours, _ = build(num_key_heads=4)
    embeddings, _ = sequence(padded=False)
    cache, (attention, norm) = KVCache(LENGTH), (ours.model.layers[0].self_attn, ours.model.layers[0].input_layernorm)
    run_layers(ours.model, embeddings, None, 1, is_causal=True, cache=cache)
    cache.length = 0
    keys, _ = cache._buffers[0]
    plain = attention.k_proj(norm(embeddings)).unflatten(-1, (4, 8)).transpose(1, 2)
    for position in (0, 1, LENGTH - 1):
        for i in range(4):
            angle = position * 10000.0 ** (-2 * i / 8)
            pair = torch.complex(plain[:, :, position, i], plain[:, :, position, i + 4])
            turned = pair * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(keys[:, :, position, i], turned.real, atol=3e-5, rtol=0)
            torch.testing.assert_close(keys[:, :, position, i + 4], turned.imag, atol=3e-5, rtol=0)


@pytest.mark.parametrize("num_keys", [13, 16])
def test_the_mask_of_a_gpu_is_that_of_a_cpu_in_rows_that_need_no_copy(num_keys):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, 8, generator=generator) for n in (5, num_keys, num_keys))
    key_mask = torch.arange(num_keys) >= torch.tensor([[0], [4]])
    allowed = attention_mask(key_mask, 5, num_keys, True, query.device)
    mask = aligned(allowed, torch.float32)
    assert mask.shape == allowed.shape and mask.stride(-1) == 1 and all(step % 8 == 0 for step in mask.stride()[:-1])
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(query, key, value, attn_mask=allowed)
    torch.testing.assert_close(attend(query, key, value, attn_mask=mask), expected)
    assert not torch.allclose(attend(query, key, value, attn_mask=mask.roll(1, -1)), expected), "control"
    if num_keys % 8:
        assert additive(allowed, torch.float32).stride(-2) % 8, "control: a copy would be needed"


WIDTH, ROWS = 64, (3, 50)
PAIRS = {
    "mlp": (lambda: LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=96)), LeanMLP),
    "norm": (lambda: LlamaRMSNorm(WIDTH), LeanRMSNorm),
}


def pass_of(module, x, gradient):
    """Result, gradients of input and weights, and the bytes that are kept beside input and weights."""
    x, kept = x.clone().requires_grad_(), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = module(x)
    # A residual connection adds a third term to the gradient of the input.
    (result.float() * gradient + x.float().sin() * gradient).sum().backward()
    for known in (x, *module.parameters()):
        kept.pop(known.untyped_storage().data_ptr(), None)
    weights = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return {"result": result, "input": x.grad, **weights}, sum(kept.values())


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_lean_parts_have_the_bits_of_transformers(name, weights, states, frozen):
    torch.manual_seed(0)
    build, lean = PAIRS[name]
    plain = build().to(weights).requires_grad_(not frozen)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    ours = copy.deepcopy(plain)
    ours.__class__ = lean
    x, gradient = 3 * torch.randn(*ROWS, WIDTH).to(states), torch.randn(*ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=weights != states):
        (wanted, kept), (actual, less) = pass_of(plain, x, gradient), pass_of(ours, x, gradient)
    assert actual.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert tensor.abs().max() > 0 and torch.equal(actual[key], tensor), key
    assert less < kept or (name, states) == ("norm", torch.float32)
