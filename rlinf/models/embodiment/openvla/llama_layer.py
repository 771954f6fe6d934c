"""A Llama layer with bidirectional attention that can compute only the last positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import silu
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    eager_attention_forward,
)

from rlinf.models.norms import LeanRMSNorm


class KVCache:
    """Keys and values of every layer in preallocated buffers, so that a new token does not copy earlier ones.

    Used for decoding without gradients. The buffers are allocated at the first update, with its dtype.

    Attributes:
        max_len: Number of positions in the complete sequence, including future ones.
        length: Number of positions written so far; ``run_layers`` updates it once all layers have written.
        rotary: Rotary tables for all positions; ``run_layers`` computes them in the first call.
    """

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.length = 0
        self.rotary: tuple[Tensor, Tensor] | None = None
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def repeated(self, times: int, length: int) -> KVCache:
        """Return a cache with ``times`` adjacent copies of each row and its first ``length`` positions."""
        cache = KVCache(self.max_len)
        cache.length = length
        is_shared = len(self.rotary[0]) == 1  # one table for all rows
        cache.rotary = self.rotary if is_shared else tuple(x.repeat_interleave(times, dim=0) for x in self.rotary)
        for layer, parts in self._buffers.items():
            cache._buffers[layer] = tuple(part.repeat_interleave(times, dim=0) for part in parts)
        return cache

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append keys and values ``[B, heads, S, head_dim]``; return all of them so far, as views of the buffers."""
        end = self.length + key.shape[2]
        if end > self.max_len:
            raise ValueError(f"The cache has {self.max_len} positions, but {end} are needed.")
        if layer_idx not in self._buffers:
            shape = (*key.shape[:2], self.max_len, key.shape[3])
            self._buffers[layer_idx] = key.new_empty(shape), value.new_empty(shape)
        keys, values = self._buffers[layer_idx]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]


class LlamaActionLayer(LlamaDecoderLayer):
    """``LlamaDecoderLayer`` for use in ``run_layers``, with identical parameters and results."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
        num_queries: int | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        """Transform ``[B, S, H]`` into ``[B, num_queries or S, H]``.

        Args:
            attention_mask: ``[B or 1, 1, queries, keys]``, bool (sdpa on a CPU) or additive; ``[B, keys]`` for flash
                attention; None allows all keys (up to the query if causal).
            rotary: Result of ``rotary_tables`` for these positions.
            cache: Keys and values of earlier positions, extended in place.
            num_queries: Number of last positions to return; None returns all.
            is_causal: Use causal attention; only applies if ``attention_mask`` is None.
        """
        # Called `cache` because gradient checkpointing drops arguments with transformers' own name for it.
        attention, residual = self.self_attn, hidden_states
        keys_from = queries_from = self.input_layernorm(hidden_states)
        query_rotary = rotary
        # The last layer needs keys and values at all positions, but queries, projection and MLP only at the last ones.
        if num_queries is not None:
            residual, queries_from = residual[:, -num_queries:], queries_from[:, -num_queries:]
            query_rotary = tuple(table[:, -num_queries:] for table in rotary)

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, attention.head_dim))

        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        if queries_from is keys_from:
            query, key, value = map(heads, project(keys_from, *projections))
        else:
            query = heads(attention.q_proj(queries_from))
            key, value = map(heads, project(keys_from, *projections[1:]))
        query = _rotate(query, *query_rotary).transpose(1, 2)
        key, value = _rotate(key, *rotary).transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, attention.layer_idx)
        implementation = attention.config._attn_implementation
        if implementation == "sdpa" and query.shape[2] == 1:
            attended = _attend_once(query, key, value, attention_mask, attention.scaling)
        else:
            kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
            options = {"dropout": 0.0, "scaling": attention.scaling, "is_causal": is_causal}
            attended, _ = kernel(attention, query, key, value, attention_mask, **options)
        hidden_states = residual + attention.o_proj(attended.flatten(2))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def use_action_layers(language_model: LlamaForCausalLM) -> None:
    """Convert a new model's layers to ``LlamaActionLayer`` with lean MLPs and norms, without changing parameters."""
    for layer in language_model.model.layers:
        layer.__class__ = LlamaActionLayer
        layer.input_layernorm.__class__ = layer.post_attention_layernorm.__class__ = LeanRMSNorm
        if language_model.config.hidden_act == "silu":
            layer.mlp.__class__ = LeanMLP


def project(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Return the result of each linear layer for the same input; layers with adapters may join their matrix products."""
    together = getattr(layers[0], "together", None)
    return tuple(layer(x) for layer in layers) if together is None else together(x, layers)


def _rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Apply rotary embeddings (Su et al. 2021) to ``[B, S, heads, head_dim]``, pairing the halves of a head."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), signed_sin)


def _attend_once(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attend with one query per head, ``[B, heads, 1, head_dim]``, and return ``[B, 1, heads, head_dim]``."""
    # Heads with common keys are treated as several queries of one head, so that no key is repeated.
    grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    attended = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return attended.flatten(1, 2).unsqueeze(1)


def rotary_tables(
    decoder: LlamaModel, embeddings: Tensor, key_mask: Tensor | None, length: int
) -> tuple[Tensor, Tensor]:
    """Return cosines, and sines with a negated first half, of all positions: ``[B or 1, length, 1, head_dim]``."""
    if key_mask is None:
        positions = torch.arange(length, device=embeddings.device)[None]
    else:
        positions = key_mask.long().cumsum(1) - 1
    cos, sin = (table.unsqueeze(2) for table in decoder.rotary_emb(embeddings, position_ids=positions))
    first, second = sin.chunk(2, dim=-1)
    return cos, torch.cat((-first, second), dim=-1)


def run_layers(
    decoder: LlamaModel,
    embeddings: Tensor,
    key_mask: Tensor | None,
    num_queries: int | None,
    is_causal: bool,
    cache: KVCache | None = None,
    last_inputs: list[Tensor] | None = None,
) -> Tensor:
    """Run a model with ``LlamaActionLayer`` on ``embeddings [B, S, H]``; return the last ``num_queries`` normed positions.

    The embeddings are the last ``S`` positions of the sequence; earlier ones are in ``cache``, which is extended in place.
    ``key_mask`` is bool ``[B, keys]`` or, with a cache, ``[B, cache.max_len]`` (including future positions), and false on
    padding. If ``last_inputs`` is given, the input of the last layer, ``[B, S, H]``, is appended to it.
    """
    length = num_keys = embeddings.shape[1]
    if cache is None:
        rotary = rotary_tables(decoder, embeddings, key_mask, num_keys)
    else:
        num_keys += cache.length
        if cache.rotary is None:
            cache.rotary = rotary_tables(decoder, embeddings, key_mask, cache.max_len)
        rotary = tuple(table[:, cache.length : num_keys] for table in cache.rotary)
        key_mask = None if key_mask is None else key_mask[:, :num_keys]
    implementation = decoder.config._attn_implementation

    def mask(queries: int) -> Tensor | None:
        if implementation.startswith("flash"):
            return key_mask
        if implementation == "sdpa" and key_mask is None and queries == num_keys:
            # The kernel supports this case without a mask.
            return None
        allowed = attention_mask(key_mask, queries, num_keys, is_causal, embeddings.device)
        if implementation == "eager":
            return additive(allowed, embeddings.dtype)
        return allowed if allowed is None or allowed.device.type == "cpu" else aligned(allowed, embeddings.dtype)

    full_mask = mask(length) if len(decoder.layers) > 1 or num_queries is None else None
    hidden_states = embeddings
    for layer in decoder.layers:
        if last_inputs is not None and layer is decoder.layers[-1]:
            last_inputs.append(hidden_states)
        last = num_queries is not None and layer is decoder.layers[-1]
        hidden_states = layer(
            hidden_states,
            attention_mask=mask(num_queries) if last else full_mask,
            rotary=rotary,
            cache=cache,
            num_queries=num_queries if last else None,
            is_causal=is_causal,
        )
    if cache is not None:
        cache.length = num_keys
    return decoder.norm(hidden_states)


def attention_mask(
    key_mask: Tensor | None, num_queries: int, num_keys: int, is_causal: bool, device: torch.device
) -> Tensor | None:
    """Return which keys each query sees, bool ``[B or 1, 1, num_queries, num_keys]``, or None for all.

    Queries are the last positions; ``key_mask`` ``[B, num_keys]`` is false on padding.
    """
    allowed = None
    if is_causal and num_queries > 1:
        ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        allowed = ones.tril(num_keys - num_queries)[None, None]
    if key_mask is not None:
        keys = key_mask[:, None, None, :].expand(-1, -1, num_queries, -1)
        allowed = keys if allowed is None else allowed & keys
    return allowed


def additive(allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a bool mask to the additive mask used by eager attention."""
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def aligned(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to the additive mask of sdpa's GPU kernels once, instead of in every layer."""
    # Align rows to multiples of 8 elements, because the kernels would otherwise copy them.
    *shape, num_keys = allowed.shape
    padded = torch.zeros(*shape, -(-num_keys // 8) * 8, dtype=dtype, device=allowed.device)
    return padded[..., :num_keys].masked_fill_(~allowed, float("-inf"))


class LeanMLP(LlamaMLP):
    """``LlamaMLP`` with SwiGLU (Shazeer 2020) that stores ``gate`` and ``up``, but not ``silu(gate)``."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(_SwiGLU.apply(*project(hidden_states, self.gate_proj, self.up_proj)))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        up_grad = silu(gate).mul_(gradient)
        gate_grad = gradient * up
        torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
        return gate_grad, up_grad
